"""Geodesics on a fibre in a program that is being captured: a loop of steps, whose rows stop by masks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autodiff.loops import repeat
from ..autodiff.row_execution import CapturedRows
from ..conditioning.fibre import Linearisation
from ..errors import Status
from ..structures import JacobianMap
from .integrators import STRAIGHT, FreeMotion, GeodesicEndpoint, Solver, kick_length


class _Counts(NamedTuple):
    """What became of the drifts of every row so far, each ``[R]``."""

    status: Tensor
    iterations: Tensor
    retried: Tensor
    returned: Tensor
    """Whether all drifts came back when they were reversed."""


class _Moving(NamedTuple):
    """Rows between two drifts."""

    position: Tensor
    momentum: Tensor
    jacobian: JacobianMap
    counts: _Counts


def captured_geodesic(
    fibre: CapturedRows,
    position: Tensor,
    momentum: Tensor,
    linearisation: Linearisation,
    step_size: Tensor,
    n_steps: int | Tensor,
    n_geodesic: int,
    solver: Solver,
    reversal_tolerance: float,
    *,
    flow: FreeMotion = STRAIGHT,
) -> GeodesicEndpoint:
    """:func:`~dgm_infer.kernels.integrators.geodesic`: the same trajectories, each drift reversed at once.

    A row whose drift does not return moves on all the same, as it does there.
    """
    n_steps = torch.as_tensor(n_steps, device=position.device).expand_as(step_size)
    step = step_size.unsqueeze(-1)
    start = linearisation.jacobian.tangent(flow.force(position, linearisation.gradient))
    none = torch.zeros_like(n_steps, dtype=torch.bool)
    counts = _Counts(none.to(torch.int8) + int(Status.OK), none.to(torch.int32), none, ~none)

    def drifted(here: _Moving, constants: Any) -> tuple[_Moving, Any]:
        fibre, drift, moving, evaluate = constants
        u, counts = here.position, here.counts
        alive = moving & (counts.status == Status.OK)
        forward = solver(fibre, flow.move(u, here.momentum, drift), here.jacobian, active=alive)
        moved = alive & forward.converged
        there = torch.where(moved.unsqueeze(-1), forward.position, u)
        found = getattr(fibre, evaluate)(there)
        jacobian = found.jacobian if isinstance(found, Linearisation) else found
        p = jacobian.tangent(flow.arrival(u, there, drift))
        back = solver(fibre, flow.move(there, -p, drift), jacobian, active=moved, expected=u, within=reversal_tolerance)
        near = (back.position - u).abs().amax(-1) < reversal_tolerance
        counts = _Counts(
            torch.where(alive & ~moved, int(Status.PROJECTION_FAILED), counts.status),
            counts.iterations + forward.iterations + back.iterations,
            counts.retried | forward.retried | back.retried,
            counts.returned & (~moved | (back.converged & near)),
        )
        return _Moving(there, torch.where(moved.unsqueeze(-1), p, here.momentum), jacobian, counts), found

    def stepped(k: Any, carried: tuple[_Moving, Linearisation], constants: Any) -> tuple[_Moving, Linearisation]:
        (here, there), (fibre, step, n_steps) = carried, constants
        given = (fibre, step / n_geodesic, k < n_steps)
        if n_geodesic == 1:
            here, there = drifted(here, (*given, "linearise"))
        else:
            here = repeat(n_geodesic, lambda _, here, given: drifted(here, (*given, "jacobian"))[0], here, given)
            there = fibre.linearise(here.position)
        force = here.jacobian.tangent(flow.force(here.position, there.gradient))
        return here._replace(momentum=here.momentum - kick_length(k, step, n_steps) * force), there

    first = _Moving(position, momentum - 0.5 * step * start, linearisation.jacobian, counts)
    end, there = repeat(n_steps.max(), stepped, (first, linearisation), (fibre, step, n_steps))
    status = torch.where(end.counts.returned, end.counts.status, int(Status.REVERSAL_FAILED))
    return GeodesicEndpoint(end.position, end.momentum, there, status, end.counts.iterations, end.counts.retried)
