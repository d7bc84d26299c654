"""The interface of Markov kernels: check, init, step; and, optional, what warm-up can tune."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..arguments.values import shown
from ..errors import ArgumentError, Status
from .metrics import Metric

Tree = TypeVar("Tree")


class TrajectoryEnd(NamedTuple):
    """Starts and ends of trajectories, ``[chains, *batch, D]``, and their durations."""

    start: Tensor
    position: Tensor
    momentum: Tensor
    fraction: Tensor
    """Duration over the trajectory length, ``[*batch]``."""


class Trial(NamedTuple):
    """What a transition reports to warm-up beyond acceptance and status; None for what the kernel does not report."""

    step_size: Tensor | None = None
    """Size of the steps taken, ``[chains, *batch]``, if it can be below the requested one."""
    end: TrajectoryEnd | None = None
    """Ends of the trajectories, accepted or not."""
    position: Tensor | None = None
    """New positions in the coordinates of the metric, ``[chains, *batch, D]``."""
    gradient: Tensor | None = None
    """The energy's gradient there, if the kernel has it."""
    acceptance: Tensor | None = None
    """Acceptance probability that the step size determines, ``[chains, *batch]``, if it is not that of the Info."""


@dataclass(frozen=True, eq=False)
class Info:
    """Diagnostics of one transition, each ``[chains, *batch]``.

    Args:
        acceptance_rate: acceptance probability of the proposal; 0 if it failed, 1 for kernels that never reject.
        status: :class:`Status` of the proposal.
        energy: energy of the new state, including the kinetic energy of a momentum.
        stats: per-draw statistics that only this family of kernels reports, by name.
        tuning: what warm-up learns from; None if there is nothing to tune.
    """

    acceptance_rate: Tensor
    status: Tensor
    energy: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)
    tuning: Trial | None = None

    @property
    def tuned_acceptance(self) -> Tensor:
        """The acceptance probability that a step size is adapted to, ``[chains, *batch]``."""
        own = None if self.tuning is None else self.tuning.acceptance
        return self.acceptance_rate if own is None else own

    def all_stats(self) -> dict[str, Tensor]:
        """The statistics that :class:`Draws` keeps: those of every kernel, and ``stats``."""
        return {
            "acceptance_rate": self.acceptance_rate,
            "diverging": self.status == Status.DIVERGED,
            "energy": self.energy,
            **self.stats,
        }


class State(Protocol):
    """Positions of chains, with what the next transition needs; immutable."""

    @property
    def position(self) -> Tensor:
        """``[chains, *batch, D]``."""
        ...

    @property
    def energy(self) -> Tensor:
        """Minus the log density of the positions, up to a constant per problem: ``[chains, *batch]``."""
        ...


@runtime_checkable
class Kernel(Protocol):
    """An immutable configuration of a Markov transition: all that is required of a kernel.

    A failure of one chain, such as a failed solve or a NaN energy, is a status in :class:`Info` and a rejection of
    that chain, never an exception. All random numbers come from ``rng``.
    """

    def check(self, problem: Any, /) -> None:
        """Raise ArgumentError, in one line, if the kernel cannot sample this problem."""
        ...

    def init(self, problem: Any, position: Tensor, /) -> State:
        """State at ``position [chains, *batch, D]``."""
        ...

    def step(self, problem: Any, state: Any, rng: torch.Generator, /) -> tuple[State, Info]:
        """One transition of every chain."""
        ...


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
    metric: str | None = None
    """Name of the metric that warm-up adapts to ``Trial.position`` and ``gradient``, one per problem; None if fixed."""
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
        """Whether they are; None if those to come take as long as compiling."""
        ...

    def is_program(self, problem: Any, /) -> bool:
        """Whether a step has fixed shapes, and decides nothing by the values of tensors."""
        ...


@runtime_checkable
class Counted(Compilable, Protocol):
    """A kernel that can be compiled, of whose transitions the gradients of a target are not the greater part."""

    def saves_calls(self, problem: Any, /) -> bool:
        """Whether calls of operations take the time of a transition, which code would save, and not arithmetic."""
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


def either(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """``a`` where the condition ``[...]`` holds, else ``b``: nested tuples of tensors ``[...]`` or ``[..., E]``."""
    if isinstance(a, Tensor):
        return torch.where(condition.unsqueeze(-1) if a.ndim > condition.ndim else condition, a, b)  # type: ignore
    parts = [either(condition, x, y) for x, y in zip(a, b, strict=True)]  # type: ignore[call-overload]
    return type(a)(*parts) if hasattr(a, "_fields") else tuple(parts)  # type: ignore[return-value]


def check_kernel(call: str, kernel: Any, example: str) -> Kernel:
    """The kernel, unless it is none, or a class of them.

    Raises:
        ArgumentError: it is not an instance.
    """
    if isinstance(kernel, type) or not isinstance(kernel, Kernel):
        name = kernel.__name__ if isinstance(kernel, type) else shown(kernel)
        raise ArgumentError(
            f"{call}(kernel={name}): expected an instance, for example {example}, or None to choose one"
        )
    return kernel
