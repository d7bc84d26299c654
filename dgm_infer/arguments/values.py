"""Checks of arguments that are numbers, names, functions and objects: each returns the value."""

import errno
import hashlib
import math
import operator
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import ArgumentError

Value = TypeVar("Value")

# Problems up to which a message names them all.
_NAMED = 4


def file_path(call: str, field: str, value: Any) -> Path:
    """The path of a file or a folder."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or isinstance(os.fspath(value), bytes):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a path, a str or a pathlib.Path")
    try:
        os.lstat(value)
    except ValueError:
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a path without null characters") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ArgumentError(f"{call}({field}={shown(value)}): must be a shorter path") from None
    return Path(value)


def random_generator(call: str, field: str, value: Any) -> torch.Generator:
    """A generator of random numbers, by what it can do."""
    if not (hasattr(value, "get_state") and hasattr(value, "device")):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a torch.Generator")
    return value


def mapping(call: str, field: str, value: Any, example: str) -> dict[str, Any]:
    """Values by name; none for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a mapping by name, such as {example}")
    return dict(value)


def names_of(call: str, field: str, value: Any, known: Collection[str] | None = None) -> list[str]:
    """Some of the known names, at least one: a sequence of them, or a single one."""
    names = [value] if isinstance(value, str) else value
    given = is_sequence(names) and bool(names) and all(isinstance(name, str) for name in names)
    if given and (known is None or set(names) <= set(known)):
        return list(names)
    expected = "one or more names" if known is None else f"among {', '.join(known)}"
    raise ArgumentError(f"{call}({field}={shown(value)}): must be {expected}")


def of_kind(call: str, field: str, value: Any) -> Literal[True]:
    """Refuse arrays and tensors that do not hold one number per entry; anything else passes."""
    kind, remedy = "", ""
    if isinstance(value, Tensor):
        if value.is_nested:
            kind, remedy = "nested tensor", "give rows of one length, x.to_padded_tensor(0.0)"
        elif value.layout is not torch.strided:
            kind, remedy = "sparse tensor", "x.to_dense() converts it"
        elif value.is_quantized:
            kind, remedy = "quantized tensor", "x.dequantize() converts it"
        elif value.device.type == "meta" and type(value) in (Tensor, Parameter):
            kind, remedy = "tensor on the meta device, which holds no numbers", "make it on 'cpu'"
    elif type(value).__module__.startswith("numpy.ma") and value.mask.any():
        kind = "masked array, whose masked entries are not numbers"
        remedy = "give x.filled(0.0), for data with observe=dgm.pixels(~x.mask)"
    if kind:
        raise ArgumentError(f"{call}({field}): is a {kind}: {remedy}")
    return True


def function(call: str, field: str, value: Any, example: str) -> Callable[..., Any]:
    """Something that can be called."""
    if not callable(value) or isinstance(value, type):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a function, such as {example}")
    return value


def instance(call: str, field: str, value: Any, kind: type[Value], example: str) -> Value:
    """An object of one class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ArgumentError(f"{call}({field}={shown(value)}): must be {article} {kind.__name__}, such as {example}")
    return value


def shown(value: Any) -> str:
    """A value in a message: short, and on one line."""
    try:
        if isinstance(value, Tensor) and value.numel() > 4:
            return f"tensor of shape {tuple(value.shape)}"
        text = " ".join(repr(value).split())
    except Exception:
        text = f"{type(value).__name__}()"
    if " at 0x" in text:
        # where an object lies in memory tells nobody what it is
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def real_number(value: Any) -> float | None:
    """A real number as a float; None for anything else."""
    if isinstance(value, bool | str | bytes) or value is None or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def of_problems(which: Tensor) -> str:
    """`` of problems 2, 5 and 7`` for a mask ``[*batch]``; of many the first and a count; nothing for one problem."""
    if which.ndim == 0:
        return ""
    numbers = which.cpu().reshape(-1).nonzero().flatten().tolist()
    named = [str(number) for number in numbers[: _NAMED if len(numbers) <= _NAMED else _NAMED - 1]]
    if len(named) < len(numbers):
        named.append(f"{len(numbers) - len(named)} others")
    *before, last = named
    return f" of problems {', '.join(before)} and {last}" if before else f" of problem {last}"


def plural(n: int, noun: str) -> str:
    """``1 draw``, or ``2 draws``."""
    return f"{n} {noun}" + ("" if n == 1 else "s")


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def whole_number(call: str, field: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """An integer from ``least`` to ``most``; a bool is not one."""
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        whole = None
    if whole is None or whole < least or whole >= 2**63 or (most is not None and whole > most):
        bounds = f"from {least} to {most}" if most is not None else f">= {least}"
        # what torch counts with
        bounds += " and below 2**63" if most is None and whole is not None and whole >= 2**63 else ""
        raise ArgumentError(f"{call}({field}={shown(value)}): must be an integer {bounds}")
    return whole


def positive(call: str, field: str, value: Any) -> float:
    """A finite number above 0."""
    number = real_number(value)
    if number is None or not 0 < number < math.inf:
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a positive number")
    return number


def fraction(call: str, field: str, value: Any) -> float:
    """A number between 0 and 1, ends excluded."""
    number = real_number(value)
    if number is None or not 0 < number < 1:
        raise ArgumentError(f"{call}({field}={shown(value)}): must lie between 0 and 1")
    return number


def within(call: str, field: str, value: Any, low: float, high: float = math.inf, *, open_end: bool = False) -> float:
    """A finite number from ``low`` to ``high``; ``high`` excluded with ``open_end``."""
    number = real_number(value)
    inside = number is not None and math.isfinite(number) and low <= number <= high
    if not inside or (open_end and number == high):
        bounds = f"a number >= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}{')' if open_end else ']'}"
        raise ArgumentError(f"{call}({field}={shown(value)}): must be {bounds}")
    assert number is not None
    return number


def interval(call: str, field: str, value: Any) -> tuple[float, float]:
    """Two numbers (low, high) with ``low < high``; either may be infinite."""
    ends = [real_number(end) for end in value] if is_sequence(value) else []
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None and ends[0] < ends[1]:
        return ends[0], ends[1]
    raise ArgumentError(f"{call}({field}={shown(value)}): must be two numbers (low, high) with low less than high")


def optional_positive(call: str, field: str, value: float | Tensor | None) -> None:
    """Check a positive number, a tensor of positive numbers, or None, which stands for "to be adapted"."""
    if value is None:
        return
    of_kind(call, field, value)
    try:
        values = None if isinstance(value, bool | str) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        values = None
    if values is None or values.is_complex() or values.dtype == torch.bool or not values.numel():
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a positive number, or None to adapt it")
    bad = ~((values > 0) & values.isfinite())
    if bad.any():
        raise ArgumentError(f"{call}({field}={values[bad][0].item():g}): must be positive, or None to adapt it")


def counts(call: str, field: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """An integer >= 1, or an inclusive range (low, high) of integers >= 1."""
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ArgumentError(f"{call}({field}={shown(value)}): must be an integer >= 1, or a (low, high) pair")
    low, high = (whole_number(call, field, end) for end in pair)
    if low > high:
        raise ArgumentError(f"{call}({field}={shown(value)}): low must not be above high")
    return low, high


def random_seed(call: str, seed: int | None) -> int:
    """The seed of a run: the one given, or a random one for None."""
    return secrets.randbits(31) if seed is None else whole_number(call, "seed", seed, 0, 2**63 - 1)


def flag(call: str, field: str, value: Any) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be True or False")
    return value


def choice(call: str, field: str, value: Value, options: Collection[Value]) -> Value:
    """One of some values."""
    if not any(type(value) is type(option) and value == option for option in options):
        *others, last = map(repr, options)
        known = f"{', '.join(others)} or {last}" if others else last
        raise ArgumentError(f"{call}({field}={shown(value)}): must be {known}")
    return value


def other_seed(call: str, seed: int) -> int:
    """Seed of a stream separate from that of ``sample(seed=seed)``, whose numbers would not be fresh noise."""
    digest = hashlib.sha256(f"{call} {seed}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
