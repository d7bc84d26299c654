"""Checks of tensors, their sizes, types and devices, and the memory that they need."""

import os
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, cause
from .objects import is_sequence, shown
from .values import whole_number

__all__ = [
    "allocatable",
    "available_device",
    "boolean_mask",
    "finite",
    "floating_type",
    "indices",
    "numbers",
    "positive_numbers",
    "sizes",
]


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
        first = value[0] if is_sequence(value) and value else value
        # whether it is of Pillow, which is not imported for it
        is_image = type(first).__module__.startswith("PIL.")
        remedy = ": convert images with np.asarray(image) / 255" if is_image else ""
        raise ArgumentError(
            f"{call}({field}={shown(value)}): must be a tensor, or numbers to make one of{remedy}"
        ) from None
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
        raise ArgumentError(f"{call}({field}={values[bad][0].item():g}): not finite")
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
        what = f" of {mask.dtype}" if mask.numel() else f"={shown(value)}"
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
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a tensor [N] of integers from 0 to {n - 1}")
    return found


def sizes(call: str, field: str, value: Any, *, least: int = 1, empty: bool = False) -> tuple[int, ...]:
    """A sequence of integers, such as the shape of an image or the widths of layers.

    Raises:
        ArgumentError: it is something else, an integer is below ``least``, or it is empty unless ``empty`` allows it.
    """
    try:
        whole = [whole_number(call, field, size, least) for size in value] if is_sequence(value) else None
    except ArgumentError:
        whole = None
    if whole is None or not (whole or empty):
        raise ArgumentError(
            f"{call}({field}={shown(value)}): must be a sequence of integers >= {least}, such as (8, 8)"
        )
    return tuple(whole)


def floating_type(call: str, field: str, value: Any) -> torch.dtype:
    """``torch.float32`` or ``torch.float64``.

    Raises:
        ArgumentError: it is another type.
    """
    if value not in (torch.float32, torch.float64):
        raise ArgumentError(
            f"{call}({field}={shown(value)}): must be torch.float64, or torch.float32 with less precision"
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
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a device such as 'cpu' or 'cuda:0'")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(f"{call}({field}={shown(value)}): must be an available device: {cause(error)}") from error
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
        raise ArgumentError(f"{call}({field}={shown(value)}): needs {needed} GiB of {most} GiB available: {remedy}")


def _memory(device: torch.device) -> int:
    """Bytes of memory in a device, or in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
