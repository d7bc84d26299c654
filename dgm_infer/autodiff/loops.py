"""Loops that are loops in captured programs too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from .capture import bound, bound_graphs, recorded_graphs
from .pytrees import flatten, tree_map, unflatten

Tree = TypeVar("Tree")

# Whether a program is being captured: its values are rehearsed first, then its operations are traced, and those of a
# loop's body are probed before.
_CAPTURE: ContextVar[Literal["no", "rehearsal", "trace", "probe"]] = ContextVar("capture", default="no")


def is_captured() -> bool:
    """Whether the caller is being captured: no decision may then depend on the values of tensors."""
    return _CAPTURE.get() != "no"


@contextmanager
def capturing(stage: Literal["rehearsal", "trace", "probe"]) -> Iterator[None]:
    """Functions called within are captured."""
    token = _CAPTURE.set(stage)
    try:
        yield
    finally:
        _CAPTURE.reset(token)


def repeat(n: int | Tensor, body: Callable[[Any, Tree, Any], Tree], carried: Tree, constants: Any = ()) -> Tree:
    """``carried = body(k, carried, constants)`` for k = 0, ..., n - 1.

    In a captured program that is one loop, whose body is captured once: the body uses no tensor but its arguments and
    the constants of graphs, and returns tensors of the same shapes and types. k is a number, or there a tensor.
    """
    if _CAPTURE.get() == "probe":
        return body(0, carried, constants)
    if _CAPTURE.get() != "trace":
        for k in range(int(n)):
            carried = body(k, carried, constants)
        return carried
    like = flatten(carried)[0][0]
    length = n.to(torch.int64) if isinstance(n, Tensor) else like.new_full((), n, dtype=torch.int64)

    def turn(k: Tensor, carried: Tree, constants: Any) -> tuple[Tensor, Tree]:
        own, length = constants
        new = body(k, carried, own)
        return k + 1, tree_map(lambda there, here: torch.where(k < length, there, here), new, carried)

    return _looped(turn, torch.zeros_like(length), length, carried, (constants, length))


def repeat_while(
    more: Callable[[Tree], Tensor], body: Callable[[Tree, Any], Tree], carried: Tree, constants: Any = ()
) -> Tree:
    """``carried = body(carried, constants)`` as long as ``more(carried)``, a tensor without dimensions.

    In a captured program that is one loop, of a body as in :func:`repeat`.
    """
    stage = _CAPTURE.get()
    if stage != "trace":
        # a rehearsal calls the graphs of every loop, of such without a turn, too
        if stage == "probe" or (stage == "rehearsal" and not more(carried)):
            new = body(carried, constants)
            return new if stage == "probe" else carried
        while more(carried):
            carried = body(carried, constants)
        return carried

    # the counter of other loops: 0 to go on
    def stops(carried: Tree) -> Tensor:
        return (~more(carried)).to(torch.int64)

    def turn(k: Tensor, carried: Tree, constants: Any) -> tuple[Tensor, Tree]:
        new = body(carried, constants)
        return stops(new), new

    first = stops(carried)
    return _looped(turn, first, torch.ones_like(first), carried, constants)


def _looped(
    turn: Callable[[Tensor, Tree, Any], tuple[Tensor, Tree]], k: Tensor, end: Tensor, carried: Tree, constants: Any
) -> Tree:
    """``k, carried = turn(k, carried, constants)`` while k < end, as a loop of the program that is being captured."""
    from torch._higher_order_ops.while_loop import while_loop_op
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    leaves, form = flatten(carried)
    others, other_form = flatten(constants)
    # what this computes nobody reads, and need not be traced: it shows which graphs the body calls
    with capturing("probe"), recorded_graphs() as used, disable_proxy_modes_tracing():
        turn(torch.zeros_like(k), carried, constants)
    known = [(graph, tensors) for graph, tensors in bound_graphs() if graph in used]
    graphs, shared = zip(*known, strict=True) if known else ((), ())
    flat = [tensor for tensors in shared for tensor in tensors]
    # each once: a loop does not take a tensor twice
    unique = list({id(tensor): tensor for tensor in [*others, *flat]}.values())
    places = [next(k for k, own in enumerate(unique) if own is tensor) for tensor in [*others, *flat]]

    def more(k: Tensor, *rest: Tensor) -> Tensor:
        return k < rest[len(leaves)]

    def once(k: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        own, inner = rest[: len(leaves)], rest[len(leaves) + 1 :]
        given = [inner[place] for place in places]
        with bound(graphs, given[len(others) :]):
            k, after = turn(k, unflatten(own, form), unflatten(given[: len(others)], other_form))
        new, new_form = flatten(after)
        assert new_form == form, "a loop's body returns another tree than it takes"
        # what a step returns must not share memory with what it was given
        return k.clone(), *(t.clone(memory_format=torch.contiguous_format) for t in new)

    start = tuple(t.clone(memory_format=torch.contiguous_format) for t in leaves)
    inputs: Any = (k.clone(), *start)
    # nor a tensor that shares memory with another
    _, *ends = while_loop_op(more, once, inputs, (end.clone(), *unique))
    return unflatten(ends, form)
