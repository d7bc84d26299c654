"""Generative adversarial networks (Goodfellow et al. 2014): generators to condition, critics to train them against.

With transposed convolutions and batch normalisation they are those of Radford, Metz and Chintala 2016.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dgm_infer import GenerativeModel, StandardNormal
from dgm_infer.arguments import choice, interval, whole_number

from .networks import Normalisation, checked_sizes, single, to_image, to_vector
from .registry import register

__all__ = ["GAN", "Critic"]


@register
class GAN(GenerativeModel):
    """An implicit generator ``x = g(z)`` of images, ``z ~ N(0, I)``, without output noise: its Jacobian is dense.

    At most ``latent_dim`` pixels can be observed exactly; :class:`dgm_infer.WithNoise` lifts that. In evaluation mode
    each image depends only on its own latents, for any normalisation; :func:`dgm_infer.condition` refuses the
    batch statistics of training mode. Latent: ``z``.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image, (H, W) or (C, H, W); any shape if fully connected.
        hidden: widths of the fully connected layers.
        channels: channels of the transposed convolutions after them, from coarse to fine; None for none.
        normalisation: normalisation before the convolutions: batch, group or none.
        output_range: (low, high): a sigmoid keeps all pixels strictly between them; None for a linear output. A range
            slightly wider than that of the data lets outputs reach its edges.

    Raises:
        ArgumentError: a size below 1, an empty range, or convolutions for an output that is not an image.
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
        name = type(self).__name__
        whole_number(name, "latent_dim", latent_dim)
        output_shape, hidden, channels = checked_sizes(name, output_shape, hidden, channels)
        choice(name, "normalisation", normalisation, ("none", "batch", "group"))
        self.output_range = None if output_range is None else interval(name, "output_range", output_range)
        self.config: dict[str, Any] = {
            "latent_dim": latent_dim,
            "output_shape": list(output_shape),
            "hidden": list(hidden),
            "channels": None if channels is None else list(channels),
            "normalisation": normalisation,
            "output_range": None if output_range is None else list(output_range),
        }
        self.output_shape = output_shape
        self.input_density = StandardNormal(latent_dim)
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
    """Scores images, higher if they look real: ``[..., *output_shape] -> [...]``; a logit, or Wasserstein's critic.

    Args:
        output_shape: shape of an image, (H, W) or (C, H, W); any shape if fully connected.
        hidden: widths of the fully connected layers after the convolutions.
        channels: channels of the strided convolutions, from fine to coarse; None for none.
        normalisation: none, batch (excluded by Wasserstein's gradient penalty), group, or spectral.

    Raises:
        ArgumentError: a size below 1, or convolutions for an input that is not an image.
    """

    def __init__(
        self,
        output_shape: Sequence[int],
        hidden: Sequence[int] = (),
        channels: Sequence[int] | None = (32, 64),
        normalisation: Normalisation = "none",
    ):
        super().__init__()
        output_shape, hidden, channels = checked_sizes(type(self).__name__, output_shape, hidden, channels)
        choice(type(self).__name__, "normalisation", normalisation, get_args(Normalisation))
        self.config = {
            "output_shape": list(output_shape),
            "hidden": list(hidden),
            "channels": None if channels is None else list(channels),
            "normalisation": normalisation,
        }
        self.output_shape = output_shape
        self.normalisation = normalisation
        self.network = to_vector(self.output_shape, 1, hidden, channels, normalisation)

    def forward(self, images: Tensor) -> Tensor:
        return single(self.network(images.flatten(-len(self.output_shape))).squeeze(-1))
