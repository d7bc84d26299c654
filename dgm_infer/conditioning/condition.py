"""``condition()``: a generative model and an observation become a problem to sample."""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor, nn

from ..arguments import array, available_device, choice, context, digits, floating_type, positive
from ..arguments.values import shown
from ..errors import ArgumentError, ObservationError, reported_as
from ..models import (
    DiscreteModel,
    GenerativeModel,
    LatentVariableModel,
    MeanOfDecoder,
    as_generative_model,
    frozen_copy,
    is_discrete,
    reference_tensor,
)
from .abc_kernels import KERNELS, InputPosterior
from .checks import APPROXIMATE_CHECKS, DATA_CHECKS, MODEL_CHECKS, enforce
from .faults import check_once
from .fibre import Fibre
from .latent import LatentPosterior, check_decoder
from .observations import Bound, Pixels
from .observations import observe as as_observation
from .observed import constraint_units, made_by
from .operators import Everything, Function, Operator, Selection
from .subject import LIMITS, Subject


@overload
def condition(
    model: DiscreteModel, observed, *, observe=..., tolerance: None = ..., dtype=..., device=...
) -> LatentPosterior: ...
@overload
def condition(
    model: nn.Module, observed, *, observe=..., noise=..., tolerance: None = ..., dtype=..., device=...
) -> Fibre: ...
@overload
def condition(
    model: nn.Module,
    observed,
    *,
    observe=...,
    tolerance: float,
    kernel: str = ...,
    distance=...,
    summaries=...,
    dtype=...,
    device=...,
) -> InputPosterior: ...
def condition(
    model,
    observed,
    *,
    observe=None,
    noise: float | None = None,
    tolerance: float | None = None,
    kernel: str = "gaussian",
    distance: Callable[[Tensor, Tensor], Tensor] | None = None,
    summaries: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Fibre | InputPosterior | LatentPosterior:
    """Condition a generative model on an observation, exactly: ``{u : A(g_x(u)) = y}``.

    Continuous inputs cannot be solved for discrete outputs. The result is then the posterior ``p(z | y)`` of the
    latents of the model's decoder, given the pixels selected by ``pixels(mask)``.

    Args:
        model: a :class:`GenerativeModel`, or a module with the parts of a :class:`LatentVariableModel`. It is used as
            a frozen, cast, evaluation-mode copy; the model itself is not changed.
        observed: the data y. With ``pixels(mask)`` or no operator, complete outputs ``[*batch, *output_shape]``
            whose hidden entries are ignored (NaN allowed); with a callable operator ``[*batch, *y_shape]``.
        observe: the observation operator A: ``pixels(mask)``, a callable on ``[..., *output_shape]``, or None for
            the complete output.
        noise: standard deviation of independent normal noise of the measurement, ``y = A(g_x(u)) + noise n``, after
            the operator, where ``WithNoise`` has it before; completions are ``g_x(u)``. None for no such noise.
        tolerance: None for the exact posterior; a number eps for the ABC posterior with a kernel of that width and of
            height 1, by which its evidence is not a density of the data. The model then needs no derivative.
        kernel: with a tolerance, ``"gaussian"`` of that standard deviation, or ``"uniform"`` or ``"epanechnikov"``,
            which are 0 beyond it.
        distance: with a tolerance, the distance of outputs from the data, ``[..., K], [*batch, K] -> [...]``; None for
            the Euclidean one.
        summaries: with a tolerance, a function of the flat values of A whose results are compared,
            ``[..., Dy] -> [..., K]``; None for the values themselves.
        dtype: floating-point type of the computation. None for float64, which exact conditioning needs, or the
            decoder's own if outputs are discrete.
        device: None for the model's own.

    Returns:
        a ``Fibre``; with ``tolerance`` an ``InputPosterior``; if outputs are discrete a
        ``LatentPosterior``. ``batch_shape`` comes from the data.

    Raises:
        ModelError: the model cannot be conditioned as it is.
        ObservationError: the data or the mask do not fit the model.
        ArgumentError: an unsuitable dtype, device or noise, or a tolerance or noise although outputs are discrete.
    """
    context("condition")
    choice("condition", "kernel", kernel, tuple(KERNELS))
    if tolerance is None and (kernel != "gaussian" or distance is not None or summaries is not None):
        raise ArgumentError("condition(kernel=, distance=, summaries=) describe an ABC posterior: give tolerance= too")
    if noise is not None:
        noise = checked_noise("condition", noise)
        if tolerance is not None:
            raise ArgumentError(f"condition(noise={noise:g}): tolerance= is the width of such noise, omit one of them")
        if is_discrete(model):
            raise ArgumentError(f"condition(noise={noise:g}): outputs are discrete, and have no such noise: omit it")
    if is_discrete(model):
        return _latent_posterior(LatentVariableModel.of(model), observed, observe, tolerance, dtype, device)
    given, model = model, as_generative_model(model)
    dtype, device = _computed_in(model, torch.float64 if dtype is None else dtype, device)
    subject = Subject.of(model, dtype, device, needs_gradient=tolerance is None)
    check_once(given, "model", lambda: enforce(subject, MODEL_CHECKS))
    bound = bind(subject.model, observed, observe, dtype, device)
    # a shipped operator has no attributes that could differ
    own = observe if callable(observe) and not isinstance(bound.operator, Everything | Selection) else None
    subject.observe(*bound, noise).source = given, own
    enforce(subject, DATA_CHECKS if tolerance is None else APPROXIMATE_CHECKS)
    reduced, values = subject.reduced, bound.values
    if tolerance is not None:
        if distance is None and summaries is None:
            # with either, the tolerance is in other units than the outputs
            _check_tolerance(subject, positive("condition", "tolerance", tolerance))
        return InputPosterior(
            reduced,
            values,
            tolerance,
            kernel=kernel,
            distance=distance,
            summaries=summaries,
            has_gradient=subject.has_gradient,
        )
    return Fibre(reduced.measured_in(constraint_units(reduced.operator, values, subject.made)), values)


def checked_noise(call: str, noise) -> float:
    """The standard deviation of a measurement's noise, one number.

    Raises:
        ArgumentError: it is not positive, or one for each output.
    """
    if getattr(noise, "ndim", 0) > 0 or isinstance(noise, list | tuple):
        raise ArgumentError(
            f"{call}(noise={shown(noise)}): must be one positive number; where noise differs between outputs, give the "
            "model noise, WithNoise(model, sd=...) of their shape"
        )
    return positive(call, "noise", noise)


def _check_tolerance(subject: Subject, tolerance: float) -> None:
    """Raise :class:`ArgumentError` for the tolerance of an ABC kernel that is as good as infinite at prior draws."""
    assert subject.values is not None
    with torch.no_grad():
        misfit = (made_by(subject.reduced.operator, subject.values, subject.made) - subject.values).norm(dim=-1)
    misfit = misfit[misfit.isfinite()]
    if len(misfit) and tolerance > LIMITS.blind * misfit.max():
        raise ArgumentError(
            f"condition(tolerance={tolerance:g}): outputs at prior draws miss the data by {misfit.max().item():.3g} at "
            "most, so that the data would not matter; use a tolerance well below that"
        )


def _latent_posterior(
    model: LatentVariableModel, observed, observe, tolerance: float | None, dtype: torch.dtype | None, device
) -> LatentPosterior:
    name = type(model.module).__name__
    if tolerance is not None:
        raise ArgumentError(
            f"condition(tolerance={tolerance}): the outputs of this {name} are discrete, and the posterior of its "
            "latents is exact: omit tolerance"
        )
    observation = pixels_only(observe, name)
    mean = MeanOfDecoder(model)
    dtype, device = _computed_in(mean, reference_tensor(mean).dtype if dtype is None else dtype, device)
    subject = Subject.of(mean, dtype, device, needs_gradient=False)
    # the mean of discrete outputs may have no derivative: what is differentiated there is the likelihood
    check_once(model.module, "model", lambda: enforce(subject, MODEL_CHECKS))
    frozen = subject.model
    assert isinstance(frozen, MeanOfDecoder)
    selection, values = bind(frozen, observed, observation, dtype, device)
    assert isinstance(selection, Everything | Selection)
    shape = torch.Size(frozen.output_shape)
    check_once(model.module, "decoder", lambda: check_decoder(frozen.decoder, model.prior))
    return LatentPosterior.of_pixels(frozen.decoder, model.prior, shape, values, selection.index)


def pixels_only(observe, name: str) -> Pixels:
    """The observed pixels that ``condition(observe=...)`` selects for a model of discrete outputs.

    Raises:
        ObservationError: it is another operator.
    """
    observation = as_observation(observe)
    if not isinstance(observation, Pixels):
        raise ObservationError(
            f"observe={type(observation).__name__.lower()}: the outputs of this {name} are discrete: only "
            "pixels(mask) can be observed"
        )
    return observation


def _computed_in(model: GenerativeModel, dtype: torch.dtype, device) -> tuple[torch.dtype, torch.device]:
    dtype = floating_type("condition", "dtype", dtype)
    return dtype, reference_tensor(model).device if device is None else available_device("condition", "device", device)


def bind(frozen: GenerativeModel, observed, observe, dtype: torch.dtype, device: torch.device) -> Bound:
    """The operator and values ``[*batch, Dy]`` that ``condition(observed=..., observe=...)`` specifies for a model.

    Raises:
        ObservationError: the data or the mask do not fit the model.
    """
    with reported_as(ObservationError):
        y = array("condition", "observed", observed, digits(observed)).to(device=device, dtype=dtype)
    if isinstance(observe, nn.Module):
        observe = frozen_copy(observe, dtype, device)
    operator, values = as_observation(observe).bind(y, frozen)
    if values.numel() == 0:
        raise ObservationError(f"observed has shape {tuple(y.shape)}: the observation is empty")
    # an observation of a user's own may give any function
    return Bound(operator if isinstance(operator, Operator) else Function(operator), values)
