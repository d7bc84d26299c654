"""Auto-encoders of pixels that are cut off at black and white: what sd their pixels have."""

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError
from trainers import VAETraining


@pytest.mark.parametrize(("shape", "channels"), [((4, 4), None), ((8, 8), (4,)), ((3, 8, 8), (4,)), ((5,), None)])
def test_an_sd_of_each_pixel_has_the_shape_of_the_image_and_a_least_value(shape, channels):
    torch.manual_seed(0)
    vae = generators.CensoredVAE(2, shape, (8,), channels, sd=0.1, pixelwise=True)
    z = torch.randn(3, 6, 2)
    pixels = vae.decoder(z).base_dist
    assert pixels.loc.shape == (3, 6, torch.Size(shape).numel())
    assert (pixels.scale > 0.1).all()
    assert pixels.scale.std() > 0
    # about 0.2 above the least value before training, of every pixel
    assert (pixels.scale - 0.1).median().item() == pytest.approx(0.2, rel=0.3)
    assert vae.generate(2, seed=0).images.shape == (2, *shape)


def test_it_is_stored_and_conditioned(tmp_path):
    torch.manual_seed(0)
    vae = generators.CensoredVAE(2, (4, 4), (8,), sd=0.1, pixelwise=True)
    generators.save(vae, tmp_path / "vae")
    again = generators.load(str(tmp_path / "vae"))
    z = torch.randn(3, 2)
    torch.testing.assert_close(again.decoder(z).base_dist.scale, vae.decoder(z).base_dist.scale, rtol=0, atol=0)
    image = vae.generate(1, seed=1).images[0]
    posterior = dgm.condition(vae, image)
    log_likelihood = vae.decoder(z).log_prob(image.flatten())
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    energies = -(log_likelihood + prior)
    torch.testing.assert_close(posterior.energy(z.unsqueeze(1)).squeeze(1), energies, check_dtype=False)


def test_without_a_least_sd_it_is_refused():
    with pytest.raises(ArgumentError, match=r"pixelwise=True.*sd=0\.05"):
        generators.CensoredVAE(2, (4, 4), (8,), pixelwise=True)
    with pytest.raises(ArgumentError, match="sd"):
        generators.CensoredVAE(2, (4, 4), (8,), sd=-1.0, pixelwise=True)


def test_plain_images_get_a_small_sd_and_rough_ones_a_large_one():
    """Two kinds of images, grey 0.3 with noise 0.03 and grey 0.7 with noise 0.15: one sd for all cannot serve both."""
    torch.manual_seed(0)
    rough = torch.arange(512) % 2 == 1
    grey, noise = torch.where(rough, 0.7, 0.3), torch.where(rough, 0.15, 0.03)
    images = (grey[:, None] + noise[:, None] * torch.randn(512, 16)).clamp(0, 1).reshape(-1, 4, 4)
    elbo, sds = {}, {}
    for pixelwise in (True, False):
        torch.manual_seed(1)
        vae = generators.CensoredVAE(2, (4, 4), (16,), sd=0.01 if pixelwise else None, pixelwise=pixelwise)
        training = VAETraining(vae)
        optimiser = torch.optim.Adam(vae.parameters(), 0.01)
        for _ in range(600):
            optimiser.zero_grad()
            (-training.elbo(images).mean()).backward()
            optimiser.step()
        with torch.no_grad():
            elbo[pixelwise] = training.elbo(images, 16).mean().item()
            z = vae.encoder(images.flatten(1)).mean
            sds[pixelwise] = vae.decoder(z).base_dist.scale.mean(-1)
    assert sds[True][~rough].mean() == pytest.approx(0.03, rel=0.3)
    assert sds[True][rough].mean() == pytest.approx(0.15, rel=0.3)
    # the negative control: one number for both kinds
    assert sds[False].std() < 1e-6
    assert elbo[True] > elbo[False] + 2
