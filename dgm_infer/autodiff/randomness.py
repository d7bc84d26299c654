"""Random numbers of transitions: drawn from a generator, or inputs of a program that is being captured."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor


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


class Numbers(NamedTuple):
    """The random numbers of a function, all of a kind in one tensor: to draw many takes as long as to draw a few."""

    drawn: tuple[Drawn, ...]
    """What the function draws, in order."""
    kinds: tuple[tuple[Drawn, tuple[int, ...]], ...]
    """The tensors, and which of the function's draws each holds."""

    @classmethod
    def of(cls, drawn: Sequence[Drawn]) -> Self:
        places: dict[Drawn, list[int]] = {}
        for place, each in enumerate(drawn):
            places.setdefault(each._replace(shape=()), []).append(place)
        sizes = [math.prod(each.shape) for each in drawn]
        kinds = ((kind._replace(shape=(sum(sizes[k] for k in own),)), tuple(own)) for kind, own in places.items())
        return cls(tuple(drawn), tuple(kinds))

    def draw(self, rng: torch.Generator) -> list[Tensor]:
        """New numbers, a tensor of each kind."""
        return [kind.draw(rng) for kind, _ in self.kinds]

    def joined(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Those of the function's draws, a tensor of each kind."""
        return [torch.cat([values[k].flatten() for k in places]) for _, places in self.kinds]

    def apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The function's draws, from a tensor of each kind."""
        values: list[Any] = [None] * len(self.drawn)
        for tensor, (_, places) in zip(tensors, self.kinds, strict=True):
            parts = tensor.split([math.prod(self.drawn[k].shape) for k in places])
            for k, part in zip(places, parts, strict=True):
                values[k] = part.view(self.drawn[k].shape)
        return values


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
        return next(self._values)


def normal(shape: Sequence[int], like: Tensor, rng: "torch.Generator | Source") -> Tensor:
    """Standard normal numbers of a shape, in the type and on the device of a tensor."""
    return _take(Drawn("normal", tuple(shape), like.dtype, like.device), rng)


def uniform(shape: Sequence[int], like: Tensor, rng: "torch.Generator | Source") -> Tensor:
    """Numbers in [0, 1) of a shape, in the type and on the device of a tensor."""
    return _take(Drawn("uniform", tuple(shape), like.dtype, like.device), rng)


def _take(drawn: Drawn, rng: "torch.Generator | Source") -> Tensor:
    # generators of other devices need not be of torch's class
    return rng.take(drawn) if hasattr(rng, "take") else drawn.draw(rng)  # type: ignore[union-attr, arg-type]
