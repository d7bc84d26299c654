"""Families of densities, many problems in a batch, of log Z = 0: whether errors are as large as they say."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dgm_infer import Gaussian, Target

__all__ = ["FAMILIES", "HEAVY", "LogGammas", "Normals", "Secants", "Students"]


class Normals(Target):
    """Independent normals of these means and standard deviations, both ``[n, D]``."""

    def __init__(self, mean: Tensor, sd: Tensor):
        super().__init__(None, mean.shape[-1], tuple(mean.shape[:-1]))
        self.mean, self.sd = mean, sd

    def energy(self, x):
        z = (x - self.mean) / self.sd
        return (0.5 * z.square() + self.sd.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def take(self, problems):
        return Normals(self.mean[problems], self.sd[problems])


class Students(Target):
    """Student's t in D dimensions, n times."""

    def __init__(self, n: int, dim: int, free: float = 5.0):
        super().__init__(None, dim, (n,))
        self.free = free

    def energy(self, x):
        free, dim = self.free, self.dim
        constant = math.lgamma((free + dim) / 2) - math.lgamma(free / 2) - 0.5 * dim * math.log(free * math.pi)
        return 0.5 * (free + dim) * (x.square().sum(-1) / free).log1p() - constant

    def take(self, problems):
        return Students(len(problems), self.dim, self.free)


class Secants(Target):
    """Independent hyperbolic secants, of density ``1/(2 cosh(pi x/2))``, n times: tails fall as an exponential's."""

    def __init__(self, n: int, dim: int):
        super().__init__(None, dim, (n,))

    def energy(self, x):
        a = 0.5 * math.pi * x.abs()
        return (a + (-2 * a).exp().log1p()).sum(-1)

    def take(self, problems):
        return Secants(len(problems), self.dim)


class LogGammas(Target):
    """Logarithms of D exponential variables: skewed, with a tail to the left; n times."""

    def __init__(self, n: int, dim: int):
        super().__init__(None, dim, (n,))

    def energy(self, x):
        return (x.exp() - x).sum(-1)

    def take(self, problems):
        return LogGammas(len(problems), self.dim)


def _near(n: int, dim: int) -> tuple[Target, Gaussian]:
    rng = torch.Generator().manual_seed(0)
    mean = torch.randn(n, dim, generator=rng, dtype=torch.float64)
    sd = 0.5 + torch.rand(n, dim, generator=rng, dtype=torch.float64)
    return Normals(mean, sd), Gaussian(mean + 0.4 * sd / dim**0.5, 1.2 * sd)


def _from_prior(n: int, dim: int) -> tuple[Target, Gaussian]:
    rng = torch.Generator().manual_seed(0)
    sd = (-3 * torch.rand(n, dim, generator=rng, dtype=torch.float64)).exp()
    mean = (1 - sd.square()).sqrt() * torch.randn(n, dim, generator=rng, dtype=torch.float64)
    return Normals(mean, sd), Gaussian(torch.zeros_like(mean), 1.0)


def _narrow(target: Target, sd: float) -> tuple[Target, Gaussian]:
    return target, Gaussian(torch.zeros(*target.batch_shape, target.dim, dtype=torch.float64), sd)


FAMILIES: dict[str, Callable[[int], tuple[Target, Gaussian]]] = {
    "normals": lambda n: _near(n, 10),
    "normals-5, prior": lambda n: _from_prior(n, 5),
    "normals-20, prior": lambda n: _from_prior(n, 20),
    "students": lambda n: _narrow(Students(n, 10), 1.2),
    "students, narrow base": lambda n: _narrow(Students(n, 10), 0.7),
    "log-gammas": lambda n: (LogGammas(n, 10), Gaussian(torch.full((n, 10), -0.4, dtype=torch.float64), 1.3)),
}
"""By name, n problems with a base: near them; the prior, of mean 0 and sd 1, with sds of 0.05 to 1 below it; or of less
than a third of the Students' variance."""

HEAVY: dict[str, Callable[[int], tuple[Target, Gaussian]]] = {
    "students-3": lambda n: _narrow(Students(n, 20, 3.0), 1.0),
    "students-8": lambda n: _narrow(Students(n, 4, 8.0), 0.5),
    "secants": lambda n: _narrow(Secants(n, 10), 0.5),
    "students-2.5": lambda n: _narrow(Students(n, 6, 2.5), 0.6),
    "students-4": lambda n: _narrow(Students(n, 15, 4.0), 1.0),
    "secants-20": lambda n: _narrow(Secants(n, 20), 0.6),
}
"""Likewise, of tails heavier than a narrow base's: three have shown what is to be named, the others test it."""
