"""A Gaussian process classifier with a probit link, whose likelihood is estimated by importance sampling (math 10.9).

The covariance has a scale and a length scale per feature, which are inferred; the latent function values are integrated
out by samples of their Laplace approximation (T 3.6.2).
"""

import csv
import math
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dgm_infer import StandardNormal
from dgm_infer.arguments import whole_number
from dgm_infer.errors import ArgumentError, CheckpointError, cause
from dgm_infer.kernels import PseudoMarginal

__all__ = ["Cases", "CovariancePrior", "LaplaceFit", "ProbitEstimate", "gp_probit", "read_cases"]

# What is added to the diagonal of a covariance.
_JITTER = 1e-8
# Newton iterations and halvings of a step, at most, and the increase of the log density at which they end.
_NEWTON, _HALVINGS, _CLOSE = 60, 12, 1e-10


class Cases(NamedTuple):
    """Points of the feature space, all different, and the labels of the cases that lie there, float64."""

    features: Tensor
    """``[n, K]``."""
    positive: Tensor
    """Cases of the positive class at every point, ``[n]``."""
    negative: Tensor
    """Those of the other, ``[n]``."""

    @classmethod
    def of(cls, features: Tensor, labels: Tensor) -> "Cases":
        """Cases ``[M, K]`` with labels ``[M]``, true for positive, at their different points.

        Cases at one point have one latent value, so that the likelihood is that of all cases; only the jitter of the
        covariance, which the published model has for every case, is one for every point.
        """
        points, index = features.double().unique(dim=0, return_inverse=True)
        counts = [points.new_zeros(len(points)).index_add(0, index, mine.double()) for mine in (labels, ~labels)]
        return cls(points, *counts)


class LaplaceFit(NamedTuple):
    """The Laplace approximation ``N(L m, L A^-1 L^T)`` of the latent values given the data, ``C = L L^T``."""

    factor: Tensor
    """L, ``[n, n]``."""
    mode: Tensor
    """m, the mode in coordinates of the prior, ``[n]``."""
    precision: Tensor
    """Cholesky factor of ``A = I + L^T W L``, ``[n, n]``."""


class CovariancePrior:
    """``log p(x) = 11 x_1/10 - exp(x_1)/10 + sum_k (x_k - exp(x_k)/3)`` plus a constant (T (3.18)).

    ``x = (log s, log l_1, ..., log l_K)`` with ``s ~ Gamma(11/10, 1/10)`` and exponential length scales of mean 3.

    Args:
        features: K.
    """

    def __init__(self, features: int):
        self.dim = whole_number("CovariancePrior", "features", features) + 1
        self._shape = torch.tensor([1.1, *[1.0] * features], dtype=torch.float64)
        self._rate = torch.tensor([0.1, *[1 / 3] * features], dtype=torch.float64)

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised, ``[..., K + 1] -> [...]``."""
        constant = (self._shape * self._rate.log() - self._shape.lgamma()).sum()
        return (self._shape * x - self._rate * x.exp()).sum(-1) + constant

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws, ``[*shape, K + 1]``, float64."""
        from scipy.special import gammaincinv

        uniform = torch.rand(*shape, self.dim, generator=generator, dtype=torch.float64)
        quantiles = torch.from_numpy(gammaincinv(self._shape.numpy(), uniform.numpy()))
        # the quantile of a uniform of exactly 0 has no logarithm
        return (quantiles.clamp_min(torch.finfo(torch.float64).tiny) / self._rate).log()


class ProbitEstimate:
    """Unbiased estimates of ``log p(y | x)`` with the Laplace approximation as the importance density (math 10.9).

    With ``C = L L^T`` and latent values ``z_n = L v_n``, ``v_n = m + R^-T u_n``, ``R R^T = A``,

        log mean_n p(y | z_n) exp(|u_n|^2/2 - |v_n|^2/2)/det R

    The mode is found by Newton's method with ``B = I + W^1/2 C W^1/2``, which is well conditioned (Rasmussen and
    Williams 2006), and steps that are halved where the density would fall. An approximation depends on x alone and is
    kept for a while: new noise at the same x takes no cubic operation.

    Args:
        cases: the data.
        samples: N.
        kept: approximations that are kept, of ``2 n^2`` numbers each; at least twice as many as there are chains.

    Attributes:
        noise_dim: ``N n``.
        cubic_operations: those done so far: Cholesky factorisations (of C, of A, and of B once per Newton iteration)
            and one matrix product per approximation.
    """

    def __init__(self, cases: Cases, samples: int = 50, kept: int = 64):
        self.cases = cases
        self.samples = whole_number("ProbitEstimate", "samples", samples)
        self.kept = whole_number("ProbitEstimate", "kept", kept)
        self.noise_dim = self.samples * len(cases.features)
        self.cubic_operations = 0
        self._fits: OrderedDict[bytes, LaplaceFit | None] = OrderedDict()

    @torch.no_grad()
    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        """``[..., K + 1], [..., N n] -> [...]``; minus infinity where a covariance cannot be factorised."""
        noise = u.double().reshape(-1, self.samples, len(self.cases.features))
        rows = x.double().reshape(-1, x.shape[-1])
        found = [self._estimate(self._kept_fit(row), n) for row, n in zip(rows, noise, strict=True)]
        return torch.stack(found).reshape(x.shape[:-1])

    def covariance(self, x: Tensor) -> Tensor:
        """``C = s exp(-1/2 sum_k ((d_ik - d_jk)/l_k)^2) + 1e-8 I`` at one x: ``[n, n]``."""
        scaled = self.cases.features / x[1:].exp()
        squares = scaled.square().sum(-1)
        distances = (squares[:, None] + squares - 2 * scaled @ scaled.mT).clamp_min(0)
        c = x[0].exp() * (-0.5 * distances).exp()
        c.diagonal().copy_((x[0].exp() + _JITTER).expand(len(c)))
        return c

    def log_likelihood(self, z: Tensor) -> Tensor:
        """``log p(y | z)``, ``[..., n] -> [...]``."""
        log_p, log_not = torch.special.log_ndtr(z), torch.special.log_ndtr(-z)
        return log_p @ self.cases.positive + log_not @ self.cases.negative

    def slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of :meth:`log_likelihood` at z and minus its second derivatives, W, both ``[n]``."""
        up, down = _hazard(z), _hazard(-z)
        gradient = self.cases.positive * up - self.cases.negative * down
        return gradient, self.cases.positive * up * (up + z) + self.cases.negative * down * (down - z)

    def fit(self, x: Tensor) -> LaplaceFit | None:
        """The Laplace approximation at one x ``[K + 1]``; None if the covariance cannot be factorised."""
        c = self.covariance(x)
        factor = self._cholesky(c)
        if factor is None:
            return None
        alpha, z = torch.zeros_like(c[0]), torch.zeros_like(c[0])
        value = self.log_likelihood(z)
        for _ in range(_NEWTON):
            gradient, w = self.slope(z)
            root = w.sqrt()
            b = root[:, None] * c * root
            b.diagonal().add_(1)
            lower = self._cholesky(b)
            if lower is None:
                return None
            towards = w * z + gradient
            solved = torch.cholesky_solve((root * (c @ towards))[:, None], lower)[:, 0]
            alpha, z, higher = self._climb(c, alpha, towards - root * solved, value)
            done = higher - value < _CLOSE
            value = higher
            if done:
                break
        _, w = self.slope(z)
        a = (factor.mT * w) @ factor
        self.cubic_operations += 1
        a.diagonal().add_(1)
        precision = self._cholesky(a)
        return None if precision is None else LaplaceFit(factor, factor.mT @ alpha, precision)

    def _climb(self, c: Tensor, alpha: Tensor, target: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From ``z = C alpha`` towards ``C target``, not below the present log density: new alpha, z and value."""
        step = target - alpha
        for halving in range(_HALVINGS):
            there = alpha + 0.5**halving * step
            z = c @ there
            found = self.log_likelihood(z) - 0.5 * there @ z
            if found >= value:
                return there, z, found
        return alpha, c @ alpha, value

    def _estimate(self, fit: LaplaceFit | None, u: Tensor) -> Tensor:
        """The estimate by one approximation with noise ``[N, n]``."""
        if fit is None:
            return u.new_tensor(-torch.inf)
        v = fit.mode + torch.linalg.solve_triangular(fit.precision, u, upper=False, left=False)
        log_weight = self.log_likelihood(v @ fit.factor.mT) + 0.5 * (u.square() - v.square()).sum(-1)
        return log_weight.logsumexp(0) - math.log(self.samples) - fit.precision.diagonal().log().sum()

    def _kept_fit(self, x: Tensor) -> LaplaceFit | None:
        key = x.numpy().tobytes()
        if key not in self._fits:
            self._fits[key] = self.fit(x)
            if len(self._fits) > self.kept:
                self._fits.popitem(last=False)
        self._fits.move_to_end(key)
        return self._fits[key]

    def _cholesky(self, matrix: Tensor) -> Tensor | None:
        self.cubic_operations += 1
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return None if failed else factor


def gp_probit(estimate: ProbitEstimate) -> PseudoMarginal:
    """The posterior of the covariance's parameters, with noise that is standard normal."""
    prior = CovariancePrior(estimate.cases.features.shape[1])
    return PseudoMarginal(estimate, prior, StandardNormal(estimate.noise_dim))


def read_cases(folder: Path, count: int | None = None) -> Cases:
    """Breast cancer Wisconsin (original): nine features from 1 to 10, positive for malignant; 683 complete cases.

    Args:
        folder: with ``wisconsin_original.csv``, in itself or in its subfolder ``breast_cancer``.
        count: the first cases only; None for all.

    Raises:
        CheckpointError: the file is missing or damaged.
        ArgumentError: there are fewer cases than ``count``.
    """
    inner = folder / "breast_cancer"
    path = (inner if inner.is_dir() else folder) / "wisconsin_original.csv"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: the reference data has it in its folder breast_cancer")
    try:
        with path.open(newline="") as file:
            rows = [row[1:] for row in list(csv.reader(file))[1:] if "?" not in row]
        table = torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
        features, classes = table[:, :-1], table[:, -1]
        if features.shape[1] != 9 or not ((classes == 2) | (classes == 4)).all():
            raise ValueError("expected nine features and a class of 2 or 4")
    except (ValueError, IndexError, OSError, csv.Error) as error:
        raise CheckpointError(f"{path} holds no cases: {cause(error)}") from error
    if count is not None and whole_number("read_cases", "count", count) > len(table):
        raise ArgumentError(f"read_cases(count={count}): the file has {len(table)} complete cases")
    return Cases.of(features[:count], classes[:count] == 4)


def _hazard(z: Tensor) -> Tensor:
    """``phi(z)/Phi(z)``."""
    return (-0.5 * z.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(z)).exp()
