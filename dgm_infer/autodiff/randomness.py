"""Random numbers of transitions: drawn from a generator, or inputs of a program that is being captured."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Drawn", "Recorded", "Replayed", "normal", "uniform"]


class Drawn(NamedTuple):
    """A tensor of random numbers that a function draws."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def draw(self, rng: torch.Generator) -> Tensor:
        """New numbers."""
        draw = torch.randn if self.kind == "normal" else torch.rand
        return draw(self.shape, generator=rng, dtype=self.dtype, device=self.device)


class Source(Protocol):
    """What stands for a generator while a function is captured."""

    def take(self, drawn: Drawn) -> Tensor: ...


class Recorded:
    """Draws from a generator, and keeps what was drawn."""

    def __init__(self, rng: torch.Generator):
        self._rng = rng
        self.drawn: list[Drawn] = []
        self.values: list[Tensor] = []

    def take(self, drawn: Drawn) -> Tensor:
        self.drawn.append(drawn)
        self.values.append(drawn.draw(self._rng))
        return self.values[-1]


class Replayed:
    """Gives tensors in order in the place of new numbers."""

    def __init__(self, values: Sequence[Tensor]):
        self._values = iter(values)

    def take(self, drawn: Drawn) -> Tensor:
        # of the same numbers, however they are arranged
        return next(self._values).view(drawn.shape)


def normal(shape: Sequence[int], like: Tensor, rng: "torch.Generator | Source") -> Tensor:
    """Standard normal numbers of a shape, in the type and on the device of a tensor."""
    return _take(Drawn("normal", tuple(shape), like.dtype, like.device), rng)


def uniform(shape: Sequence[int], like: Tensor, rng: "torch.Generator | Source") -> Tensor:
    """Numbers in [0, 1) of a shape, in the type and on the device of a tensor."""
    return _take(Drawn("uniform", tuple(shape), like.dtype, like.device), rng)


def _take(drawn: Drawn, rng: "torch.Generator | Source") -> Tensor:
    # generators of other devices need not be of torch's class
    return rng.take(drawn) if hasattr(rng, "take") else drawn.draw(rng)  # type: ignore[union-attr, arg-type]
