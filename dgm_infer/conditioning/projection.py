"""Batched solvers for the projection onto the fibre: ``c(u') = 0``, ``u' = v - J(u)^T lam`` (math 3.3).

Every solver is one update rule in one loop. Rows that have converged, or diverged to infinity, stop iterating: the
loop continues with a compacted batch, so that the slowest chain does not set the pace of all. Rows on which the first
solver fails fall back to the next one. A device works off a fixed number of masked updates instead, a program that is
being captured a loop of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..autodiff.loops import is_captured, repeat_while
from ..autodiff.pytrees import tree_map
from ..settings import Settings
from ..structures import Evaluation, JacobianMap


class Constraint(Protocol):
    """A batch of constraints, one per row: the part of a fibre that the solvers need."""

    def constraint(self, u: Tensor) -> Tensor: ...
    def entries(self, u: Tensor) -> Evaluation: ...
    def jacobian(self, u: Tensor) -> JacobianMap: ...
    def take(self, problems: Tensor) -> "Constraint": ...
    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any: ...


def solver_tolerance(dtype: torch.dtype) -> float:
    """What constraints are solved to unless something else is asked for, relative to :func:`magnitude`."""
    return 1e-8 if dtype == torch.float64 else 1e-5


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


Steps = tuple[tuple[Tensor, Tensor], ...]
"""Steps s made so far and ``s / |s|^2``, each ``[R, D]``."""


class Update(Protocol):
    """One iteration of a solver on rows that are all active."""

    def __call__(
        self, fibre: Constraint, u: Tensor, c: Tensor, base: JacobianMap, steps: Steps
    ) -> tuple[Tensor, Steps]:
        """The next iterate and, if later ones need it, the step to it; ``steps`` are those made so far."""
        ...


def quasi_newton(fibre, u, c, base, steps):
    """``u' - J(u)^T (J(u) J(u)^T)^-1 c(u')``: one factorisation for all iterations."""
    return u - base.pseudo_inverse(c), ()


def broyden(fibre, u, c, base, steps):
    """Quasi-Newton that corrects its factorisation by the steps made (Broyden 1965, *good* update).

    With ``H_0 = J^T (J J^T)^-1`` and ``y`` the change of the constraint over a step s,
    ``H' = H + (s - H y) s^T H / (s^T H y)``. Only the steps are kept: ``-H c`` is a product of their rank-one factors
    with ``-H_0 c`` (Kelley 1995, section 7.3). All steps lie in the row space of J. Steps of 0 change nothing.
    """
    step = -base.pseudo_inverse(c)
    for (_, along), (later, _) in pairwise(steps):
        step = torch.addcmul(step, _dot(step, along), later)
    if steps:
        step = step / (1 - _dot(step, steps[-1][1]))
    # a row that stands on a root of its own has made a step of 0
    along = step / step.square().sum(-1, keepdim=True).clamp_min(1e-30)
    return u + step, ((step, along),)


def newton(fibre, u, c, base, steps):
    """``u' - J(u)^T (J(u') J(u)^T)^-1 c(u')``: a new Jacobian per iteration."""
    return u - base.oblique_inverse(fibre.entries(u).entries, c), ()


SOLVERS: dict[str, Update] = {"quasi_newton": quasi_newton, "broyden": broyden, "newton": newton}


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b).unsqueeze(-1)


@dataclass(frozen=True)
class SolverSettings(Settings):
    """When a solve has failed, and how many of its rows iterate at once."""

    divergence: float = 1e3
    """Growth of the residual that counts as divergence."""
    patience: int = 10
    """Updates after which a residual that has not fallen by :attr:`contraction` will not: the few chains that do not
    converge, as beyond a kink, must not delay the others. At such a rate fifty updates gain a factor of 30."""
    contraction: float = 0.5
    """Decrease of the residual per update that shows that a solver converges."""
    compaction: float = 0.75
    """Share of the rows still iterating below which the batch is compacted."""
    memory: int = 6
    """Steps that Broyden's method corrects by, after which it begins again from where it is: a program has fixed
    shapes, and on a device the host does not ask how far its rows are."""
    device_updates: int = 16
    """Updates of every solve on a device, which never asks how far its rows are: the host would wait for the answer."""


SETTINGS = SolverSettings()


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
    then does not wait.

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
    on_device = v.device.type != "cpu"
    limit = min(max_iterations, SETTINGS.device_updates) if on_device else max_iterations
    stop = Stop.of(tolerance, limit, expected, within)
    if is_captured():
        return _captured([SOLVERS[solver] for solver in solvers], fibre, v, base, stop, active)
    if on_device:
        return masked(SOLVERS[solvers[0]], fibre, v, base, stop, active, limit)
    none = torch.zeros_like(active)
    result = Projection(v, none, none.to(torch.int32), none)
    rows = None if bool(active.all()) else active.nonzero().squeeze(-1)
    for solver in solvers:
        if solver != solvers[0]:
            result = result._replace(retried=active & ~result.converged)
        if rows is None:
            position, converged, iterations = _solve(SOLVERS[solver], fibre, v, base, stop)
            result = Projection(position, converged, iterations, none)
        elif len(rows):
            part = _solve(SOLVERS[solver], fibre.take(rows), v[rows], base[rows], _take(stop, rows))
            position, converged = store(rows, result[:2], part[:2])
            result = Projection(position, converged, result.iterations.index_add(0, rows, part[2]), result.retried)
        rows = (active & ~result.converged).nonzero().squeeze(-1)
    return result


class Stop(NamedTuple):
    """What a solve stops at, per row."""

    tolerance: Tensor
    updates: Tensor
    """``[R]``, after which a solver has failed."""
    near: tuple[Tensor, ...] = ()
    """The expected roots ``[R, D]`` and the distance that counts as near ``[R]``; or nothing."""

    @classmethod
    def of(cls, tolerance: Tensor, updates: int, expected: Tensor | None = None, within: float = 0.0) -> "Stop":
        limit = torch.full_like(tolerance, updates, dtype=torch.int32)
        near = () if expected is None else (expected, torch.full_like(tolerance, within))
        return cls(tolerance, limit, near)

    def reached(self, u: Tensor, residual: Tensor, before: Tensor, updates: Tensor) -> Tensor:
        """Whether a row has converged by its latest update, given its residual before it."""
        converged = residual < self.tolerance
        if not self.near:
            return converged
        root, distance = self.near
        near = (u - root).abs().amax(-1) < distance
        # what halves the residual from then on may run out of updates
        early = updates <= self.updates // 2
        return converged | (near & early & (residual < SETTINGS.contraction * before))


class Solve(NamedTuple):
    """Rows of a solve: their iterates and the residual of those before, and which have converged or still iterate."""

    u: Tensor
    first: Tensor
    residual: Tensor
    converged: Tensor
    running: Tensor
    updates: Tensor

    @classmethod
    def start(cls, v: Tensor, stop: Stop, active: Tensor) -> "Solve":
        """Before the constraint is known."""
        # tensors of their own: loops of programs take none twice
        unknown = torch.full_like(stop.tolerance, torch.inf)
        none = torch.zeros_like(stop.updates)
        no = torch.zeros_like(active)
        return cls(v, unknown, unknown.clone(), no, active.clone(), none)

    def assessed(self, c: Tensor, stop: Stop) -> "Solve":
        """With the constraint at the iterates known: which rows have converged, or failed."""
        residual, fresh = torch.where(self.running, c.abs().amax(-1), self.residual), self.updates == 0
        reached = stop.reached(self.u, residual, self.residual, self.updates)
        converged = self.converged | (self.running & torch.where(fresh, residual < stop.tolerance, reached))
        first = torch.where(fresh, residual, self.first)
        # a NaN residual is neither below its limit nor converged
        limit = torch.where(self.updates < SETTINGS.patience, SETTINGS.divergence, SETTINGS.contraction) * first
        running = self.running & ~converged & (residual <= limit) & (self.updates < stop.updates)
        return Solve(self.u, first, residual, converged, running, self.updates)

    def moved(self, u: Tensor) -> "Solve":
        """After an update to ``u`` of the rows that iterate."""
        return self._replace(u=torch.where(self.running.unsqueeze(-1), u, self.u), updates=self.updates + self.running)


@cache
def one(update: Update) -> Callable[..., tuple[Solve, Steps]]:
    """A function for :meth:`Fibre.evaluate` that assesses the iterates and makes one update of those that need it.

    It returns the step made, if that is needed.
    """

    def make(fibre: Constraint, loop: Solve, stop: Stop, base: JacobianMap, steps: Steps) -> tuple[Solve, Steps]:
        c = fibre.constraint(loop.u)
        loop = loop.assessed(c, stop)
        u, made = update(fibre, loop.u, c, base, steps)
        return loop.moved(u), made

    return make


@cache
def _several(update: Update, n: int) -> Callable[..., Solve]:
    """A function for :meth:`Fibre.evaluate` that makes the next ``n`` updates, remembering no earlier ones."""

    def make(fibre: Constraint, loop: Solve, stop: Stop, base: JacobianMap) -> Solve:
        steps: Steps = ()
        for _ in range(n):
            loop, made = one(update)(fibre, loop, stop, base, steps)
            steps = (*steps, *made)
        return loop.assessed(fibre.constraint(loop.u), stop)

    return make


def masked(
    update: Update, fibre: Constraint, v: Tensor, base: JacobianMap, stop: Stop, active: Tensor, iterations: int
) -> Projection:
    """:func:`project` by one solver in a fixed number of updates."""
    # without a look at which rows still iterate
    loop, n = Solve.start(v, stop, active), 1 if update is newton else SETTINGS.memory
    for _ in range(0, iterations, n):
        loop = fibre.evaluate(_several(update, n), loop, stop, base)
    return Projection(loop.u, loop.converged, loop.updates, active & ~loop.converged)


def _solve(update: Update, fibre: Constraint, v: Tensor, base: JacobianMap, stop: Stop) -> tuple[Tensor, ...]:
    """:func:`project` by one solver, with all rows active: position, converged and iterations."""
    loop = Solve.start(v, stop, torch.ones_like(stop.updates, dtype=torch.bool))
    steps: Steps = ()
    whole = (loop.u, loop.converged, loop.updates)
    # the rows still in the loop: all of them until the batch is first compacted
    rows: Tensor | None = None
    while True:
        steps = steps if len(steps) < SETTINGS.memory else ()
        loop, step = fibre.evaluate(one(update), loop, stop, base, steps)
        steps = (*steps, *step)
        n_running = int(loop.running.sum())
        if n_running == 0:
            break
        if n_running < SETTINGS.compaction * len(loop.running):
            whole = store(rows, whole, (loop.u, loop.converged, loop.updates))
            keep = loop.running.nonzero().squeeze(-1)
            rows = keep if rows is None else rows[keep]
            loop, stop, steps = _take((loop, stop, steps), keep)
            fibre, base = fibre.take(keep), base[keep]
    return store(rows, whole, (loop.u, loop.converged, loop.updates))


def damped_gauss_newton(
    fibre: Constraint, u: Tensor, *, tolerance: Tensor, max_iterations: int = 100
) -> tuple[Tensor, Tensor]:
    """Nearby points on the fibre by Levenberg-Marquardt: ``u' = u - J^T (J J^T + mu I)^-1 c(u)``.

    Damping is divided by 10 after a step that reduces ``|c|``, after which the Jacobian is computed again, and
    multiplied by 10 otherwise. Unlike in :func:`project`, moves may leave the row space of one Jacobian: this finds
    starting points, not proposals. Rows that have converged leave the batch.

    Returns:
        points ``[R, D]`` and the max-norm of their constraint ``[R]``.
    """
    position, c = u, fibre.evaluate(type(fibre).constraint, u)
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
            jacobian = fibre.evaluate(type(fibre).jacobian, u)
        elif moved.any():
            changed = moved.nonzero().squeeze(-1)
            news = fibre.take(changed).evaluate(type(fibre).jacobian, u[changed])
            jacobian = jacobian.map(lambda mine, new, at=changed: mine.index_copy(0, at, new), news)
        if damping is None or floor is None:
            # relative to the stiffness of J J^T along c
            stiffness = jacobian.transpose(c).square().sum(-1) / c.square().sum(-1).clamp_min(1e-30)
            damping, floor = 1e-2 * stiffness, 1e-14 * stiffness
        proposal = u - jacobian.damped_step(c, damping)
        c_new = fibre.evaluate(type(fibre).constraint, proposal)
        better = c_new.norm(dim=-1) < c.norm(dim=-1)
        u = torch.where(better.unsqueeze(-1), proposal, u)
        c = torch.where(better.unsqueeze(-1), c_new, c)
        damping = torch.where(better, torch.maximum(0.1 * damping, floor), 10 * damping)
        moved = better
    return store(rows, (position, residual), (u, c.abs().amax(-1)))  # type: ignore[return-value]


def _take(tree: Any, rows: Tensor) -> Any:
    return tree_map(lambda t: t[rows], tree)


def store(rows: Tensor | None, whole: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``whole`` with the given rows replaced by ``part``; None replaces all."""
    if rows is None:
        return part
    return tuple(w.index_copy(0, rows, p) for w, p in zip(whole, part, strict=True))


def _captured(
    solvers: Sequence[Update], fibre: Any, v: Tensor, base: JacobianMap, stop: Stop, active: Tensor
) -> Projection:
    """:func:`project` in a program that is being captured: loops of fixed shapes with masks, with the same result."""
    none = torch.zeros_like(active)
    result = Projection(v, none, none.to(torch.int32), none)
    for solver in solvers:
        left = active & ~result.converged
        loop = _repeated(solver, fibre, v, base, stop, left)
        result = Projection(
            torch.where(left.unsqueeze(-1), loop.u, result.position),
            result.converged | loop.converged,
            result.iterations + loop.updates,
            none if solver is solvers[0] else left | result.retried,
        )
    return result


def _repeated(update: Update, fibre: Any, v: Tensor, base: JacobianMap, stop: Stop, active: Tensor) -> Solve:
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
