"""``condition()``: a generative model and an observation become a problem to sample."""

import copy
from typing import TypeVar, overload

import torch
from torch import Tensor, nn

from .errors import ArgumentError, ModelError, ObservationError
from .fibre import Fibre
from .jacobian import push_forward
from .model import DirectedModel, GenerativeModel, validate
from .observe import observe as as_observation
from .observed import observed_model
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
    if reduced.units is not None:
        assert isinstance(frozen, DirectedModel)
        _check_structure(frozen, dtype, device)
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
        except ModelError:
            # the model's own word on why it cannot be conditioned
            raise
        except Exception as error:
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


def _check_structure(model: DirectedModel, dtype: torch.dtype, device: torch.device) -> None:
    """``J [0, r]`` is ``D_i r_i`` in every unit i, for a random r, when units share no local inputs."""
    name, units = type(model).__name__, model.units
    assert units is not None
    n_local, n_outputs = model.local_density.dim, torch.Size(model.output_shape).numel()
    whole = n_local % units.inputs == 0 and n_outputs % units.outputs == 0
    if not whole or n_local // units.inputs != n_outputs // units.outputs:
        raise ModelError(
            f"{name} declares structure {model.structure!r} with {n_local} local inputs in units of {units.inputs} for "
            f"{n_outputs} outputs in units of {units.outputs}: as many units of inputs as of outputs are needed, or "
            "structure = 'dense'"
        )
    # a simulator may overflow at most of its prior draws: the tamest of many shows its structure best
    u = _prior_draws(model, 16, dtype, device)
    x = model.observed(u)
    tamest = x.abs().amax(-1).nan_to_num(nan=torch.inf).argmin().unsqueeze(0)
    u, x = u[tamest], x[tamest]
    markov = model.structure == "markov"
    if markov:
        try:
            miss = (model.one_step_ahead(u, x) - x).abs().max() / x.abs().max().clamp_min(1)
        except Exception as error:
            raise ModelError(
                f"{name} declares structure 'markov', but transition() fails for all steps at once: "
                f"{_first_line(error)} (states have one shape, and leading dimensions broadcast)"
            ) from error
        if miss > torch.finfo(dtype).eps ** 0.75:
            raise ModelError(
                f"{name} declares structure 'markov', but its transitions from the observed states miss the simulated "
                f"ones (by {miss.item():.3g} of the largest): let simulate() come from transition(), or declare "
                "structure = 'dense'"
            )
    rng = torch.Generator(device).manual_seed(1)
    direction = torch.randn(n_local, generator=rng, dtype=dtype, device=device)
    u1, u2 = model.split(u)

    def local(v: Tensor) -> Tensor:
        inputs = torch.cat([u1.expand(*v.shape[:-1], -1), v], -1)
        return model.one_step_ahead(inputs, x) if markov else model.observed(inputs)

    one_each = torch.eye(units.inputs, dtype=dtype, device=device).repeat(1, n_local // units.inputs)
    _, products = push_forward(local, u2, torch.cat([one_each, direction.unsqueeze(0)]))
    blocks, product = products[:-1, 0], products[-1, 0]
    own = direction.unflatten(-1, (-1, units.inputs)).repeat_interleave(units.outputs, 0)
    error = (product - (blocks * own.mT).sum(0)).abs().max()
    if error > 1e3 * torch.finfo(dtype).eps ** 0.75 * blocks.abs().max():
        what = "outputs" if model.structure == "independent" else "steps"
        raise ModelError(
            f"{name} declares structure {model.structure!r}, but its {what} depend on each other's local inputs "
            f"(directional derivatives differ by {error.item():.3g}): declare larger units (unit_inputs, "
            "unit_outputs), or structure = 'dense'"
        )
