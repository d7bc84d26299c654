"""Frozen configuration: the base of kernels and evidence methods."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from .errors import ArgumentError
from .html import block, table, text


@dataclass(frozen=True, eq=False)
class Settings:
    """Base of frozen dataclasses: copies with changes, and an equality that compares tensors by value."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """One of these fields, the others at their defaults, taken as they are: numbers that were checked before."""
        made = object.__new__(cls)
        for field in dataclasses.fields(cls):
            object.__setattr__(made, field.name, fields.get(field.name, field.default))
        return made

    def check_batch(self, batch_shape: torch.Size, *names: str) -> None:
        """Check that fields that are given as numbers, or as one number for every problem, fit a batch of problems.

        Raises:
            ArgumentError: the shape of one does not broadcast to the batch shape.
        """
        for name in names:
            value = getattr(self, name)
            shape = torch.Size() if value is None else torch.as_tensor(value).shape
            if not broadcasts(shape, batch_shape):
                raise ArgumentError(
                    f"{type(self).__name__}({name} of shape {tuple(shape)}): does not fit the problems, "
                    f"{tuple(batch_shape)}: give a number, or one for every problem"
                )

    def _repr_html_(self) -> str:
        rows = [(field.name, _shown(getattr(self, field.name))) for field in dataclasses.fields(self) if field.repr]
        return block(f'<p class="said">{text(type(self).__name__)}</p>', table(("field", "value"), rows))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self) if field.init]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def broadcasts(shape: torch.Size, full: torch.Size) -> bool:
    """Whether a tensor of one shape can stand for one of the full shape."""
    try:
        return torch.broadcast_shapes(shape, full) == full
    except RuntimeError:
        return False


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not None and b is not None and torch.equal(_double(a), _double(b))
    return a == b


def _shown(value: Any) -> str:
    """A number, or how a tensor's numbers spread; other values as they print."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return f"{value.item():.4g}"
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
        return f"{value.min().item():.4g} to {value.max().item():.4g}, shape {tuple(value.shape)}"
    return str(value)


def _double(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
