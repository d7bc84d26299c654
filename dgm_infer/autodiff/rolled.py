"""Loops of simulators, found again in the operations that they made.

A simulator written as a Python loop is, once it is captured, a sequence of thousands of operations that repeats itself.
Here the repetition is found and becomes a loop again, with its derivative as a loop backwards: what is compiled has the
size of one step. States are kept at about ``sqrt(n)`` of ``n`` steps and computed again between them on the way back.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .capture import capture, gradient_graph, quiet, vjp_graph
from .loops import repeat
from .repetition import REPEATS, IrregularError, Loop, Operation, Recorder, Value, place_of, repetition

aten = torch.ops.aten

# Steps up to which all states are kept: a few kilobytes for some chains of a small system.
_KEPT = 64
# Operations of a turn of a loop, several steps of a small simulator: 3.0 ms where single steps take 5.9, and 300 3.3.
_UNROLLED = 150
# Outputs of a loop that are read at no more steps than these are collected one by one.
_FEW = 32


def rolled(function: Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]], x: Tensor) -> "Rolled | None":
    """A scalar function per row with the longest repetition among its operations as a loop.

    None if there is none, or a part of it cannot be captured: it is then what it was.

    Args:
        function: ``[..., D]`` to ``[...]``, and other tensors that it computes on the way.
        x: an example.
    """
    x = x.detach()
    with torch.no_grad(), quiet(), Recorder(x) as recorder:
        value, others = function(x)
    results = [recorder.known.get(id(each)) for each in (value, *others)]
    if not recorder.plain or results[0] is None:
        return None
    found = repetition(recorder.operations)
    if found is None:
        return None
    # what does not depend on the input is what it was
    constants = (value, *others)
    start, period, times = found
    several = min(max(1, _UNROLLED // period), times // REPEATS)
    try:
        loop = Loop(recorder.operations, start + times % several * period, several * period, times // several)
        return Rolled(loop, [c if r is None else r for r, c in zip(results, constants, strict=True)], x)
    except (IrregularError, ModelError):
        return None


class Rolled:
    """A function with a loop in it, and its gradient: as :class:`Graph` to those who call it.

    Args:
        loop: the loop, with all operations before and after.
        results: what the function returns: values or constants, the scalars first.
        x: an example.
    """

    def __init__(self, loop: Loop, results: Sequence[Any], x: Tensor):
        self._loop, self._results = loop, results
        self._chunk = loop.times if loop.times <= _KEPT else math.isqrt(loop.times - 1) + 1
        self._chunks = -(-loop.times // self._chunk)
        # what is read after the loop: at its end, at a few steps, or at all
        self._collected, self._steps_read = self._read()
        with torch.no_grad():
            self._capture(x)

    def energy(self, x: Tensor) -> list[Tensor]:
        """The value and the other results."""
        carried, outers = self._before(x)
        end, collected, _, _ = self._run(carried, outers, keep=False)
        return self._post(*end, *collected, *outers)

    def both(self, x: Tensor) -> list[Tensor]:
        """The value, its gradient and the other results."""
        carried, outers = self._before(x)
        end, collected, starts, states = self._run(carried, outers, keep=True)
        n_results = len(self._results)
        found = self._post_vjp(*end, *collected, *outers)
        results, cotangents = found[:n_results], found[n_results:]
        n, m = len(carried), len(collected)
        gradients = self._back(cotangents[:n], cotangents[n : n + m], starts, states, outers)
        initial, of_loop = gradients[:n], gradients[n:]
        floating = [own for own in outers if own.is_floating_point()]
        total = [a + b for a, b in zip(of_loop, cotangents[n + m :], strict=True)]
        assert len(total) == len(floating)
        (slope,) = self._pre_vjp(x, *initial, *total)
        return [results[0], slope, *results[1:]]

    def gradient(self, x: Tensor) -> list[Tensor]:
        """The gradient alone."""
        return [self.both(x)[1]]

    @property
    def calls(self) -> int:
        """Operations of a gradient."""
        passes = 1 if self._chunks == 1 else 2
        step = passes * self._body.calls + self._body_vjp.calls
        return self._loop.times * step + self._pre.calls + self._pre_vjp.calls + self._post_vjp.calls

    @property
    def size(self) -> int:
        """Operations that are compiled for a gradient."""
        graphs = (self._body, self._body, self._body_vjp, self._pre, self._pre_vjp, self._post_vjp)
        return sum(graph.calls for graph in graphs)

    def _read(self) -> tuple[list[Value], list[list[int]]]:
        """Values of steps that are read after the loop, each with the steps at which."""
        loop = self._loop
        read: dict[Value, set[int]] = {}
        after = [leaf for each in loop.operations[loop.end :] for leaf in each.leaves]
        for leaf in [*after, *self._results]:
            if isinstance(leaf, Value) and loop.start <= leaf.number < loop.end:
                block, offset = divmod(leaf.number - loop.start, loop.period)
                read.setdefault(Value(offset, leaf.part), set()).add(block)
        last = loop.times - 1
        kept = {v: sorted(steps) for v, steps in read.items() if steps != {last} or v not in loop.carried}
        every = list(range(loop.times))
        return list(kept), [steps if len(steps) <= _FEW else every for steps in kept.values()]

    def _capture(self, x: Tensor) -> None:
        loop, before = self._loop, self._loop.operations[: self._loop.start]
        # what follows reads values from before it, too
        outers = list(loop.outers)
        for leaf in [*(a for o in loop.operations[loop.end :] for a in o.leaves), *self._results]:
            if isinstance(leaf, Value) and leaf.number < loop.start:
                place_of(outers, leaf)
        n, m = len(loop.carried), len(self._collected)
        device = x.device

        def pre(x: Tensor) -> list[Tensor]:
            values = _evaluated(before, 0, {Value(-1): x})

            def of(value: Any) -> Tensor:
                return value if isinstance(value, Tensor) else values[value]

            stacked = [
                torch.stack([of(v) for v in outer]) if isinstance(outer, list) else of(outer) for outer in outers
            ]
            # no two of a loop's inputs may share memory
            return [t.clone(memory_format=torch.contiguous_format) for t in (*map(of, loop.initial), *stacked)]

        self._pre = capture(pre, x, differentiable=True)
        tensors = self._pre(x)
        carried, given = tensors[:n], tensors[n:]
        stacks = [stack.to(device) for stack in loop.stacks]
        start = torch.zeros((), dtype=torch.int64, device=device)
        # the rows of a step; beyond the last one, where a chunk ends later than the loop, those of the last
        self._picks = capture(lambda k: [_taken(stack, k.clamp_max(loop.times - 1)) for stack in stacks], start)
        picks = self._picks(start)
        p = len(picks)

        def body(*inputs: Tensor) -> list[Tensor]:
            values = loop.body(inputs[:p], inputs[p : p + n], inputs[p + n :])
            return [*(values[v] for v in loop.carried), *(values[v] for v in self._collected)]

        inside = given[: len(loop.outers)]
        self._n_inside = len(inside)
        self._body = capture(body, *picks, *carried, *inside, differentiable=True)
        example = self._body(*picks, *carried, *inside)
        self._body_vjp = vjp_graph(self._body, (*picks, *carried, *inside), example, skip=p)
        counts = [len(steps) for steps in self._steps_read]
        buffers = [e.new_zeros(c, *e.shape) for e, c in zip(example[n:], counts, strict=True)]

        def post(*inputs: Tensor) -> list[Tensor]:
            end, collected, outer = inputs[:n], inputs[n : n + m], inputs[n + m :]
            values: dict[Any, Any] = {
                known: tensor for known, tensor in zip(outers, outer, strict=True) if isinstance(known, Value)
            }
            return self._after(values, end, collected)

        self._post = capture(post, *carried, *buffers, *given, differentiable=True)
        floating = [k for k, each in enumerate((*carried, *buffers, *given)) if each.is_floating_point()]
        self._post_vjp = gradient_graph(self._post, (*carried, *buffers, *given), floating)
        self._pre_vjp = vjp_graph(self._pre, (x,), tensors)

    def _after(self, values: dict[Any, Any], end: Sequence[Tensor], collected: Sequence[Tensor]) -> list[Tensor]:
        """The results, from values before the loop and from the loop."""
        loop, last = self._loop, self._loop.times - 1

        def of_loop(value: Value) -> Tensor:
            block, offset = divmod(value.number - loop.start, loop.period)
            own = Value(offset, value.part)
            if own in self._collected:
                place = self._collected.index(own)
                return collected[place][self._steps_read[place].index(block)]
            assert block == last
            return end[loop.carried.index(own)]

        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            return of_loop(leaf) if loop.start <= leaf.number < loop.end else values[leaf]

        for index in range(loop.end, len(loop.operations)):
            operation = loop.operations[index]
            joined = self._joined(operation, collected, of)
            results = [joined] if joined is not None else operation([of(leaf) for leaf in operation.leaves])
            values.update({Value(index, part): result for part, result in enumerate(results)})
        return [of(result) for result in self._results]

    def _joined(self, operation: Operation, collected: Sequence[Tensor], of: Any) -> Tensor | None:
        """``stack`` or ``cat`` of values at all steps in order, in a few operations; None of anything else."""
        if operation.target not in (aten.stack.default, aten.cat.default):
            return None
        loop = self._loop
        numbers = [leaf for leaf in operation.leaves if isinstance(leaf, int)]
        tensors = operation.leaves[: len(operation.leaves) - len(numbers)]
        inside = [isinstance(v, Value) and loop.start <= v.number < loop.end for v in tensors]
        first = inside.index(True) if True in inside else len(inside)
        values = tensors[first:]
        if len(values) < REPEATS or not all(inside[first:]) or not all(isinstance(v, Value) for v in tensors):
            return None
        # by steps of the simulator, of which a step of the loop may be several
        pairs = [(*divmod(v.number - loop.start, loop.period), v.part) for v in values]
        at = pairs[0][0]
        own = [Value(offset, part) for block, offset, part in pairs if block == at]
        expected = [(at + k // len(own), *own[k % len(own)]) for k in range(len(pairs))]
        if pairs != expected or len(pairs) % len(own) or any(v not in self._collected for v in own):
            return None
        n, parts = len(pairs) // len(own), []
        for value in own:
            place = self._collected.index(value)
            steps, begin = self._steps_read[place], self._steps_read[place].index(at)
            if steps[begin : begin + n] != list(range(at, at + n)):
                return None
            parts.append(collected[place].narrow(0, begin, n))
        joined = torch.stack(parts, 1).flatten(0, 1)
        before = [of(v) for v in tensors[:first]]
        dim = numbers[0] if numbers else 0
        if operation.target is aten.stack.default:
            every = torch.cat([torch.stack(before), joined]) if before else joined
            return every.movedim(0, dim % every.ndim)
        dim %= joined.ndim - 1
        return torch.cat([*before, joined.movedim(0, dim).flatten(dim, dim + 1)], dim)

    def _before(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        tensors = self._pre(x)
        n = len(self._loop.carried)
        return tensors[:n], tensors[n:]

    def _run(self, carried: list[Tensor], outers: list[Tensor], *, keep: bool) -> Any:
        """The loop: its end, what is collected, and where chunks began or, of one chunk, all states."""
        shapes = self._buffers(carried)
        inside = outers[: self._n_inside]
        if self._chunks == 1:
            end, collected, states = self._chunk_run(0, carried, shapes, inside, keep=keep)
            return end, collected, [], states
        starts = [c.new_zeros(self._chunks, *c.shape) for c in carried] if keep else []
        n, m = len(carried), len(shapes)

        def chunk(j: Any, held: Any, inside: Any) -> Any:
            carried, collected, starts = held[:n], held[n : n + m], held[n + m :]
            starts = [_put(all_, j, now) for all_, now in zip(starts, carried, strict=True)] if starts else []
            end, collected, _ = self._chunk_run(j, carried, collected, inside, keep=False)
            return (*end, *collected, *starts)

        held = repeat(self._chunks, chunk, (*carried, *shapes, *starts), tuple(inside))
        return list(held[:n]), list(held[n : n + m]), list(held[n + m :]), []

    def _buffers(self, carried: list[Tensor]) -> list[Tensor]:
        loop = self._loop
        like = carried[0]
        kinds = [loop.operations[loop.start + v.number].shapes[v.part] for v in self._collected]
        return [
            torch.zeros(len(steps), *shape, dtype=dtype, device=like.device)
            for (shape, dtype), steps in zip(kinds, self._steps_read, strict=True)
        ]

    def _chunk_run(
        self, j: Any, carried: Sequence[Tensor], collected: Sequence[Tensor], inside: Sequence[Tensor], *, keep: bool
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The steps of a chunk: its end, what is collected, and what was carried into each step."""
        n, m, size, times = len(carried), len(collected), self._chunk, self._loop.times
        states = [c.new_zeros(size, *c.shape) for c in carried] if keep else []

        def step(i: Any, held: Any, constants: Any) -> Any:
            carried, collected, states = held[:n], held[n : n + m], held[n + m :]
            first, *inside = constants
            k = first + i
            found = self._body(*self._picks(k), *carried, *inside)
            new = found[:n]
            if self._chunks * size != times:
                new = [torch.where(k < times, a, b) for a, b in zip(new, carried, strict=True)]
            rows = [self._row(place, k) for place in range(m)]
            # what is beyond the end has no row
            collected = [
                torch.where(row.reshape(-1, *[1] * value.ndim), value, buffer)
                for row, value, buffer in zip(rows, found[n : n + m], collected, strict=True)
            ]
            kept = [_put(all_, i, now) for all_, now in zip(states, carried, strict=True)] if states else []
            return (*new, *collected, *kept)

        held = repeat(size, step, (*carried, *collected, *states), (self._first(j, carried), *inside))
        return list(held[:n]), list(held[n : n + m]), list(held[n + m :])

    def _first(self, j: Any, like: Sequence[Tensor]) -> Tensor:
        """The first step of chunk j, a number, or in a captured program a tensor."""
        first = j * self._chunk
        return first if isinstance(first, Tensor) else torch.full((), first, dtype=torch.int64, device=like[0].device)

    def _row(self, place: int, k: Tensor) -> Tensor:
        """Which row of a buffer is that of step k, as a mask."""
        steps = self._steps_read[place]
        if len(steps) == self._loop.times:
            return torch.arange(len(steps), device=k.device) == k
        return torch.stack([k == step for step in steps])

    def _back(
        self,
        ends: Sequence[Tensor],
        collected: Sequence[Tensor],
        starts: Sequence[Tensor],
        states: Sequence[Tensor],
        outers: Sequence[Tensor],
    ) -> list[Tensor]:
        """Cotangents of what was carried at first, and of values from before the loop, zero for those not in it.

        Args:
            ends, collected: cotangents of the loop's end and of what it collected.
            starts, states: what :meth:`_run` kept.
            outers: values from before the loop.
        """
        inside = outers[: self._n_inside]
        floating = [k for k, own in enumerate(inside) if own.is_floating_point()]
        n, m, chunks = len(ends), len(collected), self._chunks
        held = (*ends, *(torch.zeros_like(inside[k]) for k in floating))
        if chunks == 1:
            held = self._chunk_back(0, held, states, collected, inside)
        else:

            def chunk(i: Any, held: Any, constants: Any) -> Any:
                starts, collected, inside = constants[:n], constants[n : n + m], constants[n + m :]
                j = chunks - 1 - i
                begun = [_taken(all_, j) for all_ in starts]
                _, _, states = self._chunk_run(j, begun, (), inside, keep=True)
                return self._chunk_back(j, held, states, collected, inside)

            held = repeat(chunks, chunk, held, (*starts, *collected, *inside))
        of_loop = dict(zip(floating, held[n:], strict=True))
        rest = (of_loop.get(k, torch.zeros_like(own)) for k, own in enumerate(outers) if own.is_floating_point())
        return [*held[:n], *rest]

    def _chunk_back(
        self, j: Any, held: Sequence[Tensor], states: Sequence[Tensor], collected: Sequence[Tensor], inside: Any
    ) -> tuple[Tensor, ...]:
        """Cotangents at the beginning of a chunk, and sums of those of values from before the loop, from its end's."""
        n, m, size, times = len(states), len(collected), self._chunk, self._loop.times

        def back(i: Any, held: Any, constants: Any) -> Any:
            cotangent, sums = held[:n], held[n:]
            first, states, collected = constants[0], constants[1 : 1 + n], constants[1 + n : 1 + n + m]
            k = first + (size - 1 - i)
            state = [_taken(all_, size - 1 - i) for all_ in states]
            given = [self._given(buffer, place, k) for place, buffer in enumerate(collected)]
            found = self._body_vjp(*self._picks(k), *state, *constants[1 + n + m :], *cotangent, *given)
            new, added = found[:n], found[n:]
            if self._chunks * size != times:
                new = [torch.where(k < times, a, b) for a, b in zip(new, cotangent, strict=True)]
                added = [torch.where(k < times, a, 0.0) for a in added]
            return (*new, *(a + b for a, b in zip(sums, added, strict=True)))

        return repeat(size, back, tuple(held), (self._first(j, states), *states, *collected, *inside))

    def _given(self, buffer: Tensor, place: int, k: Tensor) -> Tensor:
        """The cotangent of what step k left in a buffer; zero if it left nothing."""
        here = self._row(place, k)
        if len(self._steps_read[place]) == self._loop.times and self._chunks * self._chunk == self._loop.times:
            return _taken(buffer, k)
        return torch.where(here.reshape(-1, *[1] * (buffer.ndim - 1)), buffer, 0.0).sum(0)


def _evaluated(operations: Sequence[Operation], start: int, values: dict[Value, Any]) -> dict[Value, Any]:
    for index, operation in enumerate(operations, start):
        leaves = [values[leaf] if isinstance(leaf, Value) else leaf for leaf in operation.leaves]
        values.update({Value(index, part): result for part, result in enumerate(operation(leaves))})
    return values


def _taken(stack: Tensor, k: Any) -> Tensor:
    """``stack[k]``, k perhaps a tensor."""
    index = torch.as_tensor(k, device=stack.device).reshape(1)
    return stack.index_select(0, index).squeeze(0)


def _put(stack: Tensor, k: Any, value: Tensor) -> Tensor:
    """The stack with a value at k."""
    index = torch.as_tensor(k, device=stack.device).reshape(1)
    return stack.index_copy(0, index, value.unsqueeze(0))
