"""Checks of paths, functions and objects, and values as messages show them."""

import errno
import os
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
    """The path of a file or a folder.

    Raises:
        ArgumentError: it is neither a str nor a PathLike, it is empty, or no path of this system.
    """
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
    """A generator of random numbers, by what it can do.

    Raises:
        ArgumentError: it is not one.
    """
    if not (hasattr(value, "get_state") and hasattr(value, "device")):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a torch.Generator")
    return value


def mapping(call: str, field: str, value: Any, example: str) -> dict[str, Any]:
    """Values by name; none for None.

    Raises:
        ArgumentError: it is not a mapping with names for its keys; the message shows ``example``.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a mapping by name, such as {example}")
    return dict(value)


def names_of(call: str, field: str, value: Any, known: Collection[str] | None = None) -> list[str]:
    """Some of the known names, at least one: a sequence of them, or a single one.

    Raises:
        ArgumentError: it is something else, or has a name that is not known.
    """
    names = [value] if isinstance(value, str) else value
    given = is_sequence(names) and bool(names) and all(isinstance(name, str) for name in names)
    if given and (known is None or set(names) <= set(known)):
        return list(names)
    expected = "one or more names" if known is None else f"among {', '.join(known)}"
    raise ArgumentError(f"{call}({field}={shown(value)}): must be {expected}")


def optional(call: str, field: str, value: Any, kind: type[Value], example: str) -> Value | None:
    """As :func:`instance`, or None."""
    return None if value is None else instance(call, field, value, kind, example)


def of_kind(call: str, field: str, value: Any) -> Literal[True]:
    """Refuse arrays and tensors that do not hold one number per entry; anything else passes.

    Raises:
        ArgumentError: a sparse, nested or quantized tensor, one on the meta device, or an array with masked entries.
    """
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


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
