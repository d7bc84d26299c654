"""The projection onto the fibre in a program that is being captured: loops of fixed shapes, with masks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..autodiff.loops import repeat_while
from ..autodiff.pytrees import tree_map
from ..autodiff.row_execution import CapturedRows
from ..structures import JacobianMap
from .projection import SETTINGS, SOLVERS, Projection, Solve, Steps, Stop, Update, broyden, one


def captured_project(
    fibre: CapturedRows,
    v: Tensor,
    base: JacobianMap,
    *,
    tolerance: Tensor,
    active: Tensor,
    solvers: Sequence[str] = ("quasi_newton",),
    max_iterations: int = 50,
    expected: Tensor | None = None,
    within: float = 0.0,
) -> Projection:
    """:func:`~dgm_infer.conditioning.projection.project`: the same updates of every row, with the same result."""
    stop = Stop.of(tolerance, max_iterations, expected, within)
    none = torch.zeros_like(active)
    result = Projection(v, none, none.to(torch.int32), none)
    for solver in solvers:
        left = active & ~result.converged
        loop = _solved(SOLVERS[solver], fibre, v, base, stop, left)
        result = Projection(
            torch.where(left.unsqueeze(-1), loop.u, result.position),
            result.converged | loop.converged,
            result.iterations + loop.updates,
            none if solver == solvers[0] else left | result.retried,
        )
    return result


def _solved(update: Update, fibre: CapturedRows, v: Tensor, base: JacobianMap, stop: Stop, active: Tensor) -> Solve:
    """All updates of the active rows by one solver."""
    zero = torch.zeros_like(v)
    # steps of 0 correct nothing
    steps: Steps = ((zero, zero),) * SETTINGS.memory if update is broyden else ()

    def turn(carried: tuple[Solve, Steps], constants: Any) -> tuple[Solve, Steps]:
        (loop, steps), (fibre, stop, base) = carried, constants
        # the rows that still iterate have all made as many
        full = loop.updates.amax() % SETTINGS.memory == 0
        steps = tree_map(lambda step: torch.where(full, 0.0, step), steps)
        loop, made = one(update)(fibre, loop, stop, base, steps)
        return loop, (*steps, *made)[len(made) :]

    start = Solve.start(v, stop, active), steps
    return repeat_while(lambda carried: carried[0].running.any(), turn, start, (fibre, stop, base))[0]
