"""The interface of evidence methods, and outcomes of chunks of problems, joined."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import allocatable
from ..arguments.objects import shown
from ..errors import ArgumentError
from ..progress import Progress
from .estimators import Estimate
from .path import AnnealedPath

__all__ = ["EstimateStatus", "Method", "Outcome", "check_held", "check_method", "joined", "replaced"]


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


def joined(parts: Sequence[Outcome], shape: torch.Size) -> Outcome:
    """Join the outcomes of chunks ``[n]`` of a batch of problems into one of all of them, ``[*shape]``.

    Where an interrupt left the last problems out, theirs are NaN; where it left chains shorter, the draws that are
    missing have weight zero.
    """
    first = parts[0]
    length = max(part.log_weights.shape[1] for part in parts)
    parts = [_filled(part, length) for part in parts]
    estimate = Estimate(*(torch.cat(values) for values in zip(*(p.estimate for p in parts), strict=True)))
    diagnostics = {name: torch.cat([p.diagnostics[name] for p in parts], -1) for name in first.diagnostics}
    draws = torch.cat([p.draws for p in parts], -2)
    log_weights = torch.cat([p.log_weights for p in parts], -1)
    interrupted = any(part.interrupted for part in parts)
    outcome = Outcome(estimate, draws, log_weights, diagnostics, first.pilot_evaluations, interrupted)
    return _shaped(_with_missing(outcome, shape.numel()), shape)


def replaced(outcome: Outcome, part: Outcome, problems: Tensor, shape: torch.Size) -> Outcome:
    """An outcome of problems ``[*shape]`` with that of some of them, of these flat indices ``[n]``, in its place."""

    def put(value: Tensor, new: Tensor, after: int = 0) -> Tensor:
        start = value.ndim - after - len(shape)
        flat = value.reshape(*value.shape[:start], -1, *value.shape[value.ndim - after :])
        return flat.index_copy(start, problems, new.to(flat)).reshape(value.shape)

    return outcome._replace(
        estimate=Estimate(*(put(*values) for values in zip(outcome.estimate, part.estimate, strict=True))),
        draws=put(outcome.draws, part.draws, after=1),
        log_weights=put(outcome.log_weights, part.log_weights),
        diagnostics={name: put(value, part.diagnostics[name]) for name, value in outcome.diagnostics.items()},
    )


def _filled(outcome: Outcome, length: int) -> Outcome:
    """The same with so many draws per chain: those that are missing have weight zero."""
    missing = length - outcome.log_weights.shape[1]
    # without draws to keep there are none to fill up
    rows = missing if outcome.draws.shape[1] else 0
    return outcome._replace(
        draws=pad(outcome.draws, (0, 0) * (outcome.draws.ndim - 2) + (0, rows), value=math.nan),
        log_weights=pad(outcome.log_weights, (0, 0) * (outcome.log_weights.ndim - 2) + (0, missing), value=-math.inf),
    )


def _with_missing(outcome: Outcome, n: int) -> Outcome:
    """An outcome of the first problems of a flat batch, with NaN for the rest of all n."""

    def last(value: Tensor, after: int = 0) -> Tensor:
        missing = n - value.shape[-1 - after]
        if missing == 0:
            return value
        width = (0, 0) * after + (0, missing)
        if value.dtype == torch.bool:
            return pad(value, width, value=False)
        return pad(value if value.is_floating_point() else value.double(), width, value=math.nan)

    return _problems_changed(outcome, last)


def _shaped(outcome: Outcome, shape: torch.Size) -> Outcome:
    """Reshape the flat batch ``[N]`` of an outcome to ``shape``."""

    def last(value: Tensor, after: int = 0) -> Tensor:
        end = value.ndim - after
        return value.reshape(*value.shape[: end - 1], *shape, *value.shape[end:])

    return _problems_changed(outcome, last)


def _problems_changed(outcome: Outcome, change: Callable[..., Tensor]) -> Outcome:
    """Change the last dimension, that of the problems, of everything; ``after=1`` dimension follows it in the draws."""
    return outcome._replace(
        estimate=Estimate(*(change(value) for value in outcome.estimate)),
        draws=change(outcome.draws, after=1),
        log_weights=change(outcome.log_weights),
        diagnostics={name: change(value) for name, value in outcome.diagnostics.items()},
    )
