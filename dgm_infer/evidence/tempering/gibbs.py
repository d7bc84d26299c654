"""Continuous tempering by Gibbs steps (Graham and Storkey 2017; T 5): exact draws of the temperature."""

from dataclasses import dataclass
from typing import Literal

import torch

from ...arguments import choice
from ..path import AnnealedPath, PathPoint
from ..plan import TUNED, StepSizes
from .temperatures import Ladder, Sigmoid, Warped
from .tempering import TemperedChain, TemperedState, Tempering


@dataclass(frozen=True, eq=False)
class GibbsTempering(Tempering):
    """Continuous tempering that alternates a Hamiltonian move of x at beta with an exact draw of beta given x.

    ``p(x, beta) ~ exp(-beta (phi + log zeta) - (1 - beta) psi)``; ``log Z = log zeta + log sum w1 - log sum w0`` over
    all draws of all chains, with ``w1 = p(beta = 1 | x)`` and ``w0 = p(beta = 0 | x)``: consistent.

    Args:
        draws: states kept per chain.
        warmup: states discarded before them.
        n_steps: leapfrog steps per state.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per temperature and
            problem on a pilot.
        log_zeta: guess of log Z, a number or ``[*batch]``; ``"pilot"`` takes the pilot's estimate, ``"importance"``
            that of 100 draws of the base; None takes the base's own guess if it has one, else ``"pilot"``. A poor
            guess costs draws at one end of the temperatures, not correctness.
        thin: states per draw of x in the result; the estimates use all states.
        target_acceptance: mean acceptance probability that step sizes are adapted to.
        pilot_temperatures: temperatures of the annealing run that tunes step sizes and starts the chains, spread over
            all of them.
        schedule: density of the temperatures: ``"linear"``, uniform on [0, 1], or ``"barrier"``, at equal distances
            along the communication barrier that the pilot measures (math 6.19).
    """

    continuous = True
    schedule: Literal["linear", "barrier"] = "linear"

    def __post_init__(self):
        super().__post_init__()
        choice("GibbsTempering", "schedule", self.schedule, ("linear", TUNED))

    def _chain(self, path, pilot, log_zeta, point, rng):
        ladder = Warped(pilot, log_zeta) if self.schedule == TUNED else Sigmoid(log_zeta)
        return LadderChain(path, pilot.step_sizes, ladder, point, rng, self.n_steps)


class LadderChain(TemperedChain):
    """Chains that alternate a Hamiltonian move of x with an exact draw of its temperature."""

    def __init__(
        self,
        path: AnnealedPath,
        step_sizes: StepSizes,
        ladder: Ladder,
        point: PathPoint,
        rng: torch.Generator,
        n_steps: int,
    ):
        self.path, self.step_sizes, self.ladder, self.rng, self.n_steps = path, step_sizes, ladder, rng, n_steps
        self.point, self.log_prior = point, ladder.log_prior
        self.beta = ladder.draw(path.difference(point), rng).beta

    def step(self) -> TemperedState:
        step_size = self.step_sizes.at(self.beta)
        self.point, acceptance = self.path.move(self.point, self.beta, step_size, self.n_steps, self.rng)
        rung = self.ladder.draw(self.path.difference(self.point), self.rng)
        self.beta = rung.beta
        return TemperedState(self.point, rung.beta, acceptance, (rung.log_p1, rung.log_p0))
