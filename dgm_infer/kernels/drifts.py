"""Drifts on a fibre: a free motion, projected back (math 3.2), and the check that it is reversible (math 3.4)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..autodiff.pytrees import flatten, tree_map
from ..conditioning.fibre import Fibre
from ..conditioning.projection import Projection
from ..structures.jacobian import JacobianMap

__all__ = ["CIRCULAR", "STRAIGHT", "Drift", "Flow", "ReverseChecks", "Solver"]

# Most numbers that drifts waiting for their check hold.
_WAITING = 2**23


class Flow(NamedTuple):
    """Free motion in the input space, and the force left to the kicks."""

    move: Callable[[Tensor, Tensor, Tensor], Tensor]
    """``(u, p, h)``: the point that momentum p reaches from u in time h."""
    arrival: Callable[[Tensor, Tensor, Tensor], Tensor]
    """``(u, u', h)``: the momentum on arrival at u' of the motion from u that reaches u' in time h."""
    force: Callable[[Tensor, Tensor], Tensor]
    """``(u, grad phi)``: the gradient left to the kicks."""


STRAIGHT = Flow(
    move=lambda u, p, h: u + h * p,
    arrival=lambda u, u_new, h: (u_new - u) / h,
    force=lambda u, gradient: gradient,
)
"""Straight lines: ``u' = u + h p``."""

CIRCULAR = Flow(
    move=lambda u, p, h: u * h.cos() + p * h.sin(),
    arrival=lambda u, u_new, h: (u_new * h.cos() - u) / h.sin(),
    force=lambda u, gradient: gradient - u,
)
"""The exact motion under the energy ``u.u / 2`` of a standard normal density (the Gaussian split, math 3.6)."""


class Solver(Protocol):
    """:func:`projection.project` with its settings filled in."""

    def __call__(
        self,
        fibre: Fibre,
        v: Tensor,
        base: JacobianMap,
        *,
        active: Tensor,
        expected: Tensor | None = None,
        within: float = 0.0,
    ) -> Projection: ...


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
    rows: Tensor
    """``[R]``, their problems in the fibre."""


class ReverseChecks:
    """Whether drifts of a trajectory are reversible: the solver, started with the momentum negated, must return.

    Drifts are collected and reversed together, as many as memory allows: one solve of many rows in the place of one
    after every drift. What a row does after a drift that does not return is for nothing; that is rare.

    Args:
        fibre: R constraints, one per row.
        solver: projects drifted points back.
        flow: the free motion.
        tolerance: max-norm distance within which a reversed drift must return.
    """

    def __init__(self, fibre: Fibre, solver: Solver, flow: Flow, tolerance: float):
        self._fibre, self._solver, self._flow, self._tolerance = fibre, solver, flow, tolerance
        self._waiting: list[Drift] = []
        self._size = 0
        n, device = len(fibre.values), fibre.values.device
        self._failures, self._retries, self._iterations = torch.zeros(3, n, dtype=torch.int32, device=device)

    def add(self, drift: Drift) -> None:
        """Reverse this drift, of a row per constraint, now or later."""
        if drift.moved.device.type == "cpu" and not drift.moved.all():
            moved = drift.moved.nonzero().squeeze(-1)
            drift = tree_map(lambda tensor: tensor[moved], drift)
        self._waiting.append(drift)
        self._size += sum(tensor.numel() for tensor in flatten(drift)[0])
        if self._size > _WAITING:
            self._reverse()

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per row ``[R]``: whether all its drifts returned, solver iterations, whether the first solver failed."""
        if self._waiting:
            self._reverse()
        return self._failures == 0, self._iterations, self._retries > 0

    def _reverse(self) -> None:
        drift, several = self._waiting[0], len(self._waiting) > 1
        if several:
            drift = tree_map(lambda *tensors: torch.cat(tensors), *self._waiting)
        self._waiting, self._size = [], 0
        if not len(drift.rows):
            return
        alone = not several and len(drift.rows) == len(self._fibre.values)
        # until it converges, or contracts towards its start from nearby: a truncated solve would accept moves whose
        # reversal fails, and bias the draws
        back = self._solver(
            self._fibre if alone else self._fibre.take(drift.rows),
            self._flow.move(drift.position, -drift.momentum, drift.duration),
            drift.jacobian,
            active=drift.moved,
            expected=drift.start,
            within=self._tolerance,
        )
        near = (back.position - drift.start).abs().amax(-1) < self._tolerance
        failed = drift.moved & ~(back.converged & near)
        for total, more in (
            (self._failures, failed),
            (self._retries, back.retried),
            (self._iterations, back.iterations),
        ):
            total.index_add_(0, drift.rows, more.to(total.dtype))
