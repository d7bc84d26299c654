"""Faults of a function of rows, of its derivatives, and of data beside what it gives, each said in one sentence."""

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from ..autodiff.jacobian_products import forward_mode
from ..diagnosis import Finding
from ..errors import ModelError, cause
from ..models import GenerativeModel, copied
from ..probe import Differences, differences, disagreement
from ..settings import Settings

__all__ = [
    "DIFFERENTIABLE",
    "FaultSettings",
    "check_agreeing",
    "check_agreement",
    "check_once",
    "check_rows",
    "constant_outputs",
    "derivative_remedy",
    "evaluated",
    "far_values",
    "faulty_operation",
    "functions_of",
    "has_passed",
    "largest",
    "largest_difference",
    "mixing",
    "own_random_numbers",
    "passes",
    "said_interval",
    "type_remedy",
]


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
    modes: float = 1e-6
    """Relative difference up to which derivatives in both modes agree."""
    differences: float = 1e-3
    """The same of derivatives and finite differences."""
    coarse: float = 5e-2
    """Both in 32 bits."""


SETTINGS = FaultSettings()
# Operations of torch with a wrong derivative, by the beginning of the name of their node, and what to use instead.
_FAULTY = {
    "CholeskyInverseBackward": "the forward-mode derivative of torch.cholesky_inverse(L) is wrong (torch 2.14.1): use "
    "torch.linalg.inv(L @ L.mT)",
}


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


_PASSED: weakref.WeakKeyDictionary[nn.Module, list] = weakref.WeakKeyDictionary()


def has_passed(module: nn.Module, stage: str, operator: object = None) -> bool:
    """Whether a module, seen through an operator of the user's own, has passed a check with its present weights."""
    known = _PASSED.get(module, ())
    return any(key == (stage, _version(module)) and (each() if each else None) is operator for key, each in known)


def passes(module: nn.Module, stage: str, operator: object = None) -> None:
    # what takes no weak reference is looked at every time
    with suppress(TypeError):
        reference = None if operator is None else weakref.ref(operator)
        _PASSED.setdefault(module, []).append(((stage, _version(module)), reference))


def _version(module: nn.Module) -> tuple[Any, ...]:
    tensors = (*module.parameters(), *module.buffers())
    return module.training, *((id(tensor), tensor._version) for tensor in tensors)


def check_agreeing(function: Callable[[Tensor], Tensor], u: Tensor, name: str) -> None:
    """Raise :class:`ModelError` if two evaluations of a function at ``u`` differ."""
    first, second = evaluated(function, u, u)
    difference = largest_difference(first, second)
    # a GPU adds in another order each time
    rounding = 0.0 if u.device.type == "cpu" else torch.finfo(first.dtype).eps ** 0.75 * max(1e-3, largest(first))
    if difference > rounding:
        raise ModelError(
            f"{name} returns different outputs for the same inputs (by {difference:.3g}): make its hidden randomness "
            "an input: a part of u, or for a network an argument of forward, named in from_module(net, ..., "
            "inputs={'noise': (1, 4, 4)})"
        )


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
    first, second = (result[0] for result in function(torch.cat([u[:1], near]), torch.cat([u[:1], other])))
    (few,) = function(u[:2])
    # rounding depends on the number of rows, too; less than the tolerance below
    differences = [largest_difference(first, second), largest_difference(first, few[0])]
    # a branch on the whole batch shows far out, where a simulator may refuse to go
    with suppress(Exception):
        (far,) = function(torch.cat([u[:1], 8 * other]))
        differences.append(largest_difference(first, far[0]))
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


def check_agreement(
    function: Callable[[Tensor], Tensor], u: Tensor, name: str, *, needs_both: bool = False
) -> Differences:
    """Raise :class:`ModelError` unless reverse mode, forward mode and finite differences of a function agree.

    It costs seven evaluations at every point.

    Args:
        function: ``[..., D] -> [..., N]``.
        u: points ``[n, D]``.
        name: what it is a function of, for messages.
        needs_both: whether a mode that is not defined is an error; else it is not compared.

    Returns:
        the finite differences.
    """
    rng = torch.Generator(u.device).manual_seed(3)
    # each point has a direction of its own: one alone may hide what is wrong with others
    v = torch.randn(u.shape, generator=rng, dtype=u.dtype, device=u.device)
    with torch.no_grad():
        w = torch.randn(function(u[:1]).shape[-1], generator=rng, dtype=u.dtype, device=u.device)
    found = differences(function, u, v, w)
    with _differentiating(name, "reverse"):
        pulled = vjp(function, u)[1](w.expand_as(found.products))[0] if needs_both else _reverse(function, u, w)
    reverse = torch.linalg.vecdot(pulled, v)
    forward = None
    try:
        with _differentiating(name, "forward"):
            # a number a point moves it along its direction
            start, one = u.new_zeros(len(u), 1), u.new_ones(1, 1)
            forward = forward_mode(lambda t: function(u + t * v), start, one)[1][0] @ w
    except ModelError:
        if needs_both:
            raise
    exact = u.dtype == torch.float64
    apart = disagreement(found, reverse)
    if not apart <= (SETTINGS.differences if exact else SETTINGS.coarse):
        raise ModelError(
            f"the derivatives of {name} do not match its outputs (finite differences differ by {apart:.2g} of "
            "their size): look for detach(), no_grad(), rounding, or a backward of another function"
        )
    if forward is None:
        return found
    size = found.size.maximum(reverse.abs()).clamp_min(1e-12)
    apart = ((reverse - forward).abs() / size).nanmedian().item()
    if not apart <= (SETTINGS.modes if exact else SETTINGS.coarse):
        raise ModelError(
            f"reverse- and forward-mode derivatives of {name} differ, by {apart:.2g} of their size: "
            + (faulty_operation(function, u) or "correct the backward or the jvp of its autograd.Function")
        )
    return found


def _reverse(function: Callable[[Tensor], Tensor], u: Tensor, w: Tensor) -> Tensor:
    """``J^T w`` by plain autograd, which asks less of a model than torch.func."""
    with torch.enable_grad():
        x = u.detach().requires_grad_()
        value = function(x)
        if not value.requires_grad:
            return torch.zeros_like(u)
        return torch.autograd.grad((value * w).sum(), x, materialize_grads=True)[0]


def faulty_operation(function: Callable[[Tensor], Tensor], u: Tensor) -> str | None:
    """What to use instead of an operation of torch with a wrong derivative; None if a function has none."""
    with torch.enable_grad():
        waiting, seen = [function(u.detach().requires_grad_()).grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name, remedy in _FAULTY.items():
            if node.name().startswith(name):
                return remedy
        waiting += [before for before, _ in node.next_functions]
    return None


@contextmanager
def _differentiating(name: str, mode: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"{name} has no {mode}-mode derivative ({cause(error)}): {derivative_remedy(str(error)) or DIFFERENTIABLE}"
        ) from error


def derivative_remedy(error: str) -> str | None:
    """What to change where torch refuses to differentiate a model, by its message; None if that does not say."""
    if "in-place" in error.lower() or "inplace" in error.lower():
        return "replace operations in place (x += y, x[...] = y, copy_) by ones that return new tensors"
    if "out=" in error:
        return "replace operations that write into a given tensor (torch.mul(a, b, out=c)) by ones that return new ones"
    if "use_reentrant" in error:
        return "call checkpoint(..., use_reentrant=False)"
    if "once_differentiable" in error:
        return "an adjoint or a function marked once_differentiable has a first derivative only: use plain operations"
    if "setup_context" in error:
        return "its autograd.Function needs setup_context, with forward(x) in place of forward(ctx, x), and a jvp"
    if "generate_vmap_rule" in error:
        return "its autograd.Function needs generate_vmap_rule = True, or a vmap of its own"
    return None


DIFFERENTIABLE = (
    "compute with torch's differentiable functions; an autograd.Function needs setup_context and its own jvp"
)


def constant_outputs(found: Differences, name: str) -> str | None:
    """Which observed values are constant, or change in steps; None if none does.

    Args:
        found: differences of the values at several prior draws.
        name: of the model.
    """
    flat = (found.products == 0).all(0)
    if not flat.any():
        return None
    index = int(flat.nonzero()[0])
    values, n = found.values[:, index], int(flat.sum())
    which = f"{n} of {len(flat)} observed values of {name} (the first is number {index})"
    if (values == values[0]).all():
        return (
            f"{which} are the same at every prior draw: leave these constants out, "
            "observe=pixels(mask), or add noise, WithNoise(model, sd=...)"
        )
    return (
        f"{which} change only in steps, with derivatives that are exactly 0: leave out rounding (round, floor, "
        "comparisons, argmax), or pass tolerance= and a kernel that needs no derivative"
    )
