"""Symplectic integrators: leapfrog on R^D, geodesic on a fibre (J Algorithm 1, T Algorithm 11)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .errors import Status
from .fibre import Fibre, Linearisation
from .jacobian import JacobianMap
from .projection import Projection
from .target import Target

__all__ = ["geodesic", "leapfrog"]


class Endpoint(NamedTuple):
    """Where a leapfrog trajectory ends."""

    position: Tensor
    momentum: Tensor
    energy: Tensor
    gradient: Tensor


def leapfrog(
    target: Target, position: Tensor, momentum: Tensor, gradient: Tensor, step_size: Tensor, n_steps: int
) -> Endpoint:
    """``n_steps`` steps of kick-drift-kick with adjacent half kicks merged, unit mass.

    Args:
        target: energy on ``[..., D]``.
        position, momentum, gradient: ``[..., D]``, the gradient at the position.
        step_size: ``[...]``.
    """
    step = step_size.unsqueeze(-1)
    momentum, energy = momentum - 0.5 * step * gradient, torch.full_like(step_size, torch.nan)
    for i in range(n_steps):
        position = position + step * momentum
        energy, gradient = target.energy_and_gradient(position)
        momentum = momentum - (step if i < n_steps - 1 else 0.5 * step) * gradient
    return Endpoint(position, momentum, energy, gradient)


class GeodesicEndpoint(NamedTuple):
    """Where a trajectory on the fibre ends; rows whose ``status`` is not OK stopped at their last good point."""

    position: Tensor
    momentum: Tensor
    linearisation: Linearisation
    status: Tensor
    """``[R]`` of :class:`Status`."""


class Solver(Protocol):
    """:func:`projection.project` with its settings filled in."""

    def __call__(self, fibre: Fibre, v: Tensor, base: JacobianMap, *, active: Tensor) -> Projection: ...


def geodesic(
    fibre: Fibre,
    position: Tensor,
    momentum: Tensor,
    linearisation: Linearisation,
    step_size: Tensor,
    n_steps: int,
    n_geodesic: int,
    solver: Solver,
    reversal_tolerance: float,
    *,
    trace: Callable[[Tensor], None] | None = None,
) -> GeodesicEndpoint:
    """``n_steps`` steps of projected kicks around ``n_geodesic`` projected drifts each (MATH 3).

    Every drift is checked: the solver, started from the new point with the momentum reversed, must return.

    Args:
        fibre: R constraints, one a row.
        position: ``[R, D]`` on the fibre; momentum ``[R, D]`` in its tangent space.
        linearisation: at ``position``.
        step_size: ``[R]``, of one step; a drift takes ``step_size / n_geodesic``.
        solver: projects drifted points back.
        reversal_tolerance: max-norm distance within which a reversed drift must return.
        trace: called with the position after every step.
    """
    step = step_size.unsqueeze(-1)
    drift = step / n_geodesic
    u, p = position, momentum - 0.5 * step * linearisation.jacobian.tangent(linearisation.gradient)
    jacobian = linearisation.jacobian
    status = torch.full(u.shape[:1], int(Status.OK), dtype=torch.int8, device=u.device)
    for i in range(n_steps):
        for j in range(n_geodesic):
            alive = status == Status.OK
            forward = solver(fibre, u + drift * p, jacobian, active=alive)
            moved = alive & forward.converged
            status = torch.where(alive & ~moved, int(Status.PROJECTION_FAILED), status)
            # a row that failed stays at its last good point, so that the rest of the batch meets no NaN
            u_new = torch.where(moved.unsqueeze(-1), forward.position, u)
            if j < n_geodesic - 1:
                jacobian_new = fibre.jacobian(u_new)
            else:
                linearisation = fibre.linearise(u_new)
                jacobian_new = linearisation.jacobian
            p_new = jacobian_new.tangent((u_new - u) / drift)
            # to full tolerance: a solve cut short here would accept moves whose reversal fails, and bias the draws
            back = solver(fibre, u_new - drift * p_new, jacobian_new, active=moved)
            distance = (back.position - u).abs().amax(-1)
            returned = back.converged & (distance < reversal_tolerance)
            status = torch.where(moved & ~returned, int(Status.REVERSAL_FAILED), status)
            p = torch.where(moved.unsqueeze(-1), p_new, p)
            u, jacobian = u_new, jacobian_new
        kick = step if i < n_steps - 1 else 0.5 * step
        p = p - kick * jacobian.tangent(linearisation.gradient)
        if trace is not None:
            trace(u)
        if not (status == Status.OK).any():
            break
    return GeodesicEndpoint(u, p, linearisation, status)
