"""The posterior of a decoder's latents given an image, for every image of a batch."""

import copy
import math
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Normal
from torch.nn import functional as F

from .. import InputDensity, Target
from ..errors import ArgumentError, ModelError, ObservationError, cause
from ..models import reference_tensor
from .partial import ObservedPixels, base_distribution, mask_index

__all__ = ["LatentPosterior"]


class LatentPosterior(Target):
    """``p(z | x)`` of a decoder ``p(x | z)`` and a prior ``p(z)``; its log normalising constant is ``log p(x)``.

    ``energy(z) = -log p(x | z) - log p(z)``, ``[..., *batch, Dz] -> [..., *batch]``

    Args:
        decoder: ``decoder(z)`` is a :class:`torch.distributions.Distribution` over images. Works in here as a frozen
            copy in evaluation mode, in its own dtype and on its own device.
        images: ``[*batch, *image_shape]``, as many values an image as the decoder gives; of a Bernoulli decoder
            they are 0 or 1.
        prior: density of z, such as ``StandardNormal(50)``.
        mask: pixels observed, a boolean array ``[*image_shape]``, True = observed; the others of the images are ignored
            (NaN allowed), and ``Draws.generate()`` draws them from the decoder. None for all. The decoder's pixels are
            then independent Bernoulli or Normal variables.

    Raises:
        ArgumentError: the prior is no :class:`InputDensity`.
        ModelError: the decoder does not take such latents, or does not return a distribution (of independent pixels,
            where there is a mask).
        ObservationError: the images or the mask do not fit the decoder.
    """

    def __init__(self, decoder: nn.Module, images, prior: InputDensity, mask=None):
        if not isinstance(prior, InputDensity):
            raise ArgumentError(f"LatentPosterior(prior={prior!r}): give an InputDensity, such as StandardNormal(50)")
        if not isinstance(decoder, nn.Module):
            raise ModelError(f"LatentPosterior(decoder={type(decoder).__name__}): expected a torch.nn.Module")
        frozen = copy.deepcopy(decoder).eval().requires_grad_(False)
        like = reference_tensor(frozen)
        likelihood = _likelihood(frozen, prior, like)
        images = torch.as_tensor(images).detach()
        self.image_shape = _image_shape(images, likelihood.event_shape)
        if mask is not None:
            index = mask_index(mask, self.image_shape).to(like.device)
            frozen = ObservedPixels(frozen, index)
            images = images.reshape(*images.shape[: images.ndim - len(self.image_shape)], -1)[
                ..., index.to(images.device)
            ]
            likelihood = _likelihood(frozen, prior, like)
        x = _flat(images, likelihood.event_shape).to(like)
        if isinstance(base_distribution(likelihood), Bernoulli) and not ((x == 0) | (x == 1)).all():
            wrong = x[(x != 0) & (x != 1)][0].item()
            raise ObservationError(f"images: a Bernoulli decoder gives pixels of 0 or 1, not {wrong:g}: binarise them")
        self._set(frozen, x, prior, likelihood.event_shape)

    def _set(self, decoder: nn.Module, x: Tensor, prior: InputDensity, event_shape: torch.Size) -> None:
        super().__init__(None, prior.dim, tuple(x.shape[: x.ndim - len(event_shape)]))
        self.decoder, self.images, self.prior, self._event_shape = decoder, x, prior, event_shape

    @property
    def values(self) -> Tensor:
        """The images, whose dtype and device are those of the computation."""
        return self.images

    def take(self, problems: Tensor) -> Self:
        """The posteriors of some images, counted over the flat batch: batch shape ``[len(problems)]``.

        Args:
            problems: indices, ``[n]`` of whole numbers.
        """
        images = self.images.flatten(0, len(self.batch_shape) - 1) if self.batch_shape else self.images.unsqueeze(0)
        taken = object.__new__(type(self))
        taken.image_shape = self.image_shape
        taken._set(self.decoder, images[problems.to(images.device)], self.prior, self._event_shape)
        return taken

    def log_likelihood(self, z: Tensor) -> Tensor:
        """``log p(x | z)``, ``[..., *batch, Dz] -> [..., *batch]``."""
        likelihood = self.decoder(z)
        base = base_distribution(likelihood)
        if len(self._event_shape) == 1 and isinstance(base, Bernoulli):
            if torch.is_grad_enabled():
                return _bernoulli_log_prob(base.logits, self.images)
            return -_bernoulli_energy(base.logits, torch.sigmoid(base.logits), self.images)
        return likelihood.log_prob(self.images)

    def energy(self, x):
        return -self.log_likelihood(x) - self.prior.log_prob(x)

    def energy_and_gradient(self, x):
        """Energy ``[...]`` and gradient ``[..., D]``, detached.

        Where the log-likelihood's derivative in the network's outputs is known, only the network is differentiated:
        ``sigmoid(logits) - x`` and ``(mean - x)/sd^2`` cost one pass over the pixels.
        """
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            base = base_distribution(self.decoder(z))
            outputs = self._known(base)
            if outputs is None:
                return super().energy_and_gradient(x)
            misfit, slope, parameter = outputs
            (gradient,) = torch.autograd.grad(parameter, z, slope)
        prior, prior_gradient = self._prior(x)
        return misfit + prior, gradient + prior_gradient

    def _known(self, base: Distribution) -> tuple[Tensor, Tensor, Tensor] | None:
        """``-log p(x | z)``, its derivative in the network's outputs, and these; None for other families."""
        if len(self._event_shape) != 1:
            return None
        with torch.no_grad():
            if isinstance(base, Bernoulli):
                logits = base.logits.detach()
                p = torch.sigmoid(logits)
                return _bernoulli_energy(logits, p, self.images), p.sub_(self.images), base.logits
            if isinstance(base, Normal) and not base.scale.requires_grad:
                residual, sd = base.loc.detach() - self.images, base.scale
                scaled = residual / sd
                constant = 0.5 * math.log(2 * math.pi) * residual.shape[-1] + sd.log().sum(-1)
                return 0.5 * torch.linalg.vecdot(scaled, scaled) + constant, scaled / sd, base.loc
        return None

    def _prior(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``-log p(z)`` and its gradient."""
        z = z.detach()
        if self.prior.is_standard_normal:
            return 0.5 * torch.linalg.vecdot(z, z) + 0.5 * math.log(2 * math.pi) * self.dim, z
        with torch.enable_grad():
            z = z.requires_grad_()
            energy = -self.prior.log_prob(z)
            (gradient,) = torch.autograd.grad(energy.sum(), z)
        return energy.detach(), gradient

    def latents(self, x):
        return {"z": x}

    def complete(self, u: Tensor, rng: torch.Generator) -> Tensor:
        """Images ``[..., *batch, *image_shape]``: observed pixels as observed, the others drawn from the decoder."""
        images = self.images.expand(*u.shape[:-1], *self.images.shape[len(self.batch_shape) :])
        if isinstance(self.decoder, ObservedPixels):
            with torch.no_grad():
                images = self.decoder.complete(u, images, rng)
        return images.reshape(*u.shape[:-1], *self.image_shape)

    def start(self, chains, rng):
        """Draws from the prior, ``[chains, *batch, D]``."""
        like = self.images

        def draw() -> Tensor:
            z = self.prior.sample((chains, *self.batch_shape), generator=rng, dtype=like.dtype, device=rng.device)
            return z.to(like.device)

        return self._finite(draw)


def _likelihood(decoder: nn.Module, prior: InputDensity, like: Tensor) -> Distribution:
    """What the decoder returns for one row of zeros."""
    name = type(decoder).__name__
    try:
        with torch.no_grad():
            likelihood = decoder(torch.zeros(prior.dim, dtype=like.dtype, device=like.device))
    except Exception as error:
        raise ModelError(f"{name} fails for latents of {prior.dim} dimensions, the prior's: {cause(error)}") from error
    if not isinstance(likelihood, Distribution):
        raise ModelError(
            f"{name} returns a {type(likelihood).__name__}, not a torch.distributions.Distribution: wrap its outputs, "
            "for example Independent(Bernoulli(logits=...), 1)"
        )
    if likelihood.batch_shape:
        raise ModelError(
            f"{name} returns {tuple(likelihood.batch_shape)} distributions for one latent: make the pixels one event "
            "with torch.distributions.Independent"
        )
    return likelihood


def _image_shape(images: Tensor, event_shape: torch.Size) -> torch.Size:
    """The last dimensions of the images, which hold as many values as the decoder gives."""
    for k in range(1, images.ndim + 1):
        if images.numel() and images.shape[-k:].numel() == event_shape.numel():
            return images.shape[-k:]
    raise ObservationError(
        f"images of shape {tuple(images.shape)} do not end in the {event_shape.numel()} values that the decoder gives "
        "an image"
    )


def _flat(images: Tensor, event_shape: torch.Size) -> Tensor:
    """``[*batch, *image_shape]`` in the shape of the decoder's events, ``[*batch, *event_shape]``."""
    shape = _image_shape(images, event_shape)
    images = images.reshape(*images.shape[: images.ndim - len(shape)], *event_shape)
    if images.is_floating_point() and not images.isfinite().all():
        raise ObservationError("images: some values are not finite; hide them with a mask, or repair the data")
    return images


def _bernoulli_log_prob(logits: Tensor, x: Tensor) -> Tensor:
    """``sum_i x_i a_i - log(1 + exp(a_i))`` of logits a: no sigmoid that saturates."""
    return torch.linalg.vecdot(logits, x) - F.softplus(logits).sum(-1)


def _bernoulli_energy(logits: Tensor, p: Tensor, x: Tensor) -> Tensor:
    """``sum_i log(1 + exp(a_i)) - x_i a_i`` of logits a and ``p = sigmoid(a)``, ``[..., D] -> [...]``.

    ``log(1 + exp(a)) = max(a, 0) - log max(p, 1 - p)``. These factors are at least a half, so that up to a hundred of
    them are multiplied before a logarithm is taken.
    """
    factors = torch.maximum(p, 1 - p)
    n = factors.shape[-1]
    group = max(size for size in range(1, 101) if n % size == 0)
    log_factors = factors.unflatten(-1, (n // group, group)).prod(-1).log_().sum(-1)
    return logits.relu().sum(-1) - torch.linalg.vecdot(logits, x) - log_factors
