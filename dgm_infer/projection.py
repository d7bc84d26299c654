"""Batched solvers for the projection onto the fibre: ``c(u') = 0``, ``u' = v - J(u)^T lam`` (MATH 3).

Every solver is one update rule in one loop. Rows that have converged, or that have left for infinity, stop
iterating: the loop goes on with a compacted batch, so that the slowest chain does not set the pace of all.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .jacobian import JacobianMap

__all__ = ["SOLVERS", "Projection", "damped_gauss_newton", "project"]


class Constraint(Protocol):
    """A batch of constraints, one a row: what the solvers need of a fibre."""

    def constraint(self, u: Tensor) -> Tensor: ...
    def jacobian(self, u: Tensor) -> JacobianMap: ...
    def take(self, problems: Tensor) -> "Constraint": ...


class Projection(NamedTuple):
    """Result of :func:`project`, one row a chain."""

    position: Tensor
    """``[R, D]``; where ``converged`` is False, the last iterate."""
    converged: Tensor
    """``[R]``, max-norm of the constraint below the tolerance."""
    iterations: int
    """Constraint evaluations of the slowest row."""


def quasi_newton(fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap) -> Tensor:
    """``u' - J(u)^T (J(u) J(u)^T)^-1 c(u')``: one factorisation for all iterations."""
    return u - base.pseudo_inverse(c)


def newton(fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap) -> Tensor:
    """``u' - J(u)^T (J(u') J(u)^T)^-1 c(u')``: a new Jacobian each iteration."""
    return u - base.transpose(base.cross_solve(fibre.jacobian(u), c))


SOLVERS: dict[str, Callable[[Constraint, Tensor, Tensor, JacobianMap], Tensor]] = {
    "quasi_newton": quasi_newton,
    "newton": newton,
}

# A residual this many times the first one has left for infinity; after some iterations any growth is a failure, so that
# the few chains that will not converge do not hold up the others.
_DIVERGENCE = 1e3
_PATIENCE = 10
# Compact the batch when less than this fraction of it is still iterating.
_COMPACTION = 0.75


def project(
    fibre: Constraint,
    v: Tensor,
    base: JacobianMap,
    *,
    tolerance: Tensor,
    active: Tensor,
    solver: str = "quasi_newton",
    max_iterations: int = 50,
) -> Projection:
    """Move ``v`` along the rows of ``base`` until it satisfies the constraint.

    Args:
        fibre: constraints, one a row.
        v: ``[R, D]`` points to project.
        base: Jacobian map at the points the moves started from, R rows.
        tolerance: ``[R]``; a row has converged when ``max|c| < tolerance``.
        active: ``[R]``, False for rows to leave alone (reported as not converged).
        solver: a key of :data:`SOLVERS`.
        max_iterations: constraint evaluations after which a row has failed.
    """
    update = SOLVERS[solver]
    position = v.clone()
    converged = torch.zeros_like(active)
    rows = active.nonzero().squeeze(-1)
    u = v
    if len(rows) < len(v):
        fibre, base, u, tolerance = fibre.take(rows), base[rows], u[rows], tolerance[rows]
    first = None
    iteration = 0
    while len(rows):
        iteration += 1
        c = fibre.constraint(u)
        residual = c.abs().amax(-1)
        first = residual if first is None else first
        done = residual < tolerance
        # a NaN residual is not below its limit
        running = ~done & (residual <= (_DIVERGENCE if iteration <= _PATIENCE else 1.0) * first)
        count = int(running.sum())
        if count == 0 or iteration == max_iterations:
            position[rows], converged[rows] = u, done
            break
        if count < _COMPACTION * len(rows):
            position[rows], converged[rows] = u, done
            keep = running.nonzero().squeeze(-1)
            rows, u, c, tolerance, first = rows[keep], u[keep], c[keep], tolerance[keep], first[keep]
            fibre, base = fibre.take(keep), base[keep]
            u = update(fibre, u, c, base)
        else:
            u = torch.where(running.unsqueeze(-1), update(fibre, u, c, base), u)
    return Projection(position, converged, iteration)


def damped_gauss_newton(
    fibre: Constraint, u: Tensor, *, tolerance: Tensor, max_iterations: int = 100
) -> tuple[Tensor, Tensor]:
    """Nearby points on the fibre by Levenberg-Marquardt: ``u' = u - J^T (J J^T + mu I)^-1 c(u)``.

    Damping falls by 10 after a step that reduces ``|c|`` and grows by 10 otherwise. Unlike :func:`project` the
    moves may leave the rows of one Jacobian: this finds starting points, not proposals.

    Returns:
        points ``[R, D]`` and the max-norm of their constraint ``[R]``.
    """
    c = fibre.constraint(u)
    damping = floor = None
    for _ in range(max_iterations):
        running = c.abs().amax(-1) >= tolerance
        if not running.any():
            break
        jacobian = fibre.jacobian(u)
        if damping is None or floor is None:
            # relative to the stiffness of J J^T along c
            stiffness = jacobian.transpose(c).square().sum(-1) / c.square().sum(-1).clamp_min(1e-30)
            damping, floor = 1e-2 * stiffness, 1e-14 * stiffness
        proposal = u - jacobian.damped_step(c, damping)
        c_new = fibre.constraint(proposal)
        better = running & (c_new.norm(dim=-1) < c.norm(dim=-1))
        u = torch.where(better.unsqueeze(-1), proposal, u)
        c = torch.where(better.unsqueeze(-1), c_new, c)
        damping = torch.where(better, torch.maximum(0.1 * damping, floor), 10 * damping)
    return u, c.abs().amax(-1)
