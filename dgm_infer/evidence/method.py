"""What every method of estimating log Z offers to :func:`log_evidence`."""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..progress import Progress
from .estimators import Estimate
from .path import AnnealedPath

__all__ = ["Method", "Outcome", "Status", "check_method"]

Status = Literal["unbiased", "consistent", "lower", "upper", "heuristic"]


class Outcome(NamedTuple):
    """What a method found for the problems of one chunk."""

    estimate: Estimate
    draws: Tensor
    """Of the target, weighted: ``[chains, draws, *batch, D]``."""
    log_weights: Tensor
    """``[chains, draws, *batch]``, float64."""
    diagnostics: dict[str, Tensor]
    """By name, each ``[..., *batch]``."""
    pilot_evaluations: int = 0
    """Gradients of the target, a chain of a problem, that tuning took."""


class Method(Protocol):
    """An immutable configuration of an estimator of log Z."""

    @property
    def status(self) -> Status:
        """What its estimates are: see :class:`Evidence`."""
        ...

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        """Estimates for every problem of the path, with ``chains`` independent chains each."""
        ...


def check_method(method: object) -> None:
    """Raises ArgumentError for what is no method, such as a class in place of an instance."""
    if isinstance(method, type) or not hasattr(method, "run"):
        name = method.__name__ if isinstance(method, type) else repr(method)
        raise ArgumentError(f"method={name}: expected an instance, for example GibbsTempering()")
