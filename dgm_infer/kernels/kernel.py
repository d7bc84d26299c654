"""What every Markov kernel offers, and what Hamiltonian kernels share."""

from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ..errors import ArgumentError, Status

__all__ = ["Info", "Kernel", "accept", "check_n_steps", "check_step_size", "draw_n_steps"]

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
    if isinstance(n_steps, int):
        return n_steps
    low, high = n_steps
    return int(torch.randint(low, high + 1, (), generator=rng, device=rng.device))


def broadcast_step_size(step_size: float | Tensor | None, like: Tensor) -> Tensor:
    """The step size of every chain, in the shape of ``like [chains, *batch]``."""
    if step_size is None:
        raise ArgumentError("step_size=None is chosen by sample(); to call step() directly give it a number")
    step_size = torch.as_tensor(step_size, dtype=like.dtype, device=like.device)
    try:
        return step_size.expand_as(like)
    except RuntimeError:
        raise ArgumentError(
            f"step_size of shape {tuple(step_size.shape)} does not fit the problems {tuple(like.shape[1:])}: give a "
            "number, or one for every problem"
        ) from None


def check_step_size(name: str, step_size: float | Tensor | None) -> None:
    if step_size is None:
        return
    values = torch.as_tensor(step_size)
    bad = ~((values > 0) & values.isfinite())
    if bad.any():
        raise ArgumentError(f"{name}(step_size={values[bad][0].item():g}): must be positive, or None to adapt it")


def check_n_steps(name: str, n_steps: int | tuple[int, int]) -> None:
    bounds = (n_steps, n_steps) if isinstance(n_steps, int) else n_steps
    whole = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(isinstance(n, int) for n in bounds)
    if not whole or not 1 <= bounds[0] <= bounds[1]:
        raise ArgumentError(f"{name}(n_steps={n_steps}): must be 1 or more, or a range (low, high) of such")
