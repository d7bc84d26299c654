"""Scores of draws of a posterior that is known: regions of highest density, distances from exact draws."""

import torch
from torch import Tensor

__all__ = ["highest", "sliced_distance"]


def highest(log_densities: Tensor, of_truth: Tensor, level: float = 0.9) -> Tensor:
    """Whether truths lie in the region of highest density of draws: ``[S, P], [P] -> [P]``; S draws as calibrated."""
    above = (log_densities > of_truth).sum(0)
    return above < level * (len(log_densities) + 1)


def sliced_distance(a: Tensor, b: Tensor, n: int = 64) -> Tensor:
    """Mean Wasserstein distance of projections onto n directions, ``[S, P, D], [S, P, D] -> [P]``."""
    rng = torch.Generator().manual_seed(0)
    directions = torch.randn(a.shape[-1], n, generator=rng, dtype=a.dtype)
    directions = directions / directions.norm(dim=0)
    return ((a @ directions).sort(0).values - (b @ directions).sort(0).values).abs().mean((0, -1))
