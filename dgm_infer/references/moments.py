"""Means and covariances of mixtures (math 11.5, T (5.50)) and of weighted draws."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import numbers
from ..errors import ArgumentError, EvidenceError

__all__ = ["MixtureMoments", "WeightedMoments", "check_mixture", "distinct", "mixture_moments", "weighted_moments"]


class MixtureMoments(NamedTuple):
    mean: Tensor
    """``[*batch, D]``."""
    covariance: Tensor
    """``[*batch, D, D]``."""
    log_total: Tensor
    """Log of the sum of the weights, ``[*batch]``."""


def mixture_moments(means: Tensor, covariances: Tensor, log_weights: Tensor) -> MixtureMoments:
    """Mean and covariance of ``sum_i w_i q_i / sum_i w_i`` from those of its components.

    Args:
        means: ``[L, *batch, D]``.
        covariances: ``[L, *batch, D, D]``.
        log_weights: ``[L, *batch]``; ``-inf`` ignores a component.
    """
    log_total = log_weights.logsumexp(0)
    weights = (log_weights - log_total).exp()
    mean = (weights.unsqueeze(-1) * means).sum(0)
    deviations = weights.sqrt().unsqueeze(-1) * (means - mean)
    within = (weights[..., None, None] * covariances).sum(0)
    return MixtureMoments(mean, within + _outer_sum(deviations), log_total)


def check_mixture(call: str, means, covariances, log_weights) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of :meth:`Gaussian.of_mixture` as tensors.

    Raises:
        ArgumentError: shapes that do not fit, no components, or a value that is not finite.
        EvidenceError: all weights of a problem are zero.
    """
    means, covariances = numbers(call, "means", means), numbers(call, "covariances", covariances)
    log_weights = numbers(call, "log_weights", log_weights)
    if not means.ndim or covariances.shape != (*means.shape, means.shape[-1]) or log_weights.shape != means.shape[:-1]:
        raise ArgumentError(
            f"{call}(means {tuple(means.shape)}, covariances {tuple(covariances.shape)}, log_weights "
            f"{tuple(log_weights.shape)}): expected [L, *batch, D], [L, *batch, D, D] and [L, *batch]"
        )
    if not len(means):
        raise ArgumentError(f"{call}(means): there are no components")
    if not (means.isfinite().all() and covariances.isfinite().all() and (log_weights < math.inf).all()):
        raise ArgumentError(f"{call}(): a mean, a covariance or a weight is not finite")
    if not (covariances.diagonal(dim1=-2, dim2=-1) > 0).all():
        raise ArgumentError(f"{call}(covariances): a variance is not positive")
    empty = log_weights.isneginf().all(0)
    if empty.any():
        raise EvidenceError(
            f"all components have zero weight for {int(empty.sum())} of {empty.numel()} problems: all local fits "
            "reach outside the target's support; give a start inside it"
        )
    return means, covariances, log_weights


def distinct(means: Tensor, covariances: Tensor, order: Tensor, tolerance: float) -> Tensor:
    """Which components to keep so that no two are duplicates, ``[L, *batch]``.

    Two are duplicates if ``d^T (C_1 + C_2)^-1 d / D``, with d the difference of their means, is below ``tolerance``
    squared. The one with the larger ``order [L, *batch]`` stays.
    """
    n = len(means)
    rank = order.argsort(0, descending=True)
    index = rank[..., None].expand_as(means)
    means = means.gather(0, index)
    covariances = covariances.gather(0, index[..., None].expand_as(covariances))
    kept = torch.ones_like(order, dtype=torch.bool)
    for i in range(1, n):
        d = (means[i] - means[:i]).unsqueeze(-1)
        solved = torch.linalg.solve(covariances[i] + covariances[:i], d)
        distance = (d * solved).sum((-2, -1)) / means.shape[-1]
        kept[i] = ~(kept[:i] & (distance < tolerance**2)).any(0)
    return torch.zeros_like(kept).scatter(0, rank, kept)


class WeightedMoments(NamedTuple):
    mean: Tensor
    """``[*batch, D]``."""
    covariance: Tensor
    """``[*batch, D, D]``."""
    ess: Tensor
    """Effective sample size of the weights, ``[*batch]``."""


def weighted_moments(draws: Tensor, log_weights: Tensor) -> WeightedMoments:
    """Moments of draws ``[N, *batch, D]`` with log weights ``[N, *batch]``; a weight that is not finite counts as zero.

    Raises:
        EvidenceError: all weights of a problem are zero.
    """
    log_weights = torch.where(log_weights < math.inf, log_weights.double(), -math.inf)
    log_weights = log_weights.nan_to_num(nan=-math.inf, neginf=-math.inf)
    empty = log_weights.isneginf().all(0)
    if empty.any():
        raise EvidenceError(
            f"all weights are zero for {int(empty.sum())} of {empty.numel()} problems: they determine no base"
        )
    weights = log_weights.softmax(0)
    mean = (weights.unsqueeze(-1) * draws).sum(0)
    deviations = weights.sqrt().unsqueeze(-1) * (draws - mean)
    return WeightedMoments(mean, _outer_sum(deviations), 1 / weights.square().sum(0))


def _outer_sum(deviations: Tensor) -> Tensor:
    """``sum_n d_n d_n^T``: ``[N, *batch, D]`` to ``[*batch, D, D]``."""
    return torch.einsum("n...i,n...j->...ij", deviations, deviations)
