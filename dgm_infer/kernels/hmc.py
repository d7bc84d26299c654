"""Hamiltonian Monte Carlo on R^D (math 8.1, T Algorithm 6)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, Status
from ..settings import Settings
from ..target import Target
from .integrators import PhasePoint, energy_of, leapfrog
from .kernel import (
    Info,
    TrajectoryEnd,
    accept,
    check_schedule,
    draw_schedule,
)

__all__ = ["HMC", "HMCState", "check_target"]


class HMCState(NamedTuple):
    position: Tensor
    energy: Tensor
    gradient: Tensor


def check_target(name: str, problem: object) -> None:
    """Raise ArgumentError unless a problem is a target."""
    if not isinstance(problem, Target):
        raise ArgumentError(
            f"{name} samples a Target, not a {type(problem).__name__}: use ConstrainedHMC, or "
            "condition(..., tolerance=eps)"
        )


@dataclass(frozen=True, eq=False)
class HMC(Settings):
    """Hamiltonian Monte Carlo with unit mass and leapfrog trajectories of random length.

    Args:
        step_size: positive number or tensor ``[*batch]``, fixed; None to adapt it in warm-up.
        n_steps: leapfrog steps a transition, or the inclusive range they are drawn from; None to take as many as
            the trajectory length needs.
        trajectory_length: mean time of a trajectory, a number or ``[*batch]``; None to adapt it in warm-up, per
            problem. Trajectories last between half and one and a half times as long, at random.
    """

    step_size: float | Tensor | None = None
    n_steps: int | tuple[int, int] | None = None
    trajectory_length: float | Tensor | None = None

    def __post_init__(self):
        check_schedule(self)

    def check(self, problem) -> None:
        check_target("HMC", problem)

    def longest_step(self, problem: Target) -> float:
        return math.inf

    def init(self, problem: Target, position: Tensor) -> HMCState:
        return HMCState(position, *problem.energy_and_gradient(position))

    def step(self, problem: Target, state: HMCState, rng: torch.Generator) -> tuple[HMCState, Info]:
        position = state.position
        momentum = torch.randn(position.shape, generator=rng, dtype=position.dtype, device=position.device)
        n_steps, step_size, fraction = draw_schedule(self, problem, state.energy, rng)
        start = PhasePoint(position, momentum, state.energy, state.gradient)
        end = leapfrog(energy_of(problem), start, step_size, n_steps)
        h_old, h_new = start.hamiltonian, end.hamiltonian
        status = torch.full_like(h_old, int(Status.OK), dtype=torch.int8)
        accepted, probability, status = accept(h_old, h_new, status, rng)
        keep = accepted.unsqueeze(-1)
        state = HMCState(
            torch.where(keep, end.position, position),
            torch.where(accepted, end.energy, state.energy),
            torch.where(keep, end.gradient, state.gradient),
        )
        info = Info(
            acceptance_rate=probability,
            status=status,
            n_steps=n_steps.to(torch.int32),
            step_size=step_size,
            energy=torch.where(accepted, h_new, h_old),
            end=TrajectoryEnd(position, end.position, end.momentum, fraction),
        )
        return state, info
