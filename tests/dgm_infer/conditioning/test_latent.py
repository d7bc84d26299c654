"""Posteriors of latents: energies against the definition, gradients, batches, and what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, Laplace, Normal

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ModelError, ObservationError
from dgm_infer.models import CensoredNormal
from generators import LatentPosterior
from tests.models import layer

FLOAT = torch.float64


class Distributed(nn.Module):
    """A decoder of any family: ``family(network(z))``."""

    def __init__(self, family, n_outputs=12, latent_dim=3):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(latent_dim, 8), nn.Tanh(), nn.Linear(8, 2 * n_outputs))
        self.family = family

    def forward(self, z):
        return Independent(self.family(*self.network(z).chunk(2, -1)), 1)


FAMILIES = {
    "Bernoulli": lambda a, b: Bernoulli(logits=4 * a),
    "Normal of one sd": lambda a, b: Normal(a, torch.full_like(a, 0.3)),
    "Normal of an sd that depends on z": lambda a, b: Normal(a, b.exp()),
    "Laplace": lambda a, b: Laplace(a, b.exp()),
    "CensoredNormal": lambda a, b: CensoredNormal(a, torch.full_like(a, 0.3)),
}


def decoder_and_images(family, batch=(5,), dtype=FLOAT):
    torch.manual_seed(0)
    decoder = Distributed(FAMILIES[family]).to(dtype)
    return decoder, torch.bernoulli(torch.full((*batch, 12), 0.4)).to(dtype)


def by_definition(decoder, images, z):
    """One latent and one image at a time."""
    flat = z.reshape(-1, images[..., 0].numel(), z.shape[-1])
    rows = []
    for chain in flat:
        for row, image in zip(chain, images.reshape(-1, 12), strict=True):
            likelihood = decoder(row).log_prob(image)
            rows.append(-likelihood - Normal(0.0, 1.0).log_prob(row).sum())
    return torch.stack(rows).reshape(z.shape[:-1])


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_energy_is_that_of_the_joint_density(family, batch):
    decoder, images = decoder_and_images(family, batch)
    target = LatentPosterior(decoder, images, dgm.StandardNormal(3))
    assert target.batch_shape == batch
    assert target.dim == 3
    z = torch.randn(4, *batch, 3, dtype=FLOAT)
    expected = by_definition(decoder, images, z).detach()
    torch.testing.assert_close(target.energy(z), expected)
    torch.testing.assert_close(target.energy_and_gradient(z)[0], expected)


def test_control_a_forgotten_prior_is_noticed():
    decoder, images = decoder_and_images("Bernoulli")
    target = LatentPosterior(decoder, images, dgm.StandardNormal(3))
    z = torch.randn(4, 5, 3, dtype=FLOAT)
    forgotten = -target.log_likelihood(z)
    assert (forgotten - by_definition(decoder, images, z)).abs().min() > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_energy(family):
    decoder, images = decoder_and_images(family)
    for prior in (dgm.StandardNormal(3), dgm.Logistic(3)):
        target = LatentPosterior(decoder, images, prior)
        z = torch.randn(2, 5, 3, dtype=FLOAT)
        energy, gradient = target.energy_and_gradient(z)
        plain = dgm.Target(target.energy, 3, (5,)).energy_and_gradient(z)
        torch.testing.assert_close((energy, gradient), plain)
        assert not energy.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gradient_calls_the_network_once(family):
    target = LatentPosterior(*decoder_and_images(family), dgm.StandardNormal(3))
    calls = []
    target.decoder.register_forward_hook(lambda *_: calls.append(1))
    target.energy_and_gradient(torch.randn(2, 5, 3, dtype=FLOAT))
    assert len(calls) == 1


def test_gradients_are_found_without_the_callers_gradients():
    decoder, images = decoder_and_images("Bernoulli")
    target = LatentPosterior(decoder, images, dgm.StandardNormal(3))
    z = torch.randn(2, 5, 3, dtype=FLOAT)
    expected = target.energy_and_gradient(z)
    with torch.no_grad():
        torch.testing.assert_close(target.energy_and_gradient(z), expected)


def test_saturated_pixels_keep_their_energy_in_float32():
    class Steep(nn.Module):
        def forward(self, z):
            return Independent(Bernoulli(logits=z.expand(*z.shape[:-1], 200), validate_args=False), 1)

    target = LatentPosterior(Steep(), torch.zeros(1, 200), dgm.StandardNormal(1))
    z = torch.tensor([[[-150.0]], [[-20.0]], [[0.0]], [[20.0]], [[150.0]]])
    exact = 200 * torch.nn.functional.softplus(z.double()) + 0.5 * z.double() ** 2 + 0.5 * math.log(2 * math.pi)
    energy, gradient = target.energy_and_gradient(z)
    torch.testing.assert_close(energy.double(), exact[..., 0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient.double(), 200 * z.double().sigmoid() + z.double(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("n_outputs", [1, 7, 97, 128, 211, 784])
def test_products_of_pixels_come_in_groups_of_any_size(n_outputs):
    torch.manual_seed(0)
    decoder = Distributed(FAMILIES["Bernoulli"], n_outputs).double()
    images = torch.bernoulli(torch.full((3, n_outputs), 0.4)).double()
    target = LatentPosterior(decoder, images, dgm.StandardNormal(3))
    z = 3 * torch.randn(2, 3, 3, dtype=FLOAT)
    torch.testing.assert_close(target.energy_and_gradient(z)[0], target.energy(z))
    with torch.no_grad():
        torch.testing.assert_close(target.energy(z), target.energy_and_gradient(z)[0])


def test_problems_can_be_taken_out_of_the_batch():
    decoder, images = decoder_and_images("Bernoulli", (2, 3))
    target = LatentPosterior(decoder, images, dgm.StandardNormal(3))
    z = torch.randn(4, 2, 3, 3, dtype=FLOAT)
    which = torch.tensor([5, 0, 4])
    taken = target.take(which)
    assert taken.batch_shape == (3,)
    torch.testing.assert_close(taken.energy(z.flatten(1, 2)[:, which]), target.energy(z).flatten(1)[:, which])
    assert taken.decoder is target.decoder
    assert LatentPosterior(decoder, images[0, 0], dgm.StandardNormal(3)).take(torch.tensor([0])).batch_shape == (1,)


def test_images_of_the_models_shape_and_flat_ones_are_the_same():
    decoder, images = decoder_and_images("Bernoulli")
    flat = LatentPosterior(decoder, images, dgm.StandardNormal(3))
    shaped = LatentPosterior(decoder, images.reshape(5, 3, 4).bool(), dgm.StandardNormal(3))
    assert shaped.batch_shape == (5,)
    assert torch.equal(flat.images, shaped.images)


def test_events_of_several_dimensions():
    class Pictures(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 12)

        def forward(self, z):
            return Independent(Bernoulli(logits=self.layer(z).unflatten(-1, (3, 4))), 2)

    decoder, images = Pictures(), torch.bernoulli(torch.full((5, 3, 4), 0.5))
    target = LatentPosterior(decoder, images, dgm.StandardNormal(2))
    z = torch.randn(6, 5, 2)
    expected = -decoder(z).log_prob(images) - Normal(0.0, 1.0).log_prob(z).sum(-1)
    torch.testing.assert_close(target.energy_and_gradient(z)[0], expected)


def test_the_decoder_is_a_frozen_copy():
    decoder, images = decoder_and_images("Bernoulli")
    decoder.train()
    target = LatentPosterior(decoder, images, dgm.StandardNormal(3))
    assert decoder.training
    assert all(p.requires_grad for p in decoder.parameters())
    z = torch.randn(5, 3, dtype=FLOAT)
    before = target.energy(z)
    with torch.no_grad():
        layer(decoder.network, 0).weight.zero_()
    assert torch.equal(target.energy(z), before)
    assert not before.requires_grad


def test_the_shipped_generator_has_a_latent_posterior():
    model = generators.load("digits_vae")
    assert isinstance(model, generators.GaussianVAE)
    images = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(0))
    dim = model.global_density.dim
    target = LatentPosterior(model.decoder, images, dgm.StandardNormal(dim))
    z = target.start(3, torch.Generator().manual_seed(1))
    assert z.shape == (3, 4, dim)
    energy, gradient = target.energy_and_gradient(z)
    p = Normal(model.decoder.mean(z), model.decoder.sd)
    expected = -p.log_prob(images.flatten(1)).sum(-1) - Normal(0.0, 1.0).log_prob(z).sum(-1)
    torch.testing.assert_close(energy, expected.detach(), rtol=1e-5, atol=1e-3)
    plain = dgm.Target(target.energy, dim, (4,)).energy_and_gradient(z)[1]
    torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-3)


def test_it_is_sampled_like_any_target():
    """``x = W z + b + sd n`` has a Gaussian posterior in closed form."""
    torch.manual_seed(4)

    class Linear(nn.Linear):
        def forward(self, z):
            mean = super().forward(z)
            return Independent(Normal(mean, torch.full_like(mean, 0.7)), 1)

    decoder, x = Linear(2, 4, bias=False).double(), torch.randn(4, dtype=FLOAT)
    target = LatentPosterior(decoder, x, dgm.StandardNormal(2))
    draws = dgm.sample(target, chains=64, warmup=100, draws=200, seed=0, progress=False)
    weight = decoder.weight.detach()
    precision = weight.mT @ weight / 0.49 + torch.eye(2, dtype=FLOAT)
    mean = torch.linalg.solve(precision, weight.mT @ x / 0.49)
    z = draws.latents["z"].mean(1)
    error = z.std(0) / 8
    assert error.max() < 0.05
    assert ((z.mean(0) - mean).abs() < 5 * error).all()
    # the prior's mean is another
    assert (z.mean(0).abs() > 5 * error).any()


def test_the_evidence_of_a_linear_decoder_is_in_closed_form_in_chunks_that_do_not_divide_the_batch():
    torch.manual_seed(5)

    class Linear(nn.Linear):
        def forward(self, z):
            mean = super().forward(z)
            return Independent(Normal(mean, torch.full_like(mean, 0.7)), 1)

    decoder, x = Linear(2, 4).double(), torch.randn(5, 4, dtype=FLOAT)
    target = LatentPosterior(decoder, x, dgm.StandardNormal(2))
    base = dgm.Gaussian.fit(target, steps=300, start=dgm.Gaussian.standard(target, FLOAT))
    found = dgm.log_evidence(
        target, base, dgm.evidence.ImportanceSampling(2000), chains=16, chunk=2, seed=0, progress=False
    )
    weight = decoder.weight.detach()
    covariance = weight @ weight.mT + 0.49 * torch.eye(4, dtype=FLOAT)
    exact = torch.distributions.MultivariateNormal(decoder.bias.detach(), covariance).log_prob(x)
    assert found.std_error.max() < 0.02
    assert ((found.log_z - exact).abs() < 5 * found.std_error).all()
    # other images have another evidence
    assert ((found.log_z - exact.roll(1)).abs() > 5 * found.std_error).all()


def refuses(error, words, *arguments):
    with pytest.raises(error, match=words) as caught:
        LatentPosterior(*arguments)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_named():
    decoder, images = decoder_and_images("Bernoulli")
    prior = dgm.StandardNormal(3)
    refuses(ArgumentError, "prior=3", decoder, images, 3)
    refuses(ModelError, "expected a torch.nn.Module", lambda z: z, images, prior)
    refuses(ModelError, "fails for latents of 4 dimensions", decoder, images, dgm.StandardNormal(4))
    refuses(ModelError, "returns a Tensor", nn.Linear(3, 12), images, prior)
    refuses(ObservationError, r"\(5, 11\).*12 values", decoder, images[:, :11], prior)
    refuses(ObservationError, "not finite", decoder, images.masked_fill(images == 0, math.nan), prior)
    refuses(ObservationError, "not 0.5: binarise", decoder, images / 2, prior)
    refuses(ObservationError, r"\(0, 12\)", decoder, images[:0], prior)


def test_pixels_that_are_no_one_event_are_refused():
    class Loose(Distributed):
        def forward(self, z):
            return super().forward(z).base_dist

    refuses(ModelError, "Independent", Loose(FAMILIES["Bernoulli"]), torch.zeros(2, 12), dgm.StandardNormal(3))
