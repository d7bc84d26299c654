"""Tensors of a vectorised program that have a value per chain, and the same for all."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .straight_line import SHAPED, writes


class Constants:
    """Tensors under vmap that do not depend on the inputs of a program, though they have a value for each row."""

    def __init__(self):
        # by identity, with those that may share memory; the tensors are held, so that no other takes their identity
        self._groups: dict[int, tuple[Tensor, _Group]] = {}

    def has(self, tensor: Any) -> bool:
        entry = self._groups.get(id(tensor))
        return entry is not None and not entry[1].root().is_random

    def add(self, tensor: Tensor, group: "_Group | None" = None) -> None:
        self._groups[id(tensor)] = tensor, group or _Group()

    def follow(self, func: Callable[..., Any], args: tuple, kwargs: dict, result: Any) -> None:
        """What a call makes of constants alone is constant; memory that random values are written to is not."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # of its first argument the values do not matter
        given = given[1:] if func in SHAPED else given
        is_random = any(is_wrapped(each) and not self.has(each) for each in given)
        if writes(func):
            if is_random and self.has(args[0]):
                self._groups[id(args[0])][1].root().is_random = True
            return
        known = [self._groups[id(each)][1] for each in given if self.has(each)]
        if is_random or not (known or func in SHAPED):
            return
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and is_wrapped(each)]
        # pointwise results have memory of their own
        group = _Group() if func in SHAPED or _is_pointwise(func.__name__) else _Group.of(known)
        for each in made:
            if id(each) not in self._groups:
                self.add(each, group)


class _Group:
    """Tensors that may share memory."""

    def __init__(self):
        self.is_random = False
        self._parent: _Group | None = None

    @classmethod
    def of(cls, groups: "list[_Group]") -> "_Group":
        """The union of some."""
        joined = cls()
        for root in {group.root() for group in groups}:
            root._parent = joined
        return joined

    def root(self) -> "_Group":
        group = self
        while group._parent is not None:
            group = group._parent
        return group


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor has one value per row, or derivatives, of a transformation of torch.func."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]


def unwrapped(tensor: Tensor) -> Tensor:
    """The value of a constant of all rows."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    while is_wrapped(tensor):
        dim = functorch.maybe_get_bdim(tensor) if functorch.is_batchedtensor(tensor) else -1
        tensor = functorch.get_unwrapped(tensor)
        tensor = tensor if dim < 0 else tensor.select(dim, 0)
    return tensor.detach()


@cache
def _is_pointwise(name: str) -> bool:
    """By torch's own tags: of ``add`` for ``torch.add``, ``Tensor.add_``, ``Tensor.__add__`` and ``__radd__``."""
    name = name.strip("_")
    for plain in (name, name[1:]):
        packet = getattr(torch.ops.aten, _OPERATORS.get(plain, plain), None)
        if packet is not None and name in (plain, f"r{plain}", f"i{plain}"):
            # those of numbers have no tags
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            return plain not in _REDUCE_TOO and any(torch.Tag.pointwise in overload.tags for overload in overloads)
    return False


# without a second argument they are extremes of all elements
_REDUCE_TOO = {"max", "min"}
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
