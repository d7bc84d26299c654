"""Auto-encoders of images in [0, 1] with pixels that are exactly black or white."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributions import Independent

from dgm_infer.models import CensoredNormal

from .bernoulli_vae import BernoulliVAE
from .registry import register
from .vae import GaussianDecoder

__all__ = ["CensoredDecoder", "CensoredVAE"]


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

    Raises:
        ArgumentError: a size below 1, or convolutions for an output that is not an image.
    """

    def __init__(
        self,
        latent_dim: int = 16,
        output_shape: Sequence[int] = (28, 28),
        hidden: Sequence[int] = (128,),
        channels: Sequence[int] | None = None,
        sd: float | None = None,
    ):
        super().__init__(latent_dim, output_shape, hidden, channels)
        self.config = {**self.config, "sd": sd}
        self.decoder = CensoredDecoder(latent_dim, self.output_shape, hidden, sd, channels)  # type: ignore[assignment]
