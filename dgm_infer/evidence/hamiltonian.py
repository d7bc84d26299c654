"""Hamiltonian annealed importance sampling (Sohl-Dickstein and Culpepper 2012): a momentum that goes on."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError
from .annealing import Annealing
from .path import AnnealedPath, Move, Point
from .plan import check_settings, frozen_plan

__all__ = ["HamiltonianAIS"]

# Leapfrog steps a temperature of the pilot, whose chains take a fresh momentum at every one.
_PILOT_STEPS = 5


@dataclass(frozen=True, eq=False)
class HamiltonianAIS(Annealing):
    """Annealed importance sampling of one leapfrog step a temperature, ``E[mean w] = Z`` (unbiased) for a frozen plan.

    The momentum is kept from temperature to temperature, so that chains travel on and do not walk at random. A step is
    accepted, or the momentum turned round; then ``p' = sqrt(a) p + sqrt(1 - a) n`` with ``a = 2^(-t/half_life)`` after
    a step of length t and n standard normal. Position and momentum together have the density that is annealed, and
    weights are those of :class:`AIS`.

    These defaults take 2 537 gradients of every chain of every problem, the pilot's 536 included.

    Args:
        temperatures: K, steps from the base to the target.
        schedule: as in :class:`AIS`.
        half_life: time in which half of the momentum's variance is replaced.
        step_size: longest step in whitened coordinates, a number or ``[*batch]``; None to adapt it to every
            temperature and problem on a pilot.
        target_acceptance: mean acceptance probability of the pilot's trajectories, of five steps each. Single steps
            are accepted more often, as they must: every rejection turns a chain round.
        pilot_temperatures: of the pilot.
    """

    temperatures: int = 2000
    schedule: str | Tensor | Callable[[int], Tensor] = "sigmoid"
    half_life: float = 0.5
    step_size: float | Tensor | None = None
    target_acceptance: float = 0.8
    pilot_temperatures: int = 100

    def __post_init__(self):
        check_settings(self)
        if not (isinstance(self.half_life, int | float) and 0 < self.half_life < math.inf):
            raise ArgumentError(f"HamiltonianAIS(half_life={self.half_life!r}): must be a positive number")

    def plan(self, path, chains, rng, progress):
        return frozen_plan(self, path, chains, _PILOT_STEPS, rng, progress)

    def moves(self, path, chains, rng):
        return _Persistent(path, self.half_life, path.normal(chains, rng), rng)


class _Persistent:
    """Steps of one momentum a chain.

    A transition is a step, turned round if rejected, and then a refreshment. Its reversal is the refreshment and then
    a step of the momentum turned round; a pass backwards keeps the momentum turned round all the way, where that is
    a refreshment and a step.
    """

    def __init__(self, path: AnnealedPath, half_life: float, momentum: Tensor, rng: torch.Generator):
        self.path, self.half_life, self.momentum, self.rng = path, half_life, momentum, rng

    def forward(self, point: Point, beta: Tensor, step_size: Tensor) -> Move:
        step = self.path.random_step(point, step_size, self.rng)
        move, self.momentum = self.path.move_on(point, self.momentum, beta, step, self.rng)
        self._refresh(step)
        return move

    def backward(self, point: Point, beta: Tensor, step_size: Tensor) -> Move:
        step = self.path.random_step(point, step_size, self.rng)
        self._refresh(step)
        move, self.momentum = self.path.move_on(point, self.momentum, beta, step, self.rng)
        return move

    def _refresh(self, step: Tensor) -> None:
        kept = torch.exp2(-step / self.half_life).unsqueeze(-1)
        p = self.momentum
        noise = torch.randn(p.shape, generator=self.rng, dtype=p.dtype, device=p.device)
        self.momentum = kept.sqrt() * p + (1 - kept).sqrt() * noise
