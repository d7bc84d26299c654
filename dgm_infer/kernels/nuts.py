"""The No-U-Turn sampler on R^D (Hoffman and Gelman 2014; Betancourt 2017)."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..arguments import counts, optional_positive
from ..settings import Settings
from ..target import Target
from .hamiltonian import HMCState, check_target, draw_momentum, given_step_size
from .integrators import PhasePoint, energy_of
from .kernel import Info, Trial
from .metrics import Metric, check_metric, check_shape, metric_in_use, open_metric
from .trees import deepest, grow
from .tuning import Tuning

__all__ = ["NUTS"]


@dataclass(frozen=True, eq=False)
class NUTS(Settings):
    """Hamiltonian Monte Carlo whose trajectories end at a U-turn.

    The next state is drawn from all states of the trajectory by their densities; a divergence ends a trajectory, whose
    earlier states still count. Chains step together, so a transition takes as long as its longest trajectory.

    Args:
        step_size: positive number or tensor ``[*batch]``, fixed; None adapts it per problem in warm-up.
        n_steps: maximum leapfrog steps per transition: trees have at most ``2^depth - 1`` of them. Only the upper end
            of a range counts.
        metric: as in :class:`HMC`.
    """

    step_size: float | Tensor | None = None
    n_steps: int | tuple[int, int] = 1023
    metric: str | Metric = "identity"

    def __post_init__(self):
        check_metric("NUTS", self.metric)
        optional_positive("NUTS", "step_size", self.step_size)
        counts("NUTS", "n_steps", self.n_steps)

    def check(self, problem) -> None:
        check_target("NUTS", problem)
        self.check_batch(problem.batch_shape, "step_size")
        check_shape("NUTS", self.metric, problem.batch_shape, problem.dim)

    @property
    def max_steps(self) -> int:
        """The leapfrog steps of the largest tree."""
        return 2 ** deepest(counts("NUTS", "n_steps", self.n_steps)[1]) - 1

    def tuning(self, problem: Target) -> Tuning:
        return Tuning(step_size=self.step_size is None, metric=open_metric(self.metric))

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        return self.replace(step_size=step_size, n_steps=n_steps)

    def init(self, problem: Target, position: Tensor) -> HMCState:
        return HMCState(position, *problem.energy_and_gradient(position))

    def step(self, problem: Target, state: HMCState, rng: torch.Generator) -> tuple[HMCState, Info]:
        step_size = given_step_size(self.step_size, state.energy)
        _, most = counts("NUTS", "n_steps", self.n_steps)
        start = PhasePoint(state.position, draw_momentum(state.position, rng), state.energy, state.gradient)
        tree = grow(start, energy_of(problem), step_size, deepest(most), rng, metric_in_use(self.metric))
        draw = tree.draw
        info = Info(
            acceptance_rate=tree.acceptance,
            status=tree.status,
            energy=draw.hamiltonian,
            stats={"n_steps": tree.n_steps, "step_size": step_size},
            tuning=Trial(step_size, position=draw.position),
        )
        return HMCState(draw.position, draw.energy, draw.gradient), info
