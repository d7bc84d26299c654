"""Outcomes of chunks of problems, joined."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .estimators import Estimate
from .method import Outcome

__all__ = ["joined", "replaced"]


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
