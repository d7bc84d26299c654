"""Continuous tempering by Gibbs steps (Graham and Storkey 2017; T 5): exact draws of the temperature."""

from dataclasses import dataclass
from typing import Literal

from ...arguments import choice
from .. import schedules
from ..path import Point
from ..pilot import StepSizes
from .ladder import LadderChain
from .record import TemperedState
from .tempering import Tempering, draw_beta
from .warped import Warped

__all__ = ["GibbsTempering"]


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
        schedule: density of the temperatures: ``"linear"``, uniform on [0, 1], or by the pilot as the temperatures of
            :class:`SimulatedTempering`, ``"equalised"`` or ``"barrier"`` (math 6.21).
    """

    schedule: Literal["linear", "equalised", "barrier"] = "linear"

    def __post_init__(self):
        super().__post_init__()
        choice("GibbsTempering", "schedule", self.schedule, ("linear", *schedules.TUNED))

    def _chain(self, path, pilot, log_zeta, point, rng):
        if self.schedule != "linear":
            ladder = Warped(self.schedule, pilot, log_zeta)
            return LadderChain(path, pilot.step_sizes, ladder, point, rng, self.n_steps)
        return _GibbsChain(path, pilot.step_sizes, log_zeta, point, rng, self.n_steps)


class _GibbsChain:
    log_prior = None

    def __init__(self, path, step_sizes: StepSizes, log_zeta, point: Point, rng, n_steps: int):
        self.path, self.step_sizes, self.log_zeta, self.rng, self.n_steps = path, step_sizes, log_zeta, rng, n_steps
        self.point = point

    def step(self) -> TemperedState:
        beta = draw_beta(self.path.difference(self.point) + self.log_zeta, self.rng)
        self.point, acceptance = self.path.move(self.point, beta, self.step_sizes.at(beta), self.n_steps, self.rng)
        return TemperedState(self.point, beta, acceptance)

    def warm(self) -> None:
        self.step()

    def freeze(self) -> None:
        pass
