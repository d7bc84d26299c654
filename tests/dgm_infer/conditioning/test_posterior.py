"""Posteriors whose likelihood can be tempered: the information of their outputs, and what a power does."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, Normal

import dgm_infer as dgm
from dgm_infer.kernels.metrics import first_metric
from dgm_infer.models import CensoredNormal
from dgm_infer.sampling.annealed_starts import AnnealedPosterior
from generators import LatentPosterior

FAMILIES = ("bernoulli", "normal", "spread", "censored")


class Decoder(nn.Module):
    """Three latents, five pixels of a family; those of ``spread`` have a width of their own that depends on z."""

    def __init__(self, family: str):
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        self.family = family
        self.weight = nn.Parameter(torch.randn(5, 3, generator=rng, dtype=torch.float64))
        self.other = nn.Parameter(0.3 * torch.randn(5, 3, generator=rng, dtype=torch.float64))

    def forward(self, z):
        loc, width = z @ self.weight.T, (z @ self.other.T).exp()
        if self.family == "bernoulli":
            return Independent(Bernoulli(logits=loc), 1)
        if self.family == "censored":
            return Independent(CensoredNormal(loc, 0.4 * torch.ones_like(loc)), 1)
        return Independent(Normal(loc, width if self.family == "spread" else 0.4 * torch.ones_like(loc)), 1)


def posterior(family: str, n: int = 2) -> LatentPosterior:
    torch.manual_seed(3)
    decoder = Decoder(family)
    images = decoder(torch.randn(n, 3, dtype=torch.float64)).sample()
    return LatentPosterior(decoder, images, dgm.StandardNormal(3))


def expected_information(decoder: Decoder, z: torch.Tensor) -> torch.Tensor:
    """``E[score score^T]`` of all pixels at one z ``[3]``, by sums and quadrature over each pixel's values."""
    base = decoder(z).base_dist
    if decoder.family == "bernoulli":
        x, weight = torch.tensor([0.0, 1.0]).double().unsqueeze(-1), torch.ones(2, 1).double()
    elif decoder.family == "censored":
        inside = torch.linspace(1e-4, 1 - 1e-4, 4999).double()
        x = torch.cat([torch.zeros(1).double(), inside, torch.ones(1).double()]).unsqueeze(-1)
        weight = torch.full_like(x, (1 - 2e-4) / 4998)
        weight[0] = weight[-1] = 1
    else:
        t = torch.linspace(-9, 9, 4001).double().unsqueeze(-1)
        x, weight = base.loc + base.scale * t, base.scale * (18 / 4000)
    x = x.expand(len(x), 5)
    mass = (base.log_prob(x).exp() * weight).detach()
    assert torch.allclose(mass.sum(0), torch.ones(5).double(), atol=1e-3)
    scores = torch.func.jacfwd(lambda z: decoder(z).base_dist.log_prob(x))(z)
    return torch.einsum("np,npi,npj->ij", mass, scores, scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_precision_is_the_prior_s_and_the_information_of_the_pixels(family):
    target = posterior(family)
    z = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = target.precision(z)
    assert found is not None
    for i, j in ((0, 0), (3, 1)):
        expected = torch.eye(3).double() + expected_information(target.decoder, z[i, j])
        torch.testing.assert_close(found[i, j], expected, rtol=2e-3, atol=2e-3)


def test_control_the_information_at_the_edges_is_counted():
    target = posterior("censored")
    z = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    within = torch.eye(3).double() + target.decoder.weight.T @ target.decoder.weight / 0.4**2
    assert (target.precision(z)[0, 0] - within).abs().max() > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_power_of_the_likelihood_leads_from_the_prior_to_the_posterior(family):
    target = posterior(family)
    z = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    annealed = AnnealedPosterior(target)
    assert annealed.is_exact
    energies = {}
    for beta in (0.0, 0.3, 1.0):
        x = torch.cat([z, torch.full((4, 2, 1), beta, dtype=torch.float64)], -1)
        energies[beta], gradient = annealed.energy_and_gradient(x)
        # the slope in the power is the misfit
        torch.testing.assert_close(gradient[..., -1], -target.log_likelihood(z))
    torch.testing.assert_close(energies[0.0], 0.5 * z.square().sum(-1) + 1.5 * math.log(2 * math.pi))
    torch.testing.assert_close(energies[1.0], target.energy(z))
    torch.testing.assert_close(energies[0.3], 0.7 * energies[0.0] + 0.3 * energies[1.0])


def test_in_another_type_it_is_the_same_and_the_first_one_stays_as_it_is():
    target = posterior("normal")
    z = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    other = target.to(torch.float32)
    torch.testing.assert_close(other.energy(z.float()).double(), target.energy(z), rtol=1e-5, atol=1e-5)
    assert target.decoder.weight.dtype == target.images.dtype == torch.float64


class Cauchys(Decoder):
    def forward(self, z):
        return Independent(torch.distributions.Cauchy(z @ self.weight.T, 1.0), 1)


def test_a_family_of_unknown_information_begins_without_a_metric():
    target = LatentPosterior(Cauchys("cauchy"), torch.zeros(2, 5).double(), dgm.StandardNormal(3))
    assert first_metric("dense", target, torch.zeros(4, 2, 3).double()) is None
    draws = dgm.sample(target, chains=8, warmup=200, draws=200, seed=1, progress=False)
    assert draws.summary()["r_hat"].to_numpy(float).max() < 1.1
