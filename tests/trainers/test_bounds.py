"""The importance-weighted bound and its two gradients, where their expectations are known."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

import generators
from tests.models import layer, linear_vae
from trainers.bounds import Gradient, elbo_terms, importance_weighted, log_weights

K = 5


def shifted(scale: float = 1.4, shift: float = 0.3) -> tuple[generators.GaussianVAE, torch.Tensor, torch.Tensor]:
    """A linear VAE whose encoder is not the exact posterior, images, and their log evidence; float64."""
    vae, weight = linear_vae()
    with torch.no_grad():
        layer(vae.encoder.network, 0).bias.add_(torch.tensor([shift, -shift, math.log(scale), math.log(scale)]))
    images = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    evidence = MultivariateNormal(torch.zeros(4), weight @ weight.T + 0.25 * torch.eye(4)).log_prob(images.float())
    return vae.double(), images, evidence.double()


def mean_and_error(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.mean(0), values.std(0) / math.sqrt(len(values))


def test_the_exact_posterior_has_equal_weights():
    vae, images, evidence = shifted(1.0, 0.0)
    weights = log_weights(vae, images, 7)
    torch.testing.assert_close(weights, evidence.expand(7, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(importance_weighted(weights), evidence, rtol=0, atol=1e-5)


def test_bounds_rise_with_the_number_of_draws_and_stay_below_the_evidence():
    vae, images, evidence = shifted()
    torch.manual_seed(1)
    with torch.no_grad():
        weights = log_weights(vae, images, 400_000).reshape(-1, 100, 3)
        bounds = [weights[:, 0], *(importance_weighted(weights[:, :k].movedim(1, 0)) for k in (2, 10, 100))]
        elbo = elbo_terms(vae, images, 4000)
    (first, error), *rest = [mean_and_error(bound) for bound in bounds]
    expected = elbo.log_likelihood - elbo.divergence
    assert ((first - expected).abs() < 5 * (error**2 + 0.05**2).sqrt()).all()
    for value, own in rest:
        assert (value - first > 5 * (error + own)).all()
        first, error = value, own
    assert ((evidence - first).abs() < 0.01 + 5 * error).all()
    assert (first < evidence + 5 * error).all()


def gradients(vae: generators.GaussianVAE, images: torch.Tensor, gradient: Gradient, n: int = 50) -> torch.Tensor:
    """``n`` gradients of the mean bound in the encoder's biases and the decoder's, each of 100 draws: ``[n, 8]``."""
    parameters = [layer(vae.encoder.network, 0).bias, layer(vae.decoder.network, 0).bias]
    rows = []
    for _ in range(n):
        bound = importance_weighted(log_weights(vae, images.repeat(100, 1), K, gradient)).mean()
        rows.append(torch.cat(torch.autograd.grad(bound, parameters)))
    return torch.stack(rows)


def difference_quotients(vae: generators.GaussianVAE, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Central differences of the bound, estimated with the same draws on both sides: ``[8]``, and their errors."""
    means, errors = [], []
    for bias in (layer(vae.encoder.network, 0).bias, layer(vae.decoder.network, 0).bias):
        for i in range(len(bias)):
            sides = []
            for step in (1e-3, -1e-3):
                torch.manual_seed(5)
                with torch.no_grad():
                    bias[i] += step
                    bound = importance_weighted(log_weights(vae, images, K * 20_000).unflatten(0, (K, -1)))
                    bias[i] -= step
                sides.append(bound.mean(-1))
            mean, error = mean_and_error((sides[0] - sides[1]) / 2e-3)
            means.append(mean)
            errors.append(error)
    return torch.stack(means), torch.stack(errors)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["plain", "doubly_reparameterised"])
def test_both_gradients_are_those_of_the_bound(gradient):
    vae, images, _ = shifted()
    expected, expected_error = difference_quotients(vae, images)
    torch.manual_seed(6)
    mean, error = mean_and_error(gradients(vae, images, gradient))
    z = (mean - expected) / (error**2 + expected_error**2).sqrt()
    assert z.abs().max() < 5
    # and they are not zero
    assert (expected.abs() > 10 * expected_error).sum() >= 6


@pytest.mark.slow
def test_control_leaving_out_the_second_factor_or_the_density_of_q_is_noticed(monkeypatch):
    """Weights v in place of v^2 for the encoder: what detaching q alone would give."""
    vae, images, _ = shifted()
    expected, expected_error = difference_quotients(vae, images)
    monkeypatch.setattr(torch.Tensor, "register_hook", lambda tensor, hook: None)
    torch.manual_seed(6)
    mean, error = mean_and_error(gradients(vae, images, "doubly_reparameterised"))
    z = (mean - expected) / (error**2 + expected_error**2).sqrt()
    assert z[:4].abs().max() > 10
    # the decoder's is untouched
    assert z[4:].abs().max() < 5


def test_the_decoders_gradient_and_the_bound_are_the_same_with_either():
    vae, images, _ = shifted()
    found = []
    for gradient in ("plain", "doubly_reparameterised"):
        torch.manual_seed(3)
        bound = importance_weighted(log_weights(vae, images, K, gradient)).mean()
        found.append((bound, *torch.autograd.grad(bound, list(vae.decoder.parameters()), allow_unused=True)))
    for a, b in zip(*found, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b)


def test_at_the_exact_posterior_the_doubly_reparameterised_gradient_has_no_noise():
    vae, images, _ = shifted(1.0, 0.0)
    torch.manual_seed(4)
    plain, twice = (gradients(vae, images, g)[:, :4] for g in ("plain", "doubly_reparameterised"))
    assert plain.std(0).min() > 0.001
    assert twice.abs().max() < 1e-5


def test_without_gradients_nothing_is_recorded():
    vae, images, _ = shifted()
    with torch.no_grad():
        assert not log_weights(vae, images, K, "doubly_reparameterised").requires_grad


def test_sixteen_bits_leave_the_bound_of_many_pixels_where_it_is():
    """Under mixed precision the network is rounded, the sum over 784 pixels is not."""
    torch.manual_seed(0)
    model = generators.BernoulliVAE(4, (28, 28), (50,))
    images = torch.bernoulli(torch.rand(20, 28, 28))
    bounds = []
    for enabled in (False, True):
        torch.manual_seed(1)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            weights = log_weights(model, images, 10)
        assert weights.dtype == torch.float32
        bounds.append(importance_weighted(weights).mean().item())
    # eight bits of a sum of 543 would be off by a nat each
    assert bounds[0] == pytest.approx(-543, abs=10)
    assert bounds[1] == pytest.approx(bounds[0], abs=0.2)
