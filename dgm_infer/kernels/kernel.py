"""What every Markov kernel offers, and what Hamiltonian kernels share."""

import dataclasses
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ..errors import ArgumentError, Status

__all__ = ["DEFAULT_LENGTH", "Info", "Kernel", "Settings", "TrajectoryEnd"]

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


@dataclass(frozen=True, eq=False)
class Settings:
    """Base of kernels that are frozen dataclasses: copies with changes, and equality that tensors do not upset."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def longest_step(self, problem: Any) -> float:
        """Above which no step size is used."""
        return math.inf

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not None and b is not None and torch.equal(_double(a), _double(b))
    return a == b


def _double(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


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
        low, high = _bounds(kernel.n_steps)
        steps = torch.randint(low, high + 1, (), generator=rng, device=rng.device) if low < high else torch.tensor(low)
        return Schedule(steps.to(like.device).expand(like.shape), step_size, like.new_ones(problem.batch_shape))
    length = DEFAULT_LENGTH if kernel.trajectory_length is None else kernel.trajectory_length
    length = torch.as_tensor(length, dtype=like.dtype, device=like.device)
    fraction = 0.5 + torch.rand(problem.batch_shape, generator=rng, dtype=like.dtype, device=like.device)
    time = (fraction * length).expand_as(like)
    steps = (time / step_size).ceil().clamp(1, MAX_STEPS)
    return Schedule(steps.to(torch.int64), torch.minimum(time / steps, step_size), fraction)


def check_step_size(name: str, step_size: float | Tensor | None) -> None:
    if step_size is not None:
        _check_positive(name, "step_size", step_size)


def _check_positive(name: str, field: str, value: float | Tensor) -> None:
    try:
        values = torch.as_tensor(value)
        bad = ~((values > 0) & values.isfinite())
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"{name}({field}={value!r}): must be a positive number, or None") from None
    if bad.any():
        raise ArgumentError(f"{name}({field}={values[bad][0].item():g}): must be positive, or None to adapt it")


def check_trajectory_length(name: str, trajectory_length: float | Tensor | None, n_steps) -> None:
    if trajectory_length is None:
        return
    if n_steps is not None:
        raise ArgumentError(f"{name}(n_steps={n_steps}, trajectory_length=...): give one of them")
    _check_positive(name, "trajectory_length", trajectory_length)


def check_n_steps(name: str, n_steps: int | tuple[int, int] | None) -> None:
    if n_steps is None:
        return
    try:
        low, high = _bounds(n_steps)
    except (TypeError, ValueError):
        low = high = 0
    if not 1 <= low <= high:
        raise ArgumentError(f"{name}(n_steps={n_steps}): must be 1 or more, a range (low, high) of such, or None")


def check_count(name: str, field: str, value: int) -> None:
    try:
        value = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}({field}={value!r}): must be a whole number, 1 or more") from None
    if value < 1:
        raise ArgumentError(f"{name}({field}={value}): must be 1 or more")


def _bounds(n_steps: int | tuple[int, int]) -> tuple[int, int]:
    low, high = n_steps if isinstance(n_steps, tuple | list) else (n_steps, n_steps)
    return operator.index(low), operator.index(high)
