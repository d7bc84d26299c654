"""Targets whose energies and gradients are captured graphs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import ModelError
from ..target import Target
from .capture import Graph, capture, coarsest_type, operations, quiet, reproducible, value_and_gradient
from .loops import is_captured
from .rolled import rolled

Made = TypeVar("Made")

# The targets, and other subjects, of the program that is being captured, by identity.
_TARGETS: ContextVar[dict[int, Any]] = ContextVar("targets")
# A target, and what it is evaluated by.
_EVALUATED: ContextVar[tuple[Any, Any]] = ContextVar("evaluated", default=(None, None))
# Size of the move to the second point at which a graph is compared with its function.
_MOVE = 0.1
# How much more than inputs that differ by one rounding do the roundings of a trajectory may change its end: it rounds
# some dozens of times. Code that is refused for it is not used, and the draws are those of the graph.
_AMPLIFIED = 100.0


def captured(target: Target) -> Target:
    """The target with its energy and gradient as graphs, if the caller is being captured; else the target, or what
    :func:`evaluated_by` has put in its place."""
    if isinstance(target, CapturedTarget):
        return target
    if not is_captured():
        own, other = _EVALUATED.get()
        return other if own is target else target
    return once(target, lambda: CapturedTarget(target))


def once(subject: Any, make: Callable[[], Made]) -> Made:
    """What is made of a subject, once per program that is being captured."""
    known = _TARGETS.get()
    if id(subject) not in known:
        # an identity is one only as long as its owner lives
        known[id(subject)] = (subject, make())
    return known[id(subject)][1]


@contextmanager
def evaluated_by(target: Target, other: Target) -> Iterator[None]:
    """Kernels called within evaluate the target by another one of the same density."""
    token = _EVALUATED.set((target, other))
    try:
        yield
    finally:
        _EVALUATED.reset(token)


@contextmanager
def captured_targets(known: Sequence["CapturedTarget"] = ()) -> Iterator[None]:
    """Each target that is :func:`captured` within is captured once, unless it is known: it may be another one at the
    next time."""
    token = _TARGETS.set({id(each._target): (each._target, each) for each in known})
    try:
        yield
    finally:
        _TARGETS.reset(token)


class CapturedTarget(Target):
    """A target of the same density, each shape of positions captured on first use.

    Args:
        longest: operations of an energy, at most, unless they are a loop; None for any number.

    Raises:
        ModelError: on use, if the energy or its gradient cannot be captured.
    """

    def __init__(self, target: Target, longest: int | None = None):
        self._target, self._longest = target, longest
        super().__init__(target.energy, target.dim, tuple(target.batch_shape))
        self.prior, self.standardised = target.prior, target.standardised
        self._graphs: dict[tuple[torch.Size, torch.dtype], _Captured] = {}

    def energy(self, x):
        return self._of(x).energy(x.contiguous())[0]

    def energy_and_extra(self, x):
        energy, *extra = self._of(x).energy(x.contiguous())
        return energy, tuple(extra)

    def energy_and_gradient(self, x):
        energy, gradient = self._of(x).both(x.contiguous())[:2]
        return energy, gradient

    def energy_gradient_and_extra(self, x):
        energy, gradient, *extra = self._of(x).both(x.contiguous())
        return energy, gradient, tuple(extra)

    def gradient(self, x):
        return self._of(x).gradient(x.contiguous())[0]

    def operations(self, x: Tensor) -> tuple[int, int]:
        """Operations of the gradient at positions of this shape: those that are made, and those that are compiled."""
        found = self._of(x)
        return found.calls, found.size

    def is_loop(self, x: Tensor) -> bool:
        """Whether most of the energy is a loop."""
        return self._of(x).calls > self._of(x).size

    def _of(self, x: Tensor) -> "_Captured":
        key = x.shape, x.dtype
        if key not in self._graphs:
            # views in a graph hold for one layout
            with reproducible():
                self._graphs[key] = self._captured(x.detach().contiguous())
        return self._graphs[key]

    def _captured(self, x: Tensor) -> "_Captured":
        target = self._target
        rng = torch.Generator(x.device).manual_seed(0)
        other = x + _MOVE * torch.randn(x.shape, generator=rng, dtype=x.dtype, device=x.device)

        def whole(x: Tensor) -> list[Tensor]:
            energy, gradient, extra = target.energy_gradient_and_extra(x)
            return [energy, gradient, *extra]

        def values(x: Tensor) -> list[Tensor]:
            energy, extra = target.energy_and_extra(x)
            return [energy, *extra]

        with quiet():
            expected = [whole(point) for point in (x, other)]
            energies = [[value.detach() for value in values(point)] for point in (x, other)]
            gradients = [target.gradient(point) for point in (x, other)]
        if target.coarse is not None:
            return self._in_two_types(target.coarse, x, values, (x, other), (expected, energies))
        loop = rolled(target.energy_and_extra, x)
        if loop is not None:
            same = [
                _same(graph, (x, other), expectation)
                for graph, expectation in ((loop.both, expected), (loop.energy, energies))
            ]
            if all(same):
                return _Captured(loop.energy, loop.both, loop.gradient, loop.calls, loop.size)
        if self._longest is not None and operations(target.energy, x) > self._longest:
            raise ModelError(f"it has more than {self._longest} operations, and no loop")
        try:
            graphs = value_and_gradient(target.energy_and_extra, x)
        except ModelError:
            graphs = None
        if graphs is None or not _same(graphs[1], (x, other), expected):
            # derivatives of its own, or operations that hide theirs
            graphs = capture(values, x), capture(whole, x)
            if not _same(graphs[1], (x, other), expected):
                raise ModelError("its graph computes something else at another position")
        both = graphs[1]
        alone = capture(lambda x: [both(x)[1]], x)
        if not _same(alone, (x, other), [[g] for g in gradients]):
            alone = capture(lambda x: [target.gradient(x)], x)
            if not _same(alone, (x, other), [[g] for g in gradients]):
                raise ModelError("its gradient computes something else at another position")
        if not _same(graphs[0], (x, other), energies):
            raise ModelError("its energy computes something else at another position")
        return _Captured(graphs[0], both, alone, alone.calls, alone.calls)

    def _in_two_types(
        self,
        coarse: Target,
        x: Tensor,
        values: Callable[[Tensor], list[Tensor]],
        points: Sequence[Tensor],
        expected: Sequence[Sequence[Sequence[Tensor]]],
    ) -> "_Captured":
        """Energies as they are, and the gradients of the same density in float32."""
        own = CapturedTarget(coarse, self._longest)._of(x.float())

        def gradient(x: Tensor) -> Tensor:
            return own.gradient(x.float())[0].to(x)

        def whole(x: Tensor) -> list[Tensor]:
            energy, *extra = values(x)
            return [energy, gradient(x), *extra]

        graphs = [capture(each, x) for each in (values, whole, lambda x: [gradient(x)])]
        wholes, energies = expected
        gradients = [[each[1]] for each in wholes]
        checked = zip(graphs, (energies, wholes, gradients), strict=True)
        if not all(_same(graph, points, values, torch.float32) for graph, values in checked):
            raise ModelError("its graph computes something else at another position")
        energy, both, alone = graphs
        return _Captured(energy, both, alone, alone.calls, alone.calls)


class _Captured(NamedTuple):
    """What computes a target, ``[tensors] -> [tensors]``."""

    energy: Callable[..., list[Tensor]]
    """The energy and what is kept beside it."""
    both: Callable[..., list[Tensor]]
    """The same with the gradient in second place."""
    gradient: Callable[..., list[Tensor]]
    calls: int
    """Operations of a gradient."""
    size: int
    """The same, those of a loop counted once."""


def _same(
    graph: Callable[..., list[Tensor]],
    points: Sequence[Tensor],
    expected: Sequence[Sequence[Tensor]],
    computed: torch.dtype | None = None,
) -> bool:
    if computed is None and isinstance(graph, Graph):
        # a network may have fewer digits than its energy
        computed = coarsest_type(graph.module)
    try:
        with torch.no_grad():
            found = [graph(x) for x in points]
    except RuntimeError:
        # constants may be laid out in another way than what they were computed from: views fail
        return False
    return all(agree(f, e, computed) for f, e in zip(found, expected, strict=True))


def agree(
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    computed: torch.dtype | None = None,
    nearby: Sequence[Sequence[Tensor]] = (),
) -> bool:
    """Whether tensors are the same to rounding, in units of the largest number of each.

    What is smaller than a ten thousandth of the largest of all may be rounding itself.

    Args:
        computed: what they were computed in; None for the type of each.
        nearby: what is expected at inputs that differ by rounding, from which a long trajectory may make anything.
    """
    sizes = [_largest(tensor) for tensor in expected]
    others = [[each[k] for each in nearby] for k in range(len(expected))]
    return len(found) == len(expected) and all(
        _agree(f, e, max(size, 1e-4 * max(sizes)), computed, near)
        for f, e, size, near in zip(found, expected, sizes, others, strict=True)
    )


def _largest(tensor: Tensor) -> float:
    usual = tensor[tensor.isfinite()].abs() if tensor.is_floating_point() else tensor.new_empty(0)
    return float(usual.max()) if usual.numel() else 0.0


def _agree(
    found: Tensor, expected: Tensor, size: float, computed: torch.dtype | None, nearby: Sequence[Tensor]
) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        same = found == expected
        return bool(torch.stack([same, *(near != expected for near in nearby)]).any(0).all())
    rounding = torch.finfo(computed or expected.dtype).eps ** 0.5
    allowed = rounding * (size + expected.abs())
    for near in nearby:
        allowed = torch.maximum(allowed, _AMPLIFIED * (near - expected).abs())
    # what is not finite nearby says nothing, what is not finite itself has no distance
    close = expected.isfinite() & (((found - expected).abs() <= allowed) | ~allowed.isfinite())
    return bool(((found == expected) | (found.isnan() & expected.isnan()) | close).all())
