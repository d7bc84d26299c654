"""Models with a prior, a decoder and perhaps an encoder, which are asked for these parts, never for their class."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal, constraints
from torch.distributions.utils import broadcast_all
from torch.special import log_ndtr, ndtr

from ..arguments import random_seed, whole_number
from ..errors import ModelError, cause
from .densities import InputDensity, StandardNormal
from .directed import DirectedModel, validate
from .model import GeneratedImages, GenerativeModel, evaluation_copy, in_evaluation, reference_tensor

_NO_SHAPE = torch.Size()


class CensoredNormal(Distribution):
    """``x = min(max(loc + scale n, 0), 1)``, ``n ~ N(0, 1)``: a density within (0, 1), and masses at 0 and 1.

    Images have pixels that are exactly black or white, which no density describes: this is the tobit model (Tobin
    1958) of both edges. ``log_prob`` is that of a mass at 0 and 1, ``log Phi(-loc / scale)`` and ``log Phi((loc - 1) /
    scale)``, and the normal's between them; a mixed measure's, so that evidences compare among such models.

    Args:
        loc: mean before it is cut off, ``[...]``.
        scale: standard deviation before, positive, ``[...]``.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # type: ignore[assignment]
    support = constraints.unit_interval  # type: ignore[assignment]
    has_rsample = True

    def __init__(self, loc: Tensor | float, scale: Tensor | float, validate_args: bool | None = None):
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        z = (value - self.loc) / self.scale
        within = -z.square() / 2 - self.scale.log() - math.log(2 * math.pi) / 2
        # one call for both edges: whichever is not there has another value that is finite
        edge = log_ndtr(torch.where(value <= 0, z, -z))
        return torch.where((value <= 0) | (value >= 1), edge, within)

    def rsample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = _NO_SHAPE) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return (self.loc + self.scale * noise).clamp(0, 1)

    @property
    def mean(self) -> Tensor:
        """``E[x] = m (Phi(b) - Phi(a)) + s (phi(a) - phi(b)) + 1 - Phi(b)``, ``a = -m / s``, ``b = (1 - m) / s``."""
        low, high = -self.loc / self.scale, (1 - self.loc) / self.scale
        inner = self.loc * (ndtr(high) - ndtr(low)) + self.scale * (_phi(low) - _phi(high))
        return inner + ndtr(-high)

    @property
    def variance(self) -> Tensor:
        low, high = -self.loc / self.scale, (1 - self.loc) / self.scale
        between, down, up = ndtr(high) - ndtr(low), _phi(low), _phi(high)
        # E[(loc + scale n)^2 1(within)]
        second = (self.loc.square() + self.scale.square()) * between
        second = second + 2 * self.loc * self.scale * (down - up) + self.scale.square() * (low * down - high * up)
        return (second + ndtr(-high) - self.mean.square()).clamp_min(0)

    @property
    def information(self) -> Tensor:
        """Fisher's, of loc: ``(Phi(b) - Phi(a) + h(a) + h(-b)) / s^2``, where ``h(t) = phi(t) (t + phi(t) / Phi(t))``
        is that of a pixel at an edge."""
        low, high = -self.loc / self.scale, (1 - self.loc) / self.scale
        inside = ndtr(high) - ndtr(low)
        return (inside + _edge(low) + _edge(-high)).clamp_min(0) / self.scale.square()


def _edge(t: Tensor) -> Tensor:
    """``phi(t) (t + phi(t) / Phi(t))``, minus the second derivative of ``log Phi(t)`` times ``Phi(t)``."""
    ratio = (-t.square() / 2 - log_ndtr(t)).exp() / math.sqrt(2 * math.pi)
    return _phi(t) * (t + ratio)


def _phi(z: Tensor) -> Tensor:
    return (-z.square() / 2).exp() / math.sqrt(2 * math.pi)


class DiscreteModel(Protocol):
    """A model that declares its outputs to be discrete."""

    discrete: Literal[True]


@dataclass(frozen=True)
class LatentVariableModel:
    """``z ~ p(z)``, ``x ~ p(x | z)``, optionally with ``q(z | x)``: the parts of a module, as :meth:`of` finds them.

    A module provides them as attributes and need not inherit from anything:

    - ``prior``: an :class:`InputDensity`. Without it, a :class:`GenerativeModel` uses the density of its inputs, a
      directed model that of its global inputs.
    - ``decoder``: a module; ``decoder(z)`` maps ``[..., Dz]`` to a :class:`torch.distributions.Distribution` over
      outputs, with batch shape ``[...]``.
    - ``encoder``, optional: ``encoder(x)`` maps flat outputs ``[..., Dx]`` to a distribution over ``[..., Dz]``.
    - ``output_shape``, optional: the shape of one output; otherwise the event shape of the decoder.
    - ``discrete``, optional: whether outputs are discrete; otherwise inferred from the support of the decoder.
    """

    module: nn.Module
    prior: InputDensity
    decoder: nn.Module
    encoder: Callable[[Tensor], Distribution] | None

    @classmethod
    def of(cls, module: object) -> Self:
        """The parts of a module.

        Raises:
            ModelError: it has no decoder, or no density for its latents.
        """
        name = type(module).__name__
        decoder, encoder = getattr(module, "decoder", None), getattr(module, "encoder", None)
        if isinstance(module, nn.Module) and callable(decoder) and not isinstance(decoder, nn.Module):
            raise ModelError(
                f"{name}.decoder is a {type(decoder).__name__}: make it a torch.nn.Module, with forward(z)"
            )
        if not isinstance(module, nn.Module) or not isinstance(decoder, nn.Module):
            raise ModelError(f"a {name} has no decoder: log p(x) needs decoder(z), a distribution over images")
        prior = next(
            (
                density
                for attribute in ("prior", "global_density", "input_density")
                if isinstance(density := getattr(module, attribute, None), InputDensity)
            ),
            None,
        )
        if prior is None:
            raise ModelError(f"{name}.prior is not set: give it the density of its latents, such as StandardNormal(D)")
        return cls(module, prior, decoder, encoder if callable(encoder) else None)  # type: ignore[arg-type]

    @classmethod
    def find(cls, module: object) -> Self | None:
        """The parts of a module whose decoder returns distributions; None if it has none."""
        try:
            found = cls.of(module)
            _ = found.outputs
        except ModelError:
            return None
        return found

    @cached_property
    def outputs(self) -> Distribution:
        """The distribution ``p(x | z = 0)`` over one output, with the decoder in evaluation mode.

        Raises:
            ModelError: the decoder rejects such latents, or does not return a distribution of one event.
        """
        devices = [tensor.device for tensor in self.decoder.parameters() if tensor.is_cuda][:1]
        # a decoder that draws random numbers must not disturb the caller's
        with torch.random.fork_rng(devices=devices):
            return output_distribution(evaluation_copy(self.decoder), self.prior)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one output."""
        try:
            return tuple(self.module.output_shape)  # type: ignore[arg-type]
        except (AttributeError, ModelError):
            return tuple(self.outputs.event_shape)

    @cached_property
    def discrete(self) -> bool:
        """Whether outputs are discrete, so that continuous inputs cannot be solved for them.

        A module that computes :meth:`GenerativeModel.observed` despite such a decoder, for example as its mean, is
        continuous.
        """
        declared = getattr(self.module, "discrete", None)
        if isinstance(declared, bool):
            return declared
        return _discrete_support(self.outputs) and not self._is_function

    @property
    def _is_function(self) -> bool:
        """Whether ``observed(u)`` is defined and not refused."""
        if not isinstance(self.module, GenerativeModel):
            return False
        try:
            frozen = evaluation_copy(self.module)
            like = reference_tensor(frozen)
            with torch.no_grad():
                frozen.observed(torch.zeros(frozen.input_density.dim, dtype=like.dtype, device=like.device))
        except (ModelError, NotImplementedError):
            return False
        return True

    def encode(self, x: Tensor) -> Distribution:
        """``q(z | x)``: flat outputs ``[..., Dx]`` to a distribution over ``[..., Dz]``.

        Raises:
            ModelError: the module has no encoder.
        """
        if self.encoder is None:
            raise ModelError(
                f"a {type(self.module).__name__} has no encoder: give it encoder(x), a distribution over z"
            )
        return self.encoder(x)

    def generate(self, n: int, seed: int) -> GeneratedImages:
        """``n`` outputs from the model itself, in its dtype and on its device, by the decoder in evaluation mode.

        Raises:
            ArgumentError: ``n`` is not an integer >= 1, or the seed not one >= 0.
            ModelError: the decoder is in training mode, and cannot be copied.
        """
        n, seed = whole_number("generate", "n", n), random_seed("generate", seed)
        like = reference_tensor(self.module)
        rng = torch.Generator(like.device).manual_seed(seed)
        z = self.prior.sample((n,), generator=rng, dtype=like.dtype, device=like.device)
        with torch.no_grad():
            likelihood = in_evaluation(self.decoder)(z)
            if isinstance(base_distribution(likelihood), Bernoulli):
                x = torch.bernoulli(likelihood.mean, generator=rng)
            else:
                # distributions draw from the global generators
                with torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
                    # not the seed itself, which would make the noise of the same numbers as z
                    torch.manual_seed(int(torch.randint(2**62, (), generator=rng, device=like.device)))
                    x = likelihood.sample()
        return GeneratedImages(x.reshape(n, *self.output_shape), z)


def is_discrete(module: object) -> bool:
    """Whether a module has a prior and a decoder of discrete outputs, and is not continuous despite them."""
    try:
        return LatentVariableModel.of(module).discrete
    except ModelError:
        return False


def output_distribution(decoder: nn.Module, prior: InputDensity) -> Distribution:
    """The distribution that a decoder returns for one row of zeros.

    Raises:
        ModelError: it rejects such latents, or does not return a distribution of one event.
    """
    name, like = type(decoder).__name__, reference_tensor(decoder)
    try:
        with torch.no_grad():
            likelihood = decoder(torch.zeros(prior.dim, dtype=like.dtype, device=like.device))
    except Exception as error:
        raise ModelError(f"{name} fails for latents of {prior.dim} dimensions, the prior's: {cause(error)}") from error
    if not isinstance(likelihood, Distribution):
        raise ModelError(
            f"{name} returns a {type(likelihood).__name__}, not a torch.distributions.Distribution: wrap its outputs, "
            "Independent(Bernoulli(logits=...), 1); or give a network noise, "
            "dgm.condition(generators.from_module(net, latent=D), images, noise=sd)"
        )
    if likelihood.batch_shape:
        raise ModelError(
            f"{name} returns {tuple(likelihood.batch_shape)} distributions for one latent: make the pixels one event "
            "with torch.distributions.Independent"
        )
    return likelihood


def base_distribution(likelihood: Distribution) -> Distribution:
    """The distribution of single pixels."""
    return likelihood.base_dist if isinstance(likelihood, Independent) else likelihood


def _discrete_support(likelihood: Distribution) -> bool:
    try:
        return bool(getattr(likelihood.support, "is_discrete", False))
    except NotImplementedError:
        return False


class MeanOfDecoder(GenerativeModel):
    """``x = E[x | z]``: the mean of a decoder, which is differentiable even if its outputs are discrete.

    Args:
        model: the latent variable model.
    """

    def __init__(self, model: LatentVariableModel):
        super().__init__()
        self.decoder = model.decoder
        self.output_shape = model.output_shape
        self.input_density = model.prior
        self.training = _is_training(model.decoder)

    def observed(self, u):
        return self.decoder(u).mean.flatten(u.ndim - 1)


class NormalOutputs(DirectedModel):
    """``x = mean(z) + sd(z) n``, ``n ~ N(0, I)``: a decoder of independent normal outputs as a generative model.

    Args:
        model: the latent variable model.
    """

    structure = "independent"

    def __init__(self, model: LatentVariableModel):
        super().__init__()
        self.decoder = model.decoder
        self.output_shape = model.output_shape
        self.training = _is_training(model.decoder)
        self.global_density = model.prior
        self.local_density = StandardNormal(torch.Size(model.output_shape).numel())

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        normal = base_distribution(self.decoder(z["z"]))
        mean, sd = (part.flatten(z["z"].ndim - 1) for part in (normal.mean, normal.stddev))
        return mean + sd * u2


def as_generative_model(module: object) -> GenerativeModel:
    """The module itself or, if it has a prior and a decoder of normal outputs, these as a generative model.

    Raises:
        ModelError: it is neither, or lacks what conditioning needs.
    """
    try:
        model = None if isinstance(module, GenerativeModel) else LatentVariableModel.of(module)
    except ModelError:
        # validate() names the fault
        model = None
    if model is not None:
        outputs = base_distribution(model.outputs)
        if isinstance(outputs, Normal):
            return NormalOutputs(model)
        name, kind = type(module).__name__, type(outputs).__name__
        raise ModelError(
            f"the decoder of {name} gives a {kind}, and conditioning takes Normal outputs or discrete ones: "
            "generators.LatentPosterior(model.decoder, images, model.prior) is the posterior of its latents, and "
            "log_evidence((model, images)) takes it as it is"
        )
    validate(module)
    return module  # type: ignore[return-value]


def _is_training(module: nn.Module) -> bool:
    """Whether any part is in training mode; only the flag is copied: ``train()`` would change the caller's module."""
    return any(getattr(part, "training", False) for part in module.modules())
