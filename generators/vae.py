"""Variational auto-encoders (Kingma and Welling 2014)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from dgm_infer import DirectedModel, StandardNormal
from dgm_infer.arguments import positive, whole_number
from dgm_infer.models.decoder import LatentVariableModel
from dgm_infer.models.model import GeneratedImages

from .networks import checked_sizes, mirrored, single, to_image, to_vector, with_channels
from .registry import register

__all__ = ["GaussianDecoder", "GaussianEncoder", "GaussianVAE"]


class GaussianEncoder(nn.Module):
    """``q(z | x) = N(mean(x), diag(sd(x)^2))``: ``[..., Dx]`` to a distribution over ``[..., Dz]``.

    Args:
        output_shape: shape of an image.
        latent_dim: Dz.
        hidden: widths of the fully connected layers.
        channels: channels of the convolutions before them; None for none.
    """

    def __init__(
        self,
        output_shape: Sequence[int],
        latent_dim: int,
        hidden: Sequence[int],
        channels: Sequence[int] | None = None,
    ):
        super().__init__()
        made = checked_sizes("GaussianEncoder", output_shape, hidden, channels)
        latent_dim = whole_number("GaussianEncoder", "latent_dim", latent_dim)
        self.network = to_vector(made.output_shape, 2 * latent_dim, made.hidden, made.channels)

    def forward(self, x: Tensor) -> Independent:
        mean, log_sd = single(self.network(x)).chunk(2, -1)
        return Independent(Normal(mean, log_sd.exp(), validate_args=False), 1, validate_args=False)


class GaussianDecoder(nn.Module):
    """``p(x | z) = N(mean(z), sd^2)``: ``[..., Dz]`` to a distribution over ``[..., Dx]``.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image.
        hidden: widths of the fully connected layers.
        sd: output standard deviation, fixed; None to learn one number.
        channels: channels of the transposed convolutions after them; None for none.
        min_sd: smallest value of a learned sd.
    """

    log_sd: Tensor

    def __init__(
        self,
        latent_dim: int,
        output_shape: Sequence[int],
        hidden: Sequence[int],
        sd: float | None,
        channels: Sequence[int] | None = None,
        *,
        min_sd: float = 1e-3,
    ):
        super().__init__()
        if sd is not None:
            positive("GaussianDecoder", "sd", sd)
        made = checked_sizes("GaussianDecoder", output_shape, hidden, channels)
        self.network = to_image(whole_number("GaussianDecoder", "latent_dim", latent_dim), *made)
        self.min_sd = positive("GaussianDecoder", "min_sd", min_sd)
        start = torch.tensor(0.3 if sd is None else float(sd)).log()
        if sd is None:
            self.log_sd = nn.Parameter(start)
        else:
            self.register_buffer("log_sd", start)

    def mean(self, z: Tensor) -> Tensor:
        return single(self.network(z))

    @property
    def sd(self) -> Tensor:
        sd = self.log_sd.exp()
        return sd.clamp_min(self.min_sd) if isinstance(self.log_sd, nn.Parameter) else sd

    def forward(self, z: Tensor) -> Independent:
        mean = self.mean(z)
        return Independent(Normal(mean, self.sd.expand_as(mean), validate_args=False), 1, validate_args=False)


@register
class GaussianVAE(DirectedModel):
    """Variational auto-encoder with Gaussian output noise, ``x = mean(z) + sd n``; every pixel has its own noise.

    Inputs ``u = [z, n]``: ``z ~ N(0, I)`` of length ``latent_dim``, ``n ~ N(0, I)`` one per pixel. Latent: ``z``.

    Args:
        latent_dim: Dz.
        output_shape: shape of an image.
        hidden: widths of the decoder's hidden layers; the encoder's are the same in reverse.
        sd: output standard deviation, fixed, in units of the pixels; None to learn one number.
        channels: channels of the decoder's transposed convolutions, from coarse to fine, after the hidden layers; the
            encoder's are the same in reverse. None for a fully connected network.

    Raises:
        ArgumentError: a size below 1, or convolutions for an output that is not an image.
    """

    structure = "independent"
    discrete = False

    def __init__(
        self,
        latent_dim: int,
        output_shape: Sequence[int],
        hidden: Sequence[int] = (64, 64),
        sd: float | None = None,
        channels: Sequence[int] | None = None,
    ):
        super().__init__()
        name = type(self).__name__
        whole_number(name, "latent_dim", latent_dim)
        if sd is not None:
            positive(name, "sd", sd)
        output_shape, hidden, channels = checked_sizes(name, output_shape, hidden, channels)
        config = {"latent_dim": latent_dim, "output_shape": list(output_shape), "hidden": list(hidden), "sd": sd}
        self.config = with_channels(config, channels)
        self.output_shape = output_shape
        n_outputs = torch.Size(output_shape).numel()
        self.prior = self.global_density = StandardNormal(latent_dim)
        self.local_density = StandardNormal(n_outputs)
        self.encoder = GaussianEncoder(self.output_shape, latent_dim, list(reversed(hidden)), mirrored(channels))
        self.decoder = GaussianDecoder(latent_dim, self.output_shape, hidden, sd, channels)

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        return self.decoder.mean(z["z"]) + self.decoder.sd * u2

    def generate(self, n: int, seed: int) -> GeneratedImages:
        """``n`` images from the model itself, in its dtype and on its device."""
        return LatentVariableModel.of(self).generate(n, seed)
