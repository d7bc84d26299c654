"""Auto-encoders of binary images (Kingma and Welling 2014)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent

from dgm_infer import GenerativeModel, StandardNormal
from dgm_infer.errors import ArgumentError, ModelError

from .networks import mirrored, single, to_image, with_channels
from .vae import GaussianEncoder

__all__ = ["BernoulliDecoder", "BernoulliVAE", "GeneratedImages"]


class BernoulliDecoder(nn.Module):
    """``p(x_i = 1 | z) = sigmoid(logit_i(z))``: ``[..., Dz]`` to a distribution over ``{0, 1}^Dx``, kept as logits.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image.
        hidden: widths of the fully connected layers.
        channels: of the transposed convolutions after them; None for none.
    """

    def __init__(
        self,
        latent_dim: int,
        output_shape: Sequence[int],
        hidden: Sequence[int],
        channels: Sequence[int] | None = None,
    ):
        super().__init__()
        self.network = to_image(latent_dim, output_shape, hidden, channels)

    def forward(self, z: Tensor) -> Independent:
        return Independent(Bernoulli(logits=single(self.network(z)), validate_args=False), 1, validate_args=False)


class GeneratedImages(NamedTuple):
    """Images of a model and the latents that generated them, which are exact draws of their posteriors."""

    images: Tensor
    """``[n, *output_shape]``, 0 or 1."""
    latents: Tensor
    """``[n, Dz]``."""


class BernoulliVAE(GenerativeModel):
    """Auto-encoder of binary images: ``z ~ N(0, I)``, ``x_i | z ~ Bernoulli(sigmoid(logit_i(z)))``.

    Its pixels are discrete, so that no fibre of continuous inputs leads to an image and :func:`dgm_infer.condition`
    refuses it. The posterior of its latents is a target of its own: :class:`generators.LatentPosterior`.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image.
        hidden: widths of the decoder's hidden layers; the encoder's are the same in reverse.
        channels: of the decoder's transposed convolutions, from coarse to fine, after the hidden layers; the encoder's
            are the same in reverse. None for a fully connected network.

    Raises:
        ArgumentError: a size below 1, or convolutions of what is no image.
    """

    output_range = (0.0, 1.0)

    def __init__(
        self,
        latent_dim: int = 50,
        output_shape: Sequence[int] = (28, 28),
        hidden: Sequence[int] = (200, 200),
        channels: Sequence[int] | None = None,
    ):
        super().__init__()
        config = {"latent_dim": latent_dim, "output_shape": list(output_shape), "hidden": list(hidden)}
        self.config = with_channels(config, channels)
        self.output_shape = tuple(output_shape)
        if latent_dim < 1 or torch.Size(self.output_shape).numel() < 1:
            raise ArgumentError(
                f"{type(self).__name__}(latent_dim={latent_dim}, output_shape={self.output_shape}): 1 or more"
            )
        self.input_density = StandardNormal(latent_dim)
        self.encoder = GaussianEncoder(self.output_shape, latent_dim, list(reversed(hidden)), mirrored(channels))
        self.decoder = BernoulliDecoder(latent_dim, self.output_shape, hidden, channels)

    def latents(self, u):
        return {"z": u}

    def observed(self, u):
        raise ModelError(
            f"the pixels of an {type(self).__name__} are discrete: no input can be solved for an image; use "
            "generators.LatentPosterior(model.decoder, images, prior) for the posterior of its latents"
        )

    def generate(self, n: int, seed: int) -> GeneratedImages:
        """``n`` images from the model itself, in its dtype and on its device."""
        like = next(self.parameters())
        rng = torch.Generator(like.device).manual_seed(seed)
        z = self.input_density.sample((n,), generator=rng, dtype=like.dtype, device=like.device)
        with torch.no_grad():
            images = torch.bernoulli(self.decoder(z).mean, generator=rng)
        return GeneratedImages(images.unflatten(-1, self.output_shape), z)
