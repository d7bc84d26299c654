"""Starting points on a fibre: prior draws moved onto it by least squares or an annealed misfit (math 5, J 8.4)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import StartError, warn
from ..settings import Settings
from ..structures.jacobian import mv
from .observed import ObservedModel
from .projection import Constraint, damped_gauss_newton, project, store


@dataclass(frozen=True)
class SearchSettings(Settings):
    """The search that anneals the misfit, and the moves along the fibre after it (math 5.5)."""

    rounds: int = 6
    """Rounds of prior draws: these searches fail less often than others and cost more."""
    width: float = 0.5
    """Share of the first misfit that the width starts at."""
    shrink: float = 0.6
    """Factor of the width once the misfit is as small: no quicker one after easy steps paid."""
    near: float = 0.1
    """Share of the first width below which a point is near the fibre, and no longer pulled to its prior draw: without
    it searches of badly conditioned models do not end."""
    little: float = 0.05
    """Promised reduction of the objective, per output, that is not worth another step."""
    patience: int = 2
    """Poor steps after which a Jacobian is computed again."""
    steps: int = 300
    """Steps after which a search has failed."""
    long: int = 60
    """Steps from which searches that are left may be given up."""
    stuck: float = 1e12
    """Damping at which steps no longer move."""
    moves: int = 8
    """Moves along the fibre towards a prior draw."""
    longest: float = 1.5
    """Longest of them: about the curvature radius of a fibre in units of the prior."""
    updates: int = 25
    """Updates after which the projection of a move has failed."""


SETTINGS = SearchSettings()


class Problems(Constraint, Protocol):
    """The part of a fibre that the search needs."""

    observed: ObservedModel
    values: Tensor
    batch_shape: torch.Size
    dim: int

    @property
    def scale(self) -> Tensor: ...
    @property
    def searches(self) -> bool: ...
    @property
    def for_searches(self) -> "Problems": ...
    def rows(self, chains: int) -> "Problems": ...
    def take(self, problems: Tensor) -> "Problems": ...


def find_starts(
    fibre: Problems,
    chains: int,
    rng: torch.Generator,
    *,
    tolerance: float,
    attempts: int,
    typical: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Tensor:
    """Points on the fibre near prior draws, ``[chains, *batch, D]``.

    In scalar units ``u1`` is a prior draw and every ``u2_i`` solves its own scalar equation (math 5.1). Otherwise, and
    if that fails, a damped Gauss-Newton solve starts from a prior draw (math 5.2); in models without local inputs the
    misfit is annealed first (math 5.5). Chains without a solution redraw; one that never finds any shares the start of
    another chain of its problem, with a warning.

    Args:
        tolerance: relative to the scale of each problem.
        attempts: rounds of prior draws, at most 6 where the misfit is annealed.
        typical: whether the points of a search then move along the fibre to where they are nearest to their prior
            draws, as draws of the posterior are if the model is linear.

    Raises:
        StartError: after all rounds a problem has no point; the message names the best residual.
    """
    flat = fibre.rows(chains)
    tol = tolerance * flat.scale
    position = fibre.values.new_empty(len(tol), fibre.dim)
    best = torch.full_like(tol, torch.inf)
    deficient = torch.zeros_like(tol, dtype=torch.bool)
    # smallest residual of points where the Jacobian is singular
    closest = torch.full_like(tol, torch.inf)
    rows = torch.arange(len(tol), device=tol.device)
    anneal = fibre.searches
    attempts = min(attempts, SETTINGS.rounds) if anneal else attempts
    for _ in range(attempts):

        def say(found: int, misfit: Tensor, n_before: int = len(tol) - len(rows)) -> None:
            report(_found_so_far(n_before + found, len(tol), misfit))

        point, residual, singular, possible = _attempt(
            flat.take(rows), rng, tol[rows], say if anneal else None, typical
        )
        deficient[rows] |= singular & (residual < tol[rows])
        closest[rows] = closest[rows].minimum(residual.masked_fill(~(singular & possible), torch.inf))
        residual = residual.masked_fill(singular | ~possible, torch.inf)
        better = residual < best[rows]
        position[rows[better]], best[rows[better]] = point[better], residual[better]
        rows = (best >= tol).nonzero().squeeze(-1)
        if len(rows) == 0:
            break
    found = (best < tol).reshape(chains, -1)
    if not found.any(0).all():
        problem = int((~found.any(0)).nonzero()[0])
        own = slice(problem, None, found.shape[1])
        least = best[own].min().item(), closest[own].min().item()
        raise StartError(_no_start(fibre, problem, *least, bool(deficient[own].any()), attempts))
    position = position.reshape(chains, -1, fibre.dim)
    if not found.all():
        warn(f"{int((~found).sum())} chains found no start of their own and share another's")
        first = found.to(torch.int8).argmax(0)[None, :, None]
        position = torch.where(found.unsqueeze(-1), position, position.take_along_dim(first, 0))
    return position.reshape(chains, *fibre.batch_shape, fibre.dim)


def search_once(
    fibre: Problems,
    rng: torch.Generator,
    *,
    tolerance: Tensor,
    report: Callable[[str], None],
    enough: Callable[[Tensor], bool],
) -> tuple[Tensor, Tensor]:
    """One search from a prior draw per row: where it ends, ``[R, D]``, and whether that is a start, ``[R]``.

    ``enough`` is called with the rows found, ``[R]``: whether to give up the others.
    """
    n = len(tolerance)

    def say(found: int, misfit: Tensor) -> None:
        report(_found_so_far(found, n, misfit))

    drawn = fibre.observed.sample_inputs((n,), rng, fibre.values)
    near = annealed_search(fibre.for_searches, drawn, tolerance=tolerance, report=say, enough=enough)
    found = (near[1] < tolerance).nonzero().squeeze(-1)
    point, start = near[0], torch.zeros_like(tolerance, dtype=torch.bool)
    if len(found):
        own = fibre.take(found)
        exact, residual = damped_gauss_newton(own, point[found], tolerance=tolerance[found])
        singular, possible = own.jacobian(exact).is_deficient(), own.observed.log_density(exact).isfinite()
        point = point.index_copy(0, found, exact)
        start[found] = (residual < tolerance[found]) & ~singular & possible
    return point, start


@torch.no_grad()
def _attempt(
    fibre: Problems,
    rng: torch.Generator,
    tolerance: Tensor,
    report: Callable[[int, Tensor], None] | None,
    typical: bool,
) -> tuple[Tensor, ...]:
    """A point per row from a new prior draw, its residual, and whether J is rank-deficient and the density positive
    at it; by annealing of the misfit if there is a ``report`` to make."""
    drawn = draw = fibre.observed.sample_inputs((len(tolerance),), rng, fibre.values)
    # by the model's structure, even if it does not pay for this many outputs
    draw = fibre.observed.structure.solve_local(fibre.constraint, draw, tolerance)
    if report is not None:
        draw = annealed_search(fibre.for_searches, draw, tolerance=tolerance, report=report)[0]
    point, residual = damped_gauss_newton(fibre, draw, tolerance=tolerance)
    if report is not None and typical:
        point = towards(fibre.for_searches, point, drawn, tolerance=tolerance, active=residual < tolerance)
    possible = fibre.observed.log_density(point).isfinite()
    return point, residual.nan_to_num(nan=torch.inf, posinf=torch.inf), fibre.jacobian(point).is_deficient(), possible


def _found_so_far(found: int, n: int, misfit: Tensor) -> str:
    return f"start-up, {found} of {n} chains found, misfit {misfit.median():.1g}"


def _no_start(fibre: Problems, problem: int, residual: float, closest: float, deficient: bool, attempts: int) -> str:
    where = f" of problem {problem}" if fibre.batch_shape else ""
    if deficient:
        return (
            f"the observed outputs{where} do not vary independently (the Jacobian is rank-deficient where the "
            "model generates the observation): observe fewer, or allow for noise, "
            "condition(..., noise=sd) or WithNoise(model, sd=...)"
        )
    if residual == float("inf") > closest:
        return (
            f"the observed outputs{where} do not vary independently and their values contradict each other: the "
            f"Jacobian is rank-deficient and the smallest residual {closest:.3g}; omit outputs that others determine, "
            "or allow for noise, condition(..., noise=sd) or WithNoise(model, sd=...)"
        )
    if residual == float("inf"):
        return (
            f"outputs or density{where} are infinite or NaN at all the inputs tried ({attempts} attempts per chain): "
            "keep the model's parameters in a range where it can be evaluated"
        )
    remedy = "check that the model can produce it"
    if not fibre.observed.model.has_local_inputs:
        remedy += ", or let it: condition(..., noise=sd) or WithNoise(model, sd=...)"
    what = "largest residual" + ("" if fibre.observed.unit is None else ", outputs that hardly vary in units of that")
    return (
        f"no inputs were found that generate the observation{where}: the nearest outputs of {attempts} attempts per "
        f"chain miss it by {residual:.3g} ({what}); {remedy}"
    )


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
        report: called at every step with the number of rows found and the misfits of the others.
        enough: called with the rows found, ``[R]``, at every step from the 60th on: whether to give up the others.

    Returns:
        points ``[R, D]`` and the max-norm of their constraint ``[R]``.
    """
    result = (start, torch.full_like(tolerance, torch.inf))
    index = torch.arange(len(start), device=start.device)
    c, jacobian = fibre.evaluate(_entries, start)
    none = torch.zeros_like(tolerance)
    width = SETTINGS.width * c.square().mean(-1).sqrt()
    rows = _Rows(start, tolerance, SETTINGS.near * width, start, c, jacobian, width, none, none, none.bool())
    for count in range(SETTINGS.steps):
        residual = rows.c.abs().amax(-1)
        running = (residual >= rows.tolerance) & (rows.damping < SETTINGS.stuck)
        if not running.all():
            result = store(index, result, (rows.u, residual))
            keep = running.nonzero().squeeze(-1)
            index, rows, fibre = index[keep], rows.take(keep), fibre.take(keep)
        if len(index) == 0 or (count >= SETTINGS.long and enough(result[1] < tolerance)):
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
    share = torch.full_like(tolerance, 0.5)
    for _ in range(SETTINGS.moves):
        base = fibre.evaluate(type(fibre).jacobian, point)
        way = base.tangent(goal - point)
        share = share.minimum(SETTINGS.longest / way.norm(dim=-1).clamp_min(1e-30))
        moved = project(
            fibre,
            point + share.unsqueeze(-1) * way,
            base,
            tolerance=tolerance,
            active=active,
            solvers=("broyden",),
            max_iterations=SETTINGS.updates,
        )
        nearer = moved.converged & ((moved.position - goal).norm(dim=-1) < (point - goal).norm(dim=-1))
        point = torch.where(nearer.unsqueeze(-1), moved.position, point)
        share = torch.where(nearer, (1.5 * share).clamp_max(1), 0.5 * share)
    return point


def _entries(fibre: Constraint, u: Tensor) -> tuple[Tensor, Tensor]:
    value, (jacobian,) = fibre.entries(u)
    return value, jacobian


def _step(fibre: Constraint, rows: _Rows) -> _Rows:
    """One damped step of every row: accepted if it reduces the objective, with a secant update of J in any case."""
    start, tolerance, near, u, c, jacobian, width, damping, poor, moved = rows

    def objective(c: Tensor, u: Tensor) -> Tensor:
        return (c / width.unsqueeze(-1)).square().sum(-1) + (u - start).square().sum(-1)

    step = _proposal(rows)
    proposal, predicted = u + step, c + mv(jacobian, step)
    c_new = fibre.evaluate(type(fibre).constraint, proposal)
    here, there = objective(c, u), objective(c_new, proposal)
    promised = here - objective(predicted, proposal)
    gain = ((here - there) / promised.clamp_min(1e-30)).nan_to_num(-torch.inf)
    accepted = there < here
    change = (c_new - predicted) / step.square().sum(-1, keepdim=True).clamp_min(1e-30)
    usable = (c_new.isfinite().all(-1) & (step != 0).any(-1))[:, None, None]
    jacobian = torch.where(usable, jacobian + change.unsqueeze(-1) * step.unsqueeze(-2), jacobian)
    u, c = torch.where(accepted.unsqueeze(-1), proposal, u), torch.where(accepted.unsqueeze(-1), c_new, c)
    # nothing is left to gain at this width, if the Jacobian is right
    least = (promised < SETTINGS.little * c.shape[-1]) & (damping < 1)
    # the usual ratios of a trust region
    worse = (gain < 0.25) & ~least
    damping = torch.where(worse, 4 * damping + 1, torch.where(gain > 0.7, damping / 4, damping))
    # the misfit is as small as the width, or no smaller one is to be had at it
    settled = (c.square().mean(-1) < width.square()) | (least & ~moved)
    poor = torch.where(least & ~settled, SETTINGS.patience, torch.where(worse, poor + 1, poor))
    moved = moved | accepted
    # misfits below the tolerance end the search
    width = torch.where(settled, SETTINGS.shrink * width, width).clamp_min(1e-3 * tolerance)
    # near the fibre what remains is in directions that hardly change the misfit: no pull holds it back
    start = torch.where((settled & (width < near)).unsqueeze(-1), u, start)
    return _Rows(start, tolerance, near, u, c, jacobian, width, damping, poor, moved)


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
    """The rows with Jacobians computed again where steps have become poor."""
    stale = ((rows.poor >= SETTINGS.patience) & rows.moved).nonzero().squeeze(-1)
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
