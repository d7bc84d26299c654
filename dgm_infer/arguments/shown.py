"""Values as messages show them, and as numbers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["is_sequence", "of_problems", "real_number", "shown"]


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
