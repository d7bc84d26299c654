"""Torch calls that act on leading dimensions alone: a further last one changes only the number of rows."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["JOINING", "SUMS", "acts_on_leading", "acts_pointwise", "counted_from_the_first"]


def acts_on_leading(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether ``f(x[..., b])`` is ``f(x)[..., b]`` for a call with these arguments: pointwise, or along dimensions that
    are counted from the first."""
    if func in _INDEXING:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(isinstance(each, int | slice) for each in index)
    if func in _ALONG:
        dims = kwargs.get("dim", _ALONG[func])
        return all(isinstance(dim, int) and dim >= 0 for dim in (dims if isinstance(dims, tuple) else (dims,)))
    return func in _COPIES or (_is_pointwise(func.__name__) and "out" not in kwargs)


def acts_pointwise(func: Callable[..., Any]) -> bool:
    """Whether each element of a new result is a function of the arguments' elements in its place."""
    return func not in _COPIES and _is_pointwise(func.__name__)


def counted_from_the_first(
    func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], ndim: int
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with dimensions by name and not negative.

    Args:
        ndim: number of dimensions of what ``dim`` is one of.
    """
    if func not in _ALONG:
        return args, kwargs
    n_before = 2 if func in _SPLITTING else 1
    dims = args[n_before] if len(args) > n_before else kwargs.get("dim", _ALONG[func])
    if dims is None and func in SUMS:
        dims = tuple(range(ndim))
    many = dims if isinstance(dims, tuple | list) else (dims,)
    if len(args) > n_before + 1 or not all(isinstance(dim, int) for dim in many):
        return args, kwargs
    counted = tuple(dim % ndim for dim in many if dim is not None)
    return args[:n_before], {**kwargs, "dim": counted if isinstance(dims, tuple | list) else counted[0]}


@cache
def _is_pointwise(name: str) -> bool:
    """By torch's own tags: of ``add`` for ``torch.add``, ``Tensor.add_``, ``Tensor.__add__`` and ``__radd__``."""
    name = name.strip("_")
    if name in _UNTAGGED:
        return True
    for plain in (name, name[1:]):
        packet = getattr(torch.ops.aten, _OPERATORS.get(plain, plain), None)
        if packet is not None and name in (plain, f"r{plain}", f"i{plain}"):
            # those of numbers have no tags
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            return plain not in _REDUCE_TOO and any(torch.Tag.pointwise in overload.tags for overload in overloads)
    return False


_UNTAGGED = {"copy", "log_sigmoid"}
# without a second argument they are extremes of all elements
_REDUCE_TOO = {"max", "min"}
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_COPIES = {Tensor.clone, Tensor.detach, Tensor.to, Tensor.double, torch.as_tensor}
JOINING = {torch.stack, torch.cat}
SUMS = {torch.sum, Tensor.sum, torch.mean, Tensor.mean}
_SPLITTING = {torch.split, Tensor.split}
# with their default dimension
_ALONG: dict[Any, int | None] = dict.fromkeys([*JOINING, *_SPLITTING, torch.unbind, Tensor.unbind], 0)
_ALONG |= dict.fromkeys(
    [
        *SUMS,
        torch.cumsum,
        Tensor.cumsum,
        torch.cumprod,
        Tensor.cumprod,
        torch.logsumexp,
        Tensor.logsumexp,
        torch.softmax,
        Tensor.softmax,
        F.softmax,
        F.log_softmax,
    ]
)
