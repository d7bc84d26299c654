"""Checks of single values: numbers, counts, seeds, flags, choices."""

import hashlib
import math
import operator
import secrets
from collections.abc import Collection
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import ArgumentError
from .objects import is_sequence, of_kind, real_number, shown

Value = TypeVar("Value")


def whole_number(call: str, field: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """An integer from ``least`` to ``most``; a bool is not one.

    Raises:
        ArgumentError: it is not an integer, or out of range.
    """
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
    """A finite number above 0.

    Raises:
        ArgumentError: it is not.
    """
    number = real_number(value)
    if number is None or not 0 < number < math.inf:
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a positive number")
    return number


def fraction(call: str, field: str, value: Any) -> float:
    """A number between 0 and 1, ends excluded.

    Raises:
        ArgumentError: it is not.
    """
    number = real_number(value)
    if number is None or not 0 < number < 1:
        raise ArgumentError(f"{call}({field}={shown(value)}): must lie between 0 and 1")
    return number


def within(call: str, field: str, value: Any, low: float, high: float = math.inf, *, open_end: bool = False) -> float:
    """A finite number from ``low`` to ``high``; ``high`` excluded with ``open_end``.

    Raises:
        ArgumentError: it is not.
    """
    number = real_number(value)
    inside = number is not None and math.isfinite(number) and low <= number <= high
    if not inside or (open_end and number == high):
        bounds = f"a number >= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}{')' if open_end else ']'}"
        raise ArgumentError(f"{call}({field}={shown(value)}): must be {bounds}")
    assert number is not None
    return number


def interval(call: str, field: str, value: Any) -> tuple[float, float]:
    """Two numbers (low, high) with ``low < high``; either may be infinite.

    Raises:
        ArgumentError: it is something else.
    """
    ends = [real_number(end) for end in value] if is_sequence(value) else []
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None and ends[0] < ends[1]:
        return ends[0], ends[1]
    raise ArgumentError(f"{call}({field}={shown(value)}): must be two numbers (low, high) with low less than high")


def optional_positive(call: str, field: str, value: float | Tensor | None) -> None:
    """Check a positive number, a tensor of positive numbers, or None, which stands for "to be adapted".

    Raises:
        ArgumentError: it is neither.
    """
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
    """An integer >= 1, or an inclusive range (low, high) of integers >= 1.

    Raises:
        ArgumentError: it is neither, or the range is empty.
    """
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ArgumentError(f"{call}({field}={shown(value)}): must be an integer >= 1, or a (low, high) pair")
    low, high = (whole_number(call, field, end) for end in pair)
    if low > high:
        raise ArgumentError(f"{call}({field}={shown(value)}): low must not be above high")
    return low, high


def random_seed(call: str, seed: int | None) -> int:
    """The seed of a run: the one given, or a random one for None.

    Raises:
        ArgumentError: it is not an integer from 0 to 2**63 - 1.
    """
    return secrets.randbits(31) if seed is None else whole_number(call, "seed", seed, 0, 2**63 - 1)


def flag(call: str, field: str, value: Any) -> bool:
    """A bool.

    Raises:
        ArgumentError: it is anything else.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be True or False")
    return value


def choice(call: str, field: str, value: Value, options: Collection[Value]) -> Value:
    """One of some values.

    Raises:
        ArgumentError: it is none of them.
    """
    if not any(type(value) is type(option) and value == option for option in options):
        *others, last = map(repr, options)
        known = f"{', '.join(others)} or {last}" if others else last
        raise ArgumentError(f"{call}({field}={shown(value)}): must be {known}")
    return value


def other_seed(call: str, seed: int) -> int:
    """Seed of a stream separate from that of ``sample(seed=seed)``, whose numbers would not be fresh noise."""
    digest = hashlib.sha256(f"{call} {seed}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
