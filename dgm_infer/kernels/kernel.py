"""What every Markov kernel offers, and what Hamiltonian kernels share."""

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ..errors import ArgumentError, Status

__all__ = ["Info", "Kernel", "Settings"]

# An energy error above this is called a divergence.
_DIVERGENCE = 1000.0


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
        return stats


class Kernel(Protocol):
    """An immutable configuration of a Markov transition.

    ``step_size=None`` stands for "to be adapted"; ``step`` needs a number, or a tensor that broadcasts to
    ``[chains, *batch]``. Warm-up replaces the field and never touches the kernel.
    """

    @property
    def step_size(self) -> float | Tensor | None: ...

    @property
    def n_steps(self) -> int | tuple[int, int]: ...

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

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not None and b is not None and torch.equal(torch.as_tensor(a).double(), torch.as_tensor(b).double())
    return a == b


def accept(h_old: Tensor, h_new: Tensor, status: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Metropolis decision on the Hamiltonian, every chain for itself.

    Returns:
        accepted, acceptance probability and status, each ``[...]``.
    """
    error = h_new - h_old
    diverged = (status == Status.OK) & ~(h_new.isfinite() & (error < _DIVERGENCE))
    status = torch.where(diverged, int(Status.DIVERGED), status)
    probability = torch.where(status == Status.OK, error.neg().clamp_max(0).exp(), torch.zeros_like(error))
    uniform = torch.rand(error.shape, generator=rng, dtype=error.dtype, device=error.device)
    return uniform < probability, probability, status


def draw_n_steps(n_steps: int | tuple[int, int], rng: torch.Generator) -> int:
    """Steps of this transition, uniform on the inclusive range; one number for all chains."""
    low, high = _bounds(n_steps)
    return int(torch.randint(low, high + 1, (), generator=rng, device=rng.device)) if low < high else low


def broadcast_step_size(step_size: float | Tensor | None, like: Tensor) -> Tensor:
    """The step size of every chain, in the shape of ``like [chains, *batch]``."""
    if step_size is None:
        raise ArgumentError("step_size=None is chosen by sample(); to call step() directly give it a number")
    return torch.as_tensor(step_size, dtype=like.dtype, device=like.device).expand_as(like)


def check_step_size(name: str, step_size: float | Tensor | None) -> None:
    if step_size is None:
        return
    try:
        values = torch.as_tensor(step_size)
        bad = ~((values > 0) & values.isfinite())
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"{name}(step_size={step_size!r}): must be a positive number, or None") from None
    if bad.any():
        raise ArgumentError(f"{name}(step_size={values[bad][0].item():g}): must be positive, or None to adapt it")


def check_n_steps(name: str, n_steps: int | tuple[int, int]) -> None:
    try:
        low, high = _bounds(n_steps)
    except (TypeError, ValueError):
        low = high = 0
    if not 1 <= low <= high:
        raise ArgumentError(f"{name}(n_steps={n_steps}): must be 1 or more, or a range (low, high) of such")


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
