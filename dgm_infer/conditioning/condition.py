"""``condition()``: a generative model and an observation become a problem to sample."""

import warnings
from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch import Tensor, nn

from ..arguments import available_device, floating_type, numbers, positive
from ..errors import ArgumentError, ObservationError, reported_as
from ..models import (
    DiscreteModel,
    GenerativeModel,
    LatentVariableModel,
    MeanOfDecoder,
    as_generative_model,
    is_discrete,
    reference_tensor,
)
from .abc_kernels import InputPosterior
from .derivatives import check_agreement, check_atoms, check_flatness, check_once, tame_draws
from .faults import (
    STRUCTURE_DRAWS,
    check_declared,
    check_gradient,
    check_log_factor,
    check_mode,
    check_operator,
    check_outputs,
    check_randomness,
    check_range,
    check_rows,
    check_values,
    device_of,
    frozen_copy,
    prior_draws,
)
from .fibre import Fibre
from .latent import LatentPosterior, check_decoder
from .magnitude import check_tolerance, constraint_units, far_data
from .measurement import ObservedMeasurement
from .observations import Bound, Pixels
from .observations import observe as as_observation
from .observed import observed_model
from .operators import Everything, Operator, Selection, as_operator

__all__ = ["bind", "condition", "pixels_only"]

# Prior draws at which derivatives are compared with differences.
_DRAWS = 8
# Observed values up to which they are compared with outputs that repeat.
_MOST = 2**20

Model = TypeVar("Model", bound=GenerativeModel)


@overload
def condition(
    model: DiscreteModel,
    observed,
    *,
    observe=...,
    tolerance: None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
) -> LatentPosterior: ...
@overload
def condition(
    model: nn.Module,
    observed,
    *,
    observe=...,
    noise: float | None = ...,
    tolerance: None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
) -> Fibre: ...
@overload
def condition(
    model: nn.Module,
    observed,
    *,
    observe=...,
    tolerance: float,
    kernel: str = ...,
    distance: Callable[[Tensor, Tensor], Tensor] | None = ...,
    summaries: Callable[[Tensor], Tensor] | None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
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
        a :class:`Fibre`; with ``tolerance`` an :class:`InputPosterior`; if outputs are discrete a
        :class:`LatentPosterior`. ``batch_shape`` comes from the data.

    Raises:
        ModelError: the model cannot be conditioned as it is.
        ObservationError: the data or the mask do not fit the model.
        ArgumentError: an unsuitable dtype, device or noise, or a tolerance or noise although outputs are discrete.
    """
    if tolerance is None and (kernel != "gaussian" or distance is not None or summaries is not None):
        raise ArgumentError("condition(kernel=, distance=, summaries=) describe an ABC posterior: give tolerance= too")
    if noise is not None:
        noise = positive("condition", "noise", noise)
        if tolerance is not None:
            raise ArgumentError(f"condition(noise={noise:g}): tolerance= is the width of such noise, omit one of them")
        if is_discrete(model):
            raise ArgumentError(f"condition(noise={noise:g}): outputs are discrete, and have no such noise: omit it")
    if is_discrete(model):
        return _latent_posterior(LatentVariableModel.of(model), observed, observe, tolerance, dtype, device)
    given, model = model, as_generative_model(model)
    dtype, device = _computed_in(model, torch.float64 if dtype is None else dtype, device)
    frozen = _checked_copy(model, dtype, device)
    # the mean of discrete outputs may have none: what is differentiated there is the likelihood
    has_gradient = check_gradient(frozen, prior_draws(frozen, 2, dtype, device), needed=tolerance is None)
    operator, values = bind(frozen, observed, observe, dtype, device)
    check_operator(frozen, operator, values.ndim - 1, prior_draws(frozen, 2, dtype, device))
    n_outputs = values.shape[-1]
    # without the noise of the measurement, which hides that outputs are constant
    plain = frozen, operator
    if noise is None:
        reduced = observed_model(frozen, operator)
    else:
        reduced = ObservedMeasurement.of(frozen, operator, noise, n_outputs)
        frozen, operator = reduced.model, reduced.operator
    u = prior_draws(frozen, STRUCTURE_DRAWS, dtype, device)
    reduced.check_declaration(u)
    if has_gradient:
        # a shipped operator has no attributes that could differ
        which = observe if callable(observe) and not isinstance(plain[1], Everything | Selection) else None
        check_once(given, which, lambda: _check_derivatives(*plain, values))
    with torch.no_grad():
        x = frozen.observed(u)
        far = far_data(frozen, operator, values, x)
    if far is not None and far.certain:
        raise ObservationError(far.words)
    if far is not None:
        warnings.warn(far.words, stacklevel=2)
    if tolerance is not None:
        if distance is None and summaries is None:
            # with either, the tolerance is in other units than the outputs
            check_tolerance(operator, values, x, positive("condition", "tolerance", tolerance))
        return InputPosterior(
            reduced,
            values,
            tolerance,
            kernel=kernel,
            distance=distance,
            summaries=summaries,
            has_gradient=has_gradient,
        )
    check_values(frozen, operator, values)
    if noise is None and values.numel() <= _MOST:
        with torch.no_grad():
            check_atoms(operator(x.reshape(len(x), *[1] * (values.ndim - 1), -1)), values, type(frozen).__name__)
    if n_outputs > reduced.dim:
        raise ObservationError(
            f"{n_outputs} observed values but only {reduced.dim} inputs: no exact posterior exists; observe fewer, "
            "allow for noise, condition(..., noise=sd) or WithNoise(model, sd=...), or pass tolerance="
        )
    return Fibre(reduced.measured_in(constraint_units(operator, values, x)), values)


def _check_derivatives(frozen: GenerativeModel, operator: Operator, values: Tensor) -> None:
    """Raise :class:`ModelError` unless the derivatives that sampling uses are those of the outputs, and of the factor.

    One problem stands for all.
    """
    n_batch = 0 if operator.data else values.ndim - 1
    reduced, data = observed_model(frozen, operator.first()), values.reshape(-1, values.shape[-1])[0]
    name = type(frozen).__name__

    def residual(v: Tensor) -> Tensor:
        return reduced.residual(v.reshape(len(v), *[1] * n_batch, -1), data).flatten(1)

    u = tame_draws(reduced, _DRAWS, data, values, residual)
    if not len(u):
        return
    check_flatness(check_agreement(residual, u, name), name)
    if frozen.has_log_factor:
        check_agreement(lambda v: frozen.log_factor(v).unsqueeze(-1), u, f"{name}.log_factor")


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
    frozen = _checked_copy(mean, dtype, device)
    selection, values = bind(frozen, observed, observation, dtype, device)
    assert isinstance(selection, Everything | Selection)
    shape = torch.Size(frozen.output_shape)
    check_once(model.module, None, lambda: check_decoder(frozen.decoder, model.prior))
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
    return dtype, device_of(model) if device is None else available_device("condition", "device", device)


def _checked_copy(model: Model, dtype: torch.dtype, device: torch.device) -> Model:
    """A frozen copy of a model that is a deterministic function of each row of its inputs."""
    frozen = frozen_copy(model, dtype, device)
    check_declared(frozen)
    u = prior_draws(frozen, 2, dtype, device)
    x = check_outputs(frozen, u)
    check_log_factor(frozen, u)
    check_randomness(frozen, u)
    check_mode(model, frozen, u)
    check_rows(frozen, u)
    check_range(frozen, x)
    return frozen


def bind(frozen: GenerativeModel, observed, observe, dtype: torch.dtype, device: torch.device) -> Bound:
    """The operator and values ``[*batch, Dy]`` that ``condition(observed=..., observe=...)`` specifies for a model.

    Raises:
        ObservationError: the data or the mask do not fit the model.
    """
    with reported_as(ObservationError):
        numbers("condition", "observed", observed)
    y = torch.as_tensor(observed).detach().to(device=device, dtype=dtype)
    if isinstance(observe, nn.Module):
        observe = frozen_copy(observe, dtype, device)
    operator, values = as_observation(observe).bind(y, frozen)
    operator = as_operator(operator)
    if values.numel() == 0:
        raise ObservationError(f"observed has shape {tuple(y.shape)}: the observation is empty")
    return Bound(operator, values)
