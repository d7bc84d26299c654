"""The interface of Markov kernels: check, init, step."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import Status

__all__ = ["Info", "Kernel", "State", "TrajectoryEnd", "Trial"]


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
    retried: Tensor | None = None
    """Whether the first solver failed a projection, ``[chains, *batch]``."""
    position: Tensor | None = None
    """New positions in the coordinates of the metric, ``[chains, *batch, D]``."""
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
