"""``condition()``: a generative model and an observation become a problem to sample."""

from typing import overload

import torch
from torch import nn

from ..errors import ArgumentError, ObservationError, cause
from ..models import DirectedModel, GenerativeModel, validate
from .faults import (
    check_mode,
    check_outputs,
    check_randomness,
    check_range,
    check_rows,
    check_structure,
    check_values,
    device_of,
    frozen_copy,
    prior_draws,
)
from .fibre import Fibre
from .observations import Bound
from .observations import observe as as_observation
from .reduced import observed_model
from .soft import InputPosterior

__all__ = ["bind", "condition"]


@overload
def condition(
    model: GenerativeModel,
    observed,
    *,
    observe=...,
    tolerance: None = ...,
    dtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> Fibre: ...
@overload
def condition(
    model: GenerativeModel,
    observed,
    *,
    observe=...,
    tolerance: float,
    dtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> InputPosterior: ...
def condition(
    model: GenerativeModel,
    observed,
    *,
    observe=None,
    tolerance: float | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Fibre | InputPosterior:
    """Condition a generative model on an observation, exactly: ``{u : A(g_x(u)) = y}``.

    Args:
        model: works in here as a frozen, cast, evaluation-mode copy; the model itself is not changed.
        observed: the data y. With ``pixels(mask)`` or no operator, complete outputs ``[*batch, *output_shape]``
            whose hidden entries are ignored (NaN allowed); with a callable operator ``[*batch, *y_shape]``.
        observe: the observation operator A: ``pixels(mask)``, a callable on ``[..., *output_shape]``, or None for
            the complete output.
        tolerance: None for the exact posterior; a number eps for the ABC posterior with a Gaussian kernel of that
            standard deviation.
        dtype: floating-point type of the computation.
        device: None for the model's own.

    Returns:
        a :class:`Fibre`, or with ``tolerance`` a :class:`InputPosterior`; ``batch_shape`` comes from the data.

    Raises:
        ModelError: the model cannot be conditioned as it is.
        ObservationError: the data or the mask do not fit the model.
    """
    validate(model)
    if dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"dtype={dtype}: conditioning needs torch.float64, or torch.float32 with less precision")
    try:
        device = torch.device(device) if device is not None else device_of(model)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device={device}: {cause(error)}") from error
    frozen = frozen_copy(model, dtype, device)
    frozen.output_shape = tuple(frozen.output_shape)
    u = prior_draws(frozen, 2, dtype, device)
    x = check_outputs(frozen, u)
    check_randomness(frozen, u)
    check_mode(model, frozen, u)
    check_rows(frozen, u)
    check_range(frozen, x)
    operator, values = bind(frozen, observed, observe, dtype, device)
    reduced = observed_model(frozen, operator)
    n_outputs = values.shape[-1]
    if reduced.units is not None:
        assert isinstance(frozen, DirectedModel)
        check_structure(frozen, dtype, device)
    if tolerance is not None:
        return InputPosterior(reduced, values, tolerance)
    check_values(frozen, operator, values)
    if n_outputs > reduced.dim:
        raise ObservationError(
            f"{n_outputs} observed values but only {reduced.dim} inputs: no exact posterior exists; observe fewer, "
            "give the model output noise with WithNoise(model, sd=...), or pass tolerance="
        )
    return Fibre(reduced, values)


def bind(frozen: GenerativeModel, observed, observe, dtype: torch.dtype, device: torch.device) -> Bound:
    """What ``condition(observed=..., observe=...)`` means for a model: an operator and values ``[*batch, Dy]``.

    Raises:
        ObservationError: the data or the mask do not fit the model.
    """
    try:
        y = torch.as_tensor(observed).detach().to(device=device, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObservationError(f"observed, a {type(observed).__name__}, is no array of numbers: {error}") from error
    if isinstance(observe, nn.Module):
        observe = frozen_copy(observe, dtype, device)
    operator, values = as_observation(observe).bind(y, frozen)
    if values.numel() == 0:
        raise ObservationError(f"observed has shape {tuple(y.shape)}: there is nothing in it to condition on")
    return Bound(operator, values)
