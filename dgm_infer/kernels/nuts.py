"""The No-U-Turn sampler on R^D (Hoffman and Gelman 2014; Betancourt 2017)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import counts, optional_positive
from ..errors import ArgumentError
from ..settings import Settings
from ..target import Target
from .hmc import HMCState, check_target
from .integrators import PhasePoint, energy_of
from .kernel import Info, TrajectoryEnd
from .trees import deepest, grow

__all__ = ["NUTS"]


@dataclass(frozen=True, eq=False)
class NUTS(Settings):
    """Hamiltonian Monte Carlo with unit mass whose trajectories end where they turn back.

    The next state is drawn from all states of the trajectory by their densities; a divergence ends a trajectory, whose
    earlier states still count. All chains take their steps together, so that a transition lasts as long as the longest
    of them.

    Args:
        step_size: positive number or tensor ``[*batch]``, fixed; None to adapt it in warm-up.
        n_steps: most leapfrog steps a transition: trees have at most ``2^depth - 1`` of them. Of a range the upper
            end counts.
        trajectory_length: None, as the trajectory finds its own.
    """

    step_size: float | Tensor | None = None
    n_steps: int | tuple[int, int] = 1023
    trajectory_length: None = None

    def __post_init__(self):
        optional_positive("NUTS", "step_size", self.step_size)
        counts("NUTS", "n_steps", self.n_steps)
        if self.trajectory_length is not None:
            raise ArgumentError(
                f"NUTS(trajectory_length={self.trajectory_length}): trajectories end where they turn; use HMC for "
                "given lengths"
            )

    def check(self, problem) -> None:
        check_target("NUTS", problem)

    def longest_step(self, problem: Target) -> float:
        return math.inf

    def init(self, problem: Target, position: Tensor) -> HMCState:
        return HMCState(position, *problem.energy_and_gradient(position))

    def step(self, problem: Target, state: HMCState, rng: torch.Generator) -> tuple[HMCState, Info]:
        if self.step_size is None:
            raise ArgumentError("step_size=None is chosen by sample(); to call step() directly give it a number")
        position, energy = state.position, state.energy
        momentum = torch.randn(position.shape, generator=rng, dtype=position.dtype, device=position.device)
        step_size = torch.as_tensor(self.step_size, dtype=energy.dtype, device=energy.device).expand_as(energy)
        most = self.n_steps[1] if isinstance(self.n_steps, tuple | list) else self.n_steps
        start = PhasePoint(position, momentum, energy, state.gradient)
        tree = grow(start, energy_of(problem), step_size, deepest(int(most)), rng)
        draw = tree.draw
        info = Info(
            acceptance_rate=tree.acceptance,
            status=tree.status,
            n_steps=tree.n_steps,
            step_size=step_size,
            energy=draw.hamiltonian,
            end=TrajectoryEnd(position, draw.position, draw.momentum, energy.new_ones(problem.batch_shape)),
        )
        return HMCState(draw.position, draw.energy, draw.gradient), info
