"""What every Markov kernel offers, and what Hamiltonian kernels share."""

import math
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ..arguments import counts, optional_positive
from ..errors import ArgumentError, Status

__all__ = ["DEFAULT_LENGTH", "Info", "Kernel", "TrajectoryEnd"]

# Before it is adapted: on a standard normal density, what makes the next position independent of this one.
DEFAULT_LENGTH = math.pi / 2
# A transition takes no more steps than this, however small they are.
MAX_STEPS = 200
# An energy error above this is called a divergence.
DIVERGENCE = 1000.0


class Info(NamedTuple):
    """Diagnostics of one transition, each ``[chains, *batch]``."""

    acceptance_rate: Tensor
    """``min(1, exp(H - H'))``; 0 for a failed trajectory."""
    status: Tensor
    """:class:`Status` of the trajectory."""
    n_steps: Tensor
    step_size: Tensor
    energy: Tensor
    """Hamiltonian of the new state: its energy plus the kinetic energy it was proposed with."""
    constraint_error: Tensor | None = None
    """``max|c|`` at the new position, on a fibre."""
    solver_iterations: Tensor | None = None
    """Updates of the projections of the trajectory, on a fibre."""
    retried: Tensor | None = None
    """Whether the first solver failed one of them."""
    end: "TrajectoryEnd | None" = None
    """Of the trajectory, accepted or not: what its length is adapted by."""

    def stats(self) -> dict[str, Tensor]:
        """The per-draw statistics that :class:`Draws` keeps."""
        stats = {
            "acceptance_rate": self.acceptance_rate,
            "diverging": self.status == Status.DIVERGED,
            "n_steps": self.n_steps,
            "step_size": self.step_size,
            "energy": self.energy,
        }
        if self.constraint_error is not None:
            stats["constraint_error"] = self.constraint_error
            stats["projection_failed"] = self.status == Status.PROJECTION_FAILED
            stats["reversal_failed"] = self.status == Status.REVERSAL_FAILED
        if self.solver_iterations is not None:
            stats["solver_iterations"] = self.solver_iterations
        return stats


class TrajectoryEnd(NamedTuple):
    """Where trajectories started and ended, ``[chains, *batch, D]``, and how long they were."""

    start: Tensor
    position: Tensor
    momentum: Tensor
    fraction: Tensor
    """Duration over the trajectory length, ``[*batch]``."""


class Kernel(Protocol):
    """An immutable configuration of a Markov transition.

    ``None`` in a field stands for "to be adapted": warm-up replaces it and never touches the kernel. ``step`` needs
    a step size, a number or a tensor that broadcasts to ``[chains, *batch]``.
    """

    @property
    def step_size(self) -> float | Tensor | None: ...

    @property
    def n_steps(self) -> int | tuple[int, int] | None: ...

    @property
    def trajectory_length(self) -> float | Tensor | None: ...

    def longest_step(self, problem: Any) -> float:
        """Above which no step size is used."""
        ...

    def check(self, problem: Any) -> None:
        """Raise ArgumentError when the kernel cannot sample this kind of problem."""
        ...

    def init(self, problem: Any, position: Tensor) -> Any:
        """State at ``position [chains, *batch, D]``."""
        ...

    def step(self, problem: Any, state: Any, rng: torch.Generator) -> tuple[Any, Info]:
        """One transition of every chain."""
        ...

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        ...


def accept(h_old: Tensor, h_new: Tensor, status: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Metropolis decision on the Hamiltonian, every chain for itself.

    Returns:
        accepted, acceptance probability and status, each ``[...]``.
    """
    error = h_new - h_old
    diverged = (status == Status.OK) & ~(h_new.isfinite() & (error < DIVERGENCE))
    status = torch.where(diverged, int(Status.DIVERGED), status)
    probability = torch.where(status == Status.OK, error.neg().clamp_max(0).exp(), torch.zeros_like(error))
    uniform = torch.rand(error.shape, generator=rng, dtype=error.dtype, device=error.device)
    return uniform < probability, probability, status


class Schedule(NamedTuple):
    """What a transition's trajectories take."""

    n_steps: Tensor
    """``[chains, *batch]``."""
    step_size: Tensor
    """``[chains, *batch]``."""
    fraction: Tensor
    """Duration over the trajectory length, ``[*batch]``."""


def draw_schedule(kernel: "Kernel", problem: Any, like: Tensor, rng: torch.Generator) -> Schedule:
    """Steps of this transition.

    ``n_steps`` is one number for all chains and problems, uniform on the kernel's inclusive range. Where that is None,
    a trajectory lasts ``t = U T`` with ``T`` the trajectory length of a problem and ``U ~ Uniform(1/2, 3/2)``, the
    same for all chains of a problem: in the fewest equal steps that are no longer than the step size.

    Args:
        like: ``[chains, *batch]``.
    """
    if kernel.step_size is None:
        raise ArgumentError("step_size=None is chosen by sample(); to call step() directly give it a number")
    step_size = torch.as_tensor(kernel.step_size, dtype=like.dtype, device=like.device).expand_as(like)
    step_size = step_size.clamp_max(kernel.longest_step(problem))
    if kernel.n_steps is not None:
        low, high = counts(type(kernel).__name__, "n_steps", kernel.n_steps)
        steps = torch.randint(low, high + 1, (), generator=rng, device=rng.device) if low < high else torch.tensor(low)
        return Schedule(steps.to(like.device).expand(like.shape), step_size, like.new_ones(problem.batch_shape))
    length = DEFAULT_LENGTH if kernel.trajectory_length is None else kernel.trajectory_length
    length = torch.as_tensor(length, dtype=like.dtype, device=like.device)
    fraction = 0.5 + torch.rand(problem.batch_shape, generator=rng, dtype=like.dtype, device=like.device)
    time = (fraction * length).expand_as(like)
    steps = (time / step_size).ceil().clamp(1, MAX_STEPS)
    return Schedule(steps.to(torch.int64), torch.minimum(time / steps, step_size), fraction)


def check_schedule(kernel: Any) -> None:
    """Check the fields that :func:`draw_schedule` reads.

    Raises:
        ArgumentError: one is outside its range, or both ``n_steps`` and ``trajectory_length`` are given.
    """
    name = type(kernel).__name__
    optional_positive(name, "step_size", kernel.step_size)
    if kernel.n_steps is not None:
        counts(name, "n_steps", kernel.n_steps)
        if kernel.trajectory_length is not None:
            raise ArgumentError(f"{name}(n_steps={kernel.n_steps}, trajectory_length=...): give one of them")
    optional_positive(name, "trajectory_length", kernel.trajectory_length)
