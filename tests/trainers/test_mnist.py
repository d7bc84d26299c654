"""MNIST in torchvision's layout: the split, and what is said where the files are missing or damaged."""

from pathlib import Path

import pytest
import torch
from torch import nn

import generators
from dgm_infer.errors import ArgumentError, ConfigError
from dgm_infer.files import REFERENCE_DATA
from evaluation.commands.inputs import HeldOutImages
from generators.checkpoints import PRETRAINED
from tests.files import reference_folder, write_mnist
from trainers import MNISTData
from trainers.mnist import N_VALIDATION


@pytest.fixture
def root(tmp_path):
    write_mnist(tmp_path, N_VALIDATION + 20, 7)
    return tmp_path


def test_the_last_training_images_are_for_validation_and_the_test_files_held_out(root):
    data = MNISTData(root)
    assert [len(part.images) for part in data.split] == [20, N_VALIDATION, 7]
    assert (data.training.images[:, 0, 0] * 255).round().tolist() == list(range(20))
    expected = [n % 256 for n in range(20, N_VALIDATION + 20)]
    assert (data.validation.images[:, 0, 0] * 255).round().tolist() == expected
    assert data.held_out_labels().tolist() == list(range(7))


def test_images_are_pixels_in_the_unit_interval(root):
    data = MNISTData(root)
    assert isinstance(data, HeldOutImages)
    images = data.held_out(3)
    assert images.shape == (3, *data.output_shape)
    assert images.dtype == torch.float32
    torch.testing.assert_close(images[:, 0, 0], torch.arange(3) / 255)


@pytest.mark.parametrize("n", [0, 8])
def test_a_number_of_held_out_images_that_does_not_exist(root, n):
    with pytest.raises(ArgumentError, match=f"n={n}"):
        MNISTData(root).held_out(n)


def test_an_empty_batch_size_is_named():
    with pytest.raises(ArgumentError, match=r"MNISTData\(batch_size=0\)"):
        MNISTData(batch_size=0)


def test_the_reference_data_is_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv(REFERENCE_DATA, str(tmp_path))
    assert MNISTData().root == tmp_path / "mnist_10k"
    monkeypatch.delenv(REFERENCE_DATA)
    assert MNISTData().root == Path("data")


def test_absent_files_give_one_line_with_the_folder_and_the_remedies(tmp_path):
    with pytest.raises(ConfigError) as caught:
        MNISTData(tmp_path).prepare_data()
    message = str(caught.value)
    assert str(tmp_path / "MNIST" / "raw") in message
    assert "download=true" in message
    assert "\n" not in message
    assert not list(tmp_path.iterdir())


def test_a_download_that_fails_is_one_line(tmp_path, monkeypatch):
    def fails(self):
        raise RuntimeError("Error downloading:\nTried a mirror")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", fails)
    with pytest.raises(ConfigError, match=r"could not be downloaded to .*: Error downloading: Tried a mirror"):
        MNISTData(tmp_path, download=True).held_out(1)


@pytest.mark.parametrize("content", [b"", b"no images", b"\x00\x00\x08\x03"])
def test_a_damaged_file_is_named(root, content):
    (root / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        MNISTData(root).prepare_data()


def test_images_of_another_size_are_refused(tmp_path):
    write_mnist(tmp_path, 3, 3, size=8)
    with pytest.raises(ConfigError, match="not MNIST"):
        MNISTData(tmp_path).held_out(1)


def test_too_few_images_to_split_are_refused(tmp_path):
    write_mnist(tmp_path, N_VALIDATION, 3)
    with pytest.raises(ConfigError, match=f"{N_VALIDATION} training images"):
        MNISTData(tmp_path).held_out(1)


def test_the_reference_data_has_8500_500_and_1000_images():
    data = MNISTData(reference_folder("mnist_10k") / "mnist_10k")
    assert [len(part.images) for part in data.split] == [8500, 500, 1000]
    assert data.held_out_labels(8).tolist() == [7, 6, 1, 1, 0, 1, 2, 3]


def test_the_shipped_generator_is_the_published_one_and_small():
    model = generators.load("mnist_vae")
    assert isinstance(model, generators.GaussianVAE)
    assert model.output_shape == (28, 28)
    assert model.global_density.dim == 50
    assert model.decoder.sd.item() == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["mnist_conv_vae", "fashion_vae"])
def test_the_shipped_convolutional_generators_have_a_learned_noise_and_few_latents(name):
    model = generators.load(name)
    assert isinstance(model, generators.GaussianVAE)
    assert model.config["channels"] == [32, 16]
    assert model.global_density.dim == 16
    assert 0.05 < model.decoder.sd.item() < 0.2


@pytest.mark.parametrize("name", ["mnist_conv_gan", "fashion_gan"])
def test_the_shipped_convolutional_adversarial_generators_are_smooth_and_reach_black_and_white(name):
    model = generators.load(name)
    assert isinstance(model, generators.GAN)
    assert model.config["channels"] == [64, 32]
    assert model.input_density.dim == 64
    assert model.output_range is not None
    low, high = model.output_range
    assert low < 0
    assert high > 1
    assert not any(isinstance(part, (nn.ReLU, nn.LeakyReLU, nn.MaxPool2d)) for part in model.modules())


@pytest.mark.parametrize("name", ["mnist_gan", "mnist_conv_gan"])
def test_the_shipped_adversarial_generators_are_nearer_to_held_out_digits_than_noise_of_their_means_and_sds(name):
    held_out = MNISTData(reference_folder("mnist_10k") / "mnist_10k").held_out().flatten(1)
    rng = torch.Generator().manual_seed(0)
    gan = generators.load(name)
    with torch.no_grad():
        images = gan(gan.input_density.sample((1000,), generator=rng))
    noise = held_out.mean(0) + held_out.std(0) * torch.randn(1000, 784, generator=rng)

    def nearest(draws: torch.Tensor) -> float:
        """Mean distance of the digits from the nearest of the draws; of other digits it is 4.8."""
        return torch.cdist(held_out, draws).min(1).values.mean().item()

    assert nearest(images) < 7.8
    assert nearest(noise) > 8.4


@pytest.mark.parametrize("name", [path.stem for path in PRETRAINED.glob("*.safetensors")])
def test_shipped_generators_are_small(name):
    files = list(PRETRAINED.glob(f"{name}.*"))
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) <= 4_000_000
