"""Batched solvers for the projection onto the fibre: ``c(u') = 0``, ``u' = v - J(u)^T lam`` (math 3.3).

Every solver is one update rule in one loop. Rows that have converged, or diverged to infinity, stop iterating: the
loop continues with a compacted batch, so that the slowest chain does not set the pace of all. Rows on which the first
solver fails fall back to the next one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..structures import Evaluation, JacobianMap

__all__ = ["SOLVERS", "Constraint", "Projection", "evaluate_constraint", "project", "store"]


class Constraint(Protocol):
    """A batch of constraints, one per row: the part of a fibre that the solvers need."""

    def constraint(self, u: Tensor) -> Tensor: ...
    def entries(self, u: Tensor) -> Evaluation: ...
    def jacobian(self, u: Tensor) -> JacobianMap: ...
    def take(self, problems: Tensor) -> "Constraint": ...
    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any: ...


class Projection(NamedTuple):
    """Result of :func:`project`, one row per chain."""

    position: Tensor
    """``[R, D]``; the last iterate where ``converged`` is False."""
    converged: Tensor
    """``[R]``, whether the max-norm of the constraint is below the tolerance."""
    iterations: Tensor
    """``[R]``, updates made by all solvers tried."""
    retried: Tensor
    """``[R]``, whether the first solver failed."""


def quasi_newton(fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap) -> tuple[Tensor, Tensor]:
    """``u' - J(u)^T (J(u) J(u)^T)^-1 c(u')`` and its constraint: one factorisation for all iterations."""
    u = u - base.pseudo_inverse(c)
    return u, fibre.constraint(u)


def newton(fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap) -> tuple[Tensor, Tensor]:
    """``u' - J(u)^T (J(u') J(u)^T)^-1 c(u')`` and its constraint: a new Jacobian per iteration."""
    u = u - base.oblique_inverse(fibre.entries(u).entries, c)
    return u, fibre.constraint(u)


SOLVERS: dict[str, Callable[[Constraint, Tensor, Tensor, JacobianMap], tuple[Tensor, Tensor]]] = {
    "quasi_newton": quasi_newton,
    "newton": newton,
}

# Growth of the residual that counts as divergence; after some iterations any growth is a failure, so that the few
# chains that will not converge do not delay the others.
_DIVERGENCE = 1e3
_PATIENCE = 10
# Compact the batch when less than this fraction of it is still iterating.
_COMPACTION = 0.75
# A device is asked for its rows' progress only every few iterations, so that the host seldom waits for it.
_DEVICE_INTERVAL = 3


def project(
    fibre: Constraint,
    v: Tensor,
    base: JacobianMap,
    *,
    tolerance: Tensor,
    active: Tensor,
    solvers: Sequence[str] = ("quasi_newton",),
    max_iterations: int = 50,
) -> Projection:
    """Move ``v`` along the rows of ``base`` until it satisfies the constraint.

    Args:
        fibre: constraints, one per row.
        v: ``[R, D]`` points to project.
        base: Jacobian map at the points the moves started from, R rows.
        tolerance: ``[R]``; a row has converged when ``max|c| < tolerance``.
        active: ``[R]``, False for rows to skip (reported as not converged).
        solvers: keys of :data:`SOLVERS`; each is tried, from ``v``, on the rows where the previous ones failed.
        max_iterations: updates after which a solver has failed.
    """
    none = torch.zeros_like(active)
    result = Projection(v, none, none.to(torch.int32), none)
    rows = None if bool(active.all()) else active.nonzero().squeeze(-1)
    for solver in solvers:
        if solver != solvers[0]:
            result = result._replace(retried=active & ~result.converged)
        if rows is None:
            position, converged, iterations = _solve(SOLVERS[solver], fibre, v, base, tolerance, max_iterations)
            result = Projection(position, converged, iterations, none)
        elif len(rows):
            part = _solve(SOLVERS[solver], fibre.take(rows), v[rows], base[rows], tolerance[rows], max_iterations)
            position, converged = store(rows, result[:2], part[:2])
            result = Projection(position, converged, result.iterations.index_add(0, rows, part[2]), result.retried)
        rows = (active & ~result.converged).nonzero().squeeze(-1)
    return result


def _solve(
    update, fibre: Constraint, v: Tensor, base: JacobianMap, tolerance: Tensor, max_iterations: int
) -> tuple[Tensor, ...]:
    """:func:`project` by one solver, with all rows active: position, converged and iterations."""
    interval = _DEVICE_INTERVAL if v.is_cuda else 1
    position, c = v, fibre.evaluate(evaluate_constraint, v)
    u, first = v, c.abs().amax(-1)
    residual, converged = first, first < tolerance
    iterations = torch.zeros_like(converged, dtype=torch.int32)
    # the rows still in the loop: all of them until the batch is first compacted
    rows: Tensor | None = None
    running = ~converged
    count = torch.zeros_like(iterations)
    for iteration in range(1, max_iterations + 1):
        if (iteration - 1) % interval == 0:
            n_running = int(running.sum())
            if n_running == 0:
                break
            if n_running < _COMPACTION * len(running):
                part = (u, residual < tolerance, count)
                position, converged, iterations = store(rows, (position, converged, iterations), part)
                keep = running.nonzero().squeeze(-1)
                rows = keep if rows is None else rows[keep]
                u, c, tolerance, first, count = u[keep], c[keep], tolerance[keep], first[keep], count[keep]
                fibre, base, running = fibre.take(keep), base[keep], running[keep]
        u_new, c_new = fibre.evaluate(update, u, c, base)
        u = torch.where(running.unsqueeze(-1), u_new, u)
        c = torch.where(running.unsqueeze(-1), c_new, c)
        count = count + running
        residual = c.abs().amax(-1)
        limit = first * (_DIVERGENCE if iteration < _PATIENCE else 1.0)
        # a NaN residual is neither below its limit nor converged
        running = (residual >= tolerance) & (residual <= limit)
    return store(rows, (position, converged, iterations), (u, residual < tolerance, count))


def evaluate_constraint(fibre: Constraint, u: Tensor) -> Tensor:
    """``c(u)``, as a function for :meth:`Fibre.evaluate`."""
    return fibre.constraint(u)


def store(rows: Tensor | None, whole: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``whole`` with the given rows replaced by ``part``; None replaces all."""
    if rows is None:
        return part
    return tuple(w.index_copy(0, rows, p) for w, p in zip(whole, part, strict=True))
