"""Resampling of weighted particles, for many runs and problems at once."""

import torch
from torch import Tensor

from .path import Point

__all__ = ["pick", "systematic"]


def systematic(log_weights: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Ancestors by systematic resampling: particle i has ``count w_i`` offspring, rounded up or down, unbiased.

    One uniform number per run places ``count`` evenly spaced points on the cumulative sum of the weights.

    Args:
        log_weights: ``[runs, particles, *batch]``, normalised per run.
        count: number of offspring per run.

    Returns:
        indices ``[runs, count, *batch]`` of particles.
    """
    below = log_weights.exp().movedim(1, -1).cumsum(-1)
    shape = (*below.shape[:-1], 1)
    uniform = torch.rand(shape, generator=rng, dtype=below.dtype, device=below.device)
    places = (torch.arange(count, dtype=below.dtype, device=below.device) + uniform) / count * below[..., -1:]
    # right=True: a particle of zero weight has no offspring
    chosen = torch.searchsorted(below.contiguous(), places.contiguous(), right=True)
    return chosen.clamp_max(log_weights.shape[1] - 1).movedim(-1, 1)


def pick(point: Point, runs: int, ancestors: Tensor) -> Point:
    """Points ``[runs * particles, *batch]`` of the ancestors ``[runs, count, *batch]``: ``[runs * count, *batch]``."""

    def picked(values: Tensor) -> Tensor:
        values = values.unflatten(0, (runs, -1))
        index = ancestors
        if values.ndim > ancestors.ndim:
            index = index.unsqueeze(-1).expand(*ancestors.shape, values.shape[-1])
        return values.gather(1, index).flatten(0, 1)

    return Point(*(picked(values) for values in point))
