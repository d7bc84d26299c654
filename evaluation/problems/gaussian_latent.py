"""Gaussian latent variables whose posterior is known, with a likelihood that is only estimated (math 10.8, T 3.6.1)."""

import math

import numpy as np
import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer import StandardNormal
from dgm_infer.arguments import whole_number
from dgm_infer.kernels import PseudoMarginal

__all__ = ["GaussianLatent", "published_observations"]


class GaussianLatent(PseudoMarginal):
    """``x ~ N(0, I)``, ``z_m ~ N(x, sigma^2 I)``, ``y_m ~ N(z_m, eps^2 I)``, the likelihood of x estimated (T (3.17)).

    The estimate is ``1/N sum_n prod_m N(y_m | x + sigma u_nm, eps^2 I)`` with standard normal u: importance sampling
    of z from its prior given x. One estimate takes N evaluations of the density. Among the latents of the draws is
    ``u``, the first coordinate of the noise, which shows how the noise mixes.

    Args:
        y: ``[M, D]``.
        samples: N.
        sigma: standard deviation of z given x.
        eps: standard deviation of y given z.
        batch_shape: shape of a batch of repetitions of this problem.
    """

    def __init__(
        self,
        y: Tensor,
        samples: int = 1,
        *,
        sigma: float = 1.0,
        eps: float = 2.0,
        batch_shape: tuple[int, ...] = (),
    ):
        self.y, self.sigma, self.eps = y, sigma, eps
        self.samples = whole_number("GaussianLatent", "samples", samples)
        prior, noise = StandardNormal(y.shape[1]), StandardNormal(self.samples * y.numel())
        super().__init__(self._log_estimate, prior, noise, batch_shape)

    def latents(self, x):
        x, u = self.split(x)
        return {"x": x, "u": u[..., 0]}

    def posterior(self) -> tuple[Tensor, float]:
        """Mean ``[D]`` and variance of ``N(mean, variance I)``, the posterior of x (T (3.15))."""
        m, s2 = len(self.y), self.sigma**2 + self.eps**2
        return self.y.sum(0) / (m + s2), s2 / (m + s2)

    def noise_posterior(self) -> tuple[float, float]:
        """Mean and standard deviation of the first coordinate of the noise given y, which is normal for N = 1."""
        if self.samples != 1:
            raise dgm.errors.ArgumentError(
                f"GaussianLatent(samples={self.samples}).noise_posterior(): is normal for 1 alone"
            )
        covariance = torch.eye(len(self.y), dtype=self.y.dtype) * (self.sigma**2 + self.eps**2) + 1
        weights = self.sigma * torch.linalg.inv(covariance)[0]
        return float(weights @ self.y[:, 0]), float(1 - self.sigma * weights[0]) ** 0.5

    def log_likelihood(self, x: Tensor) -> Tensor:
        """What the estimate has as its expectation, ``log p(y | x)``: ``[..., D] -> [...]``."""
        return self._log_normal(self.y - x.unsqueeze(-2), self.sigma**2 + self.eps**2)

    def _log_estimate(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.unflatten(-1, (self.samples, *self.y.shape))
        residuals = self.y.to(u) - x[..., None, None, :] - self.sigma * u
        return self._log_normal(residuals, self.eps**2).logsumexp(-1) - math.log(self.samples)

    def _log_normal(self, residuals: Tensor, variance: float) -> Tensor:
        """Log density of ``N(0, variance I)`` at ``[..., M, D]``: ``[...]``."""
        squares = residuals.square().sum((-1, -2))
        return -0.5 * (squares / variance + self.y.numel() * math.log(2 * math.pi * variance))


def published_observations(m: int = 10, dim: int = 10) -> Tensor:
    """Data of the published sizes, ``[M, D]``; the published draws themselves are not known.

    Normal draws of ``numpy.random.RandomState(1234)``: x, then those of z, then those of y.
    """
    rng = np.random.RandomState(1234)
    x, z, y = rng.normal(size=dim), rng.normal(size=(m, dim)), rng.normal(size=(m, dim))
    return torch.from_numpy(x + z + 2.0 * y).float()
