"""Scores of predictive draws: coverage of intervals, CRPS, and the class that a classifier gives them.

Each has a known value for a calibrated prediction, and gets worse for any other.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ClassScores", "class_scores", "covered", "crps", "probability_integral_transform"]

# Bins of confidence in the calibration error.
_BINS = 10


class ClassScores(NamedTuple):
    """How well class probabilities predict labels."""

    log_score: Tensor
    """``log p(label)`` of every prediction, nats, ``[n]``; higher is better."""
    accuracy: float
    """Share of labels that have the largest probability."""
    calibration_error: float
    """Mean distance between confidence and accuracy, over ten bins of confidence (Guo et al. 2017, (3))."""


def probability_integral_transform(draws: Tensor, truth: Tensor, rng: torch.Generator) -> Tensor:
    """``(#{X_s < x} + V (#{X_s = x} + 1)) / (S + 1)``, V uniform: uniform on (0, 1) if the truth is like the draws.

    That is exact for every number of draws, and with ties (Czado, Gneiting and Held 2009).

    Args:
        draws: ``[S, ...]``.
        truth: ``[...]``.
        rng: generator of V.
    """
    below, equal = (draws < truth).sum(0), (draws == truth).sum(0)
    v = torch.rand(truth.shape, generator=rng, device=truth.device)
    return (below + v * (equal + 1)) / (len(draws) + 1)


def covered(draws: Tensor, truth: Tensor, rng: torch.Generator, level: float = 0.9) -> Tensor:
    """Whether central intervals of the draws cover the truth; true with probability ``level`` if calibrated.

    Args:
        draws: ``[S, ...]``.
        truth: ``[...]``.
        rng: generator that decides at the ends of intervals.
        level: probability of the interval.
    """
    return (probability_integral_transform(draws, truth, rng) - 0.5).abs() < level / 2


def crps(draws: Tensor, truth: Tensor, chains: int = 1) -> Tensor:
    """The continuous ranked probability score ``E|X - x| - E|X - X'| / 2``, unbiased from S draws; lower is better.

    Draws of one chain are near each other if it has not mixed, which would pass for a narrow prediction: with several
    chains, X and X' are of different ones.

    Args:
        draws: ``[S, ...]``, S at least 2, chain after chain.
        truth: ``[...]``.
        chains: chains of the draws, each of S / chains; 1 for independent draws.
    """
    n = len(draws)
    total = _pair_distances(draws)
    if chains == 1:
        spread = total / (n * (n - 1))
    else:
        within = sum(_pair_distances(part) for part in draws.chunk(chains))
        spread = (total - within) / (n * (n - n // chains))
    return (draws - truth).abs().mean(0) - spread / 2


def _pair_distances(draws: Tensor) -> Tensor:
    """``sum_ij |X_i - X_j| = 2 sum_i (2 i - S - 1) X_(i)``, with order statistics ``X_(i)`` (Gneiting and Raftery 2007,
    (21))."""
    n = len(draws)
    weights = 2 * torch.arange(1, n + 1, dtype=draws.dtype, device=draws.device) - n - 1
    return 2 * torch.tensordot(weights, draws.sort(0).values, dims=1)


def class_scores(probabilities: Tensor, labels: Tensor) -> ClassScores:
    """Scores of class probabilities ``[n, classes]`` given labels ``[n]``."""
    log_score = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1).log()
    confidence, chosen = probabilities.max(1)
    right = (chosen == labels).to(probabilities.dtype)
    bins = (confidence * _BINS).long().clamp_max(_BINS - 1)
    gaps = torch.zeros(_BINS, dtype=probabilities.dtype, device=probabilities.device)
    gaps.index_add_(0, bins, confidence - right)
    return ClassScores(log_score, right.mean().item(), (gaps.abs().sum() / len(labels)).item())
