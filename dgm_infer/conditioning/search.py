"""Points on the fibre of a generator without noise, found by annealing the misfit from prior draws (math 5.5)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..structures.jacobian import mv
from .projection import Constraint, evaluate_constraint, evaluate_jacobian, project, store

__all__ = ["annealed_search", "towards"]

# The width starts at this share of the first misfit, and shrinks by a factor once the misfit is as small.
_FIRST_WIDTH = 0.5
_SHRINK = 0.6
# The factor after steps that needed no damping.
_SHRINK_FREELY = 0.25
# Share of the first width below which a point is near the fibre.
_NEAR = 0.1
# Ratios of actual and predicted improvement: below the first a step is poor, above the second damping shrinks.
_POOR, _GOOD = 0.25, 0.7
# Promised reduction of the objective, per output, that is not worth another step.
_LITTLE = 0.05
# Poor steps after which a Jacobian is computed anew.
_PATIENCE = 2
# Damping below this is none.
_NEGLIGIBLE = 0.05
# Moves along the fibre towards a prior draw, the longest of them, and the share of the way that the first one goes.
_MOVES, _LONGEST, _FIRST_SHARE = 8, 1.5, 0.5
# Growth of the share after a move that came nearer.
_GROWTH = 1.5
# Updates after which a projection has failed.
_UPDATES = 25
# Steps from which searches are long, so that those that are left may be given up.
_LONG = 60
# Damping at which steps no longer move.
_STUCK = 1e12


class _Rows(NamedTuple):
    """The search of every row that still runs."""

    start: Tensor
    """``[R, D]``, what points are pulled towards: the prior draws, near the fibre the last point."""
    tolerance: Tensor
    near: Tensor
    """``[R]``, width below which a point is near the fibre."""
    u: Tensor
    c: Tensor
    jacobian: Tensor
    """``[R, N, D]``, exact where it was computed, with a secant update per step since."""
    width: Tensor
    """``[R]``, standard deviation s of the misfit."""
    damping: Tensor
    poor: Tensor
    """``[R]``, poor steps since the Jacobian was computed."""
    moved: Tensor
    """``[R]``, whether the row has moved since then."""

    def take(self, rows: Tensor) -> "_Rows":
        return _Rows(*(value[rows] for value in self))


def annealed_search(
    fibre: Constraint,
    start: Tensor,
    *,
    tolerance: Tensor,
    max_iterations: int = 300,
    report: Callable[[int, Tensor], None] = lambda found, misfit: None,
    enough: Callable[[Tensor], bool] = lambda found: False,
) -> tuple[Tensor, Tensor]:
    """Points on the fibre near prior draws: the minimum of ``|c(u)|^2 / s^2 + |u - start|^2`` as s falls to 0; near
    the fibre, ``start`` is the last minimum.

    For a linear model and normal inputs this gives a draw of the posterior. The pull towards the prior draw keeps
    inputs typical where the Jacobian is badly conditioned, directions that matter little to the misfit come last, and
    no scale of the constraint needs to be known. Steps are damped Gauss-Newton steps; between few Jacobians each
    costs one evaluation of the constraint and a rank-one secant update (Broyden 1965).

    Args:
        fibre: constraints with a dense Jacobian, one per row.
        start: prior draws, ``[R, D]``.
        tolerance: ``[R]``; a row is found when ``max|c| < tolerance``.
        max_iterations: steps after which a row has failed.
        report: called at every step with the number of rows found and the misfits of the others.
        enough: called with the rows found, ``[R]``, at every step from the 60th on: whether to give up the others.

    Returns:
        points ``[R, D]`` and the max-norm of their constraint ``[R]``.
    """
    result = (start, torch.full_like(tolerance, torch.inf))
    index = torch.arange(len(start), device=start.device)
    c, jacobian = fibre.evaluate(_entries, start)
    none = torch.zeros_like(tolerance)
    width = _FIRST_WIDTH * c.square().mean(-1).sqrt()
    rows = _Rows(start, tolerance, _NEAR * width, start, c, jacobian, width, none, none, none.bool())
    for count in range(max_iterations):
        residual = rows.c.abs().amax(-1)
        running = (residual >= rows.tolerance) & (rows.damping < _STUCK)
        if not running.all():
            result = store(index, result, (rows.u, residual))
            keep = running.nonzero().squeeze(-1)
            index, rows, fibre = index[keep], rows.take(keep), fibre.take(keep)
        if len(index) == 0 or (count >= _LONG and enough(result[1] < tolerance)):
            return result  # type: ignore[return-value]
        report(len(start) - len(index), rows.c.abs().amax(-1))
        rows = _refreshed(fibre, _step(fibre, rows))
    return store(index, result, (rows.u, rows.c.abs().amax(-1)))  # type: ignore[return-value]


def towards(fibre: Constraint, point: Tensor, goal: Tensor, *, tolerance: Tensor, active: Tensor) -> Tensor:
    """Points of the fibre nearer to prior draws: moves along its tangent spaces, each projected back (math 5.5).

    A search ends far out in directions that hardly change the misfit, tens of nats above typical points of a badly
    conditioned fibre, and warm-up on it costs Jacobians and gradients; this costs few Jacobians.

    Args:
        fibre: constraints, one per row.
        point: ``[R, D]`` on the fibre.
        goal: ``[R, D]``.
        tolerance: ``[R]``, of the constraint.
        active: ``[R]``, the rows to move.
    """
    share = torch.full_like(tolerance, _FIRST_SHARE)
    for _ in range(_MOVES):
        base = fibre.evaluate(evaluate_jacobian, point)
        way = base.tangent(goal - point)
        share = share.minimum(_LONGEST / way.norm(dim=-1).clamp_min(1e-30))
        moved = project(
            fibre,
            point + share.unsqueeze(-1) * way,
            base,
            tolerance=tolerance,
            active=active,
            solvers=("broyden",),
            max_iterations=_UPDATES,
        )
        nearer = moved.converged & ((moved.position - goal).norm(dim=-1) < (point - goal).norm(dim=-1))
        point = torch.where(nearer.unsqueeze(-1), moved.position, point)
        share = torch.where(nearer, (_GROWTH * share).clamp_max(1), 0.5 * share)
    return point


def _entries(fibre: Constraint, u: Tensor) -> tuple[Tensor, Tensor]:
    """The constraint and its dense Jacobian."""
    value, (jacobian,) = fibre.entries(u)
    return value, jacobian


def _step(fibre: Constraint, rows: _Rows) -> _Rows:
    """One damped step of every row: accepted if it reduces the objective, with a secant update of J in any case."""
    start, _, _, u, c, jacobian, width, damping, poor, moved = rows

    def objective(c: Tensor, u: Tensor) -> Tensor:
        return (c / width.unsqueeze(-1)).square().sum(-1) + (u - start).square().sum(-1)

    step = _proposal(rows)
    proposal, predicted = u + step, c + mv(jacobian, step)
    c_new = fibre.evaluate(evaluate_constraint, proposal)
    here, there = objective(c, u), objective(c_new, proposal)
    promised = here - objective(predicted, proposal)
    gain = ((here - there) / promised.clamp_min(1e-30)).nan_to_num(-torch.inf)
    accepted = there < here
    change = (c_new - predicted) / step.square().sum(-1, keepdim=True).clamp_min(1e-30)
    usable = (c_new.isfinite().all(-1) & (step != 0).any(-1))[:, None, None]
    jacobian = torch.where(usable, jacobian + change.unsqueeze(-1) * step.unsqueeze(-2), jacobian)
    u, c = torch.where(accepted.unsqueeze(-1), proposal, u), torch.where(accepted.unsqueeze(-1), c_new, c)
    free = damping == 0
    # nothing is left to gain at this width, if the Jacobian is right
    least = (promised < _LITTLE * c.shape[-1]) & (damping < 1)
    worse = (gain < _POOR) & ~least
    damping = torch.where(worse, 4 * damping + 1, torch.where(gain > _GOOD, damping / 4, damping))
    damping = torch.where(damping < _NEGLIGIBLE, 0, damping)
    # the misfit is as small as the width, or no smaller one is to be had at it
    settled = (c.square().mean(-1) < width.square()) | (least & ~moved)
    poor = torch.where(least & ~settled, _PATIENCE, torch.where(worse, poor + 1, poor))
    moved = moved | accepted
    shrink = torch.where(free & accepted, _SHRINK_FREELY, _SHRINK)
    # misfits below the tolerance end the search
    width = torch.where(settled, shrink * width, width).clamp_min(1e-3 * rows.tolerance)
    # near the fibre what remains is in directions that hardly change the misfit: no pull holds it back
    start = torch.where((settled & (width < rows.near)).unsqueeze(-1), u, start)
    return _Rows(start, rows.tolerance, rows.near, u, c, jacobian, width, damping, poor, moved)


def _proposal(rows: _Rows) -> Tensor:
    """The step d to the minimum of ``|c + J d|^2 / s^2 + |u + d - start|^2 + mu |d|^2``, ``[R, D]``.

    With ``a = (start - u) / (1 + mu)``: ``d = a - J^T (J J^T + (1 + mu) s^2 I)^-1 (c + J a)``.
    """
    back = (rows.start - rows.u) / (1 + rows.damping).unsqueeze(-1)
    # the Gram matrix of a badly conditioned Jacobian needs twice its digits
    jacobian = rows.jacobian.double()
    gram = jacobian @ jacobian.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(((1 + rows.damping) * rows.width.square()).double().unsqueeze(-1))
    residual = rows.c.double() + mv(jacobian, back.double())
    return back - mv(jacobian.mT, torch.linalg.solve_ex(gram, residual)[0]).nan_to_num(0, 0, 0).to(back)


def _refreshed(fibre: Constraint, rows: _Rows) -> _Rows:
    """The rows with Jacobians computed anew where steps have become poor."""
    stale = ((rows.poor >= _PATIENCE) & rows.moved).nonzero().squeeze(-1)
    if len(stale) == 0:
        return rows
    _, jacobian = fibre.take(stale).evaluate(_entries, rows.u[stale])
    return rows._replace(
        jacobian=rows.jacobian.index_copy(0, stale, jacobian),
        # what made steps poor may have been the Jacobian
        damping=rows.damping.index_copy(0, stale, rows.damping[stale] / 50),
        poor=rows.poor.index_fill(0, stale, 0),
        moved=rows.moved.index_fill(0, stale, False),
    )
