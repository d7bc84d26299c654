"""The interface of evidence methods, as :func:`log_evidence` uses it."""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..arguments import allocatable
from ..errors import ArgumentError
from ..progress import Progress
from .estimators import Estimate
from .path import AnnealedPath

__all__ = ["EstimateStatus", "Method", "Outcome", "check_held", "check_method"]

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
        name = method.__name__ if isinstance(method, type) else repr(method)
        raise ArgumentError(f"method={name}: expected an instance, for example GibbsTempering()")


def check_held(method: object, path: AnnealedPath, **held: int) -> None:
    """Raise ArgumentError if no memory holds what a method's settings ask for: called before a run begins.

    Args:
        held: by setting, the numbers that a run holds at once because of it.
    """
    for field, elements in held.items():
        name, value, remedy = type(method).__name__, getattr(method, field), f"use fewer {field.replace('_', ' ')}"
        allocatable(name, field, value, elements, remedy, like=path.base.mean)
