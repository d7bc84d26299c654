"""The interface of evidence methods, and outcomes of chunks of problems, joined."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import allocatable
from ..arguments.values import shown
from ..errors import ArgumentError
from ..progress import Progress
from .estimators import Estimate
from .path import AnnealedPath, Inside

EstimateStatus = Literal["unbiased", "consistent", "lower", "upper", "heuristic"]


class Outcome(NamedTuple):
    """Result of a method for the problems of one chunk."""

    estimate: Estimate
    draws: Tensor
    """Weighted draws of the target, ``[chains, draws, *batch, D]``."""
    log_weights: Tensor
    """``[chains, draws, *batch]``, float64."""
    diagnostics: dict[str, Tensor]
    """By name, each ``[..., *batch]``."""
    pilot_evaluations: int = 0
    """Gradient evaluations per chain and problem spent on tuning."""
    interrupted: bool = False
    """Whether the chains were stopped before their end, and the estimate is of what they had."""


class Method(Protocol):
    """An immutable configuration of an estimator of log Z."""

    @property
    def status(self) -> EstimateStatus:
        """Status of its estimates: see :class:`Evidence`."""
        ...

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        """Estimates for every problem of the path, from ``chains`` independent chains per problem."""
        ...


def check_method(method: object) -> None:
    """Raise ArgumentError unless ``method`` is an instance of a method (its class is not)."""
    if isinstance(method, type) or not hasattr(method, "run"):
        name = method.__name__ if isinstance(method, type) else shown(method)
        raise ArgumentError(f"method={name}: expected an instance, for example GibbsTempering()")


def check_held(method: object, path: AnnealedPath, **held: int) -> None:
    """Raise ArgumentError if no memory holds what a method's settings ask for: called before a run begins.

    Args:
        held: by setting, the numbers that a run holds at once because of it.
    """
    for field, elements in held.items():
        name, value, remedy = type(method).__name__, getattr(method, field), f"use fewer {field.replace('_', ' ')}"
        allocatable(name, field, value, elements, remedy, like=path.base.mean)


def of_whole_base(outcome: Outcome, inside: Inside | None) -> Outcome:
    """The outcome of chains that started in a part of the base, with its mass."""
    if inside is None:
        return outcome
    estimate, shift = outcome.estimate, inside.log_share
    return outcome._replace(
        estimate=estimate._replace(
            log_z=estimate.log_z + shift, std_error=estimate.std_error.hypot(inside.error.to(estimate.std_error))
        ),
        log_weights=outcome.log_weights + shift,
    )


def joined(parts: Sequence[Outcome], shape: torch.Size) -> Outcome:
    """Join the outcomes of chunks ``[n]`` of a batch of problems into one of all of them, ``[*shape]``.

    Where an interrupt left the last problems out, theirs are NaN; where it left chains shorter, the draws that are
    missing have weight zero.
    """
    length = max(part.log_weights.shape[1] for part in parts)

    def whole(values: Sequence[Tensor], after: int) -> Tensor:
        value = torch.cat(list(values), -1 - after)
        missing = shape.numel() - value.shape[-1 - after]
        if missing:
            is_flag = value.dtype == torch.bool
            value = value if is_flag or value.is_floating_point() else value.double()
            value = pad(value, (0, 0) * after + (0, missing), value=False if is_flag else math.nan)
        return value.unflatten(value.ndim - 1 - after, shape)

    return _changed([_filled(part, length) for part in parts], whole)._replace(
        interrupted=any(part.interrupted for part in parts)
    )


def replaced(outcome: Outcome, part: Outcome, problems: Tensor, shape: torch.Size) -> Outcome:
    """An outcome of problems ``[*shape]`` with that of some of them, of these flat indices ``[n]``, in its place."""

    def put(values: Sequence[Tensor], after: int) -> Tensor:
        value, new = values
        start = value.ndim - after - len(shape)
        flat = value.reshape(*value.shape[:start], -1, *value.shape[value.ndim - after :])
        return flat.index_copy(start, problems, new.to(flat)).reshape(value.shape)

    return _changed([outcome, part], put)


def _filled(outcome: Outcome, length: int) -> Outcome:
    """The same with so many draws per chain: those that are missing have weight zero."""
    missing = length - outcome.log_weights.shape[1]
    # without draws to keep there are none to fill up
    rows = missing if outcome.draws.shape[1] else 0
    return outcome._replace(
        draws=pad(outcome.draws, (0, 0) * (outcome.draws.ndim - 2) + (0, rows), value=math.nan),
        log_weights=pad(outcome.log_weights, (0, 0) * (outcome.log_weights.ndim - 2) + (0, missing), value=-math.inf),
    )


def _changed(outcomes: Sequence[Outcome], change: Callable[[Sequence[Tensor], int], Tensor]) -> Outcome:
    """The first outcome with ``change`` of what is alike in all, and of how many dimensions follow the problems'."""
    first = outcomes[0]
    return first._replace(
        estimate=Estimate(*(change(values, 0) for values in zip(*(each.estimate for each in outcomes), strict=True))),
        draws=change([each.draws for each in outcomes], 1),
        log_weights=change([each.log_weights for each in outcomes], 0),
        diagnostics={name: change([each.diagnostics[name] for each in outcomes], 0) for name in first.diagnostics},
    )
