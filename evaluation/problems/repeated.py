"""Repetitions of a target and its base: independent runs of a method, in one batch."""

from typing import TypeVar, cast

import torch

from dgm_infer import Target
from dgm_infer.errors import ArgumentError
from dgm_infer.references.density import Whitened

__all__ = ["repeated"]

Base = TypeVar("Base", bound=Whitened)


class _Repeated(Target):
    def __init__(self, target: Target, runs: int):
        super().__init__(None, target.dim, (runs, *target.batch_shape))
        self.target = target

    def energy(self, x):
        return self.target.energy(x)

    def energy_and_gradient(self, x):
        return self.target.energy_and_gradient(x)


def repeated(target: Target, base: Base, runs: int) -> tuple[Target, Base]:
    """One problem as a batch ``[runs]`` of the same: the spread over the batch is that of independent runs.

    Args:
        target: target of batch shape ``()``.
        base: base of the same batch shape.
    """
    if target.batch_shape != ():
        raise ArgumentError(f"repeated(target of batch {tuple(target.batch_shape)}): expected one problem, of batch ()")
    first = torch.zeros(runs, dtype=torch.long, device=base.mean.device)
    return _Repeated(target, runs), cast(Base, base.take(first))
