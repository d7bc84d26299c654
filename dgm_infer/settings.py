"""Frozen configuration: the base of kernels and evidence methods."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Settings"]


@dataclass(frozen=True, eq=False)
class Settings:
    """Base of frozen dataclasses: copies with changes, and an equality that compares tensors by value."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not None and b is not None and torch.equal(_double(a), _double(b))
    return a == b


def _double(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
