"""All routes to the posterior of the shipped digits generator, given the top half of a held-out digit."""

from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributions import Independent, Normal

import dgm_infer as dgm
import generators
from tests.oracles import FLOAT, compare

MASK = torch.arange(8)[:, None].expand(8, 8) < 4
CONSTRAINED = {"chains": 16, "warmup": 80, "draws": 100}
FEW_STEPS = {"chains": 16, "warmup": 150, "draws": 200}


def image():
    """A digit whose top half leaves one mode."""
    digits: Any = load_digits()
    return torch.from_numpy(digits.images[1500] / 16)


def fibre():
    return dgm.condition(generators.load("digits_vae"), image(), observe=dgm.pixels(MASK))


class Noisier(nn.Module):
    """The mistake: a decoder with half as much noise again."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, z):
        normal: Any = self.decoder(z)
        base = normal.base_dist
        return Independent(Normal(base.loc, 1.5 * base.scale, validate_args=False), normal.reinterpreted_batch_ndims)


def latent(change=lambda decoder: decoder):
    model: Any = generators.load("digits_vae")
    return generators.LatentPosterior(change(model.decoder.double()), image(), model.prior, MASK)


ROUTES = {
    # which makes the transitions of one that is not: test_constrained_program
    "constrained, compiled": (fibre, dgm.ConstrainedHMC(compile=True), CONSTRAINED),
    "lifted": (fibre, dgm.LiftedHMC(), FEW_STEPS),
}


def statistics(route, seed):
    """Latents and their squares, ``[chains, draws, 2 D]``."""
    make, kernel, sizes = route
    draws = dgm.sample(make(), kernel, seed=seed, progress=False, **sizes)
    z = draws.latents["z"] if make is fibre else draws.inputs
    return torch.cat([z, z.square()], -1).to(FLOAT)


@cache
def by_nuts():
    return statistics((latent, dgm.NUTS(), FEW_STEPS), seed=7)


def standard_errors(values, other):
    """Differences of means in combined standard errors, and the smallest effective sample size."""
    z, ess = compare(values, other.mean((0, 1)))
    reference = compare(other, other.mean((0, 1))).ess
    combined = (1 + ess / reference * other.var((0, 1)) / values.var((0, 1))).sqrt()
    return (z / combined).abs().max().item(), min(ess.min().item(), reference.min().item())


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_agrees_with_nuts_on_the_latents(route):
    apart, ess = standard_errors(statistics(ROUTES[route], seed=1), by_nuts())
    assert ess > 200
    assert apart < 4


@pytest.mark.slow
def test_control_a_wrong_noise_does_not():
    wrong = statistics((lambda: latent(Noisier), dgm.NUTS(), FEW_STEPS), seed=1)
    assert standard_errors(wrong, by_nuts())[0] > 6
