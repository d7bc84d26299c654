"""A pretrained generator of 64 x 64 colour faces, from the PyPI package ``gan-face-generate``."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from dgm_infer.arguments import random_seed
from dgm_infer.errors import CheckpointError

from .modules import NetworkGenerator
from .smoothing import smooth_copy
from .weights import load_weights

__all__ = ["FaceGAN", "FaceImages"]

PACKAGE = "gan_face_generate"
LATENTS = 100
WIDTHS = (512, 256, 128, 64)


class FaceGAN(NetworkGenerator):
    """Colour faces ``[3, 64, 64]`` in (0, 1) from 100 latents: a DCGAN trained on synthetic portraits (DigiFace-1M).

    Its 3.6 million weights are those of the PyPI package ``gan-face-generate`` 1.1.1 (MIT), which ``make faces``
    installs without its dependencies; none of its code runs. Latent: ``z [100, 1, 1]``.

    Args:
        smooth: beta of the softplus in place of every ReLU, with batch normalisations folded, see
            :func:`generators.from_module`; None for the network as it was trained.

    Raises:
        CheckpointError: the package is not installed.
    """

    def __init__(self, smooth: float | None = 10.0):
        net = _network()
        load_weights(net, weights_file(), "netG_state_dict")
        super().__init__(net.eval(), (LATENTS, 1, 1), (0.0, 1.0), _to_unit, {}, {}, 0)
        if smooth is not None:
            images = self.prior_images(16)
            self.net, smoothing = smooth_copy(net, smooth)
            self.smoothing = smoothing.measured(images, self.prior_images(16))


class FaceImages:
    """Images to condition :class:`FaceGAN` on: faces that it generates, each followed by one that it does not.

    The others are double exposures, the mean of two of its faces: no latent gives them, but faces with the same block
    means exist.

    Args:
        smooth: as for :class:`FaceGAN`.
        seed: seed of the latents.
    """

    def __init__(self, smooth: float | None = 10.0, seed: int = 5):
        self.seed = random_seed("FaceImages", seed)
        self.generator = FaceGAN(smooth)

    def held_out(self, n: int | None = None) -> Tensor:
        """The first ``n`` images, ``[n, 3, 64, 64]``; None for two."""
        n = 2 if n is None else n
        rng = torch.Generator().manual_seed(self.seed)
        u = torch.randn((n + 1) // 2, 3, LATENTS, generator=rng)
        with torch.no_grad():
            faces = self.generator(u).unflatten(-1, self.generator.output_shape)
        pairs = torch.stack([faces[:, 0], faces[:, 1:].mean(1)], 1)
        return pairs.flatten(0, 1)[:n]


def weights_file() -> Path:
    """The installed package's file of weights.

    Raises:
        CheckpointError: it is not installed.
    """
    # found, not imported: the weights are all that is used
    package = find_spec(PACKAGE)
    for folder in () if package is None else package.submodule_search_locations or ():
        if (path := Path(folder) / "weights.tar").is_file():
            return path
    raise CheckpointError(
        "the face generator is not installed: make faces, or pip install --no-deps gan-face-generate==1.1.1"
    )


def _network() -> nn.Module:
    """The DCGAN of Radford, Metz and Chintala 2016, with the names of the stored weights."""
    layers: list[nn.Module] = []
    for n_in, n_out in zip((LATENTS, *WIDTHS[:-1]), WIDTHS, strict=True):
        stride, padding = (1, 0) if n_in == LATENTS else (2, 1)
        layers += [nn.ConvTranspose2d(n_in, n_out, 4, stride, padding, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]
    layers += [nn.ConvTranspose2d(WIDTHS[-1], 3, 4, 2, 1, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def _to_unit(x):
    return (x + 1) / 2
