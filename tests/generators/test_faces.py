"""The pretrained generator of faces, where its package is installed."""

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import CheckpointError
from generators import faces


@pytest.fixture(scope="module")
def face_gan():
    try:
        return generators.FaceGAN()
    except CheckpointError as error:
        pytest.skip(str(error))


def test_it_generates_colour_images_in_range(face_gan):
    images = face_gan.prior_images(4)
    assert images.shape == (4, 3, 64, 64)
    assert 0 < images.min() < 0.2 < 0.8 < images.max() < 1
    assert set(face_gan.latents(torch.zeros(2, 100))) == {"z"}
    assert not face_gan.training


def test_its_smooth_images_are_those_of_the_network(face_gan):
    assert face_gan.smoothing.activations == face_gan.smoothing.folded == 4
    assert 0 < face_gan.smoothing.difference < 0.25
    rough = generators.FaceGAN(smooth=None)
    assert rough.smoothing is None
    assert generators.FaceGAN(smooth=100).smoothing.difference < 0.02
    difference = (rough.prior_images(16) - face_gan.prior_images(16)).abs().max().item()
    assert face_gan.smoothing.difference == pytest.approx(difference)


def test_a_thumbnail_can_be_observed(face_gan):
    thumbnails = torch.nn.functional.avg_pool2d(face_gan.prior_images(2), 16)
    fibre = dgm.condition(face_gan, thumbnails, observe=dgm.downsample(16), dtype=torch.float32)
    assert fibre.values.shape == (2, 48)


def test_without_its_package_one_line_names_the_make_target(monkeypatch):
    monkeypatch.setattr(faces, "PACKAGE", "gan_face_generate_that_nobody_has")
    with pytest.raises(CheckpointError, match="make faces") as caught:
        generators.FaceGAN()
    assert "\n" not in str(caught.value)
