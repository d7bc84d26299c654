"""Gaussian latent variables: the posterior that is known, and estimates of the likelihood."""

import math

import pytest
import torch

import dgm_infer as dgm
from evaluation.problems.gaussian_latent import GaussianLatent, published_observations

FLOAT = torch.float64


@pytest.fixture(scope="module")
def small():
    return GaussianLatent(torch.tensor([[0.7], [-1.1]], dtype=FLOAT), samples=2)


def test_the_posterior_is_the_prior_times_the_likelihood():
    problem = GaussianLatent(published_observations().double())
    mean, variance = problem.posterior()
    assert variance == pytest.approx(1 / 3)
    torch.testing.assert_close(mean, problem.y.sum(0) / 15)
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    log_joint = problem.log_likelihood(x) - 0.5 * x.square().sum(-1)
    log_posterior = -0.5 * (x - mean).square().sum(-1) / variance
    difference = log_joint - log_posterior
    torch.testing.assert_close(difference, difference[:1].expand(5))


def test_the_posterior_of_the_noise_is_that_of_quadrature():
    y, sigma, eps = 1.3, 1.5, 0.8
    problem = GaussianLatent(torch.tensor([[y]], dtype=FLOAT), sigma=sigma, eps=eps)
    axis = torch.linspace(-8, 8, 801, dtype=FLOAT)
    x, u = torch.meshgrid(axis, axis, indexing="ij")
    weight = (-0.5 * (x**2 + u**2 + ((y - x - sigma * u) / eps) ** 2)).exp()
    mean = (weight * u).sum() / weight.sum()
    sd = ((weight * (u - mean) ** 2).sum() / weight.sum()).sqrt()
    assert problem.noise_posterior() == pytest.approx((float(mean), float(sd)), abs=1e-6)
    with pytest.raises(dgm.errors.ArgumentError, match="samples=2"):
        GaussianLatent(problem.y, 2).noise_posterior()


def standard_errors_off(problem, truth, n=40000):
    """How far the mean of estimates at one x is from a likelihood, in standard errors."""
    x = torch.full((n, 1), 0.4, dtype=FLOAT)
    u = torch.randn(n, problem.noise.dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    estimates = problem.log_estimate(x, u).exp()
    return float((estimates.mean() - truth).abs() / (estimates.std() / math.sqrt(n)))


def test_estimates_are_unbiased_and_those_of_another_model_are_not(small):
    x = torch.tensor([0.4], dtype=FLOAT)
    assert standard_errors_off(small, small.log_likelihood(x).exp()) < 4
    other = GaussianLatent(small.y, samples=2, sigma=1.3)
    assert standard_errors_off(small, other.log_likelihood(x).exp()) > 10


def test_a_batch_repeats_the_problem(small):
    batch = GaussianLatent(small.y, samples=2, batch_shape=(3,))
    position = torch.randn(4, 3, small.dim, generator=torch.Generator().manual_seed(2), dtype=FLOAT)
    torch.testing.assert_close(batch.energy(position), small.energy(position))
    latents = batch.latents(position)
    assert (latents["x"].shape, latents["u"].shape) == ((4, 3, 1), (4, 3))
