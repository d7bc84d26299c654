"""Repetitions among the operations of a function: a loop, found again in what it did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ModelError

aten = torch.ops.aten

# Repetitions, and operations spared, from which a loop is worth its compilation.
REPEATS, _SPARED = 8, 300


class Value(NamedTuple):
    """A result of an operation, or with ``number = -1`` the input."""

    number: int
    part: int = 0


@dataclass(frozen=True)
class Operation:
    """What was called, on values, tensors that do not depend on the input, and numbers."""

    target: Any
    leaves: list[Any]
    form: Any
    shapes: tuple[Any, ...]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        args, kwargs = tree_unflatten(list(leaves), self.form)
        # tensors may be laid out otherwise than they were
        target = torch.reshape if self.target in (aten.view.default, aten._unsafe_view.default) else self.target
        result = target(*args, **kwargs)
        return list(result) if isinstance(result, list | tuple) else [result]


class Recorder(TorchDispatchMode):
    """Records the operations on an input and on what follows from it."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.operations: list[Operation] = []
        self.known = {id(x): Value(-1)}
        # an identity is one only as long as its owner lives
        self._alive: list[Any] = [x]
        self.plain = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # whatever they are made of: random numbers are not constants
        self.plain &= torch.Tag.nondeterministic_seeded not in func.tags
        leaves, form = tree_flatten((args, kwargs or {}))
        if not any(isinstance(leaf, Tensor) and id(leaf) in self.known for leaf in leaves):
            return result
        results = list(result) if isinstance(result, list | tuple) else [result]
        self.plain &= not func._schema.is_mutable
        if not all(isinstance(each, Tensor) for each in results):
            self.plain = False
            return result
        index = len(self.operations)
        leaves = [self.known.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        shapes = tuple((tuple(each.shape), each.dtype) for each in results)
        self.operations.append(Operation(func, leaves, form, shapes))
        self.known.update({id(each): Value(index, part) for part, each in enumerate(results)})
        self._alive.append(results)
        return result


def repetition(operations: Sequence[Operation]) -> tuple[int, int, int] | None:
    """Where the longest repetition begins, how many operations are repeated, and how often."""
    kinds: dict[Any, int] = {}
    # what differs between steps is not part of a kind: which tensors, which numbers
    tokens = np.array([kinds.setdefault(_kind(each), len(kinds)) for each in operations], dtype=np.int32)
    best, found = 0, None
    for period in range(1, len(tokens) // REPEATS + 1):
        same = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        if not len(edges):
            continue
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        longest = lengths.argmax()
        times = int(lengths[longest]) // period + 1
        spared = (times - 1) * period
        if times >= REPEATS and spared > max(best, _SPARED):
            best, found = spared, (int(starts[longest]), period, times)
    return found


def _kind(operation: Operation) -> Any:
    def told(leaf: Any) -> Any:
        if isinstance(leaf, Value | Tensor):
            return "tensor"
        return type(leaf) if isinstance(leaf, int | float) and not isinstance(leaf, bool) else leaf

    # numbers in lists are shapes
    return operation.target, operation.form, tuple(map(told, operation.leaves)), operation.shapes


class IrregularError(Exception):
    """The steps of a repetition are not those of a loop."""


class _Pick(NamedTuple):
    """The row of a stack that belongs to a step."""

    place: int


class _Previous(NamedTuple):
    """What the step before computed."""

    value: Value


class _Carried(NamedTuple):
    """The same, by its place among what the loop carries."""

    place: int


class _Outer(NamedTuple):
    """What was computed before the loop."""

    place: int


class _Inner(NamedTuple):
    """What the same step computed."""

    value: Value


class Loop:
    """A repetition as a loop: where each step has its arguments from."""

    def __init__(self, operations: Sequence[Operation], start: int, period: int, times: int):
        self.operations, self.start, self.period, self.times = operations, start, period, times
        self.end = start + period * times
        # what the loop carries, and what that is at first
        self.carried: list[Value] = []
        self.initial: list[Any] = []
        # values from before the loop, or lists of them that are stacked, one for each step
        self.outers: list[Any] = []
        # numbers and constants that differ between steps, [times, ...]
        self.stacks: list[Tensor] = []
        self.steps = [self._argued(offset) for offset in range(period)]
        # an initial value may be of fewer rows than what follows
        for value, first in zip(self.carried, self.initial, strict=True):
            shape = operations[start + value.number].shapes[value.part]
            if not shape[1].is_floating_point or self.kind_of(first) != shape:
                raise IrregularError

    def kind_of(self, value: Any) -> Any:
        """Shape and type of a value or a constant; of the input None."""
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype
        return self.operations[value.number].shapes[value.part] if value.number >= 0 else None

    def _argued(self, offset: int) -> tuple[Operation, list[Any]]:
        same = [self.operations[self.start + k * self.period + offset] for k in range(self.times)]
        return same[0], [
            self._argument(list(leaves), same[0]) for leaves in zip(*(s.leaves for s in same), strict=True)
        ]

    def _argument(self, leaves: list[Any], operation: Operation) -> Any:
        first = leaves[0]
        if not isinstance(first, Value | Tensor):
            if all(type(leaf) is type(first) and leaf == first for leaf in leaves):
                return first
            return self._numbers(leaves, operation)
        places = [self._place(leaf, k) for k, leaf in enumerate(leaves)]
        if all(place == places[0] and isinstance(place, _Inner) for place in places):
            return places[0]
        if isinstance(places[1], _Previous):
            if any(place != places[1] for place in places[1:]) or places[0] is not None:
                raise IrregularError
            return self._carry(places[1].value, first)
        if any(place is not None for place in places):
            raise IrregularError
        if all(_is_same(leaf, first) for leaf in leaves):
            return first if isinstance(first, Tensor) else _Outer(place_of(self.outers, first))
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
                raise IrregularError
            return self._stack(torch.stack(leaves))
        if len({self.kind_of(leaf) for leaf in leaves}) > 1:
            raise IrregularError
        self.outers.append(leaves)
        return _Outer(len(self.outers) - 1), self._stack(torch.arange(self.times))

    def _place(self, leaf: Any, k: int) -> "_Inner | _Previous | None":
        """What a tensor of step k is to the loop; None if it is from before it, or a constant."""
        if isinstance(leaf, Tensor) or leaf.number < self.start:
            return None
        block, offset = divmod(leaf.number - self.start, self.period)
        value = Value(offset, leaf.part)
        if block == k:
            return _Inner(value)
        if block == k - 1:
            return _Previous(value)
        raise IrregularError

    def _carry(self, value: Value, first: Any) -> "_Carried":
        if value in self.carried:
            place = self.carried.index(value)
            if not _is_same(self.initial[place], first):
                raise IrregularError
            return _Carried(place)
        self.carried.append(value)
        self.initial.append(first)
        return _Carried(len(self.carried) - 1)

    def _numbers(self, leaves: list[Any], operation: Operation) -> _Pick:
        """Numbers that differ: of an index, or of anything that takes a tensor in the place of a number."""
        if not all(isinstance(leaf, int | float) for leaf in leaves):
            raise IrregularError
        whole = all(isinstance(leaf, int) for leaf in leaves)
        if whole and operation.target not in (aten.select.int, aten.slice.Tensor):
            raise IrregularError
        return self._stack(torch.tensor(leaves, dtype=torch.int64 if whole else torch.float64))

    def _stack(self, stack: Tensor) -> _Pick:
        self.stacks.append(stack)
        return _Pick(len(self.stacks) - 1)

    def body(self, picks: Sequence[Tensor], carried: Sequence[Tensor], outers: Sequence[Tensor]) -> dict[Value, Any]:
        """The values of a step."""
        values: dict[Value, Any] = {}

        def resolved(argument: Any) -> Any:
            if isinstance(argument, _Inner):
                return values[argument.value]
            if isinstance(argument, _Carried):
                return carried[argument.place]
            if isinstance(argument, _Outer):
                return outers[argument.place]
            if isinstance(argument, _Pick):
                return picks[argument.place]
            if isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[0], _Outer):
                return outers[argument[0].place].index_select(0, picks[argument[1].place].reshape(1)).squeeze(0)
            return argument

        for offset, (operation, arguments) in enumerate(self.steps):
            leaves = [resolved(argument) for argument in arguments]
            for part, result in enumerate(_called(operation, arguments, leaves)):
                values[Value(offset, part)] = result
        return values


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, Value) and isinstance(b, Value) and a == b)


def place_of(items: list[Any], item: Any) -> int:
    """The place of an item in a list, which is lengthened if need be."""
    for place, own in enumerate(items):
        if not isinstance(own, list) and own == item:
            return place
    items.append(item)
    return len(items) - 1


def _called(operation: Operation, arguments: Sequence[Any], leaves: list[Any]) -> list[Any]:
    """An operation, numbers in it perhaps tensors."""
    if not any(isinstance(argument, _Pick) and not leaf.ndim for argument, leaf in zip(arguments, leaves, strict=True)):
        return operation(leaves)
    args, kwargs = tree_unflatten(leaves, operation.form)
    if operation.target is aten.select.int:
        x, dim, index = args
        return [x.index_select(dim, index.reshape(1)).squeeze(dim)]
    if operation.target is aten.slice.Tensor:
        x, dim, first = args[:3]
        step = args[4] if len(args) > 4 else 1
        if not all(isinstance(number, int) for number in (dim, step)):
            raise ModelError("the step of a slice differs between the steps of a loop")
        width = operation.shapes[0][0][dim]
        return [x.index_select(dim, torch.as_tensor(first).to(x.device) + step * torch.arange(width, device=x.device))]
    # the overload for tensors
    result = operation.target.overloadpacket(*args, **kwargs)
    return list(result) if isinstance(result, list | tuple) else [result]
