"""Warm-up: step sizes by a start-up phase, then dual averaging, one step size a problem; frozen afterwards."""

import math
from typing import Any

import torch
from torch import Tensor

from .kernels import Info, Kernel

__all__ = ["DualAveraging", "WarmUp", "reasonable_step_size"]


class DualAveraging:
    """Stochastic approximation of the step size that gives a target acceptance probability.

    Hoffman and Gelman 2014, section 3.2 (``gamma`` 0.05, ``t0`` 10, ``kappa`` 0.75), for a batch of problems.

    Args:
        step_size: ``[*batch]`` initial values, positive.
        target: acceptance probability aimed at.
    """

    def __init__(self, step_size: Tensor, target: float, *, gamma: float = 0.05, t0: float = 10, kappa: float = 0.75):
        self.target, self.gamma, self.t0, self.kappa = target, gamma, t0, kappa
        # shrink towards a larger step than the initial one: large steps are cheap to test
        self.mu = (2 * step_size).log()
        self.current = step_size
        self.log_average = torch.zeros_like(step_size)
        self.error = torch.zeros_like(step_size)
        self.count = 0

    def update(self, acceptance: Tensor) -> None:
        """Take in the acceptance probabilities ``[*batch]`` that the current step sizes gave."""
        self.count += 1
        eta = 1 / (self.count + self.t0)
        self.error = (1 - eta) * self.error + eta * (self.target - acceptance)
        log_step = _bounded(self.mu - math.sqrt(self.count) / self.gamma * self.error)
        weight = self.count**-self.kappa
        self.log_average = weight * log_step + (1 - weight) * self.log_average
        self.current = log_step.exp()

    @property
    def final(self) -> Tensor:
        """The averaged step sizes ``[*batch]``."""
        return self.log_average.exp() if self.count else self.current


def reasonable_step_size(
    kernel: Kernel,
    problem: Any,
    state: Any,
    rng: torch.Generator,
    *,
    initial: float = 0.1,
    doublings: int = 20,
) -> Tensor:
    """A step size for every chain whose single step is accepted with probability near 1/2, ``[chains, *batch]``.

    Doubles or halves from ``initial`` until the probability crosses 1/2 (Hoffman and Gelman 2014, algorithm 4).
    The chains do not move.
    """
    position = state.position
    step_size = torch.full(position.shape[:-1], initial, dtype=position.dtype, device=position.device)
    direction = None
    for _ in range(doublings):
        _, info = kernel.replace(step_size=step_size, n_steps=1).step(problem, state, rng)
        wanted = torch.where(info.acceptance_rate > 0.5, 1.0, -1.0)
        if direction is None:
            direction = wanted
        # a chain that grew past its limit goes back to the last step that was accepted
        step_size = torch.where((direction > 0) & (wanted < 0), step_size / 2, step_size)
        direction = torch.where(wanted == direction, direction, 0)
        if not direction.any():
            break
        step_size = step_size * 2.0**direction
    return step_size


def _bounded(log_step: Tensor) -> Tensor:
    """Within 1e-10 and 1e10: where nothing is ever accepted, or everything, no step size is right."""
    return log_step.clamp(-10 * math.log(10), 10 * math.log(10))


class WarmUp:
    """The kernel of every warm-up iteration, and the frozen one that follows.

    Start-up phase (the first fifth, at most 60 iterations): prior draws projected onto a fibre have atypically high
    energy and every chain its own stiffness, so each chain has its own step size, quickly adapted, and takes one
    or two steps a transition (MATH 5). Then dual averaging of one step size a problem, over the mean acceptance of
    its chains. A kernel with a fixed step size is left as it is.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Any,
        state: Any,
        rng: torch.Generator,
        *,
        iterations: int,
        target_acceptance: float,
    ):
        self._kernel = kernel
        self._adapts = kernel.step_size is None
        self._target = target_acceptance
        self._left = min(iterations // 5, 60) if self._adapts else 0
        self._averaging: DualAveraging | None = None
        self._iterations = iterations
        if self._adapts:
            self._chain_step_size = reasonable_step_size(kernel, problem, state, rng)

    @property
    def kernel(self) -> Kernel:
        """The kernel of the next warm-up iteration."""
        if not self._adapts:
            return self._kernel
        if self._left > 0:
            return self._kernel.replace(step_size=self._chain_step_size, n_steps=(1, 2))
        return self._kernel.replace(step_size=self._dual_averaging().current)

    def update(self, info: Info) -> None:
        """Learn from the iteration that ``kernel`` just made."""
        if not self._adapts:
            return
        acceptance = info.acceptance_rate
        if self._left > 0:
            self._left -= 1
            log_step = self._chain_step_size.log() + 0.5 * (acceptance - self._target)
            self._chain_step_size = _bounded(log_step).exp()
            return
        self._dual_averaging().update(acceptance.mean(0))

    def frozen(self) -> Kernel:
        """The adapted kernel: its step size is a tensor ``[*batch]``."""
        if not self._adapts:
            return self._kernel
        return self._kernel.replace(step_size=self._dual_averaging().final)

    def _dual_averaging(self) -> DualAveraging:
        if self._averaging is None:
            # the smaller of a problem's chains: a step that half of them reject adapts slowly; without a warm-up to
            # correct it, the smallest
            quantile = 0.25 if self._iterations else 0.0
            self._averaging = DualAveraging(self._chain_step_size.quantile(quantile, dim=0), self._target)
        return self._averaging
