"""The binary auto-encoder: its parts, the published files, and why it cannot be conditioned."""

import io
import zipfile

import numpy as np
import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, CheckpointError, ModelError
from dgm_infer.files import REFERENCE_DATA
from generators.iwae import FILES
from tests.files import reference_folder, write_iwae
from tests.models import layer


@pytest.fixture(scope="module")
def published():
    return reference_folder("iwae_mnist")


def test_stored_parameters_are_those_of_the_functions_they_came_from(tmp_path):
    """Against the matrices themselves, in NumPy, one product at a time."""
    parts = write_iwae(tmp_path)
    model = generators.IWAE.from_npz(tmp_path)
    rng = np.random.default_rng(1)
    z, x = rng.normal(size=(5, 3)), rng.integers(0, 2, (5, 16)).astype(float)

    def forward(v, arrays):
        for key in sorted(key for key in arrays if key.startswith("W")):
            v = np.tanh(v @ arrays[key] + arrays["b" + key[1:]])
        return v

    last = {key: parts["decoder"][key] for key in ("W4", "b4")}
    body = {key: value for key, value in parts["decoder"].items() if key not in last}
    logits = forward(z, body) @ last["W4"] + last["b4"]
    p = model.decoder(torch.tensor(z).float())
    np.testing.assert_allclose(p.base_dist.logits.detach(), logits, rtol=1e-4, atol=1e-4)
    h = forward(x, parts["encoder_h"])
    q = model.encoder(torch.tensor(x).float())
    mean, sd = (h @ parts[name]["W0"] + parts[name]["b0"] for name in ("encoder_mean", "encoder_std"))
    np.testing.assert_allclose(q.base_dist.loc.detach(), mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(q.base_dist.scale.detach(), np.exp(sd), rtol=1e-4)
    assert model.output_shape == (4, 4)
    assert not model.training


@pytest.mark.parametrize("missing", FILES)
def test_a_missing_file_is_named_with_where_to_find_it(tmp_path, missing):
    (tmp_path / "iwae_mnist").mkdir()
    write_iwae(tmp_path / "iwae_mnist")
    (tmp_path / "iwae_mnist" / missing).unlink()
    with pytest.raises(CheckpointError, match=rf"{missing} does not exist.*{REFERENCE_DATA}") as caught:
        generators.IWAE.from_npz(tmp_path)
    assert "\n" not in str(caught.value)


def of_more_than_any_memory():
    """An archive of a few bytes that promises an array of 8 petabytes."""
    content, header = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**50,)})
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("W0.npy", header.getvalue())
    return content.getvalue()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 no archive", of_more_than_any_memory()])
def test_a_damaged_file_is_named(tmp_path, content):
    write_iwae(tmp_path)
    (tmp_path / "encoder_h.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"encoder_h\.npz is damaged"):
        generators.IWAE.from_npz(tmp_path)


def test_files_of_another_network_are_refused(tmp_path):
    write_iwae(tmp_path)
    (tmp_path / "other").mkdir()
    write_iwae(tmp_path / "other", sizes=(3, 7, 5, 16))
    (tmp_path / "other" / "encoder_h.npz").replace(tmp_path / "encoder_h.npz")
    with pytest.raises(CheckpointError, match="not those of the published IWAE"):
        generators.IWAE.from_npz(tmp_path)
    np.savez(tmp_path / "decoder.npz", other=np.zeros(3))
    with pytest.raises(CheckpointError, match="not those of the published IWAE"):
        generators.IWAE.from_npz(tmp_path)


def test_images_that_are_not_there_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=rf"images\.npz does not exist.*{REFERENCE_DATA}"):
        generators.IWAE.published_images(tmp_path)
    np.savez(tmp_path / "images.npz", other=np.zeros(3))
    with pytest.raises(CheckpointError, match="does not hold images and latents"):
        generators.IWAE.published_images(tmp_path)


def test_it_is_no_function_of_its_inputs_and_the_remedy_is_named():
    model = generators.IWAE(3, (4, 4), (5,))
    with pytest.raises(ModelError, match=r"pixels of this IWAE are discrete.*LatentPosterior") as caught:
        model.observed(torch.zeros(2, 3))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_encoder_and_decoder_take_any_leading_dimensions(leading):
    model = generators.IWAE(3, (4, 5), (7, 6))
    assert model.encoder(torch.zeros(*leading, 20)).batch_shape == leading
    p = model.decoder(torch.randn(*leading, 3))
    assert p.log_prob(torch.ones(20)).shape == leading


def test_a_saturated_pixel_keeps_its_log_probability():
    model = generators.IWAE(1, (1, 2), ())
    with torch.no_grad():
        layer(model.decoder.network, 0).weight.fill_(200)
        layer(model.decoder.network, 0).bias.zero_()
    p = model.decoder(torch.ones(1))
    assert p.log_prob(torch.zeros(2)).item() == pytest.approx(-400)
    assert p.log_prob(torch.ones(2)).item() == pytest.approx(0)


def test_generated_images_repeat_and_come_from_their_latents():
    model = generators.IWAE(2, (4, 4), (8,))
    images, latents = model.generate(4000, seed=3)
    assert torch.equal(model.generate(4000, seed=3).images, images)
    assert images.shape == (4000, 4, 4)
    assert set(images.unique().tolist()) == {0.0, 1.0}
    p = model.decoder(latents).mean.detach()
    z = (images.flatten(1) - p).sum(0) / (p * (1 - p)).sum(0).sqrt()
    assert z.abs().max() < 5


def test_control_other_latents_did_not_generate_them():
    torch.manual_seed(0)
    model = generators.IWAE(2, (4, 4), (8,))
    images, latents = model.generate(4000, seed=3)
    with torch.no_grad():
        own, other = (model.decoder(z).log_prob(images.flatten(1)).mean() for z in (latents, latents.roll(1, 0)))
    assert own > other + 0.1


def test_it_is_stored_and_read_back(tmp_path):
    model = generators.IWAE(3, (4, 5), (7, 6))
    loaded = generators.load(generators.save(model, tmp_path / "mine"))
    assert isinstance(loaded, generators.IWAE)
    z = torch.randn(3)
    assert torch.equal(loaded.decoder(z).base_dist.logits, model.decoder(z).base_dist.logits)


def test_the_folder_of_the_published_files_is_loaded_by_its_path(tmp_path):
    write_iwae(tmp_path)
    loaded, direct = generators.load(tmp_path), generators.IWAE.from_npz(tmp_path)
    assert isinstance(loaded, generators.IWAE)
    z = torch.randn(3)
    assert torch.equal(loaded.decoder(z).base_dist.logits, direct.decoder(z).base_dist.logits)


def test_illegal_sizes_are_named():
    with pytest.raises(ArgumentError, match="latent_dim=0"):
        generators.IWAE(0)


def bounds(model, images, n, repeats, seed):
    """Mean over images of the ELBO and of the importance-weighted bound with n samples, in float64."""
    target = generators.LatentPosterior(model.decoder, images, dgm.StandardNormal(model.input_density.dim))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        q = model.encoder(target.images)
        log_weights = []
        for _ in range(repeats):
            z = q.base_dist.loc + q.base_dist.scale * torch.randn(n, *q.base_dist.loc.shape, generator=rng)
            log_weights.append((-target.energy(z) - q.log_prob(z)).double())
    every = torch.stack(log_weights)
    iwae = every.logsumexp(1) - np.log(n)
    return (every.mean().item(), every.mean(1).std(0).div(repeats**0.5).norm().item() / len(images)), (
        iwae.mean().item(),
        iwae.std(0).div(repeats**0.5).norm().item() / len(images),
    )


@pytest.mark.slow
def test_the_published_bounds_are_reproduced(published):
    """ELBO -109.53 and IWAE-50 -101.98 over the first 100 images; two decimals are given."""
    model = generators.IWAE.from_npz(published)
    images = generators.IWAE.published_images(published).images[:100]
    (elbo, elbo_error), (iwae, iwae_error) = bounds(model, images, 50, 20, seed=1)
    assert max(elbo_error, iwae_error) < 0.05
    assert abs(elbo + 109.53) <= 5 * elbo_error + 0.005
    assert abs(iwae + 101.98) <= 5 * iwae_error + 0.005


@pytest.mark.slow
def test_control_heads_that_are_swapped_miss_the_published_bounds(published, tmp_path):
    for name in FILES:
        (tmp_path / name).write_bytes((published / "iwae_mnist" / name).read_bytes())
    (tmp_path / "encoder_mean.npz").rename(tmp_path / "mean")
    (tmp_path / "encoder_std.npz").rename(tmp_path / "encoder_mean.npz")
    (tmp_path / "mean").rename(tmp_path / "encoder_std.npz")
    model = generators.IWAE.from_npz(tmp_path)
    images = generators.IWAE.published_images(published).images[:100]
    (elbo, elbo_error), _ = bounds(model, images, 50, 20, seed=1)
    assert not abs(elbo + 109.53) <= 5 * elbo_error + 0.005 or elbo_error > 0.05


def test_the_published_latents_generated_the_published_images(published):
    model = generators.IWAE.from_npz(published)
    images, latents = generators.IWAE.published_images(published)
    assert images.shape == (1000, 28, 28)
    with torch.no_grad():
        own, other = (model.decoder(z).log_prob(images.flatten(1)).mean() for z in (latents, latents.roll(1, 0)))
    assert own > other + 50
