"""Checks of paths, functions and objects."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ArgumentError
from .objects import shown

__all__ = [
    "file_path",
    "function",
    "instance",
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
