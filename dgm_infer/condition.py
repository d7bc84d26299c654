"""``condition()``: a generative model and an observation become a problem to sample."""

import copy
from typing import TypeVar, overload

import torch
from torch import Tensor, nn

from .errors import ArgumentError, ModelError, ObservationError
from .fibre import Fibre
from .jacobian import push_forward
from .model import DirectedModel, GenerativeModel, validate
from .observe import ObservedUnits, observed_model
from .observe import observe as as_observation
from .target import InputPosterior

__all__ = ["condition"]

Module = TypeVar("Module", bound=nn.Module)


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
        device = torch.device(device) if device is not None else _device(model)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device={device}: {_first_line(error)}") from error
    frozen = _frozen(model, dtype, device)
    frozen.output_shape = tuple(frozen.output_shape)
    _check_outputs(frozen, dtype, device)
    if model.training:
        _check_mode(model, frozen, dtype, device)
    try:
        y = torch.as_tensor(observed).detach().to(device=device, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObservationError(f"observed, a {type(observed).__name__}, is no array of numbers: {error}") from error
    if isinstance(observe, nn.Module):
        observe = _frozen(observe, dtype, device)
    operator, values = as_observation(observe).bind(y, frozen)
    if values.numel() == 0:
        raise ObservationError(f"observed has shape {tuple(y.shape)}: there is nothing in it to condition on")
    reduced = observed_model(frozen, operator)
    n_outputs = values.shape[-1]
    if isinstance(reduced, ObservedUnits):
        _check_independence(reduced.model, dtype, device)
    if tolerance is not None:
        return InputPosterior(reduced, values, tolerance)
    if n_outputs > reduced.dim:
        raise ObservationError(
            f"{n_outputs} observed values but only {reduced.dim} inputs: no exact posterior exists; observe fewer, "
            "give the model output noise with WithNoise(model, sd=...), or pass tolerance="
        )
    return Fibre(reduced, values)


def _frozen(module: Module, dtype: torch.dtype, device: torch.device) -> Module:
    """A copy in evaluation mode, in this type and place, without gradients of its parameters."""
    try:
        return copy.deepcopy(module).to(device=device, dtype=dtype).eval().requires_grad_(False)
    except RuntimeError as error:
        raise ModelError(
            f"{type(module).__name__} cannot be copied ({_first_line(error)}): keep tensors that are computed from "
            "others out of its attributes"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _device(model: GenerativeModel) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _prior_draws(model: GenerativeModel, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    rng = torch.Generator(device).manual_seed(0)
    return model.input_density.sample((n,), generator=rng, dtype=dtype, device=device)


def _check_mode(model: GenerativeModel, frozen: GenerativeModel, dtype: torch.dtype, device: torch.device) -> None:
    """Dropout and batch statistics make another function of a model in training mode than of its frozen copy."""
    # training mode may update running statistics, so a copy is run
    training = copy.deepcopy(model).to(device=device, dtype=dtype)
    u = _prior_draws(frozen, 4, dtype, device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        difference = (training.observed(u) - frozen.observed(u)).nan_to_num(0, 0, 0).abs().max().item()
    if difference > 0:
        raise ModelError(
            f"the generator is in training mode and its outputs differ from evaluation mode by up to {difference:.3g} "
            "(dropout or batch statistics): call model.eval() first"
        )


def _check_outputs(model: GenerativeModel, dtype: torch.dtype, device: torch.device) -> None:
    size = torch.Size(model.output_shape).numel()
    u = _prior_draws(model, 2, dtype, device)
    name = type(model).__name__
    # a model with randomness of its own must not disturb the caller's
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            first, second = model.observed(u), model.observed(u)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ModelError(
                f"{name}.observed fails for inputs of shape {tuple(u.shape)} and type {dtype}: {_first_line(error)} "
                "(tensors that the model computes with must be its parameters or buffers)"
            ) from error
    if tuple(first.shape) != (2, size):
        raise ModelError(
            f"{name}.observed maps inputs of shape {tuple(u.shape)} to outputs of shape {tuple(first.shape)}; "
            f"expected (2, {size}), flat, for output_shape {tuple(model.output_shape)} (set output_shape to the shape "
            "of one output)"
        )
    if first.dtype != dtype:
        raise ModelError(
            f"{name}.observed gives {first.dtype} for inputs of {dtype}: let it compute in its inputs' type"
        )
    # a simulator may overflow at a prior draw: the search for starting points draws again
    difference = (first - second).nan_to_num(0, 0, 0).abs().max().item()
    if difference > 0:
        raise ModelError(
            f"{name}.observed gives different outputs for the same inputs (by {difference:.3g}): its hidden "
            "randomness must become an input"
        )


def _check_independence(model: DirectedModel, dtype: torch.dtype, device: torch.device) -> None:
    """``J [0, r] = d * r`` for every r when output i depends on ``u2_i`` alone."""
    u = _prior_draws(model, 1, dtype, device)
    n_local = model.local_density.dim
    if n_local != torch.Size(model.output_shape).numel():
        raise ModelError(
            f"{type(model).__name__} declares structure 'independent' with {n_local} local inputs for "
            f"{torch.Size(model.output_shape).numel()} outputs: one each is needed, or structure = 'dense'"
        )
    rng = torch.Generator(device).manual_seed(1)
    direction = torch.randn(1, n_local, generator=rng, dtype=dtype, device=device)
    u1, u2 = model.split(u)

    def local(v: Tensor) -> Tensor:
        return model.simulate(model.global_latents(u1), v)

    tangents = torch.cat([torch.ones_like(direction), direction])
    _, (diagonal, product) = push_forward(local, u2, tangents)
    error = (product - diagonal * direction).abs().max()
    if error > 1e3 * torch.finfo(dtype).eps ** 0.75 * diagonal.abs().max():
        raise ModelError(
            f"{type(model).__name__} declares structure 'independent', but its outputs depend on each other's local "
            f"inputs (directional derivatives differ by {error.item():.3g}): declare structure = 'dense'"
        )
