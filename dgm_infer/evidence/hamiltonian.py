"""Hamiltonian annealed importance sampling (Sohl-Dickstein and Culpepper 2012): persistent momentum."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import positive
from .annealing import Annealing
from .path import AnnealedPath, Move, Point
from .plan import check_settings, frozen_plan

__all__ = ["HamiltonianAIS"]

# Leapfrog steps per temperature of the pilot, which draws a fresh momentum at every temperature.
_PILOT_STEPS = 5


@dataclass(frozen=True, eq=False)
class HamiltonianAIS(Annealing):
    """Annealed importance sampling with one leapfrog step per temperature, ``E[mean w] = Z`` (unbiased) if frozen.

    The momentum persists between temperatures, so that chains do not walk at random. A step is accepted, or the
    momentum negated; then ``p' = sqrt(a) p + sqrt(1 - a) n`` with ``a = 2^(-t/half_life)`` after a step of length t,
    and n standard normal. The annealed density is that of position and momentum together; the weights are those of
    :class:`AIS`.

    The defaults take 2 537 gradients per chain and problem, including 536 for the pilot.

    Args:
        temperatures: K, steps from the base to the target.
        schedule: as in :class:`AIS`.
        half_life: time after which half of the momentum's variance is replaced.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per temperature and
            problem on a pilot.
        target_acceptance: mean acceptance probability of the pilot's trajectories of five steps. Single steps are
            accepted more often, as they must be: every rejection reverses a chain.
        pilot_temperatures: temperatures of the pilot.
    """

    temperatures: int = 2000
    schedule: str | Tensor | Callable[[int], Tensor] = "sigmoid"
    half_life: float = 0.5
    step_size: float | Tensor | None = None
    target_acceptance: float = 0.8
    pilot_temperatures: int = 100

    def __post_init__(self):
        check_settings(self)
        positive("HamiltonianAIS", "half_life", self.half_life)

    def plan(self, path, chains, rng, progress):
        return frozen_plan(self, path, chains, _PILOT_STEPS, rng, progress)

    def moves(self, path, chains, rng):
        return _Persistent(path, self.half_life, path.normal(chains, rng), rng)


class _Persistent:
    """Steps with one persistent momentum per chain.

    A transition is a step, with the momentum negated if rejected, then a refreshment. Its reversal is the refreshment,
    then a step with the momentum negated; a backward pass keeps the momentum negated throughout, so that there the
    reversal is a refreshment and a step.
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
