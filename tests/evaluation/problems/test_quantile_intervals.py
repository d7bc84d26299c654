"""Parameters of a quantile distribution with its uniforms integrated out under a kernel of finite width."""

import torch

import generators
from dgm_infer.models.densities import STANDARD_LOGISTIC
from evaluation.problems.quantile_intervals import QuantileIntervals
from tests.oracles import FLOAT


def parameters(n=6):
    return 0.5 * torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=FLOAT)


def test_the_distribution_function_is_the_inverse_of_the_quantile_function():
    model = generators.GeneralisedLambda(5)
    u1 = parameters()[:1]
    u2 = torch.linspace(-3, 3, 5, dtype=FLOAT)
    x = model.observed(torch.cat([u1[0], u2]))
    target = QuantileIntervals(model, x, 0.1, bisections=50)
    expected = torch.sigmoid(STANDARD_LOGISTIC * u2)
    torch.testing.assert_close(target.distribution(x, model.global_latents(u1))[0], expected, rtol=1e-9, atol=1e-9)


def test_as_the_tolerance_falls_the_posterior_is_the_exact_one():
    """``F(y + eps) - F(y - eps)`` is ``2 eps/q'(p)``, up to ``eps^2``: the density is the reciprocal of q'."""
    model = generators.GeneralisedLambda(20)
    observed = model.published_observations()[0][:20]
    u1, errors = parameters(), []
    for eps in (0.02, 0.01):
        target = QuantileIntervals(model, observed, eps, bisections=60)
        z = model.global_latents(u1)
        p = target.distribution(observed, z)
        a = torch.logit(p) / STANDARD_LOGISTIC
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model.simulate(z, a).sum(), a)
        # dp/da of the logistic
        log_density = (STANDARD_LOGISTIC * p * (1 - p) / slope).log().sum(-1)
        exact = -model.global_density.log_prob(u1) - log_density
        here = target.energy(u1) + 20 * torch.tensor(2 * eps, dtype=FLOAT).log()
        # a point of no density within reach of the data is left out
        finite = here.isfinite() & exact.isfinite()
        assert finite.sum() >= 2
        errors.append((here - exact)[finite].abs())
    assert (errors[1] < 0.5).all()
    ratio = errors[0] / errors[1]
    assert ((ratio > 3) & (ratio < 5) | (errors[0] < 1e-6)).all()
