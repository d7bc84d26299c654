"""Geodesics on a fibre in a program that is being captured: a loop of steps, whose rows stop by masks."""

from typing import Any

import torch
from torch import Tensor

from ..autodiff.loops import repeat
from ..autodiff.row_execution import CapturedRows
from ..conditioning.fibre import Linearisation
from ..errors import Status
from .integrators import STRAIGHT, FreeMotion, GeodesicEndpoint


def captured_geodesic(
    fibre: CapturedRows,
    position: Tensor,
    momentum: Tensor,
    linearisation: Linearisation,
    step_size: Tensor,
    n_steps: int | Tensor,
    n_geodesic: int,
    solver: Any,
    reversal_tolerance: float,
    *,
    flow: FreeMotion = STRAIGHT,
) -> GeodesicEndpoint:
    """:func:`geodesic` as a loop of a program that is being captured."""
    n_steps = torch.as_tensor(n_steps, device=position.device).expand_as(step_size)
    step = step_size.unsqueeze(-1)
    u, p = (
        position,
        momentum - 0.5 * step * linearisation.jacobian.tangent(flow.force(position, linearisation.gradient)),
    )
    status = torch.full(u.shape[:1], int(Status.OK), dtype=torch.int8, device=u.device)
    iterations, no = torch.zeros_like(status, dtype=torch.int32), torch.zeros_like(status, dtype=torch.bool)
    tally = (status, iterations, no, ~no)

    def drifted(k: Any, carried: Any, constants: Any, evaluate: str) -> Any:
        (u, p, jacobian, (status, iterations, retried, returned)), (fibre, step, n_steps) = carried, constants
        drift = step / n_geodesic
        alive = (k < n_steps) & (status == Status.OK)
        forward = solver(fibre, flow.move(u, p, drift), jacobian, active=alive)
        moved = alive & forward.converged
        status = torch.where(alive & ~moved, int(Status.PROJECTION_FAILED), status)
        u_new = torch.where(moved.unsqueeze(-1), forward.position, u)
        there = getattr(fibre, evaluate)(u_new)
        jacobian = there.jacobian if evaluate == "linearise" else there
        p_new = jacobian.tangent(flow.arrival(u, u_new, drift))
        back = solver(
            fibre, flow.move(u_new, -p_new, drift), jacobian, active=moved, expected=u, within=reversal_tolerance
        )
        near = (back.position - u).abs().amax(-1) < reversal_tolerance
        returned = returned & ~(moved & ~(back.converged & near))
        iterations = iterations + forward.iterations + back.iterations
        tally = (status, iterations, retried | forward.retried | back.retried, returned)
        return u_new, torch.where(moved.unsqueeze(-1), p_new, p), there, tally

    def stepped(k: Any, carried: Any, constants: Any) -> Any:
        u, p, here, tally = carried
        fibre, step, n_steps = constants
        inner = (u, p, here.jacobian, tally)
        if n_geodesic > 1:
            inner = repeat(
                n_geodesic - 1,
                lambda _, own, given: drifted(given[1], own, given[0], "jacobian"),
                inner,
                (constants, torch.as_tensor(k, device=step.device)),
            )
        u, p, here, tally = drifted(k, inner, constants, "linearise")
        halves = (k < n_steps).to(step) + (k + 1 < n_steps).to(step)
        kick = 0.5 * halves.unsqueeze(-1) * step
        return u, p - kick * here.jacobian.tangent(flow.force(u, here.gradient)), here, tally

    end: Any = repeat(n_steps.max(), stepped, (u, p, linearisation, tally), (fibre, step, n_steps))
    u, p, here, (status, iterations, retried, returned) = end
    status = torch.where(returned, status, int(Status.REVERSAL_FAILED))
    return GeodesicEndpoint(u, p, here, status, iterations, retried)
