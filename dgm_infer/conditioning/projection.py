"""Batched solvers for the projection onto the fibre: ``c(u') = 0``, ``u' = v - J(u)^T lam`` (math 3.3).

Every solver is one update rule in one loop. Rows that have converged, or diverged to infinity, stop iterating: the
loop continues with a compacted batch, so that the slowest chain does not set the pace of all. Rows on which the first
solver fails fall back to the next one. A device works off a fixed number of masked updates instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..structures import Evaluation, JacobianMap

__all__ = ["SOLVERS", "Constraint", "Projection", "Stop", "Update", "evaluate_constraint", "masked", "project", "store"]


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


class Update(Protocol):
    """One iteration of a solver on rows that are all active."""

    def __call__(
        self, fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap, steps: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The next iterate and its constraint; ``steps`` holds the earlier steps of a solver that keeps them."""
        ...


def quasi_newton(
    fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap, steps: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """``u' - J(u)^T (J(u) J(u)^T)^-1 c(u')`` and its constraint: one factorisation for all iterations."""
    return fibre.evaluate(_quasi_newton, u, c, base)


def broyden(fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap, steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Quasi-Newton that corrects its factorisation by the steps made (Broyden 1965, *good* update).

    With ``H_0 = J^T (J J^T)^-1`` and ``y`` the change of the constraint over a step s,
    ``H' = H + (s - H y) s^T H / (s^T H y)``. Only the steps are kept: ``-H c`` is a product of their rank-one factors
    with ``-H_0 c`` (Kelley 1995, section 7.3). All steps lie in the row space of J.
    """
    step = -fibre.evaluate(_pseudo_inverse, base, c)
    for earlier, later in pairwise(steps):
        step = step + _along(step, earlier) * later
    if steps:
        step = step / (1 - _along(step, steps[-1]))
    if len(steps) == _MEMORY:
        steps.clear()
    steps.append(step)
    u = u + step
    return u, fibre.evaluate(evaluate_constraint, u)


def newton(fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap, steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """``u' - J(u)^T (J(u') J(u)^T)^-1 c(u')`` and its constraint: a new Jacobian per iteration."""
    return fibre.evaluate(_newton, u, c, base)


SOLVERS: dict[str, Update] = {"quasi_newton": quasi_newton, "broyden": broyden, "newton": newton}


def _quasi_newton(fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap) -> tuple[Tensor, Tensor]:
    u = u - base.pseudo_inverse(c)
    return u, fibre.constraint(u)


def _newton(fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap) -> tuple[Tensor, Tensor]:
    u = u - base.oblique_inverse(fibre.entries(u).entries, c)
    return u, fibre.constraint(u)


def _pseudo_inverse(fibre: Constraint, base: JacobianMap, c: Tensor) -> Tensor:
    return base.pseudo_inverse(c)


def _along(step: Tensor, earlier: Tensor) -> Tensor:
    """The component of a step along an earlier one, in units of it: ``[R, 1]``."""
    # a row that stands on a root of its own has made a step of 0
    return (step * earlier).sum(-1, keepdim=True) / earlier.square().sum(-1, keepdim=True).clamp_min(_SMALL)


# Steps that Broyden's method keeps before it starts anew from the factorisation.
_MEMORY = 20
_SMALL = 1e-30
# Growth of the residual that counts as divergence; after some iterations any growth is a failure, so that the few
# chains that will not converge do not delay the others.
_DIVERGENCE = 1e3
_PATIENCE = 10
# Compact the batch when less than this fraction of it is still iterating.
_COMPACTION = 0.75
# Updates of every solve on a device, which never asks how far its rows are: the host would wait for the answer.
_DEVICE_ITERATIONS = 16
# Decrease of the residual per update that shows that a solver converges.
_CONTRACTION = 0.5


def project(
    fibre: Constraint,
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
    """Move ``v`` along the rows of ``base`` until it satisfies the constraint.

    On a device every solve makes the same number of updates, with masks, and only the first solver is tried: the host
    then waits for nothing.

    Args:
        fibre: constraints, one per row.
        v: ``[R, D]`` points to project.
        base: Jacobian map at the points the moves started from, R rows.
        tolerance: ``[R]``; a row has converged when ``max|c| < tolerance``.
        active: ``[R]``, False for rows to skip (reported as not converged).
        solvers: keys of :data:`SOLVERS`; each is tried, from ``v``, on the rows where the previous ones failed.
        max_iterations: updates after which a solver has failed.
        expected: ``[R, D]`` roots: a row has also converged once it is this near its root, in the max-norm, and its
            last update halved the residual, early enough that it would reach the tolerance; None to converge by
            tolerance alone.
        within: the distance from ``expected`` that counts as near.
    """
    stop = Stop(tolerance, expected, within, max_iterations // 2)
    if v.device.type != "cpu":
        return masked(SOLVERS[solvers[0]], fibre, v, base, stop, active, min(max_iterations, _DEVICE_ITERATIONS))
    none = torch.zeros_like(active)
    result = Projection(v, none, none.to(torch.int32), none)
    rows = None if bool(active.all()) else active.nonzero().squeeze(-1)
    for solver in solvers:
        if solver != solvers[0]:
            result = result._replace(retried=active & ~result.converged)
        if rows is None:
            position, converged, iterations = _solve(SOLVERS[solver], fibre, v, base, stop, max_iterations)
            result = Projection(position, converged, iterations, none)
        elif len(rows):
            part = _solve(SOLVERS[solver], fibre.take(rows), v[rows], base[rows], stop.take(rows), max_iterations)
            position, converged = store(rows, result[:2], part[:2])
            result = Projection(position, converged, result.iterations.index_add(0, rows, part[2]), result.retried)
        rows = (active & ~result.converged).nonzero().squeeze(-1)
    return result


@dataclass(frozen=True)
class Stop:
    """What a solve stops at."""

    tolerance: Tensor
    expected: Tensor | None
    within: float
    early: int
    """Updates after which contraction no longer counts: what halves the residual from then on may run out of them."""

    def take(self, rows: Tensor) -> "Stop":
        expected = None if self.expected is None else self.expected[rows]
        return replace(self, tolerance=self.tolerance[rows], expected=expected)

    def reached(self, iteration: int, u: Tensor, residual: Tensor, before: Tensor) -> Tensor:
        """Whether a row has converged by an update, given its residual before it."""
        converged = residual < self.tolerance
        if self.expected is None or iteration > self.early:
            return converged
        near = (u - self.expected).abs().amax(-1) < self.within
        return converged | (near & (residual < _CONTRACTION * before))


class _Loop(NamedTuple):
    """Rows of a solve: iterates, their constraint and residual, and which have converged or still iterate."""

    u: Tensor
    c: Tensor
    first: Tensor
    residual: Tensor
    converged: Tensor
    running: Tensor
    updates: Tensor

    @classmethod
    def start(cls, fibre: Constraint, v: Tensor, stop: Stop, active: Tensor | None = None) -> "_Loop":
        c = fibre.evaluate(evaluate_constraint, v)
        residual = c.abs().amax(-1)
        converged = residual < stop.tolerance
        running = ~converged
        if active is not None:
            converged, running = converged & active, running & active
        return cls(v, c, residual, residual, converged, running, torch.zeros_like(running, dtype=torch.int32))

    def next(self, iteration: int, u: Tensor, c: Tensor, stop: Stop) -> "_Loop":
        """After an update of the running rows to ``u``."""
        u = torch.where(self.running.unsqueeze(-1), u, self.u)
        c = torch.where(self.running.unsqueeze(-1), c, self.c)
        residual = c.abs().amax(-1)
        converged = self.converged | (self.running & stop.reached(iteration, u, residual, self.residual))
        # a NaN residual is neither below its limit nor converged
        limit = self.first * (_DIVERGENCE if iteration < _PATIENCE else 1.0)
        running = self.running & ~converged & (residual <= limit)
        return _Loop(u, c, self.first, residual, converged, running, self.updates + self.running)

    def take(self, rows: Tensor) -> "_Loop":
        return _Loop(*(t[rows] for t in tuple(self)))


def masked(
    update: Update, fibre: Constraint, v: Tensor, base: JacobianMap, stop: Stop, active: Tensor, iterations: int
) -> Projection:
    """:func:`project` by one solver in a fixed number of updates."""
    loop, steps = _Loop.start(fibre, v, stop, active), []
    for iteration in range(1, iterations + 1):
        loop = loop.next(iteration, *update(fibre, loop.u, loop.c, base, steps), stop)
    return Projection(loop.u, loop.converged, loop.updates, active & ~loop.converged)


def _solve(
    update: Update, fibre: Constraint, v: Tensor, base: JacobianMap, stop: Stop, max_iterations: int
) -> tuple[Tensor, ...]:
    """:func:`project` by one solver, with all rows active: position, converged and iterations."""
    loop, steps = _Loop.start(fibre, v, stop), []
    whole = loop.u, loop.converged, loop.updates
    # the rows still in the loop: all of them until the batch is first compacted
    rows: Tensor | None = None
    for iteration in range(1, max_iterations + 1):
        n_running = int(loop.running.sum())
        if n_running == 0:
            break
        if n_running < _COMPACTION * len(loop.running):
            whole = store(rows, whole, (loop.u, loop.converged, loop.updates))
            keep = loop.running.nonzero().squeeze(-1)
            rows = keep if rows is None else rows[keep]
            loop, stop, fibre, base = loop.take(keep), stop.take(keep), fibre.take(keep), base[keep]
            steps = [step[keep] for step in steps]
        loop = loop.next(iteration, *update(fibre, loop.u, loop.c, base, steps), stop)
    return store(rows, whole, (loop.u, loop.converged, loop.updates))


def evaluate_constraint(fibre: Constraint, u: Tensor) -> Tensor:
    """``c(u)``, as a function for :meth:`Fibre.evaluate`."""
    return fibre.constraint(u)


def store(rows: Tensor | None, whole: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``whole`` with the given rows replaced by ``part``; None replaces all."""
    if rows is None:
        return part
    return tuple(w.index_copy(0, rows, p) for w, p in zip(whole, part, strict=True))
