"""Checks of tensors, their sizes, types and devices, and the memory that they need."""

import math
import os
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, cause
from .values import is_sequence, of_kind, random_generator, shown, whole_number


def numbers(call: str, field: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A real tensor, without its history.

    Args:
        dtype: to convert to; None keeps types of 32 and 64 bits and gives others the default one.
    """
    values = array(call, field, value, dtype)
    # nothing is computed in 16 bits
    kept = values.is_floating_point() and values.element_size() >= 4
    return values if kept or values.dtype == dtype else values.to(default_type())


def digits(value: Any) -> torch.dtype | None:
    """64 bits for Python's numbers, which then lose no digits before they are converted; None for what has a type."""
    return None if hasattr(value, "dtype") or hasattr(value, "__array__") else torch.float64


def default_type() -> torch.dtype:
    """torch's default floating-point type, or 32 bits where it has 16, in which nothing is computed."""
    default = torch.get_default_dtype()
    return default if default.itemsize >= 4 else torch.float32


def context(call: str) -> None:
    """Refuse to work where tensors have no derivatives, or no numbers."""
    if torch.is_inference_mode_enabled():
        raise ArgumentError(f"{call}(): derivatives are needed, and torch.inference_mode() is on: leave it before")
    if torch.get_default_device().type == "meta":
        raise ArgumentError(f"{call}(): the default device is meta, without numbers: torch.set_default_device('cpu')")


def array(call: str, field: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """As :func:`numbers`, of the type that it has: data of a program may be counts.

    It has memory of its own: what the caller later writes into the argument changes nothing.
    """
    of_kind(call, field, value)
    try:
        value = value.detach().clone() if isinstance(value, Tensor) else _native(value)
        values = torch.as_tensor(value).detach()
        # converted directly, Python's numbers lose no digits
        values = torch.as_tensor(value, dtype=dtype).detach() if dtype and not values.is_complex() else values
    except (TypeError, ValueError, RuntimeError, OverflowError):
        first = value[0] if is_sequence(value) and value else value
        # whether it is of Pillow, which is not imported for it
        is_file = isinstance(first, str | os.PathLike) and bool(os.path.splitext(first)[1])
        is_image = type(first).__module__.startswith("PIL.") or is_file
        remedy = ": dgm.image(picture, like=model) reads one" if is_image else ""
        raise ArgumentError(
            f"{call}({field}={shown(value)}): must be a tensor, or numbers to make one of{remedy}"
        ) from None
    if values.is_complex():
        raise ArgumentError(f"{call}({field} of {values.dtype}): must be real")
    return values


def _native(value: Any) -> Any:
    """An array or a table as torch takes it: torch refuses other byte orders and strides, and warns of what it must not
    write to."""
    if isinstance(value, Tensor) or not hasattr(value, "__array__"):
        return value
    values = value.__array__()
    return (
        values.astype(values.dtype.newbyteorder("="), order="C", copy=True) if values.dtype.kind in "biuf" else values
    )


def finite(call: str, field: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """As :func:`numbers`, all of them finite."""
    values = _some(call, field, value, dtype)
    bad = ~values.isfinite()
    if bad.any():
        raise ArgumentError(f"{call}({field}={values[bad][0].item():g}): not finite")
    return values


def positive_numbers(call: str, field: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """As :func:`finite`, all of them above 0."""
    values = _some(call, field, value, dtype)
    if getattr(value, "dtype", None) == torch.bool:
        raise ArgumentError(f"{call}({field} of torch.bool): must be positive numbers")
    bad = ~((values > 0) & values.isfinite())
    if bad.any():
        raise ArgumentError(f"{call}({field}={values[bad][0].item():g}): must be positive and finite")
    return values


def _some(call: str, field: str, value: Any, dtype: torch.dtype | None) -> Tensor:
    values = numbers(call, field, value, dtype)
    if isinstance(value, bool) or not values.numel():
        found = f"={value}" if isinstance(value, bool) else f" of shape {tuple(values.shape)}"
        raise ArgumentError(f"{call}({field}{found}): must be a number, or a tensor of some")
    return values


def points(call: str, field: str, value: Any, dim: int, lead: str = "...") -> Tensor:
    """Points ``[..., D]``, with their history; ``lead`` is what messages call the dimensions before the last."""
    # the kinds first: a nested tensor has no shape
    plain = isinstance(value, Tensor) and of_kind(call, field, value) and not value.is_complex()
    plain = plain and value.dtype != torch.bool
    if not plain or value.shape[-1:] != (dim,):
        found = f" of shape {tuple(value.shape)}" if plain else f"={shown(value)}"
        raise ArgumentError(f"{call}({field}{found}): expected [{lead}, {dim}], a tensor of real numbers")
    return value


def lead_shape(
    call: str,
    shape: Any,
    size: int,
    *,
    generator: Any = None,
    dtype: Any = None,
    device: Any = None,
) -> tuple[int, ...]:
    """The leading dimensions of draws of ``size`` numbers each: those of a sequence, or the one of an integer."""
    sequence = isinstance(shape, tuple | list)
    lead = sizes(call, "shape", shape, least=0, empty=True) if sequence else (whole_number(call, "shape", shape, 0),)
    if generator is not None:
        random_generator(call, "generator", generator)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"{call}(dtype={shown(dtype)}): must be a floating-point type, such as torch.float64")
    if device is not None:
        available_device(call, "device", device)
    allocatable(call, "shape", shape, math.prod(lead) * size, "fewer draws")
    return lead


def boolean_mask(call: str, field: str, value: Any) -> Tensor:
    """A tensor of bools, with memory of its own."""
    of_kind(call, field, value)
    try:
        mask = value.detach().clone() if isinstance(value, Tensor) else torch.as_tensor(_native(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        mask = torch.empty(0)
    if mask.dtype != torch.bool:
        what = f" of {mask.dtype}" if mask.numel() else f"={shown(value)}"
        raise ArgumentError(
            f"{call}({field}{what}): must be a boolean mask, True = observed (mask.bool() converts 0 and 1)"
        )
    return mask


def indices(call: str, field: str, value: Any, n: int) -> Tensor:
    """Indices ``[N]`` of ``n`` things, from 0 to n - 1."""
    of_kind(call, field, value)
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.empty(())
    whole = found.ndim == 1 and not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if not whole or ((found < 0) | (found >= n)).any():
        raise ArgumentError(f"{call}({field}={shown(value)}): must be a tensor [N] of integers from 0 to {n - 1}")
    return found


def sizes(call: str, field: str, value: Any, *, least: int = 1, empty: bool = False) -> tuple[int, ...]:
    """A sequence of integers, such as the shape of an image or the widths of layers."""
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
    """``torch.float32`` or ``torch.float64``."""
    if not isinstance(value, torch.dtype) or value not in (torch.float32, torch.float64):
        raise ArgumentError(
            f"{call}({field}={shown(value)}): must be torch.float64, or torch.float32 with less precision"
        )
    return value


def available_device(call: str, field: str, value: Any) -> torch.device:
    """A device that tensors can be put on."""
    words = f"{call}({field}={shown(value)}): must be a device such as 'cpu' or 'cuda:0'"
    try:
        found = torch.device(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(words) from error
    try:
        tensor = torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(
            f"{call}({field}={shown(value)}): must be an available device, or leave it out: {cause(error, 120)}"
        ) from error
    # whose tensors hold no numbers
    if tensor.is_meta and type(tensor) is Tensor:
        raise ArgumentError(words)
    return found


def allocatable(call: str, field: str, value: Any, elements: int, remedy: str, *, like: Tensor | None = None) -> None:
    """Refuse an allocation that exceeds all memory, before torch tries it.

    Args:
        elements: numbers held at once.
        remedy: remedy that the message names.
        like: a tensor of their dtype and device; None for float64 in main memory.
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
