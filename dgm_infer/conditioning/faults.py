"""Faults of a function of rows, and of data beside what it gives, each said in one sentence."""

import math
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnosis import Finding
from ..errors import ModelError
from ..models import GenerativeModel, copied
from ..probe import WRITES
from ..settings import Settings


@dataclass(frozen=True)
class FaultSettings(Settings):
    """Where a difference counts as a fault."""

    widths: float = 3.0
    """Widths of what the model generates beyond which data are far outside: the prior draws of a few images reach
    several standard deviations, so that a posterior far in the tail of the prior is still within."""
    share: float = 0.1
    """Share of the values beyond which they are of another unit; a few far values are those of heavy tails."""
    pixel: float = 2.0
    """Largest output of a generator of pixels in (0, 1) or (-1, 1)."""
    collapsed: float = 0.1
    """Spread of a network's outputs, in that of the data, below which it is said to make nearly the same."""
    hidden: float = 10.0
    """Times the spread of the outputs up to which noise leaves something of the data: a value then tells a hundredth of
    the variance."""
    beyond: float = 6.0
    """Standard deviations of the noise beyond a declared range that no noise reaches."""
    pixels: int = 16
    """Values that say what scale they are on, by their signs."""
    dark: float = 0.2
    """Share of negative values at prior draws from which data without any are remarked on."""
    depth: int = 6
    """How deep changes are looked for: in a module's attributes, in what these hold, and so on."""


SETTINGS = FaultSettings()


def check_once(module: nn.Module, stage: str, check: Callable[[], None]) -> None:
    """Run a check unless the same module, with the same weights and in the same mode, has passed it.

    Args:
        module: what is looked at.
        stage: the name of the check.
        check: raises what is wrong.
    """
    if not has_passed(module, stage):
        check()
        passes(module, stage)


# What is looked into, besides objects of the user's own classes: not locks and loggers.
_HOLDING = Mapping, list, tuple, set, nn.Module, FunctionType, MethodType, partial
_NOT_THE_USERS = {*sys.stdlib_module_names, "torch"}
_PASSED: weakref.WeakKeyDictionary[nn.Module, list] = weakref.WeakKeyDictionary()


def has_passed(module: nn.Module, stage: str, operator: object = None) -> bool:
    """Whether a module, seen through an operator of the user's own, has passed a check as both are now."""
    now = (stage, _version(module), _version(operator))
    return any(key == now and (each() if each else None) is operator for key, each in _PASSED.get(module, ()))


def passes(module: nn.Module, stage: str, operator: object = None) -> None:
    # what takes no weak reference is looked at every time
    with suppress(TypeError):
        reference = None if operator is None else weakref.ref(operator)
        _PASSED.setdefault(module, []).append(((stage, _version(module), _version(operator)), reference))


def _version(thing: object) -> tuple[Any, ...]:
    """Weights, modes, hooks and other attributes of a module and its parts, or of another object."""
    parts = thing.modules() if isinstance(thing, nn.Module) else [thing]
    return tuple((type(part), _held(part, SETTINGS.depth)) for part in parts)


def _held(thing: object, depth: int) -> Any:
    """What an object or a function computes with: attributes, defaults and the variables that it encloses."""
    held = [getattr(thing, name, None) for name in ("__defaults__", "__self__", "func", "args", "keywords")]
    for cell in getattr(thing, "__closure__", None) or ():
        with suppress(ValueError):
            # an empty one is of a variable that has no value yet; a list or a dict often collects what was evaluated
            inside = cell.cell_contents
            held.append(id(inside) if isinstance(inside, list | dict | set) else inside)
    # parts of a module have a turn of their own
    own = {key: each for key, each in getattr(thing, "__dict__", {}).items() if key != "_modules"}
    return [_attribute(each, depth) for each in (own, *held) if each is not None]


def _attribute(value: Any, depth: int) -> Any:
    """An attribute as it is now: plain values by themselves, arrays by a sum, what holds such by what it holds."""
    if isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, Tensor) or hasattr(value, "__array_interface__"):
        # an array of words has no sum
        with suppress(TypeError, ValueError):
            return id(value), _sum(torch.as_tensor(value))
    own = isinstance(value, _HOLDING) or type(value).__module__.split(".")[0] not in _NOT_THE_USERS
    if not depth or not own:
        return id(value)
    if isinstance(value, Mapping):
        return [(key, _attribute(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple | set):
        return [_attribute(each, depth - 1) for each in value]
    parts = value.modules() if isinstance(value, nn.Module) else [value]
    return id(value), [_held(part, depth - 1) for part in parts]


def _sum(value: Tensor) -> Any:
    """A sum with a weight for each place, which tells values apart whoever wrote them: ``p.data.copy_()`` counts no
    version. It reads every number once, as one evaluation does."""
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta or not value.numel():
        return tuple(value.shape)
    value = value.detach()
    if not (value.is_floating_point() or value.is_complex()):
        value = value.double()
    rows = value.reshape(len(value), -1) if value.ndim > 1 else value.reshape(1, -1)
    rest, first = (torch.arange(n, device=value.device, dtype=torch.float64).cos().to(value) for n in rows.shape[::-1])
    return torch.linalg.vecdot(first, rows @ rest).item()


_INPUTS = (
    "a part of u, or for a network an argument of forward, named in from_module(net, ..., inputs={'noise': (1, 4, 4)})"
)


def check_agreeing(function: Callable[[Tensor], Tensor], u: Tensor, name: str) -> None:
    """Raise :class:`ModelError` if two evaluations of a function at ``u`` differ, one changes ``u``, or both draw."""
    given = u.clone()
    first, second, draws = _twice(function, given, u.clone())
    if not torch.equal(given, u):
        raise ModelError(f"{name} {WRITES}")
    difference = largest_difference(first, second)
    # a GPU adds in another order each time
    rounding = 0.0 if u.device.type == "cpu" else torch.finfo(first.dtype).eps ** 0.75 * max(1e-3, largest(first))
    if difference > rounding:
        raise ModelError(
            f"{name} returns different outputs for the same inputs (by {difference:.3g}): "
            f"make its hidden randomness an input: {_INPUTS}; "
            "let no call change what it computes with, such as a counter or running mean"
        )
    # rare ones, as of a little dropout, may change neither; again, as another thread may have drawn
    if draws and _twice(function, u.clone(), u.clone())[2]:
        raise ModelError(
            f"{name} draws random numbers: call model.eval() if they are dropout, or make them an input: {_INPUTS}"
        )


def _twice(function: Callable[[Tensor], Tensor], u: Tensor, again: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Two values, and whether torch's generator was moved: what seeds its own numbers leaves it at the same place."""
    state = partial(torch.cuda.get_rng_state, u.device) if u.is_cuda else torch.get_rng_state
    with torch.no_grad(), own_random_numbers(u):
        before = state()
        first = function(u)
        between = state()
        second = function(again)
        return first, second, not torch.equal(before, between) and not torch.equal(between, state())


def check_rows(function: Callable[[Tensor], Tensor], u: Tensor, name: str) -> None:
    """Raise :class:`ModelError` if a function's value in one row depends on the other rows of the batch."""
    difference = mixing(partial(evaluated, function), u)
    if difference > 0:
        raise ModelError(
            f"{name} changes the output of a row when the other rows of its batch change (by {difference:.3g}): its "
            "layers compute batch statistics; use running statistics (track_running_stats=True), or normalise every "
            "row separately, and do not branch on the whole batch"
        )


def far_values(
    name: str,
    image_shape: Sequence[int],
    values: Tensor,
    made: Tensor,
    *,
    declared: tuple[float, float] | None = None,
) -> Finding | None:
    """The finding of :func:`far_data` on values ``[*batch, n]`` and what a model made in their place, ``[k, ...]``.

    Args:
        name: of the model.
        image_shape: shape of the outputs, if the values are some of them.
        declared: the finite range that the model declares.
    """
    if declared is not None:
        low, high = declared
        where = f"its output_range is ({low:g}, {high:g})"
    else:
        n, made = len(made), made[made.isfinite()]
        if not len(made):
            return None
        low, high = made.min().item(), made.max().item()
        where = f"its outputs lie between {low:.3g} and {high:.3g} at {n} prior draws"
    least, largest = values.min().item(), values.max().item()
    beyond = torch.maximum(low - values, values - high) > SETTINGS.widths * (high - low)
    if not beyond.any() or high == low:
        return None
    what = f"observed values from {least:.3g} to {largest:.3g} are far outside what {name} generates: {where}"
    images = len(image_shape) >= 2 and max(-low, high) <= SETTINGS.pixel
    if not images and declared is None and beyond.double().mean() < SETTINGS.share:
        return None
    if not images or least < 0 or largest > 255:
        severity = "error" if declared is not None else "warning"
        return Finding(severity, f"{what}; check the units of the data", code="observations_range")
    if low < -0.5:
        return Finding("error", f"{what}; scale 8-bit pixels to (-1, 1), values / 127.5 - 1", code="observations_range")
    divisor = "255" if largest > 16 else "16, or by 255 if these are dark 8-bit pixels"
    return Finding("error", f"{what}; divide by {divisor}", code="observations_range")


def type_remedy(model: GenerativeModel, u: Tensor, error: str) -> str:
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
        (x,) = evaluated(copied(model).float().observed, u.float())
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


def mixing(function: Callable[..., list[Tensor]], u: Tensor) -> float:
    """By how much the first row's result depends on the other rows, or on their number; 0 up to rounding."""
    # equally many rows in all: rounding depends on their number
    near, other = torch.cat([u[1:], u + 1]), torch.cat([u[1:] - 1, 1 - 2 * u])
    # at both ends: a cumulative sum looks at the rows before
    at_start, at_end = function(torch.cat([u[:1], near]), torch.cat([other, u[:1]]))
    first, second = at_start[0], at_end[-1]
    (few,) = function(u[:2])
    # rounding depends on the number of rows, too; less than the tolerance below
    differences = [largest_difference(first, second), largest_difference(first, few[0])]
    # a branch on the whole batch shows far out, where a simulator may refuse to go
    with suppress(Exception):
        (far,) = function(torch.cat([8 * other, u[:1]]))
        differences.append(largest_difference(first, far[-1]))
    difference = max(differences)
    return difference if difference > torch.finfo(u.dtype).eps ** 0.5 * max(1e-3, largest(first)) else 0.0


def functions_of(model: GenerativeModel) -> dict[str, Callable[[Tensor], Tensor]]:
    """What conditioning evaluates, by name."""
    functions = {"observed": model.observed}
    return functions | {"log_factor": model.log_factor} if model.has_log_factor else functions


def evaluated(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
    """Values at several inputs, evaluated one after the other."""
    with torch.no_grad(), own_random_numbers(inputs[0]):
        return [function(u) for u in inputs]


def own_random_numbers(like: Tensor) -> AbstractContextManager[None]:
    """A model that draws random numbers must not disturb the caller's."""
    return torch.random.fork_rng(devices=[like.device] if like.is_cuda else [])


def largest_difference(a: Tensor, b: Tensor) -> float:
    # a simulator may overflow at a prior draw: the search for starting points redraws
    return largest(a - b)


def largest(x: Tensor) -> float:
    return x.nan_to_num(0, 0, 0).abs().max().item()


def said_interval(low: float, high: float) -> str:
    return f"({low:g}, {high:g})"


def off_scale(
    name: str, values: Tensor, made: Tensor, noise: float, declared: tuple[float, float] | None
) -> Finding | None:
    """What noise of the measurement hides: data on another scale, or all data by noise that is itself on another.

    Args:
        name: of the model.
        values, made: data ``[*batch, n]`` and what the model makes in their place at prior draws, without the noise.
        noise: its standard deviation.
        declared: the range that the model declares, if the values are outputs of it.
    """
    finite = made[made.isfinite()]
    spread = finite.std().item() if len(finite) > 1 else math.nan
    if noise > SETTINGS.hidden * spread > 0:
        what = f"noise={noise:.4g} hides the data, whose values spread by {spread:.3g} at prior draws of {name}"
        remedy = "the posterior is the prior: give the noise on the scale of the images"
        if values.numel() > 1 and spread < SETTINGS.collapsed * values.std():
            what += f", and the data by {values.std():.3g}"
            remedy = (
                "the network makes nearly the same outputs whatever its inputs, as one that has collapsed in training: "
                "look at model.generate(8, seed=0).images"
            )
        return Finding("warning", what, remedy, code="noise")
    if declared is None:
        return None
    low, high = declared
    least, largest = values.min().item(), values.max().item()
    beyond = max(low - least, largest - high) / noise
    what = f"observed values from {least:.3g} to {largest:.3g}, and an output_range of {said_interval(low, high)}"
    remedy = "is it another scale? dgm.image(image, like=model) maps pictures; else give more noise"
    if SETTINGS.beyond < beyond < torch.inf and values.numel() >= SETTINGS.pixels:
        what += f": {beyond:.2g} standard deviations of the noise beyond it"
        return Finding("warning", what, remedy, code="noise")
    is_dark = (made < 0).double().mean() > SETTINGS.dark
    if low < 0 <= least and high > 0 and values.numel() >= SETTINGS.pixels and is_dark:
        return Finding("warning", f"{what}: none is below its middle", remedy, code="noise")
    return None
