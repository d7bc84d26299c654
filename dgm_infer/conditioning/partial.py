"""Decoders of partly observed images."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent, Normal

from ..arguments import boolean_mask
from ..errors import ModelError, ObservationError, reported_as
from ..models import base_distribution

__all__ = ["ObservedPixels", "mask_index"]


class ObservedPixels(nn.Module):
    """``p(x_i : i observed | z)`` of a decoder whose pixels are independent given z; the others integrate to one.

    Args:
        decoder: ``decoder(z)`` is a Bernoulli or Normal distribution over images of Dx pixels.
        index: the observed pixels of a flat image, ``[n]``, or ``[*batch, n]`` if they differ between problems.

    Raises:
        ModelError: when called, the decoder returns another distribution.
    """

    index: Tensor

    def __init__(self, decoder: nn.Module, index: Tensor):
        super().__init__()
        self.decoder = decoder
        self.register_buffer("index", index)

    def forward(self, z: Tensor) -> Independent:
        base = self._pixels(z)
        parameters = {name: self._select(getattr(base, name).flatten(z.ndim - 1)) for name in _PARAMETERS[type(base)]}
        return Independent(type(base)(**parameters, validate_args=False), 1, validate_args=False)

    def complete(self, z: Tensor, observed: Tensor, rng: torch.Generator) -> Tensor:
        """Flat images ``[..., Dx]`` drawn from the decoder, with the observed pixels ``[..., n]`` as they are."""
        base = self._pixels(z)
        if isinstance(base, Bernoulli):
            x = torch.bernoulli(base.probs, generator=rng)
        else:
            x = base.mean + base.stddev * torch.randn(
                base.mean.shape, generator=rng, dtype=base.mean.dtype, device=base.mean.device
            )
        x = x.flatten(z.ndim - 1)
        return x.scatter(-1, self.index.expand(observed.shape), observed.to(x.dtype))

    def take(self, problems: Tensor) -> Self:
        """The decoder for the problems with these indices into the flat batch."""
        if self.index.ndim == 1:
            return self
        return type(self)(self.decoder, self.index.flatten(0, -2)[problems.to(self.index.device)])

    def _select(self, parameter: Tensor) -> Tensor:
        if self.index.ndim == 1:
            return parameter[..., self.index]
        return parameter.gather(-1, self.index.expand(*parameter.shape[:-1], -1))

    def _pixels(self, z: Tensor) -> Bernoulli | Normal:
        likelihood = self.decoder(z)
        base = base_distribution(likelihood)
        if type(base) not in _PARAMETERS:
            name = type(self.decoder).__name__
            raise ModelError(
                f"{name} returns a {type(base).__name__}: a mask needs independent Bernoulli or Normal pixels"
            )
        return base  # type: ignore[return-value]


_PARAMETERS = {Bernoulli: ("logits",), Normal: ("loc", "scale")}


def mask_index(mask, image_shape: torch.Size) -> Tensor:
    """The pixels of a flat image that a boolean mask ``[*image_shape]`` observes.

    Raises:
        ObservationError: it has another shape or dtype, or observes nothing.
    """
    with reported_as(ObservationError):
        mask = boolean_mask("LatentPosterior", "mask", mask)
    if mask.shape != image_shape:
        raise ObservationError(
            f"LatentPosterior(mask of shape {tuple(mask.shape)}): expected that of the images, {tuple(image_shape)}"
        )
    if not mask.any():
        raise ObservationError("the mask observes no pixel: set True where the image is known")
    return mask.flatten().nonzero()[:, 0]
