"""Checks of arguments: each returns the value as the code computes with it, or raises one line that names it.

Every message has the form ``call(field=value): must be ...``.
"""

import math
import operator
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import ArgumentError, cause

__all__ = [
    "allocatable",
    "available_device",
    "boolean_mask",
    "choice",
    "counts",
    "file_path",
    "finite",
    "flag",
    "floating_type",
    "fraction",
    "function",
    "indices",
    "instance",
    "interval",
    "numbers",
    "optional_positive",
    "positive",
    "positive_numbers",
    "random_seed",
    "sizes",
    "whole_number",
    "within",
]

Value = TypeVar("Value")

# ------------------------------------------------------------------------------------------------------------- numbers


def whole_number(call: str, field: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """An integer from ``least`` to ``most``; a bool is not one.

    Raises:
        ArgumentError: it is not an integer, or out of range.
    """
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or whole < least or (most is not None and whole > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be an integer {bounds}")
    return whole


def positive(call: str, field: str, value: Any) -> float:
    """A finite number above 0.

    Raises:
        ArgumentError: it is not.
    """
    number = _number(value)
    if number is None or not 0 < number < math.inf:
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be a positive number")
    return number


def fraction(call: str, field: str, value: Any) -> float:
    """A number between 0 and 1, ends excluded.

    Raises:
        ArgumentError: it is not.
    """
    number = _number(value)
    if number is None or not 0 < number < 1:
        raise ArgumentError(f"{call}({field}={_shown(value)}): must lie between 0 and 1")
    return number


def within(call: str, field: str, value: Any, low: float, high: float = math.inf, *, open_end: bool = False) -> float:
    """A finite number from ``low`` to ``high``; the latter excluded with ``open_end``.

    Raises:
        ArgumentError: it is not.
    """
    number = _number(value)
    inside = number is not None and math.isfinite(number) and low <= number <= high
    if not inside or (open_end and number == high):
        bounds = f"a number >= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}{')' if open_end else ']'}"
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be {bounds}")
    assert number is not None
    return number


def interval(call: str, field: str, value: Any) -> tuple[float, float]:
    """Two numbers (low, high) with ``low < high``; either may be infinite.

    Raises:
        ArgumentError: it is something else.
    """
    ends = [_number(end) for end in value] if _is_sequence(value) else []
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None and ends[0] < ends[1]:
        return ends[0], ends[1]
    raise ArgumentError(f"{call}({field}={_shown(value)}): must be two numbers (low, high) with low less than high")


def optional_positive(call: str, field: str, value: float | Tensor | None) -> None:
    """Check a positive number, a tensor of positive numbers, or None, which stands for "to be adapted".

    Raises:
        ArgumentError: it is neither.
    """
    if value is None:
        return
    try:
        values = None if isinstance(value, bool | str) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        values = None
    if values is None or values.is_complex() or values.dtype == torch.bool:
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be a positive number, or None to adapt it")
    bad = ~((values > 0) & values.isfinite())
    if bad.any():
        raise ArgumentError(f"{call}({field}={values[bad][0].item():g}): must be positive, or None to adapt it")


def counts(call: str, field: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """An integer >= 1, or an inclusive range (low, high) of integers >= 1.

    Raises:
        ArgumentError: it is neither, or the range is empty.
    """
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be an integer >= 1, or a (low, high) pair")
    low, high = (whole_number(call, field, end) for end in pair)
    if low > high:
        raise ArgumentError(f"{call}({field}={_shown(value)}): low must not be above high")
    return low, high


def random_seed(call: str, seed: int | None) -> int:
    """The seed of a run: the one given, or a random one for None.

    Raises:
        ArgumentError: it is not an integer from 0 to 2**63 - 1.
    """
    return secrets.randbits(31) if seed is None else whole_number(call, "seed", seed, 0, 2**63 - 1)


# ------------------------------------------------------------------------------------------------------------- choices


def flag(call: str, field: str, value: Any) -> bool:
    """A bool.

    Raises:
        ArgumentError: it is anything else.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be True or False")
    return value


def choice(call: str, field: str, value: Value, options: Collection[Value]) -> Value:
    """One of some values.

    Raises:
        ArgumentError: it is none of them.
    """
    if not any(type(value) is type(option) and value == option for option in options):
        *others, last = map(repr, options)
        known = f"{', '.join(others)} or {last}" if others else last
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be {known}")
    return value


# ------------------------------------------------------------------------------------------------------------- tensors


def numbers(call: str, field: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A real tensor, without its history.

    Args:
        dtype: to convert to; None keeps a floating-point type and gives others the default one.

    Raises:
        ArgumentError: it cannot be converted to a real tensor.
    """
    try:
        values = torch.as_tensor(value).detach()
        # converted directly, Python's numbers lose no digits
        values = torch.as_tensor(value, dtype=dtype).detach() if dtype and not values.is_complex() else values
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be a tensor, or numbers to make one of") from None
    if values.is_complex():
        raise ArgumentError(f"{call}({field} of {values.dtype}): must be real")
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def finite(call: str, field: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """As :func:`numbers`, all of them finite.

    Raises:
        ArgumentError: it cannot be converted to a real tensor, or a number is not finite.
    """
    values = numbers(call, field, value, dtype)
    bad = ~values.isfinite()
    if bad.any():
        raise ArgumentError(f"{call}({field}={values[bad][0].item():g}): must be finite")
    return values


def positive_numbers(call: str, field: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """As :func:`finite`, all of them above 0.

    Raises:
        ArgumentError: it cannot be converted to a real tensor, or a number is not positive or not finite.
    """
    values = numbers(call, field, value, dtype)
    bad = ~((values > 0) & values.isfinite())
    if bad.any():
        raise ArgumentError(f"{call}({field}={values[bad][0].item():g}): must be positive and finite")
    return values


def boolean_mask(call: str, field: str, value: Any) -> Tensor:
    """A tensor of bools.

    Raises:
        ArgumentError: no tensor can be made of it, or one of another type.
    """
    try:
        mask = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        mask = torch.empty(0)
    if mask.dtype != torch.bool:
        what = f" of {mask.dtype}" if mask.numel() else f"={_shown(value)}"
        raise ArgumentError(
            f"{call}({field}{what}): must be a boolean mask, True = observed (mask.bool() converts 0 and 1)"
        )
    return mask


def indices(call: str, field: str, value: Any, n: int) -> Tensor:
    """Indices ``[N]`` of ``n`` things, from 0 to n - 1.

    Raises:
        ArgumentError: it is not a vector of integers, or one of them is out of range.
    """
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.empty(())
    whole = found.ndim == 1 and not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if not whole or ((found < 0) | (found >= n)).any():
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be a tensor [N] of integers from 0 to {n - 1}")
    return found


def sizes(call: str, field: str, value: Any, *, least: int = 1, empty: bool = False) -> tuple[int, ...]:
    """A sequence of integers, such as the shape of an image or the widths of layers.

    Raises:
        ArgumentError: it is something else, an integer is below ``least``, or it is empty unless ``empty`` allows it.
    """
    try:
        whole = [whole_number(call, field, size, least) for size in value] if _is_sequence(value) else None
    except ArgumentError:
        whole = None
    if whole is None or not (whole or empty):
        raise ArgumentError(
            f"{call}({field}={_shown(value)}): must be a sequence of integers >= {least}, such as (8, 8)"
        )
    return tuple(whole)


def floating_type(call: str, field: str, value: Any) -> torch.dtype:
    """``torch.float32`` or ``torch.float64``.

    Raises:
        ArgumentError: it is another type.
    """
    if value not in (torch.float32, torch.float64):
        raise ArgumentError(
            f"{call}({field}={_shown(value)}): must be torch.float64, or torch.float32 with less precision"
        )
    return value


def available_device(call: str, field: str, value: Any) -> torch.device:
    """A device that tensors can be put on.

    Raises:
        ArgumentError: it does not name a device, or the device is not available.
    """
    try:
        found = torch.device(value)
    except (TypeError, RuntimeError):
        found = torch.device("meta")
    if found.type == "meta":
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be a device such as 'cpu' or 'cuda:0'")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be an available device: {cause(error)}") from error
    return found


def allocatable(call: str, field: str, value: Any, elements: int, remedy: str, *, like: Tensor | None = None) -> None:
    """Refuse an allocation that exceeds all memory, before torch tries it.

    Args:
        elements: numbers held at once.
        remedy: remedy that the message names.
        like: a tensor of their dtype and device; None for float64 in main memory.

    Raises:
        ArgumentError: they need more than the memory of the device.
    """
    size = elements * (8 if like is None else like.element_size())
    there = _memory(torch.device("cpu") if like is None else like.device)
    if size > there:
        needed, most = (f"{min(bytes_ // 2**30, 10**300):.3g}" for bytes_ in (size, there))
        raise ArgumentError(f"{call}({field}={_shown(value)}): needs {needed} GiB of {most} GiB available: {remedy}")


# ------------------------------------------------------------------------------------------------------- other objects


def file_path(call: str, field: str, value: Any) -> Path:
    """The path of a file or a folder.

    Raises:
        ArgumentError: it is neither a str nor a PathLike, or it is empty.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or isinstance(os.fspath(value), bytes):
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be a path, a str or a pathlib.Path")
    return Path(value)


def function(call: str, field: str, value: Any, example: str) -> Callable[..., Any]:
    """Something that can be called.

    Raises:
        ArgumentError: it cannot; the message shows ``example``.
    """
    if not callable(value) or isinstance(value, type):
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be a function, such as {example}")
    return value


def instance(call: str, field: str, value: Any, kind: type[Value], example: str) -> Value:
    """An object of one class.

    Raises:
        ArgumentError: it is of another class; the message shows ``example``.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ArgumentError(f"{call}({field}={_shown(value)}): must be {article} {kind.__name__}, such as {example}")
    return value


def _number(value: Any) -> float | None:
    """A real number as a float; None for anything else."""
    if isinstance(value, bool | str) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _memory(device: torch.device) -> int:
    """Bytes of memory in a device, or in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63


def _shown(value: Any) -> str:
    """A value in a message: short, and on one line."""
    if isinstance(value, Tensor) and value.numel() > 4:
        return f"tensor of shape {tuple(value.shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"{type(value).__name__}()"
    if " at 0x" in text:
        # where an object lies in memory tells nobody what it is
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
