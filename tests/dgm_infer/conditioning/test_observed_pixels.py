"""Latents given a part of an image: what is hidden neither counts nor changes, and completions follow the decoder."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Laplace, MultivariateNormal

import dgm_infer as dgm
from dgm_infer.errors import ModelError, ObservationError
from generators import BernoulliDecoder, GaussianDecoder, LatentPosterior

SHAPE = (3, 4)
MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]).bool()


def bernoulli(latent_dim=1):
    torch.manual_seed(0)
    decoder = BernoulliDecoder(latent_dim, SHAPE, [6]).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3)
    return decoder


def image(*batch, seed=1):
    return torch.bernoulli(torch.full((*batch, *SHAPE), 0.5), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_energy_is_that_of_the_observed_pixels(batch):
    decoder, x = bernoulli(2), image(*batch)
    target = LatentPosterior(decoder, x, dgm.StandardNormal(2), MASK)
    assert target.batch_shape == batch
    z = torch.randn(5, *batch, 2, dtype=torch.float64)
    logits = decoder(z).base_dist.logits.unflatten(-1, SHAPE)
    each = x * logits - nn.functional.softplus(logits)
    expected = -(each * MASK).sum((-1, -2)) + 0.5 * z.square().sum(-1) + math.log(2 * math.pi)
    torch.testing.assert_close(target.energy(z), expected)
    energy, gradient = target.energy_and_gradient(z)
    z.requires_grad_()
    torch.testing.assert_close(energy, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(target.energy(z).sum(), z)[0])


def test_hidden_pixels_may_hold_anything():
    decoder, x, prior = bernoulli(2), image(3), dgm.StandardNormal(2)
    z = torch.randn(5, 3, 2, dtype=torch.float64)
    expected = LatentPosterior(decoder, x, prior, MASK).energy(z)
    for junk in (math.nan, 0.5, 1e9):
        assert torch.equal(LatentPosterior(decoder, x.masked_fill(~MASK, junk), prior, MASK).energy(z), expected)
    # control: without the mask they count
    assert not torch.equal(LatentPosterior(decoder, x, prior).energy(z), expected)
    with pytest.raises(ObservationError, match=r"not 0\.5"):
        LatentPosterior(decoder, x.masked_fill(MASK, 0.5), prior, MASK)


def test_everything_observed_is_the_posterior_without_a_mask():
    decoder, x, prior = bernoulli(2), image(3), dgm.StandardNormal(2)
    z = torch.randn(5, 3, 2, dtype=torch.float64)
    whole = LatentPosterior(decoder, x, prior, torch.ones(SHAPE, dtype=torch.bool))
    torch.testing.assert_close(whole.energy(z), LatentPosterior(decoder, x, prior).energy(z))
    rng = torch.Generator().manual_seed(0)
    assert torch.equal(whole.complete(z, rng), x.expand(5, 3, *SHAPE))
    assert torch.equal(LatentPosterior(decoder, x, prior).complete(z, rng), x.expand(5, 3, *SHAPE))


def test_the_evidence_of_a_part_is_its_marginal_density():
    torch.manual_seed(2)
    decoder = GaussianDecoder(2, SHAPE, [], 0.5).double()
    x = torch.randn(4, *SHAPE, dtype=torch.float64)
    target = LatentPosterior(decoder, x, dgm.StandardNormal(2), MASK)
    weight, bias = decoder.network[0].weight[MASK.flatten()], decoder.network[0].bias[MASK.flatten()]
    covariance = weight @ weight.T + 0.25 * torch.eye(len(bias), dtype=torch.float64)
    exact = MultivariateNormal(bias, covariance).log_prob(x[:, MASK]).detach()
    base = dgm.Gaussian.laplace(target)
    found = dgm.log_evidence(target, base, dgm.evidence.ImportanceSampling(), chains=16, seed=0, progress=False)
    assert (found.std_error < 0.1).all()
    assert ((found.log_z - exact).abs() < 5 * found.std_error + 1e-6).all()
    # control: that of the whole image is another
    whole = LatentPosterior(decoder, x, dgm.StandardNormal(2))
    base = dgm.Gaussian.laplace(whole)
    other = dgm.log_evidence(whole, base, dgm.evidence.ImportanceSampling(), chains=16, seed=0, progress=False)
    assert ((other.log_z - exact).abs() > 5 * other.std_error + 1e-6).all()


@pytest.mark.slow
def test_draws_and_completions_follow_the_posterior():
    """The posterior of one latent is known on a grid: its mean, and the probability of every hidden pixel."""
    decoder, x = bernoulli(), image()
    target = LatentPosterior(decoder, x, dgm.StandardNormal(1), MASK)
    draws = dgm.sample(target, chains=100, warmup=100, draws=60, thin=5, seed=3, progress=False)
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64).unsqueeze(-1)
    weight = (-target.energy(grid)).softmax(0).unsqueeze(-1)
    exact_z = (weight * grid).sum()
    exact_x = (weight * decoder(grid).base_dist.probs.detach()).sum(0).unflatten(-1, SHAPE)

    def z_scores(values, exact):
        # chains are independent
        means = values.mean(1)
        return (means.mean(0) - exact) / (means.std(0) / len(means) ** 0.5)

    assert z_scores(draws.latents["z"].squeeze(-1), exact_z).abs() < 5
    completed = draws.generate()
    assert torch.equal(completed[..., MASK], x[MASK].expand_as(completed[..., MASK]))
    assert z_scores(completed, exact_x)[~MASK].abs().max() < 5
    # control: completions of prior draws do not follow it
    prior = torch.randn(100, 60, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    blind = target.complete(prior, torch.Generator().manual_seed(5))
    assert z_scores(blind, exact_x)[~MASK].abs().max() > 5


def test_problems_can_be_taken_out_of_the_batch():
    target = LatentPosterior(bernoulli(2), image(3), dgm.StandardNormal(2), MASK)
    taken = target.take(torch.tensor([2, 0]))
    z = torch.randn(2, 2, dtype=torch.float64)
    expected = target.energy(torch.stack([z[1], z[1], z[0]]))[[2, 0]]
    torch.testing.assert_close(taken.energy(z), expected)
    assert taken.complete(z, torch.Generator().manual_seed(0)).shape == (2, *SHAPE)


class Heavy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 12)

    def forward(self, z):
        return Independent(Laplace(self.layer(z), 1.0), 1)


def test_what_does_not_fit_is_named():
    decoder, x, prior = bernoulli(2), image(3), dgm.StandardNormal(2)
    for mask, words in (
        (MASK.T, r"shape \(4, 3\)"),
        (MASK.float(), "torch.float32"),
        (torch.zeros(SHAPE, dtype=torch.bool), "observes no entry"),
    ):
        with pytest.raises(ObservationError, match=words):
            LatentPosterior(decoder, x, prior, mask)
    with pytest.raises(ModelError, match="returns a Laplace: a mask needs"):
        LatentPosterior(Heavy(), x, prior, MASK)
