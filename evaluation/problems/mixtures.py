"""Mixtures of many separate parts, of normal and of Student's t tails (math 12.8)."""

import math
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dgm_infer import Target
from dgm_infer.arguments import finite, positive
from dgm_infer.errors import ArgumentError

__all__ = ["NormalMixture", "StudentMixture"]


class NormalMixture(Target):
    """``p(x) = 1/K sum_k N(x; m_k, s^2 I)``, normalised.

    Args:
        means: m, ``[K, D]``.
        sd: s.
    """

    log_z = 0.0

    def __init__(self, means: Tensor, sd: float = 1.0):
        self.means = finite("NormalMixture", "means", means, torch.float64)
        self.sd = positive("NormalMixture", "sd", sd)
        super().__init__(None, self.means.shape[-1])

    @classmethod
    def forty(cls) -> Self:
        """The 40 parts in two dimensions of Midgley et al. 2023, from torch's seed 0."""
        rng = torch.Generator().manual_seed(0)
        means = (torch.rand(40, 2, generator=rng) - 0.5) * 2 * 40
        return cls(means.double(), float(F.softplus(torch.tensor(1.0))))

    @classmethod
    def spread(cls, parts: int, dim: int, half_width: float, seed: int) -> Self:
        """Unit variances around means that are uniform on ``[-half_width, half_width]^D``."""
        return cls(_uniform_means(parts, dim, half_width, seed))

    def energy(self, x: Tensor) -> Tensor:
        means = self.means.to(x)
        # |x - m|^2 by differences: the expanded square cancels
        squares = (x.unsqueeze(-2) - means).square().sum(-1) / self.sd**2
        constant = self.dim * (0.5 * math.log(2 * math.pi) + math.log(self.sd)) + math.log(len(means))
        return constant - (-0.5 * squares).logsumexp(-1)

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        """Exact draws ``[n, D]``, float64."""
        part = torch.randint(len(self.means), (n,), generator=rng)
        return self.means[part] + self.sd * torch.randn(n, self.dim, generator=rng, dtype=torch.float64)


class StudentMixture(Target):
    """``p(x) = 1/K sum_k prod_d t(x_d - m_kd; nu)``, normalised: tails that no Gaussian base covers.

    Args:
        means: m, ``[K, D]``.
        dof: nu, degrees of freedom.
    """

    log_z = 0.0

    def __init__(self, means: Tensor, dof: float = 2.0):
        self.means = finite("StudentMixture", "means", means, torch.float64)
        self.dof = positive("StudentMixture", "dof", dof)
        super().__init__(None, self.means.shape[-1])

    @classmethod
    def spread(cls, parts: int, dim: int, half_width: float, seed: int, dof: float = 2.0) -> Self:
        """Around means that are uniform on ``[-half_width, half_width]^D``."""
        return cls(_uniform_means(parts, dim, half_width, seed), dof)

    def energy(self, x: Tensor) -> Tensor:
        nu, means = self.dof, self.means.to(x)
        squares = (x.unsqueeze(-2) - means).square()
        logs = -0.5 * (nu + 1) * torch.log1p(squares / nu).sum(-1)
        one = math.lgamma(0.5 * (nu + 1)) - math.lgamma(0.5 * nu) - 0.5 * math.log(nu * math.pi)
        return math.log(len(means)) - self.dim * one - logs.logsumexp(-1)

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        """Exact draws ``[n, D]``, float64.

        Raises:
            ArgumentError: odd degrees of freedom; of even ones a chi-squared variable is a sum of exponential ones.
        """
        half = round(self.dof / 2)
        if 2 * half != self.dof:
            raise ArgumentError(f"StudentMixture(dof={self.dof:g}): draws need even degrees of freedom")
        part = torch.randint(len(self.means), (n,), generator=rng)
        shape = (n, self.dim)
        normal = torch.randn(shape, generator=rng, dtype=torch.float64)
        uniform = torch.rand(*shape, half, generator=rng, dtype=torch.float64).clamp_min(1e-300)
        chi_squared = -2 * uniform.log().sum(-1)
        return self.means[part] + normal / (chi_squared / self.dof).sqrt()


def _uniform_means(parts: int, dim: int, half_width: float, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return half_width * (2 * torch.rand(parts, dim, generator=rng, dtype=torch.float64) - 1)
