"""Metrics of Hamiltonian kernels on R^D: the covariance that a kernel takes its target to have (math 8.7).

The mass is the inverse of a covariance ``S = L L^T``, L a :class:`LinearMap`. Momenta are kept in the coordinates ``L^T
p``, in which they are standard normal and the kinetic energy is ``|p|^2 / 2`` for every metric: positions then move
with velocity ``L p`` and momenta under the force ``L^T grad``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import choice
from ..errors import ArgumentError
from ..linear_maps import IDENTITY, DiagonalMap, LinearMap, LowRankMap, TriangularMap
from ..target import Posterior, Target

METRICS = ("identity", "diagonal", "dense", "low_rank")
"""The metrics that warm-up can adapt, by the names that kernels take."""
Metric = LinearMap


@dataclass(frozen=True)
class MetricSettings:
    """Settings of covariance estimates from few samples; the first two are Stan's."""

    prior_samples: float = 5
    """Weight of the prior, in samples."""
    prior_variance: float = 1e-3
    """Variance of the prior, in units of the typical variance; absolute in Stan."""
    rank: int = 10
    """Directions of a low-rank metric."""


@dataclass(frozen=True)
class CurvatureSettings:
    """Settings of the metric of the curvature, which takes a forward derivative per input and chain."""

    dim: int = 512
    """Inputs up to which a metric that is adapted begins with it."""
    chains: int = 16
    """Chains it is averaged over, at most."""


_SETTINGS, CURVATURE = MetricSettings(), CurvatureSettings()


def check_metric(name: str, metric: object, others: tuple[str, ...] = ()) -> None:
    """Raise ArgumentError unless a kernel's field is a metric or the name of one, or of one of its own."""
    if not isinstance(metric, LinearMap):
        choice(name, "metric", metric, (*METRICS, *others))


def check_shape(name: str, metric: str | Metric, batch_shape: torch.Size, dim: int) -> None:
    """Raise ArgumentError unless a metric is one of such problems."""
    if isinstance(metric, str):
        return
    for part in metric.parts:
        shape = tuple(part.shape)
        is_stretch = isinstance(metric, LowRankMap) and part is metric.stretch
        if shape[: len(batch_shape) + 1] != (*batch_shape, dim) and not is_stretch:
            raise ArgumentError(
                f"{name}(metric={metric!r}): the problem has {tuple(batch_shape)} problems of {dim} coordinates: give "
                "the metric's name to have it adapted"
            )


def metric_in_use(metric: str | Metric) -> Metric:
    """The metric of a transition: the identity as long as warm-up has not adapted one."""
    return IDENTITY if isinstance(metric, str) else metric


def open_metric(metric: str | Metric) -> str | None:
    """The name of a metric for warm-up to adapt; None if there is none."""
    return metric if isinstance(metric, str) and metric != "identity" else None


def curvature_metric(posterior: Posterior, u: Tensor) -> Metric | None:
    """The inverse of the mean of ``I + K^T K`` over at most 16 of the positions ``[points, *batch, D]`` (math 8.8)."""
    precision = posterior.precision(u[: CURVATURE.chains])
    if precision is None:
        return None
    try:
        return TriangularMap.of_precision(precision.mean(0), u.dtype)
    except RuntimeError:
        # not positive definite: not finite, or of noise so small that rounding hides the prior beside it
        return None


def first_metric(metric: str | Metric, problem: Target, position: Tensor) -> Metric | None:
    """What a dense metric to be adapted begins with at positions ``[chains, *batch, D]``: that of the curvature, where
    a problem has one; None to begin with none."""
    if metric != "dense" or not isinstance(problem, Posterior) or problem.dim > CURVATURE.dim:
        return None
    return curvature_metric(problem, position)


def fitted(name: str, samples: Tensor) -> Metric:
    """The regularised covariance of samples ``[n, *batch, D]``, n >= 2, as one of :data:`METRICS`.

    A dense one is diagonal for fewer than 2 D samples: the narrowest directions of few samples are so by chance, and
    chains would then hardly move along them. The directions of a low-rank one are the eigenvectors of the samples'
    correlation matrix whose eigenvalues ``stretch^2`` differ most from 1, in ratio, and more than those of so many
    samples of independent coordinates would (math 8.7).
    """
    x = samples.double()
    if name == "dense":
        return TriangularMap(torch.linalg.cholesky(_covariance(x)).to(samples.dtype))
    if name == "diagonal":
        return DiagonalMap(_sd(x).to(samples.dtype))
    n, sd = len(x), _sd(x)
    white = ((x - x.mean(0)) / sd).movedim(0, -1)
    # of the correlation matrix without forming it, if there are fewer samples than coordinates
    directions, values, _ = torch.linalg.svd(white, full_matrices=False)
    values = values.square() / (n - 1)
    least, most = _edges(white.shape[-2], white.new_tensor(n))
    meant = (values > most) | (values < least)
    weight = _SETTINGS.prior_samples
    values = torch.where(meant, (n * values + weight * _SETTINGS.prior_variance) / (n + weight), 1.0)
    chosen = values.log().abs().topk(min(_SETTINGS.rank, values.shape[-1]), -1).indices
    directions = directions.gather(-1, chosen.unsqueeze(-2).expand(*directions.shape[:-1], -1))
    stretch = values.gather(-1, chosen).sqrt()
    return LowRankMap(*(tensor.to(samples.dtype) for tensor in (sd, directions, stretch)))


def refitted(name: str, metric: Metric | None, positions: Tensor) -> Metric:
    """The metric of positions ``[n, chains, *batch, D]`` of chains that moved under this one.

    A dense one is corrected by the covariance that the positions have in its own coordinates. Eigenvalues that differ
    from 1 no more than those of as many independent samples of a standard normal count as 1: a good metric is not
    replaced by the noise of few samples, which the positions of a window are.
    """
    if not isinstance(metric, TriangularMap):
        return fitted(name, positions.flatten(0, 1))
    mine = TriangularMap(metric.factor.double())
    white = positions.double()
    white = mine.solve((white - white.mean((0, 1))).flatten(0, 1)).unflatten(0, positions.shape[:2])
    dim, n = white.shape[-1], positions.shape[:2].numel()
    values, vectors = torch.linalg.eigh(_covariance(white.flatten(0, 1)))
    # the largest of D variances differs from 1 as the largest eigenvalue of log D coordinates does
    least, most = _edges(dim if n >= 2 * dim else 1 + math.log(dim), _independent(white).unsqueeze(-1))
    values = torch.where((values > most) | (values < least), values, 1.0)
    correction = torch.linalg.cholesky(vectors @ torch.diag_embed(values) @ vectors.mT)
    return TriangularMap((mine.factor @ correction).to(positions.dtype))


def _covariance(samples: Tensor) -> Tensor:
    """Regularised, of ``[n, *batch, D]``; diagonal for fewer than 2 D samples."""
    x = (samples - samples.mean(0)).movedim(0, -1)
    dim, n = x.shape[-2:]
    variance = x.var(-1)
    weight, least = _prior(variance, n)
    covariance = x @ x.mT / (n - 1) if n >= 2 * dim else torch.diag_embed(variance)
    return weight * covariance + torch.diag_embed(least.expand_as(variance))


def _sd(samples: Tensor) -> Tensor:
    variance = samples.var(0)
    weight, least = _prior(variance, len(samples))
    return (weight * variance + least).sqrt()


def _prior(variance: Tensor, n: int) -> tuple[float, Tensor]:
    """The weight of n samples, and the variance ``[*batch, 1]`` to add: in units of the geometric mean of the
    variances, so that the scale of a target does not matter."""
    # coordinates that have not moved count as a hundred thousand times narrower than the widest
    widest = variance.amax(-1, keepdim=True)
    typical = variance.clamp_min(1e-10 * widest).log().mean(-1, keepdim=True).exp()
    typical = torch.where(widest > 0, typical, 1.0)
    weight = _SETTINGS.prior_samples
    return n / (n + weight), _SETTINGS.prior_variance * weight / (n + weight) * typical


def _edges(dim: float, n: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues between which those of the covariance of n samples of a standard normal lie."""
    spread = (dim / n).sqrt()
    return (1 - spread).clamp_min(0).square(), (1 + spread).square()


def _independent(x: Tensor) -> Tensor:
    """How many independent samples centred positions ``[n, chains, *batch, D]`` are worth: ``[*batch]``."""
    r = ((x[1:] * x[:-1]).sum((0, 1, -1)) / x[1:].square().sum((0, 1, -1))).clamp(0, 0.99)
    return x.shape[:2].numel() * (1 - r) / (1 + r)
