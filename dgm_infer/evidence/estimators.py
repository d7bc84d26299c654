"""Estimates of log Z from log weights, with their errors (math 6.5, math 7.7), in float64."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_OVERLAP = 0.01
# Effective weights from which on their own variance shows the error of their mean: a share of them, and three more, as
# few weights look more effective than they are.
_SHARE, _MORE = 0.5, 3
# Effective weights from which on it does whatever their share, and how many of the largest weights tell of missing ones
# by their spread: of thousands, the smaller ones do not.
_PLENTY, _LARGEST = 100, 32
# How many times wider than the largest quarter the upper half of log weights may be: beyond, the quarter is a group.
_WIDER = 3.0
# Probability that halves of a run differ by so much by chance, over all problems: one run in a thousand is warned of
# though nothing is wrong.
_DRIFT = 1e-3


class Estimate(NamedTuple):
    """An estimate of log Z for every problem, each ``[*batch]``."""

    log_z: Tensor
    std_error: Tensor
    bias: Tensor
    """Estimated ``E[log Z-hat] - log Z``; NaN if unknown."""


def finite_or_zero(log_weights: Tensor) -> Tensor:
    """Log weights in float64; NaN and ``+inf`` become weights of zero (``-inf``), none is dropped."""
    log_weights = log_weights.double()
    return torch.where(log_weights < math.inf, log_weights, -math.inf)


def log_mean(log_weights: Tensor) -> Estimate:
    """Log of the mean of N independent weights, ``[N, *batch]``.

    With ``v = var(w)/(N mean(w)^2)``, which is ``(N/ESS - 1)/(N - 1)``, the bias of the logarithm is ``-v/2`` and its
    standard error ``sqrt(v)``. Where fewer than ``N/2 + 3`` weights and fewer than 100 are effective, those that would
    count most may be missing: v is then at least ``(s^2 + s^4)/N`` with s the standard deviation of normal log weights
    whose upper half, of at most 32, spreads as that of these, for four weights or more. As ``log_z`` keeps its bias,
    the squared error is ``v + v^2/4`` (math 7.7).
    """
    n, ess = log_weights.shape[0], weight_ess(log_weights)
    log_z = log_weights.logsumexp(0) - math.log(n)
    variance = (n / ess - 1).clamp_min(0) / max(n - 1, 1)
    if n == 1:
        variance = torch.full_like(variance, math.nan)
    variance = torch.where(log_z.isneginf(), math.inf, variance)
    spread = _upper_spread(log_weights).square()
    few = (ess < _SHARE * n + _MORE) & (ess < _PLENTY)
    tail = torch.where(few, (spread + spread.square()) / n, 0.0)
    total = variance.maximum(tail)
    return Estimate(log_z, (total + 0.25 * total.square()).sqrt(), -0.5 * variance)


def _upper_spread(log_weights: Tensor) -> Tensor:
    """Standard deviation of normal numbers whose upper half, or largest 32, spread as those of ``[N, *batch]``.

    ``[*batch]``; at most three times that by half as many, since weights of several modes or lost ones fall into
    groups, and 0 for fewer than four numbers.
    """
    n = len(log_weights)
    if n < 4:
        return torch.zeros_like(log_weights[0])
    most = min(n // 2, _LARGEST)
    half = _spread_of_largest(log_weights, most)
    return half if n < 8 else half.minimum(_WIDER * _spread_of_largest(log_weights, math.ceil(most / 2)))


def _spread_of_largest(log_weights: Tensor, m: int) -> Tensor:
    """The same by the m largest and the one that follows; 0 where these are not finite."""
    n = len(log_weights)
    largest = log_weights.topk(m + 1, 0).values
    # expected order statistics (Blom 1958)
    ranks = torch.arange(n, n - m - 1, -1, dtype=torch.float64, device=log_weights.device)
    normal = torch.special.ndtri((ranks - 0.375) / (n + 0.25))
    spread = (largest[:-1].mean(0) - largest[-1]) / (normal[:-1].mean() - normal[-1])
    return torch.where(spread.isfinite(), spread, 0.0)


def known_where(known: Tensor, estimate: Estimate, other: Estimate) -> Estimate:
    """The estimate of the problems ``known [*batch]``; of the rest another one, with an infinite error."""
    infinite, no = torch.full_like(estimate.std_error, math.inf), torch.full_like(estimate.bias, math.nan)
    instead = (other.log_z, infinite, no)
    return Estimate(*(torch.where(known, mine, theirs) for mine, theirs in zip(estimate, instead, strict=True)))


def mean_of_chains(values: Tensor) -> Estimate:
    """Mean over chains of values ``[chains, *batch]``; the bias is unknown."""
    n = values.shape[0]
    error = values.std(0) / math.sqrt(n) if n > 1 else torch.full_like(values[0], math.nan)
    return Estimate(values.mean(0), error, torch.full_like(values[0], math.nan))


def welch(errors: Tensor, free: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Variance of the difference of two estimates, and its degrees of freedom by Welch, each ``[*batch]``.

    Args:
        errors: standard errors of both, ``[2, *batch]``.
        free: their degrees of freedom, of which each counts as one at least.
    """
    squares = errors.square()
    each = squares.new_tensor([max(n, 1) for n in free]).reshape(2, *[1] * (squares.ndim - 1))
    total = squares.sum(0)
    return total, total.square() / (squares.square() / each).sum(0)


def exceeded(chance: float, dof: Tensor | float) -> Tensor:
    """What Student's t exceeds with this chance, float64: a quantile; NaN without degrees of freedom."""
    # scipy.stats takes a second or two to import
    from scipy.special import stdtrit

    return -torch.as_tensor(stdtrit(torch.as_tensor(dof).double().cpu().numpy(), chance))


def tail_excess(difference: Tensor, log_weights: Tensor) -> Tensor:
    """How much larger ``log f/q``, of target f and base q, is at a draw in the tails than at most draws, ``[*batch]``.

    The largest over the weighted draws less the median: bounded by the likelihood from a prior, a few nats from a base
    with the tails of the target, without bound from one with lighter tails.

    Args:
        difference: ``-log f/q``, ``[draws, *batch]``.
        log_weights: likewise; draws of no weight do not count.
    """
    ratio = torch.where(log_weights.isneginf() | ~difference.isfinite(), math.nan, -difference)
    return (ratio.nan_to_num(-math.inf).amax(0) - ratio.nanmedian(0).values).nan_to_num(0.0, neginf=0.0)


def log_ratio(log_numerators: Tensor, log_denominators: Tensor) -> Estimate:
    """Log of a ratio of sums over chains, both ``[chains, *batch]``; standard error and bias by the jackknife.

    A ratio of sums, never a sum of ratios: with ``r_c`` the estimate that leaves out chain c, the squared error is
    ``(C - 1)/C sum_c (r_c - mean r)^2`` and the bias ``(C - 1) (mean r - r)``.
    """
    return log_ratios(log_numerators.unsqueeze(1), log_denominators.unsqueeze(1))


def log_ratios(log_numerators: Tensor, log_denominators: Tensor, powers: Tensor | None = None) -> Estimate:
    """Log of a product of ratios of sums over chains, both ``[chains, ratios, *batch]``, as :func:`log_ratio`.

    Args:
        log_numerators, log_denominators: logs of the sums of every chain.
        powers: of the ratios in the product, ``[ratios, *batch]``; None for ones. A ratio of power zero is left out.
    """
    n = log_numerators.shape[0]

    def product(log_ratios: Tensor, dim: int) -> Tensor:
        return (log_ratios if powers is None else torch.where(powers > 0, powers * log_ratios, 0.0)).sum(dim)

    whole = product(log_numerators.logsumexp(0) - log_denominators.logsumexp(0), 0)
    if n == 1:
        unknown = torch.full_like(whole, math.nan)
        return Estimate(whole, unknown, unknown)
    left_out = product(_log_sum_of_others(log_numerators) - _log_sum_of_others(log_denominators), 1)
    mean = left_out.mean(0)
    error = ((left_out - mean).square().sum(0) * (n - 1) / n).sqrt()
    # if one chain holds all the weight, leaving it out leaves no estimate
    error = torch.where(left_out.isfinite().all(0), error, math.inf)
    return Estimate(whole, error, (n - 1) * (mean - whole))


def drift(log_numerators: Tensor, log_denominators: Tensor, powers: Tensor | None = None) -> Tensor:
    """By how much the second half of a run has a larger :func:`log_ratios`, ``[*batch]``; 0 where that can be chance.

    Args:
        log_numerators, log_denominators: of both halves, ``[2, chains, ratios, *batch]``.
        powers: as there.
    """
    chains = log_numerators.shape[1]
    if chains == 1:
        return torch.zeros_like(log_numerators[0, 0, 0])
    twice = None if powers is None else torch.cat([powers, powers])
    # the first half turned upside down
    above = torch.cat([log_numerators[1], log_denominators[0]], 1)
    change, error, _ = log_ratios(above, torch.cat([log_denominators[1], log_numerators[0]], 1), twice)
    beyond = float(exceeded(_DRIFT / (2 * max(change.numel(), 1)), chains - 1)) * error
    # differences of exact numbers are of rounding, however small their error
    sizes = torch.cat([log_numerators, log_denominators], 2).abs().nan_to_num(0.0, 0.0).amax(1).sum((0, 1))
    rounding = torch.finfo(change.dtype).eps * sizes
    return torch.where(change.isfinite() & (change.abs() > torch.maximum(beyond, rounding)), change, 0.0)


def _log_sum_of_others(log_values: Tensor) -> Tensor:
    """``log sum_{c' != c} exp(v_c')`` for every c: ``[chains, *batch]`` to the same, without a difference of sums."""
    none = torch.full_like(log_values[:1], -math.inf)
    before = torch.cat([none, log_values.logcumsumexp(0)[:-1]])
    after = torch.cat([log_values.flip(0).logcumsumexp(0).flip(0)[1:], none])
    return torch.logaddexp(before, after)


def log_weights_at_ends(delta: Tensor) -> tuple[Tensor, Tensor]:
    """``log p(beta = 1 | x)`` and ``log p(beta = 0 | x)`` of ``Delta(x)``.

    ``w1 = Delta/expm1(Delta)``, ``w0 = Delta/(-expm1(-Delta))``; with ``a = |Delta|`` the larger of them is
    ``a/(-expm1(-a))`` and the other ``exp(-a)`` of it.
    """
    a = delta.abs()
    larger = torch.where(a < 1e-8, a / 2, a.log() - (-torch.expm1(-a)).log())
    # an infinite Delta (zero target density) puts all probability at the base's end
    return torch.where(delta == math.inf, -math.inf, larger - delta.clamp_min(0)), larger + delta.clamp_max(0)


def weight_ess(log_weights: Tensor) -> Tensor:
    """Effective sample size of weights ``[N, *batch]``, ``(sum w)^2 / sum w^2``; 0 if all are zero."""
    ess = (2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp()
    return ess.nan_to_num(nan=0.0)


def largest_share(log_weights: Tensor) -> Tensor:
    """The largest of the weights ``[N, *batch]`` over their sum; NaN if all are zero."""
    return (log_weights.amax(0) - log_weights.logsumexp(0)).exp()


def bennett(forward: Tensor, reverse: Tensor, *, iterations: int = 200) -> tuple[Estimate, Tensor]:
    """Bennett's acceptance ratio on forward log weights ``f [N, *batch]`` and reverse ones ``r [M, *batch]``.

    ``E[exp f] = Z`` and ``E[exp r] = 1/Z``. With ``m = log(N/M)``, log Z is the root c of
    ``sum sigmoid(f - c - m) = sum sigmoid(r + c + m)`` (Bennett 1976), found by bisection. Its error is that of the
    two sums, divided by the slope of their difference.

    Returns:
        the estimate, and the overlap of the two sets ``[*batch]``: 1 if all weights agree. Below 0.01 the weights are
        uninformative and the error is infinite.
    """
    n, m = forward.shape[0], reverse.shape[0]
    shift = math.log(n / m)
    ends = torch.cat([forward, -reverse])
    low = torch.where(ends.isfinite(), ends, math.inf).amin(0) - abs(shift) - 50
    high = torch.where(ends.isfinite(), ends, -math.inf).amax(0) + abs(shift) + 50

    def sums(c: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(forward - c - shift), torch.sigmoid(reverse + c + shift)

    for _ in range(iterations):
        middle = 0.5 * (low + high)
        a, b = sums(middle)
        falling = a.sum(0) > b.sum(0)
        low, high = torch.where(falling, middle, low), torch.where(falling, high, middle)
        if bool(((high - low) <= 1e-12 * high.abs().clamp_min(1)).all()):
            break
    log_z = 0.5 * (low + high)
    a, b = sums(log_z)
    slope = (a * (1 - a)).sum(0) + (b * (1 - b)).sum(0)
    spread = n * _variance(a) + m * _variance(b)
    error = spread.sqrt() / slope
    overlap = slope * (n + m) / (n * m)
    error = torch.where(overlap >= _LEAST_OVERLAP, error, math.inf)
    return Estimate(log_z, error, torch.full_like(log_z, math.nan)), overlap


def _variance(values: Tensor) -> Tensor:
    return values.var(0) if values.shape[0] > 1 else torch.full_like(values[0], math.nan)


class CurvePoints(NamedTuple):
    """Estimates at one temperature, each ``[*batch]``, float64."""

    rate: Tensor
    rate_error: Tensor
    distortion: Tensor
    distortion_error: Tensor
    ess: Tensor


def curve_points(beta: Tensor | float, log_weights: Tensor, distortions: Tensor) -> CurvePoints:
    """Rate ``-log Z - beta D`` and distortion D of weighted draws (math 7.9), both ``[chains, *batch]``.

    The errors are those of the delta method: with shares w of the weights, which sum to 1 over C chains, the mean of
    squares over ``C - 1`` of ``C w_c (d_c - D)``, and of ``-(C w_c - 1) - beta C w_c (d_c - D)``.
    """
    n = log_weights.shape[0]
    total = log_weights.logsumexp(0)
    shares = (log_weights - total).exp().nan_to_num(nan=0.0)
    # a state of infinite distortion has no weight
    weighted = torch.where(shares > 0, shares * distortions, 0.0)
    mean = weighted.sum(0)
    moved = n * (weighted - shares * mean)
    log_z = total - math.log(n)

    def error(influence: Tensor) -> Tensor:
        if n == 1:
            return torch.full_like(mean, torch.nan)
        return (influence.square().sum(0) / (n * (n - 1))).sqrt()

    ess = 1 / shares.square().sum(0)
    return CurvePoints(
        -log_z - beta * mean, error(-(n * shares - 1) - beta * moved), mean, error(moved), ess.nan_to_num(posinf=0.0)
    )
