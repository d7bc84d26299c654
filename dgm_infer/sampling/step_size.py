"""Step sizes: dual averaging of the acceptance, and a search for an initial one."""

import math
from typing import Any

import torch
from torch import Tensor

from ..kernels.kernel import Tunable

__all__ = ["DualAveraging", "bounded", "reasonable_step_size"]


class DualAveraging:
    """Stochastic approximation of the step size that gives a target acceptance probability.

    Hoffman and Gelman 2014, section 3.2 (``gamma`` 0.05, ``t0`` 10, ``kappa`` 0.75), for a batch of problems.

    Args:
        step_size: ``[*batch]`` initial values, positive.
        target: target acceptance probability.
    """

    def __init__(self, step_size: Tensor, target: float, *, gamma: float = 0.05, t0: float = 10, kappa: float = 0.75):
        self.target, self.gamma, self.t0, self.kappa = target, gamma, t0, kappa
        # shrink towards a larger step than the initial one: large steps are cheap to test
        self.mu = (2 * step_size).log()
        self.current = step_size
        self.log_average = torch.zeros_like(step_size)
        self.error = torch.zeros_like(step_size)
        self.count = 0
        self.floor = torch.zeros_like(step_size)
        """Step sizes below which none is used, ``[*batch]``."""

    def update(self, acceptance: Tensor, weight: Tensor | float = 1.0) -> None:
        """Learn from the acceptance probabilities ``[*batch]`` of the current step sizes.

        ``weight [*batch]`` in [0, 1] is how informative they are: 0 if the steps taken were far shorter.
        """
        self.count += 1
        eta = 1 / (self.count + self.t0)
        self.error = (1 - eta) * self.error + eta * weight * (self.target - acceptance)
        log_step = bounded(self.mu - math.sqrt(self.count) / self.gamma * self.error)
        log_step = log_step.maximum(self.floor.log())
        share = self.count**-self.kappa
        self.log_average = share * log_step + (1 - share) * self.log_average
        self.current = log_step.exp()

    @property
    def final(self) -> Tensor:
        """The averaged step sizes ``[*batch]``."""
        return self.log_average.exp() if self.count else self.current


def reasonable_step_size(
    kernel: Tunable,
    problem: Any,
    state: Any,
    rng: torch.Generator,
    *,
    initial: float = 0.1,
    doublings: int = 20,
) -> Tensor:
    """A step size per chain whose single step is accepted with probability near 1/2, ``[chains, *batch]``.

    Doubles or halves from ``initial`` until the probability crosses 1/2 (Hoffman and Gelman 2014, algorithm 4).
    The chains do not move.
    """
    position = state.position
    step_size = torch.full(position.shape[:-1], initial, dtype=position.dtype, device=position.device)
    direction = None
    for _ in range(doublings):
        _, info = kernel.probe(step_size, 1).step(problem, state, rng)
        wanted = torch.where(info.tuned_acceptance > 0.5, 1.0, -1.0)
        if direction is None:
            direction = wanted
        # a chain that grew past its limit returns to the last accepted step
        step_size = torch.where((direction > 0) & (wanted < 0), step_size / 2, step_size)
        direction = torch.where(wanted == direction, direction, 0)
        if not direction.any():
            break
        step_size = step_size * 2.0**direction
    return step_size


def bounded(log_step: Tensor) -> Tensor:
    """Clamp to the logs of 1e-10 and 1e10: if nothing or everything is accepted, no step size is right."""
    return log_step.clamp(-10 * math.log(10), 10 * math.log(10))
