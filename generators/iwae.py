"""The importance-weighted auto-encoder of binary images (Burda, Grosse and Salakhutdinov 2016), as published."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import torch
from torch import Tensor, nn

from dgm_infer.arguments import file_path
from dgm_infer.errors import CheckpointError, cause

from .arrays import read_arrays
from .bernoulli_vae import BernoulliVAE, GeneratedImages
from .registry import register

__all__ = ["IWAE"]

# Subfolder of the reference data.
FOLDER = "iwae_mnist"
# The published files of the network's parts: the decoder, the encoder's body and its two heads.
FILES = ("decoder.npz", "encoder_h.npz", "encoder_mean.npz", "encoder_std.npz")


@register
class IWAE(BernoulliVAE):
    """The auto-encoder of binary images, trained by the importance-weighted bound; its published parameters and data.

    A :class:`generators.BernoulliVAE` with one stochastic layer: only the objective differs.
    """

    @classmethod
    def from_npz(cls, folder: str | os.PathLike) -> Self:
        """The published parameters, trained on binarised MNIST: 50 latents, 28 x 28 pixels, float32 (T 5.6.2).

        Args:
            folder: contains ``decoder.npz``, ``encoder_h.npz``, ``encoder_mean.npz`` and ``encoder_std.npz``, directly
                or in its subfolder ``iwae_mnist``, as the reference data (``DGM_INFER_REFERENCE_DATA``) does.

        Raises:
            CheckpointError: a file is missing, damaged, or belongs to another network.
        """
        folder = _subfolder("IWAE.from_npz", folder)
        decoder, body, mean, sd = (_read(folder / name) for name in FILES)
        try:
            sizes = [*(decoder[f"W{i}"].shape[0] for i in _layers(decoder)), decoder["b4"].shape[-1]]
            model = cls(sizes[0], cls._square(sizes[-1]), sizes[1:-1])
            _fill(model.decoder.network, [(decoder[f"W{i}"], decoder[f"b{i}"]) for i in _layers(decoder)])
            # one layer gives means and log standard deviations
            heads = torch.cat([mean["W0"], sd["W0"]], -1), torch.cat([mean["b0"], sd["b0"]], -1)
            _fill(model.encoder.network, [*((body[f"W{i}"], body[f"b{i}"]) for i in _layers(body)), heads])
        except (LookupError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"the files in {folder} are not those of the published IWAE: {cause(error)}"
            ) from error
        return model.eval()

    @staticmethod
    def published_images(folder: str | os.PathLike) -> GeneratedImages:
        """The 1000 images of the published experiment, float32, and the latents that generated them (T 5.6.2).

        Args:
            folder: contains ``images.npz``, directly or in its subfolder ``iwae_mnist``.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        path = _subfolder("IWAE.published_images", folder) / "images.npz"
        arrays = _read(path)
        try:
            images, latents = arrays["images"], arrays["latents"]
            return GeneratedImages(images.float().unflatten(-1, (28, 28)), latents.float())
        except (LookupError, RuntimeError) as error:
            raise CheckpointError(f"{path} does not hold images and latents: {cause(error)}") from error

    @staticmethod
    def _square(n_outputs: int) -> tuple[int, int]:
        side = round(n_outputs**0.5)
        if side * side != n_outputs:
            raise ValueError(f"{n_outputs} outputs are not a square image")
        return side, side


def _subfolder(call: str, folder: str | os.PathLike) -> Path:
    folder = file_path(call, "folder", folder)
    return folder / FOLDER if (folder / FOLDER).is_dir() else folder


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return read_arrays(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: name the folder of the published IWAE's files, {FOLDER} of the reference data "
            "(DGM_INFER_REFERENCE_DATA); they come from GitHub, matt-graham/continuously-tempered-hmc"
        ) from error
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged: {cause(error)}") from error


def _layers(arrays: Mapping[str, Tensor]) -> list[int]:
    """Positions of the linear layers among all layers, activations included."""
    return sorted(int(key[1:]) for key in arrays if key.startswith("W"))


def _fill(network: nn.Sequential, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Set the linear layers to stored ones, which act from the right: ``x @ W + b``."""
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer, (weight, bias) in zip(linear, layers, strict=True):
            if layer.weight.shape != weight.mT.shape:
                raise ValueError(f"a layer is {tuple(weight.mT.shape)}, expected {tuple(layer.weight.shape)}")
            layer.weight.copy_(weight.mT)
            layer.bias.copy_(bias.reshape(-1))
