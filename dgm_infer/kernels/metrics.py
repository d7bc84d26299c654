"""Metrics of Hamiltonian kernels on R^D: the covariance that a kernel takes its target to have (math 8.7).

The mass is the inverse of a covariance ``S = L L^T``, L a :class:`LinearMap`. Momenta are kept in the coordinates ``L^T
p``, in which they are standard normal and the kinetic energy is ``|p|^2 / 2`` for every metric: positions then move
with velocity ``L p`` and momenta under the force ``L^T grad``.
"""

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
    """Settings of metrics from few positions; the first two are Stan's."""

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


def check_metric(name: str, metric: object, others: tuple[str | None, ...] = ()) -> None:
    """Raise ArgumentError unless a kernel's field is a metric or the name of one, or of one of its own."""
    if not isinstance(metric, LinearMap):
        choice(name, "metric", metric, (*METRICS, *others))


def chosen_metric(metric: str | Metric | None, problem: Target, *lengths: float | Tensor | None) -> str | Metric:
    """A kernel's metric, and for None the one that suits the problem: dense for a posterior of few latents, diagonal
    for a density, whose coordinates may have any width. Lengths that are given are those of the coordinates as they
    are."""
    if metric is not None:
        return metric
    if any(length is not None for length in lengths):
        return "identity"
    if not problem.standardised:
        return "diagonal"
    return "dense" if isinstance(problem, Posterior) and problem.dim <= CURVATURE.dim else "identity"


def check_shape(name: str, metric: str | Metric | None, batch_shape: torch.Size, dim: int) -> None:
    """Raise ArgumentError unless a metric is one of such problems."""
    if not isinstance(metric, LinearMap):
        return
    for part in metric.parts:
        shape = tuple(part.shape)
        is_stretch = isinstance(metric, LowRankMap) and part is metric.stretch
        if shape[: len(batch_shape) + 1] != (*batch_shape, dim) and not is_stretch:
            raise ArgumentError(
                f"{name}(metric={metric!r}): the problem has {tuple(batch_shape)} problems of {dim} coordinates: give "
                "the metric's name to have it adapted"
            )


def metric_in_use(metric: str | Metric | None) -> Metric:
    """The metric of a transition: the identity as long as warm-up has not adapted one."""
    return metric if isinstance(metric, LinearMap) else IDENTITY


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


def fitted(name: str, positions: Tensor, gradients: Tensor | None = None, metric: Metric | None = None) -> Metric:
    """The metric of positions ``[n, *batch, D]``, n >= 2, and of the gradients there, as one of :data:`METRICS`.

    A normal density with covariance S has ``cov(x) = S cov(g) S`` over any of its points: S is the geometric mean of
    ``cov(x)`` and ``cov(g)^-1``, exactly, of few points and of chains that have seen little of it; of other densities
    it is the metric in which gradients are most like those of a standard normal (Seyboldt, Carlson and Carpenter 2026;
    math 8.7). A dense one is found in the coordinates of a dense ``metric`` that chains moved under, or of the
    diagonal one; a low-rank one in those, in the space of the 10 directions in which positions and gradients each vary
    most.

    Without gradients S is ``cov(x)``; a dense one is then diagonal for fewer than 2 D positions, and the directions of
    a low-rank one are those in which the positions differ from as many of independent coordinates.
    """
    x = positions.double()
    if gradients is None:
        return _to_positions(name, x, positions.dtype)
    x = x - x.mean(0)
    g = gradients.double().nan_to_num(0, 0, 0)
    # a coordinate without a gradient has the width of its positions
    g = torch.where((g != 0).any(0), g - g.mean(0), x / _variance(x))
    sd = (_variance(x) / _variance(g)).pow(0.25)
    if name == "diagonal":
        return DiagonalMap(sd.to(positions.dtype))
    start: Metric = DiagonalMap(sd)
    if name == "dense" and isinstance(metric, TriangularMap):
        start = TriangularMap(metric.factor.double())
    x, g = start.solve(x).movedim(0, -2), start.transpose(g).movedim(0, -2)
    if name == "dense":
        factor = torch.linalg.cholesky(_geometric_mean(x, g))
        factor = start.factor @ factor if isinstance(start, TriangularMap) else sd.unsqueeze(-1) * factor
        return TriangularMap(factor.to(positions.dtype))
    rank = min(_SETTINGS.rank, *x.shape[-2:])
    basis = torch.cat([torch.linalg.svd(part, full_matrices=False).Vh[..., :rank, :] for part in (x, g)], -2)
    basis = torch.linalg.qr(basis.mT).Q
    values, vectors = torch.linalg.eigh(_geometric_mean(x @ basis, g @ basis))
    return _low_rank(sd, basis @ vectors, values, positions.dtype)


def _geometric_mean(x: Tensor, g: Tensor) -> Tensor:
    """The S with ``S B S = A``, of the second moments A of ``x [*batch, n, D]`` and B of ``g``."""
    a, b = _shrunk(x), _shrunk(g)
    root = torch.linalg.cholesky(b)
    # S = R^-T (R^T A R)^(1/2) R^-1 for B = R R^T
    values, vectors = torch.linalg.eigh(root.mT @ a @ root)
    half = torch.linalg.solve_triangular(root.mT, vectors * values.clamp_min(0).pow(0.25).unsqueeze(-2), upper=True)
    return half @ half.mT


def _shrunk(x: Tensor) -> Tensor:
    """Second moments, shrunk towards a multiple of the identity, further where there are directions of which few points
    say nothing: those of positions and those of gradients are not the same."""
    n, dim = x.shape[-2:]
    weight = _SETTINGS.prior_samples
    mean = x.square().mean((-2, -1)) * (_SETTINGS.prior_variance if n >= 2 * dim else 1.0)
    mean = torch.where(mean > 0, mean, 1.0)
    unit = torch.eye(dim, dtype=x.dtype, device=x.device)
    return (x.mT @ x + weight * mean[..., None, None] * unit) / (n + weight)


def _to_positions(name: str, x: Tensor, dtype: torch.dtype) -> Metric:
    """The metric of positions ``[n, *batch, D]`` alone."""
    if name == "dense":
        return TriangularMap(torch.linalg.cholesky(_covariance(x)).to(dtype))
    sd = _variance(x).sqrt()
    if name == "diagonal":
        return DiagonalMap(sd.to(dtype))
    n = len(x)
    white = ((x - x.mean(0)) / sd).movedim(0, -1)
    # of the correlation matrix without forming it, if there are fewer samples than coordinates
    directions, values, _ = torch.linalg.svd(white, full_matrices=False)
    values = values.square() / (n - 1)
    # between these lie those of n samples of a standard normal
    spread = (white.shape[-2] / n) ** 0.5
    meant = (values > (1 + spread) ** 2) | (values < max(1 - spread, 0) ** 2)
    weight = _SETTINGS.prior_samples
    values = torch.where(meant, (n * values + weight * _SETTINGS.prior_variance) / (n + weight), 1.0)
    return _low_rank(sd, directions, values, dtype)


def _low_rank(sd: Tensor, directions: Tensor, values: Tensor, dtype: torch.dtype) -> LowRankMap:
    """The directions ``[*batch, D, K]`` whose variances ``[*batch, K]`` differ most from 1, in ratio."""
    chosen = values.log().abs().topk(min(_SETTINGS.rank, values.shape[-1]), -1).indices
    directions = directions.gather(-1, chosen.unsqueeze(-2).expand(*directions.shape[:-1], -1))
    stretch = values.gather(-1, chosen).sqrt()
    return LowRankMap(*(tensor.to(dtype) for tensor in (sd, directions, stretch)))


def _covariance(samples: Tensor) -> Tensor:
    """Regularised, of ``[n, *batch, D]``; diagonal for fewer than 2 D samples."""
    x = (samples - samples.mean(0)).movedim(0, -1)
    dim, n = x.shape[-2:]
    variance = x.var(-1)
    weight, least = _prior(variance, n)
    covariance = x @ x.mT / (n - 1) if n >= 2 * dim else torch.diag_embed(variance)
    return weight * covariance + torch.diag_embed(least.expand_as(variance))


def _variance(samples: Tensor) -> Tensor:
    """Regularised, of ``[n, *batch, D]``."""
    variance = samples.var(0)
    weight, least = _prior(variance, len(samples))
    return weight * variance + least


def _prior(variance: Tensor, n: int) -> tuple[float, Tensor]:
    """The weight of n samples, and the variance ``[*batch, 1]`` to add: in units of the geometric mean of the
    variances, so that the scale of a target does not matter."""
    # coordinates that have not moved count as a hundred thousand times narrower than the widest
    widest = variance.amax(-1, keepdim=True)
    typical = variance.clamp_min(1e-10 * widest).log().mean(-1, keepdim=True).exp()
    typical = torch.where(widest > 0, typical, 1.0)
    weight = _SETTINGS.prior_samples
    return n / (n + weight), _SETTINGS.prior_variance * weight / (n + weight) * typical
