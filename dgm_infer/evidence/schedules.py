"""Inverse temperatures of annealing, from 0 at the base to 1 at the target."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import numbers
from ..errors import ArgumentError

__all__ = [
    "SCHEDULES",
    "TUNED",
    "Schedule",
    "barrier",
    "check",
    "checked",
    "equalised",
    "is_tuned",
    "linear",
    "sigmoid",
    "values_of",
]


def linear(n: int) -> Tensor:
    """``beta_k = k/K``, ``[K + 1]``."""
    return torch.arange(n + 1, dtype=torch.float64) / n


def sigmoid(n: int) -> Tensor:
    """``s_k = sigmoid(4 (2k - K)/K)`` rescaled to [0, 1], ``[K + 1]``: dense at both ends (math 7.4, T (5.53))."""
    s = torch.sigmoid(4 * (2 * torch.arange(n + 1, dtype=torch.float64) - n) / n)
    return (s - s[0]) / (s[-1] - s[0])


def equalised(n: int, betas: Tensor, variances: Tensor) -> Tensor:
    """Temperatures between which the log weight gains equal variance, by a pilot's estimate: ``[K + 1, *batch]``.

    A short step adds ``(beta' - beta)^2 var_beta(Delta)`` to the variance of the log weight, so the density of
    temperatures is proportional to the standard deviation of Delta. A fifth of it follows the sigmoid instead, to
    limit the effect of the pilot's noise.

    Args:
        n: K.
        betas: temperatures of the pilot, ``[J + 1]``, from 0 to 1.
        variances: variance of Delta over its chains, ``[J + 1, *batch]``.
    """
    return _spaced(n, betas, variances.clamp_min(0).sqrt())


def barrier(n: int, betas: Tensor, rates: Tensor) -> Tensor:
    """Temperatures at equal distances along the communication barrier, by a pilot's estimate: ``[K + 1, *batch]``.

    Swaps between neighbours would be rejected equally often: their density is proportional to ``E|d - d'|/2`` over
    pairs of states at a temperature (math 6.12), a fifth of it to the sigmoid's, as in :func:`equalised`.

    Args:
        n, betas: as in :func:`equalised`.
        rates: ``E|d - d'|/2``, ``[J + 1, *batch]``.
    """
    return _spaced(n, betas, rates.clamp_min(0))


def _spaced(n: int, betas: Tensor, rates: Tensor) -> Tensor:
    """Temperatures whose density is proportional to ``rates [J + 1, *batch]``, all but a fifth of it."""
    lengths = 0.5 * (rates[1:] + rates[:-1]) * _column(betas[1:] - betas[:-1], rates)
    total = lengths.sum(0, keepdim=True)
    even = _column(betas[1:] - betas[:-1], rates).expand_as(lengths)
    # if Delta does not vary, any schedule will do
    share = torch.where(total > 0, lengths / total.clamp_min(1e-300), even)
    travelled = torch.cat([torch.zeros_like(share[:1]), share.cumsum(0)])
    # the sigmoid schedule of the pilot is even in its index
    own = _column(torch.linspace(0, 1, len(betas), dtype=rates.dtype, device=rates.device), rates)
    travelled = 0.8 * travelled + 0.2 * own
    return _inverse(travelled, betas, n)


def _inverse(travelled: Tensor, betas: Tensor, n: int) -> Tensor:
    """Temperatures at evenly spaced values of the increasing ``travelled [J + 1, *batch]``."""
    shape = travelled.shape[1:]
    rows = travelled.flatten(1).mT.contiguous() if shape else travelled[None]
    even = torch.linspace(0, 1, n + 1, dtype=rows.dtype, device=rows.device).expand(len(rows), -1).contiguous()
    right = torch.searchsorted(rows, even).clamp(1, len(betas) - 1)
    a, b = rows.gather(1, right - 1), rows.gather(1, right)
    fraction = ((even - a) / (b - a).clamp_min(1e-300)).clamp(0, 1)
    result = torch.lerp(betas[right - 1], betas[right], fraction)
    result[:, 0], result[:, -1] = 0, 1
    return result.mT.reshape(n + 1, *shape)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))


TUNED = ("equalised", "barrier")
"""Names of the schedules that a pilot's estimates determine."""

SCHEDULES: dict[str, Callable[[int], Tensor]] = {"linear": linear, "sigmoid": sigmoid}

Schedule = str | Tensor | Callable[[int], Tensor]
"""A name, the K + 1 values, or a function of K that returns them."""


def check(name: str, schedule: Schedule, n: int, also: tuple[str, ...] = ()) -> None:
    """Raise ArgumentError unless a schedule gives values from 0 to 1 for ``n``, or is a name in :data:`SCHEDULES` or
    ``also``."""
    if isinstance(schedule, str):
        if schedule not in (*SCHEDULES, *also):
            names = ", ".join([*SCHEDULES, *also])
            raise ArgumentError(f"{name}(schedule={schedule!r}): must be one of {names}, a function or values")
    else:
        values_of(name, schedule, n)


def is_tuned(schedule: Schedule) -> bool:
    """Whether a schedule takes a pilot."""
    return isinstance(schedule, str) and schedule in TUNED


def values_of(name: str, schedule: Schedule, n: int) -> Tensor:
    """Values ``[K + 1]`` of a schedule that needs no pilot; ``n`` is K, unless the schedule lists its values."""
    if isinstance(schedule, str):
        return SCHEDULES[schedule](n)
    return checked(name, schedule(n) if callable(schedule) else schedule)


def checked(name: str, betas: Any) -> Tensor:
    """A user's schedule ``[K + 1]``.

    Raises:
        ArgumentError: it does not rise from 0 to 1.
    """
    betas = numbers(name, "schedule", betas, torch.float64)
    rises = betas.ndim == 1 and len(betas) >= 2 and bool((betas[1:] >= betas[:-1]).all())
    if not (rises and betas[0] == 0 and betas[-1] == 1):
        raise ArgumentError(
            f"{name}(schedule=...): must rise from 0 to 1, as a vector of two or more values; this one has shape "
            f"{tuple(betas.shape)}"
            + (f", from {betas.flatten()[0]:g} to {betas.flatten()[-1]:g}" if betas.numel() else "")
        )
    return betas
