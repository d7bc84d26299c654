"""Log-Gaussian Cox process: counts of points in cells, a rate whose logarithm is a Gaussian field (math 12.8)."""

import math
from typing import Self

import torch
from torch import Tensor

from dgm_infer import StandardNormal, Target
from dgm_infer.arguments import numbers
from dgm_infer.errors import ArgumentError

__all__ = ["CoxProcess"]

# of the field, as Moller, Syversveen and Waagepetersen 1998 estimate them for 126 pine saplings
_VARIANCE, _RANGE, _POINTS = 1.91, 1 / 33, 126


class CoxProcess(Target):
    """``f = m + L v``, ``v ~ N(0, I)``, ``y_i ~ Poisson(exp(f_i)/D)`` in the D = n^2 cells of the unit square.

    ``(L L^T)_ij = 1.91 exp(-33 |i - j|)`` with the distance of the cells' centers on the unit square, and
    ``m = log 126 - 1.91/2``. As in print, the factorials of the counts are left out of the energy (Christensen,
    Roberts and Rosenthal 2005, who take the same setting).

    Args:
        counts: y, ``[n, n]``.
    """

    standardised = True
    log_z = None

    def __init__(self, counts: Tensor):
        counts = numbers("CoxProcess", "counts", counts, torch.float64)
        if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or (counts < 0).any():
            raise ArgumentError(f"CoxProcess(counts of shape {tuple(counts.shape)}): expected [n, n], none negative")
        super().__init__(None, counts.numel())
        self.prior = StandardNormal(self.dim)
        self.counts = counts.reshape(-1)
        self.factor = torch.linalg.cholesky(covariance(len(counts)))
        self.mean = math.log(_POINTS) - 0.5 * _VARIANCE

    @classmethod
    def simulated(cls, n: int, seed: int) -> Self:
        """Counts drawn from the model itself."""
        rng = torch.Generator().manual_seed(seed)
        process = cls(torch.zeros(n, n))
        v = torch.randn(n * n, generator=rng, dtype=torch.float64)
        return cls(torch.poisson(process.rate(v), generator=rng).reshape(n, n))

    @classmethod
    def of_points(cls, points: Tensor, n: int) -> Self:
        """Points of the unit square ``[N, 2]``, counted in ``n x n`` cells."""
        cell = (points * n).long().clamp(0, n - 1)
        return cls(torch.bincount(cell[:, 0] * n + cell[:, 1], minlength=n * n).reshape(n, n).double())

    def rate(self, v: Tensor) -> Tensor:
        """Expected counts, ``[..., D]``."""
        return self._field(v).exp() / self.dim

    def energy(self, x: Tensor) -> Tensor:
        field = self._field(x)
        log_likelihood = (self.counts.to(x) * field - field.exp() / self.dim).sum(-1)
        return 0.5 * x.square().sum(-1) + 0.5 * self.dim * math.log(2 * math.pi) - log_likelihood

    def _field(self, v: Tensor) -> Tensor:
        return self.mean + v @ self.factor.to(v).mT


def covariance(n: int) -> Tensor:
    """Covariance of the field at the centers of ``n x n`` cells, ``[n^2, n^2]``, float64."""
    center = torch.arange(n, dtype=torch.float64) / n
    places = torch.cartesian_prod(center, center)
    return _VARIANCE * (-torch.cdist(places, places) / _RANGE).exp()
