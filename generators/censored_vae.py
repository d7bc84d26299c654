"""Auto-encoders of images in [0, 1] with pixels that are exactly black or white."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributions import Independent
from torch.nn.functional import softplus

from dgm_infer.arguments import positive, whole_number
from dgm_infer.errors import ArgumentError
from dgm_infer.models import CensoredNormal

from .bernoulli_vae import BernoulliVAE
from .networks import checked_sizes, image_channels, single, to_image
from .registry import register
from .vae import GaussianDecoder

__all__ = ["CensoredDecoder", "CensoredVAE"]

# Where the sd of pixels starts, above its least value: softplus(-1.5) = 0.2, about what one number for all learns.
_START = -1.5


class CensoredDecoder(nn.Module):
    """``x_i = min(max(mean_i(z) + sd n_i, 0), 1)``: ``[..., Dz]`` to a distribution over ``[0, 1]^Dx``.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image.
        hidden: widths of the fully connected layers.
        sd: standard deviation before pixels are cut off, fixed; None to learn one number.
        channels: channels of the transposed convolutions after them; None for none.
    """

    def __init__(
        self,
        latent_dim: int,
        output_shape: Sequence[int],
        hidden: Sequence[int],
        sd: float | None,
        channels: Sequence[int] | None = None,
    ):
        super().__init__()
        self.normal = GaussianDecoder(latent_dim, output_shape, hidden, sd, channels)

    @property
    def sd(self) -> Tensor:
        return self.normal.sd

    def forward(self, z: Tensor) -> Independent:
        pixels = CensoredNormal(self.normal.mean(z), self.normal.sd, validate_args=False)
        return Independent(pixels, 1, validate_args=False)


class _PixelwiseDecoder(nn.Module):
    """``x_i = min(max(mean_i(z) + sd_i(z) n_i, 0), 1)``, ``sd_i = least_sd + softplus(o_i(z) - 1.5)``.

    Args:
        latent_dim, output_shape, hidden, channels: as of :class:`CensoredDecoder`.
        least_sd: what no sd is below.
    """

    def __init__(
        self,
        latent_dim: int,
        output_shape: Sequence[int],
        hidden: Sequence[int],
        least_sd: float,
        channels: Sequence[int] | None = None,
    ):
        super().__init__()
        shape, hidden, channels = checked_sizes("CensoredDecoder", output_shape, hidden, channels)
        # channels of means, then as many of sds
        n, *sides = shape if channels is None else image_channels(shape)
        latent_dim = whole_number("CensoredDecoder", "latent_dim", latent_dim)
        self.network = to_image(latent_dim, (2 * n, *sides), hidden, channels)
        self.least_sd = positive("CensoredDecoder", "sd", least_sd)

    def forward(self, z: Tensor) -> Independent:
        mean, excess = single(self.network(z)).chunk(2, -1)
        pixels = CensoredNormal(mean, self.least_sd + softplus(excess + _START), validate_args=False)
        return Independent(pixels, 1, validate_args=False)


@register
class CensoredVAE(BernoulliVAE):
    """Auto-encoder of grey images: ``z ~ N(0, I)``, ``x_i | z = min(max(mean_i(z) + sd n_i, 0), 1)``.

    Black pixels have a probability, not a density, so that a noise of all pixels is not learnt from the background.
    An image has no fibre of continuous inputs: :func:`dgm_infer.condition` gives the posterior of its latents, a
    :class:`generators.LatentPosterior`. Latent: ``z``.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image.
        hidden: widths of the decoder's hidden layers; the encoder's are the same in reverse.
        channels: channels of the decoder's transposed convolutions, from coarse to fine, after the hidden layers; the
            encoder's are the same in reverse. None for a fully connected network.
        sd: standard deviation before pixels are cut off, fixed; None to learn one number.
        pixelwise: the sd is a function of the latents, one for each pixel and at least ``sd``: textures err more than
            plain areas, and a picture of them says less about what is hidden.

    Raises:
        ArgumentError: a size below 1, convolutions for an output that is not an image, or ``pixelwise`` without a
            least sd.
    """

    def __init__(
        self,
        latent_dim: int = 16,
        output_shape: Sequence[int] = (28, 28),
        hidden: Sequence[int] = (128,),
        channels: Sequence[int] | None = None,
        sd: float | None = None,
        pixelwise: bool = False,
    ):
        super().__init__(latent_dim, output_shape, hidden, channels)
        config: dict[str, Any] = {"sd": sd}
        if pixelwise:
            if sd is None:
                raise ArgumentError("CensoredVAE(pixelwise=True): needs the least sd of a pixel, such as sd=0.05")
            config["pixelwise"] = True
            decoder: nn.Module = _PixelwiseDecoder(latent_dim, self.output_shape, hidden, sd, channels)
        else:
            decoder = CensoredDecoder(latent_dim, self.output_shape, hidden, sd, channels)
        self.config = {**self.config, **config}
        self.decoder = decoder  # type: ignore[assignment]
