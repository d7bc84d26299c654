"""Faults that keep a model or its data from being conditioned: one cheap test per fault, all run by ``condition()``.

Each test raises an error that names its fault; :func:`dgm_infer.check` collects them and adds more expensive checks.
"""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..arguments import interval, sizes
from ..errors import ModelError, ObservationError, cause, reported_as
from ..models import GenerativeModel, copied, evaluation_copy
from .operators import Operator

__all__ = [
    "STRUCTURE_DRAWS",
    "check_declared",
    "check_gradient",
    "check_log_factor",
    "check_mixing",
    "check_mode",
    "check_operator",
    "check_outputs",
    "check_randomness",
    "check_range",
    "check_repeats",
    "check_rows",
    "check_values",
    "check_weights",
    "device_of",
    "frozen_copy",
    "prior_draws",
]

# Prior draws from which the check of a structure takes the tamest.
STRUCTURE_DRAWS = 16

Module = TypeVar("Module", bound=nn.Module)


def frozen_copy(module: Module, dtype: torch.dtype, device: torch.device) -> Module:
    """A copy in evaluation mode, with this dtype and device, whose parameters need no gradients.

    Raises:
        ModelError: it cannot be copied, or its weights are NaN or complex, or its buffers are complex.
    """
    check_weights(module)
    return evaluation_copy(module).to(device=device, dtype=dtype)


def check_weights(model: nn.Module) -> None:
    """Raises :class:`ModelError` if weights are NaN, or they or buffers complex, which a copy in a real type halves."""
    for name, buffer in model.named_buffers():
        if buffer.is_complex():
            raise ModelError(
                f"{type(model).__name__}: its buffer {name} is of {buffer.dtype}: must be real, such as "
                "torch.view_as_real(...)"
            )
    for name, weight in model.named_parameters():
        where = f"{type(model).__name__}: its weights {name}"
        if weight.is_complex():
            raise ModelError(f"{where} are of {weight.dtype}: must be real")
        lost = int(weight.isnan().sum())
        if lost:
            raise ModelError(
                f"{where} are NaN, {lost} of {weight.numel()}: its training diverged; load or train others"
            )


def device_of(model: GenerativeModel) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def prior_draws(model: GenerativeModel, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same ``n`` draws of ``p_u`` at every call, ``[n, Du]``."""
    rng = torch.Generator(device).manual_seed(0)
    return model.input_density.sample((n,), generator=rng, dtype=dtype, device=device)


def check_declared(model: GenerativeModel) -> None:
    """Raises :class:`ModelError` where ``output_shape`` or ``output_range`` are not a shape and a range; sets them so.

    Args:
        model: a frozen copy.
    """
    name = type(model).__name__
    with reported_as(ModelError):
        model.output_shape = sizes(name, "output_shape", model.output_shape, empty=True)
        if model.output_range is not None:
            model.output_range = interval(name, "output_range", model.output_range)


def check_gradient(model: GenerativeModel, u: Tensor, *, needed: bool = True) -> bool:
    """Whether outputs have derivatives.

    Raises:
        ModelError: they have none although they are needed.
    """
    try:
        with torch.enable_grad():
            has_gradient = model.observed(u.detach().clone().requires_grad_()).requires_grad
    except RuntimeError:
        # as of a simulator in NumPy, which takes no tensor that records derivatives
        has_gradient = False
    if needed and not has_gradient:
        raise ModelError(
            f"{type(model).__name__}.observed has no derivative: compute with torch's functions, without detach(), or "
            "pass tolerance= and a kernel that needs none"
        )
    return has_gradient


def check_log_factor(model: GenerativeModel, u: Tensor) -> None:
    """Raise :class:`ModelError` unless the log factor, if there is one, is a real number per input."""
    if not model.has_log_factor:
        return
    name = f"{type(model).__name__}.log_factor"
    try:
        with torch.enable_grad(), _own_random_numbers(u):
            factor = model.log_factor(u.detach().clone().requires_grad_())
    except Exception as error:
        raise ModelError(f"{name} fails for inputs of shape {tuple(u.shape)}: {cause(error)}") from error
    if isinstance(factor, Tensor) and factor.shape == u.shape[:-1] and not factor.is_complex():
        return
    what = f"type {type(factor).__name__}"
    if isinstance(factor, Tensor):
        what = str(factor.dtype) if factor.is_complex() else f"shape {tuple(factor.shape)}"
    raise ModelError(
        f"{name} gives {what} for inputs of shape {tuple(u.shape)}: must be one real number per input, "
        f"{tuple(u.shape[:-1])}"
    )


def check_outputs(model: GenerativeModel, u: Tensor) -> Tensor:
    """Outputs ``[n, Dx]`` at ``u [n, Du]``.

    Raises:
        ModelError: they cannot be computed, or have another shape or type.
    """
    size = torch.Size(model.output_shape).numel()
    name = type(model).__name__
    try:
        (x,) = _values(model.observed, u)
    except ModelError:
        # the model itself explains why it cannot be conditioned
        raise
    except Exception as error:
        raise ModelError(
            f"{name}.observed fails for inputs of shape {tuple(u.shape)} and type {u.dtype}: {cause(error)} "
            f"({_type_remedy(model, u, str(error))})"
        ) from error
    if tuple(x.shape) != (len(u), size):
        raise ModelError(
            f"{name}.observed maps inputs of shape {tuple(u.shape)} to outputs of shape {tuple(x.shape)}; "
            f"expected ({len(u)}, {size}), flat, for output_shape {tuple(model.output_shape)} (set output_shape to the "
            "shape of one output)"
        )
    if x.dtype != u.dtype:
        raise ModelError(f"{name}.observed gives {x.dtype} for inputs of {u.dtype}: compute in the dtype of the inputs")
    return x


def _type_remedy(model: GenerativeModel, u: Tensor, error: str) -> str:
    """What to change where tensors of different types meet: a copy converts parameters and buffers alone."""
    if not re.search(r"dtype|scalar type|same type", error):
        return "tensors used by the model must be its parameters or buffers"
    remedy = _own_type_remedy(model)
    if u.dtype == torch.float64 and _works_in_single(model, u):
        # as of layers that compute in float32 whatever they are given, and TorchScript with its weights frozen
        return f"{remedy}, or compute in float32: dgm.condition(..., dtype=torch.float32)"
    return remedy


def _works_in_single(model: GenerativeModel, u: Tensor) -> bool:
    try:
        (x,) = _values(copied(model).float().observed, u.float())
    except Exception:
        return False
    return x.dtype == torch.float32


def _own_type_remedy(model: nn.Module) -> str:
    plain = [
        f"{type(module).__name__}.{name}"
        for module in model.modules()
        for holder in (module, *type(module).__mro__)
        for name, value in vars(holder).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    if plain:
        return f"weights of another type than the inputs: register {', '.join(plain[:3])} as parameters or buffers"
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        return "weights of another type than the inputs: they are frozen into TorchScript, pass the module itself"
    if not any(True for _ in model.parameters()):
        return "weights of another type than the inputs: a function hides its network's weights, pass the module itself"
    return (
        "weights of another type than the inputs: let its code follow the type of its inputs, without float() or half()"
    )


def check_randomness(model: GenerativeModel, u: Tensor) -> None:
    """Raise :class:`ModelError` if two evaluations at ``u`` differ."""
    for name, function in _functions(model).items():
        check_repeats(function, u, f"{type(model).__name__}.{name}")


def check_repeats(function: Callable[[Tensor], Tensor], u: Tensor, name: str) -> None:
    """The same of any function."""
    first, second = _values(function, u, u)
    difference = _difference(first, second)
    # a GPU adds in another order each time
    rounding = 0.0 if u.device.type == "cpu" else torch.finfo(first.dtype).eps ** 0.75 * max(1e-3, _size(first))
    if difference > rounding:
        raise ModelError(
            f"{name} returns different outputs for the same inputs (by {difference:.3g}): make its hidden randomness "
            "an input: a part of u, or for a network an argument of forward, named in from_module(net, ..., "
            "inputs={'noise': (1, 4, 4)})"
        )


def check_rows(model: GenerativeModel, u: Tensor) -> None:
    """Raise :class:`ModelError` if the output of a row depends on the other rows of its batch."""
    for name, function in _functions(model).items():
        check_mixing(function, u, f"{type(model).__name__}.{name}")


def check_mixing(function: Callable[[Tensor], Tensor], u: Tensor, name: str) -> None:
    """The same of any function of rows."""
    difference = _mixing(partial(_values, function), u)
    if difference > 0:
        raise ModelError(
            f"{name} changes the output of a row when the other rows of its batch change (by {difference:.3g}): its "
            "layers compute batch statistics; use running statistics (track_running_stats=True), or normalise every "
            "row separately, and do not branch on the whole batch"
        )


def check_operator(model: GenerativeModel, operator: Operator, n_batch: int, u: Tensor) -> None:
    """Raise :class:`ObservationError` if an operator on outputs at ``u`` is random, or mixes the rows of its batch.

    Args:
        model: a frozen copy.
        operator: A, for data with ``n_batch`` batch dimensions.
        u: prior draws ``[n, Du]``.
    """
    with torch.no_grad():
        x = model.observed(u)

    def values(*outputs: Tensor) -> list[Tensor]:
        with torch.no_grad(), _own_random_numbers(x):
            # it may have data of each problem, with which the outputs broadcast
            return [operator(output.reshape(len(output), *[1] * n_batch, -1)) for output in outputs]

    difference = _difference(*values(x, x))
    if difference > 0:
        raise ObservationError(
            f"observe returns different values for the same output (by {difference:.3g}): it must not draw random "
            "numbers"
        )
    difference = _mixing(values, x)
    if difference > 0:
        raise ObservationError(
            f"observe changes the values of an output when the others of its batch change (by {difference:.3g}): "
            "compute every output by itself, with dimensions counted from the right, as in x.mean(-1)"
        )


def _mixing(function: Callable[..., list[Tensor]], u: Tensor) -> float:
    """By how much the first row's result depends on the other rows, or on their number; 0 up to rounding."""
    # equally many rows in all: rounding depends on their number
    near, other = torch.cat([u[1:], u + 1]), torch.cat([u[1:] - 1, 1 - 2 * u])
    first, second = (result[0] for result in function(torch.cat([u[:1], near]), torch.cat([u[:1], other])))
    (few,) = function(u[:2])
    # rounding depends on the number of rows, too; less than the tolerance below
    differences = [_difference(first, second), _difference(first, few[0])]
    # a branch on the whole batch shows far out, where a simulator may refuse to go
    with suppress(Exception):
        (far,) = function(torch.cat([u[:1], 8 * other]))
        differences.append(_difference(first, far[0]))
    difference = max(differences)
    return difference if difference > torch.finfo(u.dtype).eps ** 0.5 * max(1e-3, _size(first)) else 0.0


def check_mode(model: GenerativeModel, frozen: GenerativeModel, u: Tensor) -> None:
    """Raise :class:`ModelError` if dropout or batch statistics make training mode differ from the frozen copy."""
    if not model.training:
        return
    # on a copy: training mode may update running statistics
    training = copied(model).to(device=u.device, dtype=u.dtype)
    (trained,), (evaluated,) = _values(training.observed, u), _values(frozen.observed, u)
    difference = _difference(trained, evaluated)
    # a program rounds in another order where it runs as straight-line code
    if difference > torch.finfo(u.dtype).eps ** 0.5 * max(1e-3, _size(evaluated)):
        raise ModelError(
            f"the generator is in training mode and its outputs differ from evaluation mode by up to {difference:.3g} "
            "(dropout or batch statistics): call model.eval() first"
        )


def check_range(model: GenerativeModel, x: Tensor) -> None:
    """Raise :class:`ModelError` if outputs ``x`` leave the range that the model declares."""
    if model.output_range is None:
        return
    low, high = model.output_range
    least, largest = x.nan_to_num(low, high, low).min().item(), x.nan_to_num(low, high, low).max().item()
    if least < low or largest > high:
        raise ModelError(
            f"{type(model).__name__} declares output_range {_interval(low, high)}, but its outputs at prior draws "
            f"are between {least:.3g} and {largest:.3g}: declare the range of its last layer, or None"
        )


def check_values(model: GenerativeModel, operator: Operator, values: Tensor) -> None:
    """Raise :class:`ObservationError` if observed values are on or beyond an edge of the model's range.

    Outputs have derivatives only inside the range: tanh and the sigmoid never reach its edges, and a clipped output
    stays there. Pixels and means of pixels are tested.
    """
    if model.output_range is None or not operator.keeps_range:
        return
    low, high = model.output_range
    beyond = (values <= low) | (values >= high)
    if not beyond.any():
        return
    least, largest = values.min().item(), values.max().item()
    inside = 0.01 * (high - low)
    remedy = f"move the data inside (values.clamp({low + inside:.3g}, {high - inside:.3g})), or "
    remedy = remedy if inside < math.inf else ""
    raise ObservationError(
        f"{int(beyond.sum())} of {values.numel()} observed values, of {least:.3g} to {largest:.3g}, are on or beyond "
        f"the edge of the model's output_range {_interval(low, high)}, which it never reaches: {remedy}give the model "
        "output noise with WithNoise(model, sd=...)"
    )


def _functions(model: GenerativeModel) -> dict[str, Callable[[Tensor], Tensor]]:
    """What conditioning evaluates, by name."""
    functions = {"observed": model.observed}
    return functions | {"log_factor": model.log_factor} if model.has_log_factor else functions


def _values(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
    """Values at several inputs, evaluated one after the other."""
    with torch.no_grad(), _own_random_numbers(inputs[0]):
        return [function(u) for u in inputs]


def _own_random_numbers(like: Tensor) -> AbstractContextManager[None]:
    """A model that draws random numbers must not disturb the caller's."""
    return torch.random.fork_rng(devices=[like.device] if like.is_cuda else [])


def _difference(a: Tensor, b: Tensor) -> float:
    # a simulator may overflow at a prior draw: the search for starting points redraws
    return _size(a - b)


def _size(x: Tensor) -> float:
    return x.nan_to_num(0, 0, 0).abs().max().item()


def _interval(low: float, high: float) -> str:
    return f"({low:g}, {high:g})"
