"""Metrics of Hamiltonian kernels on R^D: the covariance that a kernel takes its target to have (math 8.7).

The mass is the inverse of a covariance ``S = L L^T``. Momenta are kept in the coordinates ``L^T p``, in which they are
standard normal and the kinetic energy is ``|p|^2 / 2`` for every metric: positions then move with velocity ``L p`` and
momenta under the force ``L^T grad``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Self

import torch
from torch import Tensor

from ..arguments import choice
from ..autodiff.loops import is_captured
from ..errors import ArgumentError
from ..settings import Settings

__all__ = ["IDENTITY", "METRICS", "DenseMetric", "DiagonalMetric", "IdentityMetric", "LowRankMetric", "Metric"]

# Stan's regularisation: the weight of prior samples, and their variance in units of the typical one.
_PRIOR_SAMPLES = 5
_PRIOR_VARIANCE = 1e-3
# Entries of a matrix up to which its product is no call of a library in compiled code.
_SMALL = 2**12
# Directions of a low-rank metric.
_RANK = 10


@dataclass(frozen=True, eq=False)
class Metric(Settings, ABC):
    """A covariance ``S = L L^T`` per problem, of tensors ``[*batch, ...]``; vectors are ``[chains, *batch, D]``."""

    @abstractmethod
    def velocity(self, p: Tensor) -> Tensor:
        """``L p``."""

    @abstractmethod
    def force(self, gradient: Tensor) -> Tensor:
        """``L^T g``."""

    @abstractmethod
    def whiten(self, x: Tensor) -> Tensor:
        """``L^-1 x``, coordinates in which S is the identity."""

    @classmethod
    @abstractmethod
    def fit(cls, samples: Tensor) -> Self:
        """The regularised covariance of samples ``[n, *batch, D]``, n >= 2."""

    def refined(self, positions: Tensor) -> Self:
        """The metric of more positions ``[n, chains, *batch, D]``, of chains that moved under this one."""
        return self.fit(positions.flatten(0, 1))

    def __repr__(self) -> str:
        # its numbers would fill pages
        shapes = (f"{each.name} of shape {tuple(getattr(self, each.name).shape)}" for each in fields(self) if each.init)
        return f"{type(self).__name__}({', '.join(shapes)})"

    def check(self, name: str, batch_shape: torch.Size, dim: int) -> None:
        """Raise ArgumentError unless the metric is one of such problems."""
        for each in fields(self):
            shape = tuple(getattr(self, each.name).shape)
            if shape[: len(batch_shape) + 1] != (*batch_shape, dim) and each.name != "stretch":
                raise ArgumentError(
                    f"{name}(metric={type(self).__name__}({each.name} of shape {shape})): the problem has "
                    f"{tuple(batch_shape)} problems of {dim} coordinates: give the metric's name to have it adapted"
                )


@dataclass(frozen=True, eq=False, repr=False)
class IdentityMetric(Metric):
    """``S = I``."""

    def velocity(self, p):
        return p

    def force(self, gradient):
        return gradient

    def whiten(self, x):
        return x

    @classmethod
    def fit(cls, samples):
        return cls()


IDENTITY = IdentityMetric()


@dataclass(frozen=True, eq=False, repr=False)
class DiagonalMetric(Metric):
    """``S = diag(scale^2)``, scale ``[*batch, D]``."""

    scale: Tensor

    def velocity(self, p):
        return self.scale * p

    def force(self, gradient):
        return self.scale * gradient

    def whiten(self, x):
        return x / self.scale

    @classmethod
    def fit(cls, samples):
        return cls(_scale(samples.double()).to(samples.dtype))


@dataclass(frozen=True, eq=False, repr=False)
class DenseMetric(Metric):
    """``S = L L^T`` with L lower triangular, ``[*batch, D, D]``; diagonal if fitted to fewer than 2 D samples."""

    factor: Tensor
    inverse: Tensor = field(init=False)

    def __post_init__(self):
        unit = torch.eye(self.factor.shape[-1]).to(self.factor)
        # the class is frozen
        object.__setattr__(self, "inverse", torch.linalg.solve_triangular(self.factor, unit, upper=False))

    def velocity(self, p):
        return _product(self.factor, p)

    def force(self, gradient):
        return _product(self.factor.mT, gradient)

    def whiten(self, x):
        return _product(self.inverse, x)

    @classmethod
    def of_precision(cls, precision: Tensor, dtype: torch.dtype) -> Self:
        """The inverse of a positive definite matrix ``[*batch, D, D]`` of float64."""
        # S = U^-1 U^-T with the factor of the reversed matrix: its inverse is lower triangular
        eye = torch.eye(precision.shape[-1], dtype=torch.float64, device=precision.device)
        # as much of the identity as the rounding of a large matrix may take away
        regular = precision + 1e-14 * precision.diagonal(0, -2, -1).amax(-1)[..., None, None] * eye
        reverse = torch.linalg.cholesky(regular.flip(-1, -2)).flip(-1, -2)
        return cls(torch.linalg.solve_triangular(reverse.mT, eye, upper=False).to(dtype))

    @classmethod
    def fit(cls, samples):
        return cls(torch.linalg.cholesky(cls._covariance(samples.double())).to(samples.dtype))

    def refined(self, positions):
        """This metric, corrected by the covariance that the positions have in its own coordinates.

        Eigenvalues that differ from 1 no more than those of as many independent samples of a standard normal count as
        1: a good metric is not replaced by the noise of few samples, which the positions of a window are.
        """
        mine = type(self)(self.factor.double())
        white = positions.double()
        white = mine.whiten((white - white.mean((0, 1))).flatten(0, 1)).unflatten(0, positions.shape[:2])
        dim, n = white.shape[-1], positions.shape[:2].numel()
        values, vectors = torch.linalg.eigh(self._covariance(white.flatten(0, 1)))
        # the largest of D variances differs from 1 as the largest eigenvalue of log D coordinates does
        least, most = _edges(dim if n >= 2 * dim else 1 + math.log(dim), _independent(white).unsqueeze(-1))
        values = torch.where((values > most) | (values < least), values, 1.0)
        correction = torch.linalg.cholesky(vectors @ torch.diag_embed(values) @ vectors.mT)
        return type(self)((mine.factor @ correction).to(positions.dtype))

    @staticmethod
    def _covariance(samples: Tensor) -> Tensor:
        """Regularised, of ``[n, *batch, D]``; diagonal for fewer than 2 D samples."""
        x = (samples - samples.mean(0)).movedim(0, -1)
        dim, n = x.shape[-2:]
        variance = x.var(-1)
        weight, least = _prior(variance, n)
        # the narrowest directions of few samples are so by chance, and chains would then hardly move along them
        covariance = x @ x.mT / (n - 1) if n >= 2 * dim else torch.diag_embed(variance)
        return weight * covariance + torch.diag_embed(least.expand_as(variance))


@dataclass(frozen=True, eq=False, repr=False)
class LowRankMetric(Metric):
    """``L = diag(scale) (I + V diag(stretch - 1) V^T)`` with orthonormal V: a few directions of other widths.

    The directions are the eigenvectors of the samples' correlation matrix whose eigenvalues ``stretch^2`` differ most
    from 1, in ratio, and more than those of so many samples of independent coordinates would (math 8.7).

    Args:
        scale: ``[*batch, D]``.
        directions: V, ``[*batch, D, r]``.
        stretch: ``[*batch, r]``.
    """

    scale: Tensor
    directions: Tensor
    stretch: Tensor

    def velocity(self, p):
        return self.scale * self._stretched(p, self.stretch)

    def force(self, gradient):
        return self._stretched(self.scale * gradient, self.stretch)

    def whiten(self, x):
        return self._stretched(x / self.scale, self.stretch.reciprocal())

    def _stretched(self, x: Tensor, by: Tensor) -> Tensor:
        return x + _product(self.directions, (by - 1) * _product(self.directions.mT, x))

    @classmethod
    def fit(cls, samples):
        x = samples.double()
        n, scale = len(x), _scale(x)
        white = ((x - x.mean(0)) / scale).movedim(0, -1)
        # of the correlation matrix without forming it, if there are fewer samples than coordinates
        directions, values, _ = torch.linalg.svd(white, full_matrices=False)
        values = values.square() / (n - 1)
        least, most = _edges(white.shape[-2], white.new_tensor(n))
        meant = (values > most) | (values < least)
        values = torch.where(meant, (n * values + _PRIOR_SAMPLES * _PRIOR_VARIANCE) / (n + _PRIOR_SAMPLES), 1.0)
        chosen = values.log().abs().topk(min(_RANK, values.shape[-1]), -1).indices
        directions = directions.gather(-1, chosen.unsqueeze(-2).expand(*directions.shape[:-1], -1))
        stretch = values.gather(-1, chosen).sqrt()
        return cls(*(tensor.to(samples.dtype) for tensor in (scale, directions, stretch)))


METRICS: dict[str, type[Metric]] = {
    "identity": IdentityMetric,
    "diagonal": DiagonalMetric,
    "dense": DenseMetric,
    "low_rank": LowRankMetric,
}
"""The metrics that warm-up can adapt, by the names that kernels take."""


def check_metric(name: str, metric: object, others: tuple[str, ...] = ()) -> None:
    """Raise ArgumentError unless a kernel's field is a metric or the name of one, or of one of its own."""
    if not isinstance(metric, Metric):
        choice(name, "metric", metric, (*METRICS, *others))


def metric_in_use(metric: str | Metric) -> Metric:
    """The metric of a transition: the identity as long as warm-up has not adapted one."""
    return IDENTITY if isinstance(metric, str) else metric


def open_metric(metric: str | Metric) -> str | None:
    """The name of a metric for warm-up to adapt; None if there is none."""
    return metric if isinstance(metric, str) and metric != "identity" else None


def _prior(variance: Tensor, n: int) -> tuple[float, Tensor]:
    """The weight of n samples, and the variance ``[*batch, 1]`` to add.

    That is 1e-3 times the weight of five more samples, as in Stan, where it is absolute; here in units of the geometric
    mean of the variances, so that the scale of a target does not matter.
    """
    # coordinates that have not moved count as a hundred thousand times narrower than the widest
    widest = variance.amax(-1, keepdim=True)
    typical = variance.clamp_min(1e-10 * widest).log().mean(-1, keepdim=True).exp()
    typical = torch.where(widest > 0, typical, 1.0)
    return n / (n + _PRIOR_SAMPLES), _PRIOR_VARIANCE * _PRIOR_SAMPLES / (n + _PRIOR_SAMPLES) * typical


def _edges(dim: float, n: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues between which those of the covariance of n samples of a standard normal lie."""
    spread = (dim / n).sqrt()
    return (1 - spread).clamp_min(0).square(), (1 + spread).square()


def _independent(x: Tensor) -> Tensor:
    """How many independent samples centred positions ``[n, chains, *batch, D]`` are worth: ``[*batch]``."""
    r = ((x[1:] * x[:-1]).sum((0, 1, -1)) / x[1:].square().sum((0, 1, -1))).clamp(0, 0.99)
    return x.shape[:2].numel() * (1 - r) / (1 + r)


def _scale(samples: Tensor) -> Tensor:
    variance = samples.var(0)
    weight, least = _prior(variance, len(samples))
    return (weight * variance + least).sqrt()


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    """``[*batch, N, D], [chains, *batch, D] -> [chains, *batch, N]``."""
    if is_captured() and matrix.shape[-1] * matrix.shape[-2] <= _SMALL:
        # compiled into one loop with what is around it, where a call of a library would take longer
        return (matrix * x.unsqueeze(-2)).sum(-1)
    # chains as columns, so that no matrix is repeated
    return (matrix @ x.movedim(0, -1)).movedim(-1, 0)
