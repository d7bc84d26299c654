"""Hamiltonian Monte Carlo on R^D (math 8.1, T Algorithm 6)."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..arguments import choice
from ..autodiff.captured import captured
from ..autodiff.loops import is_captured
from ..errors import Status
from ..settings import Settings
from ..target import Target
from .hamiltonian import (
    HMCState,
    accept,
    check_schedule,
    check_target,
    constant_steps,
    draw_momentum,
    draw_schedule,
    schedule_tuning,
)
from .integrators import PhasePoint, few, leapfrog
from .kernel import Info, TrajectoryEnd, Trial, Tuning
from .metrics import Metric, check_metric, check_shape, metric_in_use, open_metric

__all__ = ["HMC"]


@dataclass(frozen=True, eq=False)
class HMC(Settings):
    """Hamiltonian Monte Carlo with leapfrog trajectories of random length.

    Args:
        step_size: positive number or tensor ``[*batch]``, fixed; None adapts it per problem in warm-up.
        n_steps: leapfrog steps per transition, or the inclusive range they are drawn from; None derives them from the
            trajectory length.
        trajectory_length: mean duration of a trajectory, a number or ``[*batch]``; None adapts it per problem in
            warm-up. Durations are uniform between 0.5 and 1.5 times this.
        metric: covariance that the target is taken to have, whose inverse is the mass: ``"identity"``, or
            ``"diagonal"``, ``"dense"`` or ``"low_rank"`` (plus diagonal), which warm-up adapts per problem to the
            positions of all chains, or an adapted metric of another run. Lengths are in units of the metric.
        compile: whether transitions are compiled to machine code as one program, which takes about ten seconds, once
            per machine, problem and number of chains, or on a GPU are recorded as CUDA graphs; None where that saves
            time.
    """

    step_size: float | Tensor | None = None
    n_steps: int | tuple[int, int] | None = None
    trajectory_length: float | Tensor | None = None
    metric: str | Metric = "identity"
    compile: bool | None = None

    def __post_init__(self):
        check_schedule(self)
        check_metric("HMC", self.metric)
        choice("HMC", "compile", self.compile, (True, False, None))

    def check(self, problem) -> None:
        check_target("HMC", problem)
        self.check_batch(problem.batch_shape, "step_size", "trajectory_length")
        check_shape("HMC", self.metric, problem.batch_shape, problem.dim)

    def is_program(self, problem: Target) -> bool:
        """Whether :meth:`step` can be captured as one program."""
        return True

    def tuning(self, problem: Target) -> Tuning:
        return dataclasses.replace(schedule_tuning(self), metric=open_metric(self.metric))

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        return self.replace(step_size=step_size, n_steps=(1, n_steps), trajectory_length=None)

    def init(self, problem: Target, position: Tensor) -> HMCState:
        return HMCState(position, *captured(problem).energy_gradient_and_extra(position))

    def step(self, problem: Target, state: HMCState, rng: torch.Generator) -> tuple[HMCState, Info]:
        problem, metric = captured(problem), metric_in_use(self.metric)
        momentum = draw_momentum(state.position, rng)
        n_steps, step_size, fraction = draw_schedule(self, math.inf, state.energy, rng)
        start = PhasePoint(state.position, momentum, state.energy, state.gradient, state.extra)
        steps = constant_steps(self) or n_steps
        end = leapfrog(problem.energy_gradient_and_extra, start, step_size, steps, metric, _Gradient(problem))
        h_old, h_new = start.hamiltonian, end.hamiltonian
        status = torch.full_like(h_old, int(Status.OK), dtype=torch.int8)
        accepted, probability, status = accept(h_old, h_new, status, rng)
        there = HMCState(end.position, end.energy, end.gradient, end.extra).where(accepted, state)
        info = Info(
            acceptance_rate=probability,
            status=status,
            energy=torch.where(accepted, h_new, h_old),
            stats={"n_steps": n_steps.to(torch.int32), "step_size": step_size},
            tuning=Trial(
                step_size,
                TrajectoryEnd(metric.solve(start.position), metric.solve(end.position), end.momentum, fraction),
                position=there.position,
            ),
        )
        return there, info


class _Gradient:
    """The gradient of a target ``[chains, *batch, D]``, computed only for rows that still move if these are few."""

    def __init__(self, problem: Target):
        self._problem = problem
        self._rows: Tensor | None = None
        self._part = problem

    def __call__(self, position: Tensor, moving: Tensor | None) -> Tensor:
        if moving is None or is_captured() or not self._problem.can_take:
            return self._problem.gradient(position)
        rows = few(moving.flatten())
        if rows is None:
            return self._problem.gradient(position)
        if self._rows is None or len(rows) != len(self._rows):
            # rows stop, and none starts again
            self._rows = rows
            self._part = self._problem.take(rows % self._problem.batch_shape.numel())
        there = self._part.gradient(position.reshape(-1, position.shape[-1])[rows])
        return torch.zeros_like(position).reshape(-1, position.shape[-1]).index_copy(0, rows, there).view_as(position)
