"""The images on which samplers are compared, and generators handed over as plain networks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import generators
from dgm_infer.errors import ConfigError
from generators import FaceGAN, FaceImages, GaussianVAE, NetworkGenerator
from trainers import DigitsData, FashionMNISTData, MNISTData

from .completions import top_half
from .image_sampling import Conditioned

__all__ = ["GIVEN_WARMUP", "PROBLEMS", "SWEPT", "ImageProblem", "grid", "plain_network"]


GIVEN_WARMUP = 150
"""Iterations of warm-up where it does not end by itself."""
# Those of peers in JAX where a gradient takes a millisecond: 500 would take three minutes.
_CONV = 100


@dataclass(frozen=True)
class ImageProblem:
    """Images observed in part, and the generator that completes them.

    Args:
        name: as ``problems=`` has it.
        title: what is observed, in words.
        generator: makes the generator.
        images: class of the data, with ``held_out(n)``.
        mask: pixels observed of images of a shape; None for block means.
        factor: side of the blocks; None for pixels.
        warmup: iterations of warm-up where transitions take seconds; None for as many as it takes.
        jax_warmup: iterations of the peers in JAX.
    """

    name: str
    title: str
    generator: Callable[[], nn.Module]
    images: Callable[[], Any]
    mask: Callable[[tuple[int, ...]], Tensor] | None = None
    factor: int | None = None
    warmup: int | None = None
    jax_warmup: int = 500

    def conditioned(self, n: int, sd: float | None = None) -> Conditioned:
        """The first ``n`` images; ``sd`` replaces the generator's own noise.

        Raises:
            CheckpointError, ConfigError: the generator or the data are not here.
        """
        model = self.generator()
        noise = model.decoder.sd.item() if isinstance(model, GaussianVAE) else None
        mask = None if self.mask is None else self.mask(tuple(model.output_shape))  # type: ignore[arg-type]
        latent = model.shapes["z"] if isinstance(model, NetworkGenerator) else (_latent_dim(model),)
        images = self.images().held_out(n)
        return Conditioned(plain_network(model), latent, sd or noise, images, mask, self.factor)


class _Images(nn.Module):
    """``[n, *latent] -> [n, *shape]`` by the parts of a generator that compute it."""

    def __init__(self, network: nn.Module, finish: Callable[[Tensor], Tensor], shape: tuple[int, ...]):
        super().__init__()
        # one that reshapes to any leading dimensions does more than its layers
        self.network = nn.Sequential(*network) if isinstance(network, nn.Sequential) else network
        self.finish, self.shape = finish, shape

    def forward(self, z: Tensor) -> Tensor:
        return self.finish(self.network(z)).reshape(-1, *self.shape)


def plain_network(model: nn.Module) -> nn.Module:
    """The noiseless images of a generator as a network of torch's own layers, in evaluation mode.

    Other revisions can load it, and other programs read it: modules of this project are traced down to what they call.

    Args:
        model: a :class:`GaussianVAE`, :class:`GAN` or :class:`NetworkGenerator`.

    Raises:
        ConfigError: it is of another class.
    """
    if isinstance(model, GaussianVAE):
        parts = model.decoder.network, _same
    elif isinstance(model, generators.GAN):
        low, high = (0.0, 1.0) if model.output_range is None else model.output_range
        parts = model.network, _same if model.output_range is None else lambda x: low + (high - low) * x.sigmoid()
    elif isinstance(model, NetworkGenerator) and isinstance(model.net, nn.Module):
        parts = model.net, model.transform or _same
    else:
        raise ConfigError(f"a {type(model).__name__} is not a generator whose network can be handed over")
    shape = tuple(model.output_shape)  # type: ignore[arg-type]
    return fx.symbolic_trace(_Images(*parts, shape)).eval().requires_grad_(False)


def _same(x: Tensor) -> Tensor:
    return x


def _latent_dim(model: nn.Module) -> int:
    return model.config["latent_dim"]  # type: ignore[index, return-value]


def grid(spacing: int) -> Callable[[tuple[int, ...]], Tensor]:
    """Mask of every ``spacing``-th pixel of rows and columns, about the middle of blocks."""

    def mask(shape: tuple[int, ...]) -> Tensor:
        chosen = torch.zeros(shape, dtype=torch.bool)
        chosen[..., spacing // 2 :: spacing, spacing // 2 :: spacing] = True
        return chosen

    return mask


def _shipped(name: str) -> Callable[[], nn.Module]:
    return lambda: generators.load(name)


PROBLEMS = {
    problem.name: problem
    for problem in (
        ImageProblem("digits", "digits, top half", _shipped("digits_vae"), DigitsData, top_half),
        ImageProblem("mnist_vae", "MNIST, top half, fully connected", _shipped("mnist_vae"), MNISTData, top_half),
        ImageProblem("mnist", "MNIST, top half", _shipped("mnist_conv_vae"), MNISTData, top_half, jax_warmup=_CONV),
        ImageProblem(
            "fashion", "Fashion-MNIST, top half", _shipped("fashion_vae"), FashionMNISTData, top_half, jax_warmup=_CONV
        ),
        ImageProblem("gan", "MNIST GAN, 16 pixels", _shipped("mnist_gan"), MNISTData, grid(7)),
        ImageProblem("faces", "faces, 4 x 4 x 3 thumbnails", FaceGAN, FaceImages, None, 16, GIVEN_WARMUP),
    )
}
"""By name."""

SWEPT = {
    "top_half": ImageProblem("top_half", "32 pixels", _shipped("digits_vae"), DigitsData, top_half),
    "grid_3": ImageProblem("grid_3", "9 pixels", _shipped("digits_vae"), DigitsData, grid(3)),
}
"""What the sweep of the noise observes of the digits: more values than latents, and fewer."""
