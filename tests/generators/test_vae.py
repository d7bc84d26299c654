"""Shapes of the VAE's parts, and what the shipped one reaches."""

import pytest
import torch

import generators
from dgm_infer.errors import ArgumentError
from trainers import DigitsData, VAETraining


@pytest.mark.parametrize("leading", [(), (5,), (2, 3, 4)])
def test_encoder_and_decoder_take_any_leading_dimensions(leading):
    vae = generators.GaussianVAE(3, (4, 5), (7, 6))
    q = vae.encoder(torch.rand(*leading, 20))
    assert q.batch_shape == leading
    assert q.event_shape == (3,)
    p = vae.decoder(torch.randn(*leading, 3))
    assert p.batch_shape == leading
    assert p.event_shape == (20,)
    assert p.log_prob(torch.rand(*leading, 20)).shape == leading
    assert vae(torch.randn(*leading, 23)).shape == (*leading, 20)


def test_the_generator_is_the_decoder_with_its_noise():
    vae = generators.GaussianVAE(3, (4, 5), (7, 6), sd=0.2)
    z, n = torch.randn(6, 3), torch.randn(6, 20)
    p = vae.decoder(z)
    torch.testing.assert_close(vae(torch.cat([z, n], -1)), p.base_dist.mean + p.base_dist.stddev * n)
    assert p.base_dist.stddev.unique().item() == pytest.approx(0.2)


def test_leading_dimensions_are_independent():
    vae = generators.GaussianVAE(3, (4, 5), (7, 6))
    u = torch.randn(2, 4, 23)
    torch.testing.assert_close(vae(u)[1, 2], vae(u[1, 2]))


def test_a_learned_sd_is_a_parameter_and_a_fixed_one_is_not():
    names = {name for name, _ in generators.GaussianVAE(2, (4,)).named_parameters()}
    fixed = {name for name, _ in generators.GaussianVAE(2, (4,), sd=0.1).named_parameters()}
    assert names - fixed == {"decoder.log_sd"}


def test_illegal_sizes_are_named():
    with pytest.raises(ArgumentError, match="latent_dim=0"):
        generators.GaussianVAE(0, (8, 8))
    with pytest.raises(ArgumentError, match="sd=-1"):
        generators.GaussianVAE(2, (8, 8), sd=-1)


def test_the_shipped_generator_describes_held_out_digits():
    vae = generators.load("digits_vae")
    assert isinstance(vae, generators.GaussianVAE)
    assert 0.08 < vae.decoder.sd.item() < 0.15
    torch.manual_seed(0)
    with torch.no_grad():
        elbo = VAETraining(vae).elbo(DigitsData().held_out(), 50).mean().item()
    # as stated in configs/train/digits_vae.yaml
    assert elbo == pytest.approx(39.1, abs=0.2)
