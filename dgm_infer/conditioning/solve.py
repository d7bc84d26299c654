"""Starting points: prior draws moved onto the fibre (math 5, J 8.4)."""

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..errors import StartError
from ..structures import Structure
from .observed import ObservedModel
from .projection import Constraint, evaluate_constraint, evaluate_jacobian, store
from .search import annealed_search, towards

__all__ = ["damped_gauss_newton", "find_starts", "search_once"]

# Rounds of prior draws for searches that anneal the misfit, which fail less often and cost more.
_SEARCHES = 6


class Problems(Constraint, Protocol):
    """The part of a fibre that the search needs."""

    observed: ObservedModel
    values: Tensor
    batch_shape: torch.Size
    dim: int
    structure: Structure

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
        fibre: fibre of a batch of problems.
        chains: points per problem.
        rng: generator of the prior draws.
        tolerance: relative to the scale of each problem.
        attempts: rounds of prior draws, at most 6 where the misfit is annealed.
        typical: whether the points of a search then move along the fibre to where they are nearest to their prior
            draws, as draws of the posterior are if the model is linear.
        report: called with lines of progress.

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
    attempts = min(attempts, _SEARCHES) if anneal else attempts
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
        warnings.warn(f"{int((~found).sum())} chains found no start of their own and share another's", stacklevel=4)
        position = torch.where(found.unsqueeze(-1), position, position.take_along_dim(_first(found), 0))
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

    Args:
        fibre: a fibre with ``searches``, R rows.
        tolerance: ``[R]``.
        report: called with lines of progress.
        enough: called with the rows found, ``[R]``: whether to give up the others.
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


def _first(found: Tensor) -> Tensor:
    """The first chain per problem that found a point: ``[chains, B] -> [1, B, 1]``."""
    return found.to(torch.int8).argmax(0)[None, :, None]


def damped_gauss_newton(
    fibre: Constraint, u: Tensor, *, tolerance: Tensor, max_iterations: int = 100
) -> tuple[Tensor, Tensor]:
    """Nearby points on the fibre by Levenberg-Marquardt: ``u' = u - J^T (J J^T + mu I)^-1 c(u)``.

    Damping is divided by 10 after a step that reduces ``|c|``, after which the Jacobian is computed anew, and
    multiplied by 10 otherwise. Unlike in :func:`project`, moves may leave the row space of one Jacobian: this finds
    starting points, not proposals. Rows that have converged leave the batch.

    Returns:
        points ``[R, D]`` and the max-norm of their constraint ``[R]``.
    """
    position, c = u, fibre.evaluate(evaluate_constraint, u)
    residual = c.abs().amax(-1)
    rows = torch.arange(len(u), device=u.device)
    moved = torch.ones_like(residual, dtype=torch.bool)
    jacobian = damping = floor = None
    for _ in range(max_iterations):
        running = ~(c.abs().amax(-1) < tolerance)
        if not running.all():
            position, residual = store(rows, (position, residual), (u, c.abs().amax(-1)))
            keep = running.nonzero().squeeze(-1)
            if len(keep) == 0:
                break
            rows, u, c, tolerance, fibre = rows[keep], u[keep], c[keep], tolerance[keep], fibre.take(keep)
            moved = moved[keep]
            if jacobian is not None and damping is not None and floor is not None:
                jacobian, damping, floor = jacobian[keep], damping[keep], floor[keep]
        if jacobian is None or moved.all():
            jacobian = fibre.evaluate(evaluate_jacobian, u)
        elif moved.any():
            changed = moved.nonzero().squeeze(-1)
            news = fibre.take(changed).evaluate(evaluate_jacobian, u[changed])
            jacobian = jacobian.map(lambda mine, new, at=changed: mine.index_copy(0, at, new), news)
        if damping is None or floor is None:
            # relative to the stiffness of J J^T along c
            stiffness = jacobian.transpose(c).square().sum(-1) / c.square().sum(-1).clamp_min(1e-30)
            damping, floor = 1e-2 * stiffness, 1e-14 * stiffness
        proposal = u - jacobian.damped_step(c, damping)
        c_new = fibre.evaluate(evaluate_constraint, proposal)
        better = c_new.norm(dim=-1) < c.norm(dim=-1)
        u = torch.where(better.unsqueeze(-1), proposal, u)
        c = torch.where(better.unsqueeze(-1), c_new, c)
        damping = torch.where(better, torch.maximum(0.1 * damping, floor), 10 * damping)
        moved = better
    return store(rows, (position, residual), (u, c.abs().amax(-1)))  # type: ignore[return-value]
