"""Targets with a known answer and without a useful gradient, beside those of :mod:`tests.oracles`."""

import math

import torch
from torch import Tensor

import dgm_infer as dgm
from tests.oracles import FLOAT, Oracle, gaussian_oracle


def powers(x: Tensor) -> Tensor:
    """``x, x^2`` of every coordinate: ``[c, d, D] -> [c, d, 2 D]``."""
    return torch.cat([x, x.square()], -1)


class TwoModes(dgm.Target):
    """``x1`` in an even mixture of ``N(-2, 1)`` and ``N(2, 1)``, ``x2 ~ N(0, 1)``."""

    dim = 2

    def energy(self, x):
        apart = torch.stack([(x[..., 0] - 2).square(), (x[..., 0] + 2).square()])
        return 0.5 * x[..., 1].square() - torch.logsumexp(-0.5 * apart, 0)


def two_modes() -> Oracle:
    return Oracle(TwoModes(), powers, torch.tensor([0, 0, 5, 1], dtype=FLOAT))


class Cube(dgm.Target):
    """Independent ``Beta(2, 1)`` variables on the unit cube: the density is highest at a corner."""

    dim = 3

    def energy(self, x):
        inside = ((x >= 0) & (x <= 1)).all(-1)
        return torch.where(inside, -x.clamp_min(1e-300).log().sum(-1), math.inf)

    def initial_draws(self, n, rng):
        return torch.rand(n, self.dim, generator=rng, dtype=FLOAT)


def cube() -> Oracle:
    return Oracle(Cube(), powers, torch.tensor([2 / 3] * 3 + [1 / 2] * 3, dtype=FLOAT))


class Coin(dgm.Target):
    """``z ~ N(0, 1)`` and ``y = z + s``, the sign s of the second input, under a tolerance: the energy has a jump."""

    dim = 2

    def __init__(self, y: float = 0.5, tolerance: float = 0.7):
        super().__init__()
        self.y, self.tolerance = y, tolerance

    def energy(self, x):
        misfit = self.y - x[..., 0] - x[..., 1].sign()
        return 0.5 * x.square().sum(-1) + 0.5 * (misfit / self.tolerance).square()


def coin() -> Oracle:
    """z given either side of the coin is normal."""
    problem, sides = Coin(), torch.tensor([-1.0, 1.0], dtype=FLOAT)
    total = 1 + problem.tolerance**2
    weights = (-0.5 * (problem.y - sides).square() / total).softmax(0)
    means, variance = (problem.y - sides) / total, problem.tolerance**2 / total
    expected = torch.stack([means, means.square() + variance, sides, sides * means], -1)

    def statistics(x):
        z, side = x[..., 0], x[..., 1].sign()
        return torch.stack([z, z.square(), side, side * z], -1)

    return Oracle(problem, statistics, weights @ expected)


def gaussian_latent(dim: int = 2, n_data: int = 2, samples: int = 2, *, uniform: bool = False) -> Oracle:
    """``x ~ N(0, I)``, ``z_m ~ N(x, I)``, ``y_m ~ N(z_m, 4 I)``, with the z integrated out by an importance estimate.

    The exact posterior of x is ``N(sum_m y_m/(M + s), s/(M + s) I)`` with ``s = 1 + 4``.
    """
    y = torch.randn(n_data, dim, generator=torch.Generator().manual_seed(30), dtype=FLOAT)

    def log_joint(x, z):
        z, x = z.unflatten(-1, (n_data, dim)), x.unsqueeze(-2)
        return -0.5 * (z - x).square().sum((-1, -2)) - (y - z).square().sum((-1, -2)) / 8

    def prior(x):
        mean = x.repeat(*[1] * (x.ndim - 1), n_data)
        return mean, torch.ones_like(mean)

    estimate = dgm.kernels.ImportanceEstimate(log_joint, prior, n_data * dim, samples)
    noise = dgm.kernels.Uniform(estimate.noise_dim) if uniform else dgm.StandardNormal(estimate.noise_dim)

    def log_estimate(x, u):
        # torch.rand can return exactly 0
        return estimate(x, torch.special.ndtri(u.clamp(1e-12, 1 - 1e-12)) if uniform else u)

    class Start(dgm.kernels.PseudoMarginal):
        def initial_draws(self, n, rng):
            return super().initial_draws(n, rng).to(FLOAT)

    problem = Start(log_estimate, dgm.StandardNormal(dim), noise)
    total = 5.0
    means = y.sum(0, keepdim=True) / (n_data + total)
    covariances = total / (n_data + total) * torch.eye(dim, dtype=FLOAT).unsqueeze(0)
    return gaussian_oracle(problem, means, covariances, lambda u: u[..., :dim].unsqueeze(-2))
