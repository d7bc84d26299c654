"""Symplectic integrators: leapfrog on R^D, reversible geodesics on a fibre (J Algorithm 1, T Algorithm 11)."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autodiff.loops import is_captured, repeat
from ..autodiff.pytrees import flatten, tree_map
from ..conditioning.fibre import Fibre, Linearisation
from ..conditioning.projection import Projection
from ..errors import Status
from ..linear_maps import IDENTITY
from ..progress import foretold
from ..structures import JacobianMap
from .kernel import either
from .metrics import Metric

# Most numbers that drifts waiting for their check hold.
_WAITING = 2**23


class FreeMotion(NamedTuple):
    """Free motion in the input space, and the force left to the kicks."""

    move: Callable[[Tensor, Tensor, Tensor], Tensor]
    """``(u, p, h)``: the point that momentum p reaches from u in time h."""
    arrival: Callable[[Tensor, Tensor, Tensor], Tensor]
    """``(u, u', h)``: the momentum on arrival at u' of the motion from u that reaches u' in time h."""
    force: Callable[[Tensor, Tensor], Tensor]
    """``(u, grad phi)``: the gradient left to the kicks."""


STRAIGHT = FreeMotion(
    move=lambda u, p, h: u + h * p,
    arrival=lambda u, u_new, h: (u_new - u) / h,
    force=lambda u, gradient: gradient,
)
"""Straight lines: ``u' = u + h p``."""

CIRCULAR = FreeMotion(
    move=lambda u, p, h: u * h.cos() + p * h.sin(),
    arrival=lambda u, u_new, h: (u_new * h.cos() - u) / h.sin(),
    force=lambda u, gradient: gradient - u,
)
"""The exact motion under the energy ``u.u / 2`` of a standard normal density (the Gaussian split, math 3.6)."""


Solver = Callable[..., Projection]
""":func:`projection.project` with its settings filled in: ``(fibre, v, base, active=, expected=, within=)``."""


class Drift(NamedTuple):
    """Where drifts of some rows ended, and where they came from."""

    start: Tensor
    """``[R, D]``."""
    position: Tensor
    momentum: Tensor
    """On arrival."""
    duration: Tensor
    """``[R, 1]``."""
    jacobian: JacobianMap
    """At the position."""
    moved: Tensor
    """``[R]``; the other rows do not count."""


class ReverseChecks:
    """Whether drifts of a trajectory are reversible: the solver, started with the momentum negated, must return.

    Drifts are collected and reversed together, as many as memory allows: one solve of many rows in the place of one
    after every drift. What a row does after a drift that does not return is wasted; that is rare.

    Args:
        fibre: R constraints, one per row.
        solver: projects drifted points back.
        flow: the free motion.
        tolerance: max-norm distance within which a reversed drift must return.
    """

    def __init__(self, fibre: Fibre, solver: Solver, flow: FreeMotion, tolerance: float):
        self._fibre, self._solver, self._flow, self._tolerance = fibre, solver, flow, tolerance
        self._waiting: list[Drift] = []
        self._size = 0
        n, device = len(fibre.values), fibre.values.device
        self._failures, self._iterations = torch.zeros(2, n, dtype=torch.int32, device=device)

    def add(self, drift: Drift) -> None:
        """Reverse this drift, of a row per constraint, now or later."""
        self._waiting.append(drift)
        self._size += sum(tensor.numel() for tensor in flatten(drift)[0])
        if self._size > _WAITING:
            self._reverse()

    def finished(self) -> tuple[Tensor, Tensor]:
        """Per row ``[R]``: whether all its drifts returned, and solver iterations."""
        if self._waiting:
            self._reverse()
        return self._failures == 0, self._iterations

    def _reverse(self) -> None:
        drift, n = self._waiting[0], len(self._waiting)
        rows = torch.arange(len(self._failures), device=self._failures.device).repeat(n)
        if n > 1:
            drift = tree_map(lambda *tensors: torch.cat(tensors), *self._waiting)
        self._waiting, self._size = [], 0
        # until it converges, or contracts towards its start from nearby: a truncated solve would accept moves whose
        # reversal fails, and bias the draws
        back = self._solver(
            self._fibre if n == 1 else self._fibre.take(rows),
            self._flow.move(drift.position, -drift.momentum, drift.duration),
            drift.jacobian,
            active=drift.moved,
            expected=drift.start,
            within=self._tolerance,
        )
        near = (back.position - drift.start).abs().amax(-1) < self._tolerance
        failed = drift.moved & ~(back.converged & near)
        for total, more in ((self._failures, failed), (self._iterations, back.iterations)):
            total.index_add_(0, rows, more.to(total.dtype))


class PhasePoint(NamedTuple):
    """A position and a momentum, with the energy and gradient at the position; ``[...]`` is any shape of chains."""

    position: Tensor
    """``[..., D]``."""
    momentum: Tensor
    energy: Tensor
    """``[...]``, without the kinetic energy."""
    gradient: Tensor
    extra: tuple[Tensor, ...] = ()
    """Further values at the position, each ``[...]`` or ``[..., E]``."""

    @property
    def hamiltonian(self) -> Tensor:
        return self.energy + 0.5 * self.momentum.square().sum(-1)

    def where(self, condition: Tensor, other: "PhasePoint") -> "PhasePoint":
        """This point where the condition ``[...]`` holds, else the other."""
        return either(condition, self, other)


Evaluate = Callable[[Tensor], tuple[Tensor, Tensor, tuple[Tensor, ...]]]
"""Energy ``[...]``, gradient ``[..., D]`` and further values at positions ``[..., D]``."""


def leapfrog(
    evaluate: Evaluate,
    start: PhasePoint,
    step_size: Tensor,
    n_steps: int | Tensor,
    metric: Metric = IDENTITY,
    gradient_alone: Callable[[Tensor], Tensor] | None = None,
    given: tuple[Tensor, ...] = (),
) -> PhasePoint:
    """``n_steps`` steps of kick-drift-kick with adjacent half kicks merged.

    Args:
        evaluate: the energy and its gradient.
        start: initial point, with the gradient at its position.
        step_size: ``[...]``; negative to go backwards.
        n_steps: one number, or one per row, ``[...]``.
        metric: the inverse of the mass; momenta are those in which the kinetic energy is ``|p|^2 / 2``.
        gradient_alone: the gradient at the points before the last; None to ``evaluate`` at all points.
        given: other arguments of ``evaluate``, which in a program may use no other tensors than these.
    """
    step = step_size.unsqueeze(-1)
    position, energy, gradient, extra = start.position, start.energy, start.gradient, start.extra
    # a new tensor: it is updated in place
    momentum = start.momentum - 0.5 * step * metric.transpose(gradient)
    if is_captured():
        return _leapfrog_program(
            evaluate, PhasePoint(position, momentum, *start[2:]), step, n_steps, metric, gradient_alone, given
        )
    longest = _longest(n_steps)
    for i, (_, drift, kick) in enumerate(_lengths(step, n_steps, longest)):
        position = position + drift * metric.apply(momentum)
        if gradient_alone is None or i == longest - 1:
            energy, gradient, extra = evaluate(position, *given)
        else:
            gradient = gradient_alone(position)
        momentum.sub_(kick * metric.transpose(gradient))
    return PhasePoint(position, momentum, energy, gradient, extra)


def _leapfrog_program(evaluate, start, step, n_steps, metric, gradient_alone, given) -> PhasePoint:
    """:func:`leapfrog` after its first half kick, as a loop that can be captured.

    With a gradient of its own for the points before the last one, that is evaluated after the loop.
    """
    n_steps = torch.as_tensor(n_steps, device=step.device).expand(step.shape[:-1])
    longest = n_steps.max()

    def drifted(k, position, momentum, constants) -> Tensor:
        step, n_steps, metric = constants[:3]
        return torch.where((k < n_steps).unsqueeze(-1), position + step * metric.apply(momentum), position)

    def kicked(k, momentum, gradient, constants) -> Tensor:
        step, n_steps, metric = constants[:3]
        return momentum - kick_length(k, step, n_steps) * metric.transpose(gradient)

    def body(k, carried, constants) -> Any:
        position, momentum = carried[:2]
        position = drifted(k, position, momentum, constants)
        if gradient_alone is not None:
            return position, kicked(k, momentum, gradient_alone(position), constants)
        energy, gradient, extra = evaluate(position, *constants[3:])
        return position, kicked(k, momentum, gradient, constants), energy, gradient, *extra

    constants = (step, n_steps, metric, *given)
    if gradient_alone is None:
        end: Any = repeat(longest, body, (*start[:4], *start.extra), constants)
        position, momentum, energy, gradient, *extra = end
        return PhasePoint(position, momentum, energy, gradient, tuple(extra))
    inside: Any = repeat(longest - 1, body, (start.position, start.momentum), constants)
    position, momentum = inside
    position = drifted(longest - 1, position, momentum, constants)
    energy, gradient, extra = evaluate(position, *given)
    return PhasePoint(position, kicked(longest - 1, momentum, gradient, constants), energy, gradient, extra)


def kick_length(k: Any, step: Tensor, n_steps: Tensor) -> Tensor:
    """The kick after step k of rows that make so many: a full step inside a trajectory, half at its end, then none."""
    halves = (k < n_steps).to(step) + (k + 1 < n_steps).to(step)
    return 0.5 * halves.unsqueeze(-1) * step


def _longest(n_steps: int | Tensor) -> int:
    return n_steps if isinstance(n_steps, int) else int(n_steps.max())


def _lengths(step: Tensor, n_steps: int | Tensor, longest: int) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """For every step: which rows move, None for all, and the lengths of the drift and of the kick that ends the step.

    A kick is a full step inside a trajectory, half a step at its end, and nothing after it.
    """
    if isinstance(n_steps, int):
        for i in foretold(n_steps, f"a trajectory of {n_steps:.4g} steps"):
            yield None, step, step if i < n_steps - 1 else 0.5 * step
        return
    # of all steps at once: a step of a small network takes as long as a few calls
    order = torch.arange(longest + 1, device=step.device).view(-1, *[1] * n_steps.ndim)
    moving = order < n_steps
    drifts = step * moving.unsqueeze(-1)
    kicks = 0.5 * (drifts[:-1] + drifts[1:])
    yield from zip(moving[:-1], drifts[:-1], kicks, strict=True)


class GeodesicEndpoint(NamedTuple):
    """End of a trajectory on the fibre; rows whose projection failed stopped at their last valid point."""

    position: Tensor
    momentum: Tensor
    linearisation: Linearisation
    status: Tensor
    """:class:`Status` per row, ``[R]``."""
    iterations: Tensor
    """``[R]``, solver iterations."""


def geodesic(
    fibre: Fibre,
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
    """``n_steps`` steps of projected kicks around ``n_geodesic`` projected drifts each (math 3.2).

    Every drift is checked to be reversible, those of a trajectory together (:class:`ReverseChecks`).

    Args:
        fibre: R constraints, one per row; in a program what stands for them.
        position: ``[R, D]`` on the fibre; momentum ``[R, D]`` in its tangent space.
        linearisation: linearisation at ``position``.
        step_size: ``[R]``, size of one step; a drift takes ``step_size / n_geodesic``.
        n_steps: one number, or one per row, ``[R]``.
        solver: projects drifted points back.
        reversal_tolerance: max-norm distance within which a reversed drift must return.
        flow: the free motion that drifts follow, :data:`STRAIGHT` or :data:`CIRCULAR`.
    """
    steps, n_steps = n_steps, torch.as_tensor(n_steps, device=position.device).expand_as(step_size)
    step = step_size.unsqueeze(-1)
    jacobian = linearisation.jacobian
    u, p = position, momentum - 0.5 * step * jacobian.tangent(flow.force(position, linearisation.gradient))
    if is_captured():
        return _geodesic_program(
            fibre, u, p, linearisation, step, n_steps, n_geodesic, solver, reversal_tolerance, flow
        )
    longest, drift = _longest(steps), step / n_geodesic
    status = torch.full(u.shape[:1], int(Status.OK), dtype=torch.int8, device=u.device)
    iterations = torch.zeros_like(status, dtype=torch.int32)
    checks = ReverseChecks(fibre, solver, flow, reversal_tolerance)
    for i, (moving, _, kick) in enumerate(_lengths(step, n_steps, longest)):
        for j in range(n_geodesic):
            alive = moving & (status == Status.OK)
            forward = solver(fibre, flow.move(u, p, drift), jacobian, active=alive)
            moved = alive & forward.converged
            status = torch.where(alive & ~moved, int(Status.PROJECTION_FAILED), status)
            # a failed row stays at its last valid point, so that the rest of the batch meets no NaN
            u_new = torch.where(moved.unsqueeze(-1), forward.position, u)
            if j < n_geodesic - 1:
                jacobian = fibre.evaluate(type(fibre).jacobian, u_new)
            else:
                linearisation = fibre.evaluate(type(fibre).linearise, u_new)
                jacobian = linearisation.jacobian
            p_new = jacobian.tangent(flow.arrival(u, u_new, drift))
            checks.add(Drift(u, u_new, p_new, drift, jacobian, moved))
            iterations += forward.iterations
            u, p = u_new, torch.where(moved.unsqueeze(-1), p_new, p)
        p = p - kick * jacobian.tangent(flow.force(u, linearisation.gradient))
        # a device would make the host wait for the answer
        if u.device.type == "cpu" and i + 1 < longest and not (status == Status.OK).any():
            break
    returned, more = checks.finished()
    status = torch.where(returned, status, int(Status.REVERSAL_FAILED))
    return GeodesicEndpoint(u, p, linearisation, status, iterations + more)


class _Counts(NamedTuple):
    """What became of the drifts of every row so far, each ``[R]``."""

    status: Tensor
    iterations: Tensor
    returned: Tensor
    """Whether all drifts came back when they were reversed."""


class _Moving(NamedTuple):
    """Rows between two drifts."""

    position: Tensor
    momentum: Tensor
    jacobian: JacobianMap
    counts: _Counts


def _geodesic_program(
    fibre, u, p, linearisation, step, n_steps, n_geodesic, solver, reversal_tolerance, flow
) -> GeodesicEndpoint:
    """:func:`geodesic` after its first half kick, as a loop that can be captured: each drift is reversed at once.

    A row whose drift does not return moves on all the same, as it does there.
    """
    none = torch.zeros_like(n_steps, dtype=torch.bool)
    counts = _Counts(none.to(torch.int8) + int(Status.OK), none.to(torch.int32), ~none)

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

    first = _Moving(u, p, linearisation.jacobian, counts)
    end, there = repeat(n_steps.max(), stepped, (first, linearisation), (fibre, step, n_steps))
    status = torch.where(end.counts.returned, end.counts.status, int(Status.REVERSAL_FAILED))
    return GeodesicEndpoint(end.position, end.momentum, there, status, end.counts.iterations)
