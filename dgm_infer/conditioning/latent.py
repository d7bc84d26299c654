"""The posterior of the latents of a decoder given an image, for every image of a batch."""

import copy
import math
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Normal
from torch.nn import functional as F

from ..arguments import digits, indices, instance, numbers, points
from ..arguments.distributions import without_validation
from ..errors import ModelError, ObservationError
from ..models import (
    CensoredNormal,
    InputDensity,
    base_distribution,
    check_weights,
    copied,
    evaluation_copy,
    output_distribution,
    reference_tensor,
)
from ..target import Posterior
from .agreement import check_agreement
from .faults import check_agreeing, check_once, check_rows, far_values
from .marginal import gauss_newton
from .observations import pixels
from .observed import has_convolutions
from .operators import ObservedPixels


class LatentPosterior(Posterior):
    """``p(z | x)`` of a decoder ``p(x | z)`` and a prior ``p(z)``; its log normalising constant is ``log p(x)``.

    ``energy(z) = -log p(x | z) - log p(z)``, ``[..., *batch, Dz] -> [..., *batch]``

    Args:
        decoder: ``decoder(z)`` is a :class:`torch.distributions.Distribution` over images. It is used as a frozen
            copy in evaluation mode, in its own dtype and on its own device.
        images: ``[*batch, *image_shape]``, as many values per image as the decoder returns; 0 or 1 for a Bernoulli
            decoder.
        prior: density of z, such as ``StandardNormal(50)``.
        mask: pixels observed, a boolean array ``[*image_shape]``, True = observed; the others of the images are ignored
            (NaN allowed), and ``Draws.generate()`` draws them from the decoder. None for all. The decoder's pixels are
            then independent Bernoulli, Normal or CensoredNormal variables.

    Raises:
        ArgumentError: the prior is not an :class:`InputDensity`.
        ModelError: the decoder rejects such latents, or does not return a distribution (of independent pixels, if
            there is a mask); it mixes the rows of a batch, draws random numbers, or has derivatives that are not those
            of its outputs.
        ObservationError: the images or the mask do not fit the decoder.
    """

    def __init__(self, decoder: nn.Module, images, prior: InputDensity, mask=None):
        instance("LatentPosterior", "prior", prior, InputDensity, "StandardNormal(50)")
        if not isinstance(decoder, nn.Module):
            raise ModelError(f"LatentPosterior(decoder={type(decoder).__name__}): expected a torch.nn.Module")
        frozen = evaluation_copy(decoder)
        like = reference_tensor(frozen)
        images = numbers("LatentPosterior", "images", images, digits(images) and like.dtype)
        shape = _image_shape(images, output_distribution(frozen, prior).event_shape)
        values = images.reshape(*images.shape[: images.ndim - len(shape)], shape.numel())
        index = None if mask is None else pixels(mask).index(tuple(shape)).to(images.device)
        check_weights(frozen)
        check_once(decoder, "decoder", lambda: check_decoder(frozen, prior))
        _check_unit(frozen, prior, shape, values if index is None else values[..., index])
        self._observe(frozen, prior, shape, values if index is None else values[..., index], index)

    @classmethod
    def of_pixels(
        cls, decoder: nn.Module, prior: InputDensity, image_shape: torch.Size, values: Tensor, index: Tensor | None
    ) -> Self:
        """The posterior given some pixels.

        Args:
            decoder: an already frozen decoder; it is not copied.
            prior: density of z.
            image_shape: shape of one image.
            values: observed pixels, ``[*batch, n]``.
            index: positions of these pixels in a flat image, ``[n]``, or ``[*batch, n]`` if they differ between
                problems; None for all pixels in order.

        Raises:
            ModelError, ObservationError: as the constructor.
        """
        posterior = object.__new__(cls)
        posterior._observe(decoder, prior, image_shape, values, index)
        return posterior

    def _observe(
        self, decoder: nn.Module, prior: InputDensity, image_shape: torch.Size, values: Tensor, index: Tensor | None
    ) -> None:
        if values.is_floating_point() and not values.isfinite().all():
            raise ObservationError("images: some values are not finite; hide them with a mask, or repair the data")
        likelihood, like = output_distribution(decoder, prior), reference_tensor(decoder)
        batch = values.shape[:-1]
        if index is not None:
            decoder = ObservedPixels(decoder, index.to(like.device))
            with torch.no_grad():
                likelihood = decoder(like.new_zeros(*batch, prior.dim))
        x = values.reshape(*batch, *likelihood.event_shape).to(like)
        if isinstance(base_distribution(likelihood), Bernoulli) and not ((x == 0) | (x == 1)).all():
            wrong = x[(x != 0) & (x != 1)][0].item()
            raise ObservationError(f"images: a Bernoulli decoder gives pixels of 0 or 1, not {wrong:g}: binarise them")
        self._set(decoder, x, prior, image_shape, likelihood.event_shape)

    def _set(
        self, decoder: nn.Module, x: Tensor, prior: InputDensity, image_shape: torch.Size, event_shape: torch.Size
    ) -> None:
        super().__init__(None, prior.dim, tuple(x.shape[: x.ndim - len(event_shape)]))
        self.decoder, self.images, self.prior = decoder, x, prior
        self.image_shape, self._event_shape = image_shape, event_shape

    @property
    def values(self):
        return self.images

    def take(self, problems: Tensor) -> Self:
        """The posteriors of some images: batch shape ``[len(problems)]``.

        Args:
            problems: integer indices into the flat batch, ``[n]``.

        Raises:
            ArgumentError: an index is not that of an image.
        """
        problems = indices("LatentPosterior.take", "problems", problems, self.batch_shape.numel())
        images = self.images.flatten(0, len(self.batch_shape) - 1) if self.batch_shape else self.images.unsqueeze(0)
        decoder = self.decoder.take(problems) if isinstance(self.decoder, ObservedPixels) else self.decoder
        taken = object.__new__(type(self))
        taken._set(decoder, images[problems.to(images.device)], self.prior, self.image_shape, self._event_shape)
        return taken

    def log_likelihood(self, z: Tensor) -> Tensor:
        """``log p(x | z)``, ``[..., *batch, Dz] -> [..., *batch]``."""
        return self._log_prob(self._pixels(z))

    def _pixels(self, z: Tensor) -> Distribution:
        # a check of parameters would end all chains where one has diverged
        return without_validation(self.decoder)(z)

    def _log_prob(self, likelihood: Distribution) -> Tensor:
        base = base_distribution(likelihood)
        if len(self._event_shape) == 1 and isinstance(base, Bernoulli):
            return bernoulli_log_prob(base.logits, self.images)
        return likelihood.log_prob(self.images)

    def energy(self, x):
        x = points("LatentPosterior.energy", "x", x, self.dim)
        return -self.log_likelihood(x) - self.prior.log_prob(x)

    @property
    def n_outputs(self):
        return self.image_shape.numel()

    @property
    def convolves(self):
        return has_convolutions(self.decoder)

    def tempered_energy(self, u, beta):
        return -beta * self.log_likelihood(u) - self.prior.log_prob(u)

    def precision(self, u):
        """``I + J^T F J`` with J the Jacobian of the distribution's parameters and F their Fisher information."""
        z = u.to(self.images)
        with torch.no_grad():
            roots = _information_roots(base_distribution(self._pixels(z)))
        if roots is None:
            return None
        root = torch.cat([value.flatten(z.ndim - 1) for value in roots.values()], -1)

        def parameters(z: Tensor) -> Tensor:
            base = base_distribution(self._pixels(z))
            return torch.cat([getattr(base, name).flatten(z.ndim - 1) for name in roots], -1)

        return gauss_newton(parameters, z, lambda products: root * products)

    def to(self, dtype):
        other = copy.copy(self)
        other.decoder, other.images = copied(self.decoder).to(dtype), self.images.to(dtype)
        if isinstance(self.prior, nn.Module):
            other.prior = copied(self.prior).to(dtype)
        return other

    def energy_and_gradient(self, x):
        """Energy ``[...]`` and gradient ``[..., D]``, detached.

        If the derivative of the log-likelihood in the network's outputs is known, only the network is differentiated:
        ``sigmoid(logits) - x`` and ``(mean - x)/sd^2`` cost one pass over the pixels.
        """
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            likelihood = self._pixels(z)
            known = known_slope(base_distribution(likelihood), self.images) if len(self._event_shape) == 1 else None
            if known is None:
                misfit = -self._log_prob(likelihood)
                (gradient,) = torch.autograd.grad(misfit.sum(), z)
            else:
                misfit = known.misfit
                (gradient,) = torch.autograd.grad(known.outputs, z, known.slope)
        prior, prior_gradient = self._prior(x)
        return misfit.detach() + prior, gradient + prior_gradient

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

    def complete(self, u: Tensor, rng: torch.Generator, mean: bool = False) -> Tensor:
        """Images ``[..., *batch, *image_shape]``: observed pixels as observed, the others drawn from the decoder, or
        their means."""
        images = self.images.expand(*u.shape[:-1], *self.images.shape[len(self.batch_shape) :])
        if isinstance(self.decoder, ObservedPixels):
            with torch.no_grad():
                images = self.decoder.complete(u, images, rng, mean)
        return images.reshape(*u.shape[:-1], *self.image_shape)

    def initial_draws(self, n, rng):
        """Draws from the prior, ``[n, *batch, D]``."""
        like = self.images
        z = self.prior.sample((n, *self.batch_shape), generator=rng, dtype=like.dtype, device=rng.device)
        return z.to(like.device)


def check_decoder(decoder: nn.Module, prior: InputDensity) -> None:
    """Raise :class:`ModelError` unless ``log p(x | z)`` of a frozen decoder is a function of each z, differentiable."""
    like, name = reference_tensor(decoder), type(decoder).__name__
    rng = torch.Generator(like.device).manual_seed(0)
    z = prior.sample((8,), generator=rng, dtype=like.dtype, device=like.device)
    with torch.no_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        torch.manual_seed(0)
        x = decoder(z[:2]).sample()[0]

    def log_prob(z: Tensor) -> Tensor:
        return base_distribution(decoder(z)).log_prob(x).reshape(len(z), -1)

    check_agreeing(log_prob, z[:2], name)
    check_rows(log_prob, z[:2], name)
    check_agreement(log_prob, z, name)


@torch.no_grad()
def _check_unit(decoder: nn.Module, prior: InputDensity, shape: torch.Size, values: Tensor) -> None:
    """Raise ObservationError for 8-bit pixels beside a decoder of pixels in (0, 1); Bernoulli pixels are 0 or 1."""
    like = reference_tensor(decoder)
    rng = torch.Generator(like.device).manual_seed(0)
    likelihood = decoder(prior.sample((16,), generator=rng, dtype=like.dtype, device=like.device))
    if not isinstance(base_distribution(likelihood), Normal) or not values.isfinite().all():
        return
    far = far_values(type(decoder).__name__, shape, values, likelihood.mean)
    if far is not None and far.severity == "error":
        raise ObservationError(str(far))


def _image_shape(images: Tensor, event_shape: torch.Size) -> torch.Size:
    """The last dimensions of the images, which hold as many values as the decoder returns per image."""
    for k in range(1, images.ndim + 1):
        if images.numel() and images.shape[-k:].numel() == event_shape.numel():
            return images.shape[-k:]
    raise ObservationError(
        f"images of shape {tuple(images.shape)} do not end in the {event_shape.numel()} values that the decoder "
        "returns per image"
    )


def _information_roots(base: Distribution) -> dict[str, Tensor] | None:
    """Roots of the Fisher information of the parameters of independent pixels, by name, each as the parameter; None for
    families other than these three."""
    if isinstance(base, Bernoulli):
        p = base.probs
        return {"logits": (p * (1 - p)).sqrt()}
    if isinstance(base, Normal):
        return {"loc": 1 / base.scale, "scale": math.sqrt(2) / base.scale}
    if isinstance(base, CensoredNormal):
        return {"loc": base.information.sqrt()}
    return None


class KnownSlope(NamedTuple):
    """Result of one pass over the pixels, for a batch of images."""

    misfit: Tensor
    """``-log p(x | z)``, ``[...]``, detached."""
    slope: Tensor
    """Its derivative in the outputs, ``[..., Dx]``, detached."""
    outputs: Tensor
    """The outputs of the network, ``[..., Dx]``, with their graph; the slope is the derivative in them."""


def known_slope(base: Distribution, x: Tensor) -> KnownSlope | None:
    """The slope of ``-log p(x | z)`` for independent flat pixels; None for families other than these two.

    Bernoulli: ``sigmoid(logits) - x``. Normal of a fixed standard deviation: ``(mean - x)/sd^2``.
    """
    with torch.no_grad():
        if isinstance(base, Bernoulli):
            logits = base.logits.detach()
            p = torch.sigmoid(logits)
            return KnownSlope(_bernoulli_energy(logits, p, x), p.sub_(x), base.logits)
        if isinstance(base, Normal) and not base.scale.requires_grad:
            residual, sd = base.loc.detach() - x, base.scale
            scaled = residual / sd
            constant = 0.5 * math.log(2 * math.pi) * residual.shape[-1] + sd.log().sum(-1)
            return KnownSlope(0.5 * torch.linalg.vecdot(scaled, scaled) + constant, scaled / sd, base.loc)
    return None


def bernoulli_log_prob(logits: Tensor, x: Tensor) -> Tensor:
    """``sum_i x_i a_i - log(1 + exp(a_i))`` of logits a, ``[..., D] -> [...]``, without a saturating sigmoid."""
    if torch.is_grad_enabled():
        return torch.linalg.vecdot(logits, x) - F.softplus(logits).sum(-1)
    return -_bernoulli_energy(logits, torch.sigmoid(logits), x)


def _bernoulli_energy(logits: Tensor, p: Tensor, x: Tensor) -> Tensor:
    """``sum_i log(1 + exp(a_i)) - x_i a_i`` of logits a and ``p = sigmoid(a)``, ``[..., D] -> [...]``.

    ``log(1 + exp(a)) = max(a, 0) - log max(p, 1 - p)``. These factors are at least a half, so that up to a hundred of
    them are multiplied before taking a logarithm.
    """
    factors = torch.maximum(p, 1 - p)
    n = factors.shape[-1]
    group = max(size for size in range(1, 101) if n % size == 0)
    log_factors = factors.unflatten(-1, (n // group, group)).prod(-1).log_().sum(-1)
    return logits.relu().sum(-1) - torch.linalg.vecdot(logits, x) - log_factors
