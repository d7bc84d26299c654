"""What warm-up can tune in a kernel: an optional interface. A kernel without it is used as it is."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from .kernel import Kernel
from .metrics import Metric

__all__ = ["Compilable", "FibreKernel", "Preconditioned", "Tunable", "Tuning"]


@dataclass(frozen=True)
class Tuning:
    """What a kernel leaves open on one problem; the names are those of the kernel's fields."""

    step_size: bool = False
    """Whether warm-up chooses the step size, one per problem."""
    longest_step: float = math.inf
    """Upper bound on the step size, adapted or fixed."""
    trajectory_length: bool = False
    """Whether warm-up chooses the trajectory length, one per problem; needs ``Trial.end``."""
    initial_length: float | Tensor | None = None
    """Initial trajectory length, a number or ``[*batch]``; None for the step size."""
    n_geodesic: int | None = None
    """Initial geodesic sub-steps, to which warm-up may add according to ``Trial.retried``; None if it may not."""
    metric: str | None = None
    """Name of the metric that warm-up adapts, one per problem, to ``Trial.position``; None if it is fixed."""
    target_acceptance: float | None = None
    """Mean acceptance probability that the step size is adapted to; None for that of the run."""
    usual_acceptance: float = 0.8
    """The same where the run says none."""


@runtime_checkable
class Tunable(Kernel, Protocol):
    """A kernel that warm-up can tune; an open field is None in it."""

    def tuning(self, problem: Any, /) -> Tuning:
        """What is open on this problem."""
        ...

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed: those that :meth:`tuning` declares open, by name."""
        ...

    def probe(self, step_size: Tensor, n_steps: int, /) -> Self:
        """A kernel of short transitions: at most ``n_steps`` steps of these sizes, ``[chains, *batch]``."""
        ...


@runtime_checkable
class Compilable(Kernel, Protocol):
    """A kernel whose transitions can be compiled as programs."""

    @property
    def compile(self) -> bool | None:
        """Whether they are; None where that takes less time."""
        ...

    def is_program(self, problem: Any, /) -> bool:
        """Whether a step has fixed shapes, and decides nothing by the values of tensors."""
        ...


@runtime_checkable
class Preconditioned(Tunable, Protocol):
    """A tunable kernel that can find a metric where its chains are, before they have moved."""

    def metric_at(self, problem: Any, position: Tensor, /) -> Metric | None:
        """A metric for the posterior about positions ``[chains, *batch, D]``; None to go on without."""
        ...


@runtime_checkable
class FibreKernel(Kernel, Protocol):
    """What a kernel on a :class:`Fibre` may add, so that chains start at suitable points."""

    def relative_tolerance(self, dtype: torch.dtype, /) -> float:
        """The tolerance within which it stays on the fibre, relative to the fibre's scale."""
        ...

    def annealing(self) -> Tunable | None:
        """The kernel whose probes move on fibres with other noise widths; None if it has none."""
        ...
