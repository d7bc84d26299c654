"""Generative adversarial networks (Goodfellow et al. 2014): generators to condition, critics to train them against.

With transposed convolutions and batch normalisation they are those of Radford, Metz and Chintala 2016.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dgm_infer import GenerativeModel, StandardNormal
from dgm_infer.errors import ArgumentError

from .networks import Normalisation, single, to_image, to_vector
from .registry import register

__all__ = ["GAN", "Critic"]


@register
class GAN(GenerativeModel):
    """An implicit generator ``x = g(z)`` of images, ``z ~ N(0, I)``, without noise of its own: its Jacobian is dense.

    At most ``latent_dim`` pixels can be observed exactly; :class:`dgm_infer.WithNoise` lifts that. In evaluation mode
    each image depends on its own latents alone, whatever the normalisation; :func:`dgm_infer.condition` refuses the
    batch statistics of training mode. Latent: ``z``.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image, (H, W) or (C, H, W); any shape where it is fully connected.
        hidden: widths of the fully connected layers.
        channels: of the transposed convolutions after them, from coarse to fine; None for none.
        normalisation: before these: batch, group or none.
        output_range: (low, high), which a sigmoid keeps all pixels strictly between; None for a linear output. A
            range a little wider than that of the data lets it reach their edge.

    Raises:
        ArgumentError: a size below 1, an empty range, or convolutions of something that is not an image.
    """

    structure = "dense"

    def __init__(
        self,
        latent_dim: int,
        output_shape: Sequence[int],
        hidden: Sequence[int] = (),
        channels: Sequence[int] | None = (64, 32),
        normalisation: Literal["none", "batch", "group"] = "batch",
        output_range: tuple[float, float] | None = (0.0, 1.0),
    ):
        super().__init__()
        _check_sizes(type(self).__name__, output_shape, latent_dim=latent_dim)
        if output_range is not None and not (len(output_range) == 2 and output_range[0] < output_range[1]):
            raise ArgumentError(f"GAN(output_range={output_range}): two numbers, the smaller first, or None")
        if normalisation not in ("none", "batch", "group"):
            raise ArgumentError(f"GAN(normalisation={normalisation!r}): must be none, batch or group")
        self.config: dict[str, Any] = {
            "latent_dim": latent_dim,
            "output_shape": list(output_shape),
            "hidden": list(hidden),
            "channels": None if channels is None else list(channels),
            "normalisation": normalisation,
            "output_range": None if output_range is None else list(output_range),
        }
        self.output_shape = tuple(output_shape)
        self.input_density = StandardNormal(latent_dim)
        self.output_range = None if output_range is None else (float(output_range[0]), float(output_range[1]))
        self.network = to_image(latent_dim, self.output_shape, hidden, channels, normalisation)

    def observed(self, u):
        x = self.network(u)
        if self.output_range is None:
            return single(x)
        low, high = self.output_range
        return low + (high - low) * torch.sigmoid(single(x))

    def latents(self, u):
        return {"z": u}


class Critic(nn.Module):
    """Scores images, higher where they look real: ``[..., *output_shape] -> [...]``; a logit, or Wasserstein's critic.

    Args:
        output_shape: shape of an image, (H, W) or (C, H, W); any shape where it is fully connected.
        hidden: widths of the fully connected layers after the convolutions.
        channels: of the strided convolutions, from fine to coarse; None for none.
        normalisation: none, batch (which Wasserstein's gradient penalty excludes), group, or spectral.

    Raises:
        ArgumentError: a size below 1, or convolutions of something that is not an image.
    """

    def __init__(
        self,
        output_shape: Sequence[int],
        hidden: Sequence[int] = (),
        channels: Sequence[int] | None = (32, 64),
        normalisation: Normalisation = "none",
    ):
        super().__init__()
        _check_sizes(type(self).__name__, output_shape)
        self.config = {
            "output_shape": list(output_shape),
            "hidden": list(hidden),
            "channels": None if channels is None else list(channels),
            "normalisation": normalisation,
        }
        self.output_shape = tuple(output_shape)
        self.normalisation = normalisation
        self.network = to_vector(self.output_shape, 1, hidden, channels, normalisation)

    def forward(self, images: Tensor) -> Tensor:
        return single(self.network(images.flatten(-len(self.output_shape))).squeeze(-1))


def _check_sizes(name: str, output_shape: Sequence[int], **sizes: int) -> None:
    for field, value in (*sizes.items(), ("output_shape", torch.Size(output_shape).numel())):
        if value < 1:
            shown = tuple(output_shape) if field == "output_shape" else value
            raise ArgumentError(f"{name}({field}={shown}): 1 or more")
