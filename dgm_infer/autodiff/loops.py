"""Loops that are loops in captured programs too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from .capture import bound, bound_graphs, recorded_graphs
from .pytrees import flatten, unflatten

Tree = TypeVar("Tree")

# Whether a program is being captured: its values are rehearsed first, then its operations are traced.
_CAPTURE: ContextVar[Literal["no", "rehearsal", "trace"]] = ContextVar("capture", default="no")


def is_captured() -> bool:
    """Whether the caller is being captured: no decision may then depend on the values of tensors."""
    return _CAPTURE.get() != "no"


@contextmanager
def capturing(stage: Literal["rehearsal", "trace"]) -> Iterator[None]:
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
    if _CAPTURE.get() != "trace":
        for k in range(int(n)):
            carried = body(k, carried, constants)
        return carried
    from torch._higher_order_ops.while_loop import while_loop_op

    leaves, form = flatten(carried)
    others, other_form = flatten(constants)
    with recorded_graphs() as used:
        # what this computes nobody reads: it shows which graphs the body calls
        body(torch.zeros((), dtype=torch.int64, device=leaves[0].device), carried, constants)
    known = [(graph, tensors) for graph, tensors in bound_graphs() if graph in used]
    graphs, shared = zip(*known, strict=True) if known else ((), ())
    flat = [tensor for tensors in shared for tensor in tensors]
    # each once: a loop does not take a tensor twice
    unique = list({id(tensor): tensor for tensor in flat}.values())
    places = [next(k for k, own in enumerate(unique) if own is tensor) for tensor in flat]
    length = n if isinstance(n, Tensor) else leaves[0].new_full((), n, dtype=torch.int64)

    def more(k: Tensor, *rest: Tensor) -> Tensor:
        # compiled code of torch 2.14 returns anything after a loop without an iteration
        return (k < rest[len(leaves)]) | (k == 0)

    def once(k: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        own, length, rest = rest[: len(leaves)], rest[len(leaves)], rest[len(leaves) + 1 :]
        inner = rest[len(others) :]
        with bound(graphs, [inner[k] for k in places]):
            after = body(k, unflatten(own, form), unflatten(rest[: len(others)], other_form))
        new, new_form = flatten(after)
        new = [torch.where(k < length, there, here) for there, here in zip(new, own, strict=True)]
        assert new_form == form, "a loop's body returns another tree than it takes"
        # what a step returns must not share memory with what it was given
        return k + 1, *(t.clone(memory_format=torch.contiguous_format) for t in new)

    start = tuple(t.clone(memory_format=torch.contiguous_format) for t in leaves)
    zero = torch.zeros((), dtype=torch.int64, device=length.device)
    inputs: Any = (zero, *start)
    _, *ends = while_loop_op(more, once, inputs, (length.to(torch.int64), *others, *unique))
    return unflatten(ends, form)
