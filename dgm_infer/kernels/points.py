"""Positions with their energies, for kernels that use no gradient, and the Metropolis-Hastings decision on them."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..autodiff.randomness import uniform
from ..errors import Status
from ..target import Target

__all__ = ["Decision", "Point", "broken", "metropolis", "point_at", "status_of"]


class Point(NamedTuple):
    """Positions ``[chains, *batch, D]`` and their energies ``[chains, *batch]``."""

    position: Tensor
    energy: Tensor

    def where(self, condition: Tensor, other: "Point") -> "Point":
        """These where the condition ``[chains, *batch]`` holds, else the others."""
        position = torch.where(condition.unsqueeze(-1), self.position, other.position)
        return Point(position, torch.where(condition, self.energy, other.energy))


@torch.no_grad()
def point_at(problem: Target, position: Tensor) -> Point:
    """The state at a position."""
    return Point(position, problem.energy(position))


def broken(energy: Tensor) -> Tensor:
    """Where an energy is NaN or minus infinity; plus infinity is where the density is zero."""
    return energy.isnan() | energy.isneginf()


def status_of(failed: Tensor) -> Tensor:
    """Diverged where a proposal's energy was :func:`broken`."""
    return torch.where(failed, int(Status.DIVERGED), int(Status.OK)).to(torch.int8)


class Decision(NamedTuple):
    """The outcome of proposals, each ``[chains, *batch]``."""

    point: Point
    probability: Tensor
    status: Tensor


def metropolis(here: Point, there: Point, log_hastings: Tensor | float, rng: torch.Generator) -> Decision:
    """Accept with probability ``min(1, exp(phi(x) - phi(x')) q(x | x') / q(x' | x))`` (math 8.9).

    Args:
        here: present points x.
        there: proposed points x'.
        log_hastings: ``log q(x | x') - log q(x' | x)``, ``[chains, *batch]``; 0 for symmetric proposals.
    """
    failed = broken(there.energy)
    log_ratio = torch.where(failed, -torch.inf, here.energy - there.energy + log_hastings)
    probability = log_ratio.clamp_max(0).exp()
    return Decision(
        there.where(uniform(probability.shape, probability, rng) < probability, here), probability, status_of(failed)
    )
