"""Auto-encoders of binary images (Kingma and Welling 2014)."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent

from dgm_infer import GenerativeModel, StandardNormal
from dgm_infer.arguments import whole_number
from dgm_infer.errors import ModelError
from dgm_infer.models.decoder import LatentVariableModel
from dgm_infer.models.model import GeneratedImages

from .networks import checked_sizes, mirrored, single, to_image, with_channels
from .registry import register
from .vae import GaussianEncoder

__all__ = ["BernoulliDecoder", "BernoulliVAE", "GeneratedImages"]


class BernoulliDecoder(nn.Module):
    """``p(x_i = 1 | z) = sigmoid(logit_i(z))``: ``[..., Dz]`` to a distribution over ``{0, 1}^Dx``, kept as logits.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image.
        hidden: widths of the fully connected layers.
        channels: channels of the transposed convolutions after them; None for none.
    """

    def __init__(
        self,
        latent_dim: int,
        output_shape: Sequence[int],
        hidden: Sequence[int],
        channels: Sequence[int] | None = None,
    ):
        super().__init__()
        made = checked_sizes("BernoulliDecoder", output_shape, hidden, channels)
        self.network = to_image(whole_number("BernoulliDecoder", "latent_dim", latent_dim), *made)

    def forward(self, z: Tensor) -> Independent:
        return Independent(Bernoulli(logits=single(self.network(z)), validate_args=False), 1, validate_args=False)


@register
class BernoulliVAE(GenerativeModel):
    """Auto-encoder of binary images: ``z ~ N(0, I)``, ``x_i | z ~ Bernoulli(sigmoid(logit_i(z)))``.

    Its pixels are discrete, so an image has no fibre of continuous inputs: :func:`dgm_infer.condition` gives the
    posterior of its latents, a :class:`generators.LatentPosterior`. Latent: ``z``.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image.
        hidden: widths of the decoder's hidden layers; the encoder's are the same in reverse.
        channels: channels of the decoder's transposed convolutions, from coarse to fine, after the hidden layers; the
            encoder's are the same in reverse. None for a fully connected network.

    Raises:
        ArgumentError: a size below 1, or convolutions for an output that is not an image.
    """

    output_range = (0.0, 1.0)
    discrete: Literal[True] = True

    def __init__(
        self,
        latent_dim: int = 50,
        output_shape: Sequence[int] = (28, 28),
        hidden: Sequence[int] = (200, 200),
        channels: Sequence[int] | None = None,
    ):
        super().__init__()
        name = type(self).__name__
        whole_number(name, "latent_dim", latent_dim)
        output_shape, hidden, channels = checked_sizes(name, output_shape, hidden, channels)
        config = {"latent_dim": latent_dim, "output_shape": list(output_shape), "hidden": list(hidden)}
        self.config = with_channels(config, channels)
        self.output_shape = output_shape
        self.prior = self.input_density = StandardNormal(latent_dim)
        self.encoder = GaussianEncoder(self.output_shape, latent_dim, list(reversed(hidden)), mirrored(channels))
        self.decoder = BernoulliDecoder(latent_dim, self.output_shape, hidden, channels)

    def latents(self, u):
        return {"z": u}

    def observed(self, u):
        raise ModelError(
            f"the pixels of this {type(self).__name__} are discrete, so inputs cannot be solved for an image; "
            "condition() gives the posterior of its latents, a LatentPosterior"
        )

    def generate(self, n: int, seed: int) -> GeneratedImages:
        """``n`` images from the model itself, in its dtype and on its device."""
        return LatentVariableModel.of(self).generate(n, seed)
