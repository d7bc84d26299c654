"""What every Markov kernel offers: check, init, step."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import Status

__all__ = ["Info", "Kernel", "State", "TrajectoryEnd", "Trial"]


class TrajectoryEnd(NamedTuple):
    """Where trajectories started and ended, ``[chains, *batch, D]``, and how long they were."""

    start: Tensor
    position: Tensor
    momentum: Tensor
    fraction: Tensor
    """Duration over the trajectory length, ``[*batch]``."""


class Trial(NamedTuple):
    """What a transition tells warm-up beyond its acceptance and status; None for what the kernel cannot tell."""

    step_size: Tensor | None = None
    """Size of the steps taken, ``[chains, *batch]``, where it can be below the one asked for."""
    end: TrajectoryEnd | None = None
    """Of the trajectory, accepted or not."""
    retried: Tensor | None = None
    """Whether the first solver failed a projection, ``[chains, *batch]``."""


@dataclass(frozen=True, eq=False)
class Info:
    """Diagnostics of one transition, each ``[chains, *batch]``.

    Args:
        acceptance_rate: probability with which the proposal was accepted; 0 for a failed one, 1 where none is refused.
        status: :class:`Status` of the proposal.
        energy: of the new state; with a momentum, its kinetic energy included.
        stats: per-draw statistics that only this family of kernels reports, by name.
        tuning: what warm-up learns from; None where there is nothing to tune.
    """

    acceptance_rate: Tensor
    status: Tensor
    energy: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)
    tuning: Trial | None = None

    def all_stats(self) -> dict[str, Tensor]:
        """The statistics that :class:`Draws` keeps: those of every kernel, and ``stats``."""
        return {
            "acceptance_rate": self.acceptance_rate,
            "diverging": self.status == Status.DIVERGED,
            "energy": self.energy,
            **self.stats,
        }


class State(Protocol):
    """Where chains are, with what the next transition needs; it is never changed."""

    @property
    def position(self) -> Tensor:
        """``[chains, *batch, D]``."""
        ...

    @property
    def energy(self) -> Tensor:
        """Of the positions, ``[chains, *batch]``: minus their log density, up to a constant of the problem."""
        ...


@runtime_checkable
class Kernel(Protocol):
    """An immutable configuration of a Markov transition. Nothing else is required of a kernel.

    What concerns one chain, a failed solve or an energy that is not a number, is a status in :class:`Info` and a
    rejection of that chain, never an exception. All random numbers come from ``rng``.
    """

    def check(self, problem: Any, /) -> None:
        """Raise ArgumentError, in one line, where the kernel cannot sample this problem."""
        ...

    def init(self, problem: Any, position: Tensor, /) -> State:
        """State at ``position [chains, *batch, D]``."""
        ...

    def step(self, problem: Any, state: Any, rng: torch.Generator, /) -> tuple[State, Info]:
        """One transition of every chain."""
        ...
