"""Censored normal pixels: masses at the edges and moments, against quadrature and draws."""

import pytest
import torch

from dgm_infer.models import CensoredNormal

LOCS = torch.tensor([-2.0, -0.1, 0.3, 0.9, 1.4], dtype=torch.float64)


def integral(function, n=20001):
    """Of a function of pixels: the masses at the edges, and the trapezoidal rule between them."""
    x = torch.linspace(0, 1, n, dtype=torch.float64)[1:-1].unsqueeze(-1)
    density = CensoredNormal(LOCS, 0.3).log_prob(x).exp() * function(x)
    inner = torch.trapezoid(density, x.squeeze(-1), dim=0) + (density[0] + density[-1]) / (n - 1)
    edges = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    return inner + (CensoredNormal(LOCS, 0.3).log_prob(edges).exp() * function(edges)).sum(0)


def test_masses_and_density_sum_to_one_and_give_the_moments():
    pixels = CensoredNormal(LOCS, 0.3)
    torch.testing.assert_close(integral(torch.ones_like), torch.ones(5).double(), rtol=0, atol=1e-7)
    torch.testing.assert_close(integral(lambda x: x), pixels.mean, rtol=0, atol=1e-7)
    squares = integral(torch.square) - pixels.mean.square()
    torch.testing.assert_close(squares, pixels.variance, rtol=0, atol=1e-7)


def test_draws_have_the_moments_and_the_masses():
    torch.manual_seed(0)
    pixels = CensoredNormal(LOCS, 0.3)
    x = pixels.rsample((40_000,))
    error = pixels.stddev / 200
    assert ((x.mean(0) - pixels.mean).abs() < 5 * error + 1e-12).all()
    black = pixels.log_prob(torch.zeros(1, dtype=torch.float64)).exp()
    assert (((x == 0).double().mean(0) - black).abs() < 5 * (black * (1 - black) / 40_000).sqrt() + 1e-9).all()


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_log_densities_have_two_derivatives(value):
    loc = LOCS.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda m: CensoredNormal(m, 0.3).log_prob(torch.tensor(value)), (loc,))
    far = torch.tensor(-30.0, requires_grad=True)
    (slope,) = torch.autograd.grad(CensoredNormal(far, 0.3).log_prob(torch.tensor(value)), far)
    assert slope.isfinite()
