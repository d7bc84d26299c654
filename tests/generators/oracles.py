"""Posteriors of the simulators given a few observations, by importance sampling and quadrature over the parameters.

The densities are written out here and not taken from the generators, so that a wrong generator disagrees with them.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import dgm_infer as dgm
from generators import GAndK, GeneralisedLambda, LotkaVolterra
from tests.files import reference_folder
from tests.oracles import FLOAT, Comparison, Oracle, compare, gaussian_oracle

SCALE = math.pi / math.sqrt(3)
"""A unit-variance logistic times this is a standard logistic."""


def reference_data(name: str) -> dict[str, Tensor]:
    """Arrays of a file of the reference data; skips where there is none."""
    with np.load(reference_folder(name) / name) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


@dataclass(frozen=True)
class Reference(Oracle):
    """First and second moments of the global inputs, with the standard errors of the reference itself."""

    error: Tensor
    """``[K]``, of the expectations."""
    starts: Callable[[int], Tensor]
    """Independent draws of the posterior on the fibre, by their number: ``[n, D]``."""

    def compare(self, draws):
        values = self.statistics(draws.inputs)
        z, ess = compare(values, self.expected)
        mcse = values.flatten(0, 1).std(0) / ess.sqrt()
        return Comparison(z / (1 + (self.error / mcse).square()).sqrt(), ess)


def mean_and_covariance(points: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of points ``[n, d]`` with probabilities ``[n]``."""
    mean = weights @ points
    deviations = points - mean
    return mean, (weights.unsqueeze(-1) * deviations).mT @ deviations


def moments(problem: dgm.Fibre, mean: Tensor, covariance: Tensor) -> Oracle:
    """First and second moments ``[d], [d, d]`` of the first d inputs."""
    d = len(mean)
    return gaussian_oracle(problem, mean.unsqueeze(0), covariance.unsqueeze(0), lambda u: u[..., :d].unsqueeze(-2))


# ----------------------------------------------------------------------------------------------- quantile distributions


@dataclass(frozen=True)
class QuantileDistribution:
    """A quantile function of the local input, increasing, and the density of one observation."""

    model: Callable[[int], dgm.DirectedModel]
    prior: dgm.models.InputDensity
    parameters: Callable[[Tensor], Tensor]
    """``u1 [..., 4] -> z [..., 4]``."""
    quantile: Callable[[Tensor, Tensor], Tensor]
    """``z [..., 4], u2 [..., n] -> x [..., n]``."""
    log_density: Callable[[Tensor, Tensor], Tensor]
    """``z [..., 4], u2 [..., n] -> log p(x | z) [..., n]`` at ``x = quantile(z, u2)``."""
    furthest: float
    """Local inputs beyond this are as good as impossible."""

    def solve(self, z: Tensor, x: Tensor, bisections: int) -> Tensor:
        """``u2 [..., n]`` with ``quantile(z, u2) = x``; an end of the range where x is out of reach."""
        low, high = torch.full_like(z[..., :1] + x, -self.furthest), torch.full_like(z[..., :1] + x, self.furthest)
        for _ in range(bisections):
            middle = 0.5 * (low + high)
            below = self.quantile(z, middle) < x
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    def log_posterior(self, u1: Tensor, x: Tensor) -> Tensor:
        """``log p(u1) + sum_i log p(x_i | z(u1))``: ``[..., 4] -> [...]``."""
        z = self.parameters(u1)
        u2 = self.solve(z, x, bisections=30)
        within = (u2.abs() < 0.999 * self.furthest).all(-1)
        return torch.where(within, self.log_density(z, u2).sum(-1) + self.prior.log_prob(u1), -math.inf)


def _split(z: Tensor) -> tuple[Tensor, ...]:
    return z.split(1, -1)


def _lambda_logs(u2: Tensor) -> tuple[Tensor, Tensor]:
    return -F.softplus(-SCALE * u2, threshold=40), -F.softplus(SCALE * u2, threshold=40)


def _lambda_quantile(z: Tensor, u2: Tensor) -> Tensor:
    z1, z2, z3, z4 = _split(z)
    log_p, log_q = _lambda_logs(u2)
    return z1 + (torch.expm1(z3 * log_p) / z3 - torch.expm1(z4 * log_q) / z4) / z2


def _lambda_log_density(z: Tensor, u2: Tensor) -> Tensor:
    # 1 over q'(p) = (p^(z3 - 1) + (1 - p)^(z4 - 1))/z2
    _, z2, z3, z4 = _split(z)
    log_p, log_q = _lambda_logs(u2)
    return z2.log() - torch.logaddexp((z3 - 1) * log_p, (z4 - 1) * log_q)


def _lambda_parameters(u1: Tensor) -> Tensor:
    v1, v3, v4, v2 = _split(u1)
    return torch.cat([v1, F.softplus(SCALE * v2, threshold=40), v3, v4], -1)


def _g_and_k_quantile(z: Tensor, r: Tensor) -> Tensor:
    a, b, g, k = _split(z)
    return a + b * (1 + 0.8 * torch.tanh(g * r / 2)) * (1 + r.square()) ** k * r


def _g_and_k_log_density(z: Tensor, r: Tensor) -> Tensor:
    # the density of r over q'(r)
    _, b, g, k = _split(z)
    s = torch.tanh(g * r / 2)
    # d/dr of (1 + 0.8 s) r (1 + r^2)^k, over (1 + r^2)^k
    slope = 0.4 * g * (1 - s.square()) * r + (1 + 0.8 * s) * (1 + 2 * k * r.square() / (1 + r.square()))
    log_normal = -0.5 * r.square() - 0.5 * math.log(2 * math.pi)
    return log_normal - b.log() - k * torch.log1p(r.square()) - slope.log()


GENERALISED_LAMBDA = QuantileDistribution(
    GeneralisedLambda,
    dgm.Product(dgm.StandardNormal(3), dgm.Logistic(1)),
    _lambda_parameters,
    _lambda_quantile,
    _lambda_log_density,
    furthest=35 / SCALE,
)
G_AND_K = QuantileDistribution(
    GAndK,
    dgm.Logistic(4),
    lambda u1: 10 * torch.sigmoid(SCALE * u1),
    _g_and_k_quantile,
    _g_and_k_log_density,
    furthest=9.0,
)


def importance_sample(
    log_density: Callable[[Tensor], Tensor], dim: int, rng: torch.Generator, *, rounds: int = 8, draws: int = 200_000
) -> tuple[Tensor, Tensor]:
    """Points ``[draws, dim]`` and normalised weights, from a Student-t fitted to the density in ``rounds`` rounds.

    While too few of a round's draws carry the weight, the weights are tempered.
    """
    dof = 3
    mean, factor = torch.zeros(dim, dtype=FLOAT), 3 * torch.eye(dim, dtype=FLOAT)
    points = weights = mean
    for n in [8000] * rounds + [draws]:
        chi2 = torch.randn(n, dof, generator=rng, dtype=FLOAT).square().sum(-1, keepdim=True)
        t = torch.randn(n, dim, generator=rng, dtype=FLOAT) * (dof / chi2).sqrt()
        points = mean + t @ factor.mT
        log_weights = log_density(points) + 0.5 * (dof + dim) * torch.log1p(t.square().sum(-1) / dof)
        weights = log_weights.softmax(0)
        if n == draws:
            break
        power = 1.0
        while 1 / weights.square().sum() < 0.05 * n:
            power *= 0.8
            weights = (power * log_weights).softmax(0)
        mean, covariance = mean_and_covariance(points, weights)
        factor = torch.linalg.cholesky(covariance)
    return points, weights


@functools.cache
def quantile_posterior(name: str, seed: int = 30, shift: float = 0.0, draws: int = 200_000) -> Reference:
    """The global inputs of a quantile distribution given 10 observations, all of them moved by ``shift``."""
    distribution = {"generalised lambda": GENERALISED_LAMBDA, "g-and-k": G_AND_K}[name]
    rng = torch.Generator().manual_seed(seed)
    x = GeneralisedLambda.published_observations()[0][:10] + shift
    points, weights = importance_sample(lambda u1: distribution.log_posterior(u1, x), 4, rng, draws=draws)
    problem = dgm.condition(distribution.model(10), x)
    oracle = moments(problem, *mean_and_covariance(points, weights))
    deviations = oracle.statistics(points.unsqueeze(0)).squeeze(0) - oracle.expected

    def starts(n: int) -> Tensor:
        u1 = points[torch.multinomial(weights, n, replacement=True, generator=rng)]
        u2 = distribution.solve(distribution.parameters(u1), x, bisections=55)
        return torch.cat([u1, u2], -1)

    error = (weights.square() @ deviations.square()).sqrt()
    return Reference(problem, oracle.statistics, oracle.expected, error, starts)


# ------------------------------------------------------------------------------------------------------- Lotka-Volterra


def regression_posterior(design: Tensor, y: Tensor, sd: float, points: int) -> tuple[Tensor, Tensor]:
    """Grid ``[n, 2]`` and probabilities of log-normal(-2, 1) coefficients of ``y ~ N(design z, sd^2)``.

    An even grid of z over eight standard deviations of the likelihood.
    """
    precision = design.mT @ design / sd**2
    centre = torch.linalg.solve(precision, design.mT @ y / sd**2)
    t = torch.linspace(-8, 8, points, dtype=FLOAT)
    t = torch.cartesian_prod(t, t)
    # the inverse of a factor of the precision is a factor of the covariance
    z = centre + torch.linalg.solve_triangular(torch.linalg.cholesky(precision).mT, t.mT, upper=True).mT
    log_z = z.clamp_min(1e-300).log()
    log_prior = (-0.5 * (log_z + 2).square() - log_z).sum(-1)
    return z, (log_prior - 0.5 * t.square().sum(-1)).masked_fill((z <= 0).any(-1), -math.inf).softmax(0)


@functools.cache
def lotka_volterra_posterior(n_steps: int = 8, points: int = 401) -> Reference:
    """The global inputs of the simulator given the first steps of the published series, by quadrature.

    Given the states, the increments are linear in the parameters: ``r' - r = [r, -r f] [z1, z2]`` plus noise, and
    ``f' - f = [-f, r f] [z3, z4]`` plus noise; the two regressions share nothing.
    """
    rng = torch.Generator().manual_seed(31)
    x = LotkaVolterra.published_observations()[0][: 2 * n_steps]
    states = torch.cat([torch.tensor([[100.0, 100.0]], dtype=FLOAT), x.unflatten(-1, (-1, 2))])
    r, f = states[:-1].unbind(-1)
    increments = states.diff(dim=0)
    designs = torch.stack([r, -r * f], -1), torch.stack([-f, r * f], -1)
    grids = [regression_posterior(d, y, 1.0, points) for d, y in zip(designs, increments.unbind(-1), strict=True)]

    def starts(n: int) -> Tensor:
        z = torch.cat([z[torch.multinomial(p, n, replacement=True, generator=rng)] for z, p in grids], -1)
        means = torch.stack([z[:, :2] @ designs[0].mT, z[:, 2:] @ designs[1].mT], -1)
        return torch.cat([z.log() + 2, (increments - means).flatten(-2)], -1)

    blocks = [mean_and_covariance(z.clamp_min(1e-300).log() + 2, p) for z, p in grids]
    mean, covariance = torch.cat([m for m, _ in blocks]), torch.block_diag(*(c for _, c in blocks))
    oracle = moments(dgm.condition(LotkaVolterra(n_steps), x), mean, covariance)
    return Reference(oracle.problem, oracle.statistics, oracle.expected, torch.zeros_like(oracle.expected), starts)
