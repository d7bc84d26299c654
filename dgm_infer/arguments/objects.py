"""Checks of paths, functions and objects, and values as messages show them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..errors import ArgumentError

__all__ = [
    "file_path",
    "function",
    "instance",
    "is_sequence",
    "of_problems",
    "real_number",
    "shown",
]

Value = TypeVar("Value")


def file_path(call: str, field: str, value: Any) -> Path:
    """The path of a file or a folder.

    Raises:
        ArgumentError: it is neither a str nor a PathLike, or it is empty.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or isinstance(os.fspath(value), bytes):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a path, a str or a pathlib.Path")
    return Path(value)


def function(call: str, field: str, value: Any, example: str) -> Callable[..., Any]:
    """Something that can be called.

    Raises:
        ArgumentError: it cannot; the message shows ``example``.
    """
    if not callable(value) or isinstance(value, type):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a function, such as {example}")
    return value


def instance(call: str, field: str, value: Any, kind: type[Value], example: str) -> Value:
    """An object of one class.

    Raises:
        ArgumentError: it is of another class; the message shows ``example``.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ArgumentError(f"{call}({field}={shown(value)}): must be {article} {kind.__name__}, such as {example}")
    return value


def shown(value: Any) -> str:
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


def real_number(value: Any) -> float | None:
    """A real number as a float; None for anything else."""
    if isinstance(value, bool | str) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def of_problems(which: Tensor) -> str:
    """`` of problem 2 and 5 others`` for a mask ``[*batch]``; nothing for a run of one problem."""
    if which.ndim == 0:
        return ""
    numbers = which.cpu().reshape(-1).nonzero().flatten().tolist()
    return f" of problem {numbers[0]}" + (f" and {len(numbers) - 1} others" if len(numbers) > 1 else "")


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
