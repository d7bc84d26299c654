"""Warm-up: a start-up phase, then step size, trajectory length and sub-steps; frozen afterwards."""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import Status
from ..kernels import Info, Kernel
from ..kernels.kernel import DEFAULT_LENGTH, TrajectoryEnd

__all__ = ["ChEES", "DualAveraging", "SubSteps", "WarmUp", "reasonable_step_size"]


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

    def update(self, acceptance: Tensor, weight: Tensor | float = 1.0) -> None:
        """Take in the acceptance probabilities ``[*batch]`` that the current step sizes gave.

        ``weight [*batch]`` in [0, 1] says how much this tells: 0 where the steps taken were far shorter.
        """
        self.count += 1
        eta = 1 / (self.count + self.t0)
        self.error = (1 - eta) * self.error + eta * weight * (self.target - acceptance)
        log_step = _bounded(self.mu - math.sqrt(self.count) / self.gamma * self.error)
        share = self.count**-self.kappa
        self.log_average = share * log_step + (1 - share) * self.log_average
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
        _, info = kernel.replace(step_size=step_size, n_steps=1, trajectory_length=None).step(problem, state, rng)
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


class ChEES:
    """Trajectory length that changes the squared distance from the mean most (Hoffman, Radul and Sountsov 2021).

    Ascends ``E[(|x' - m|^2 - |x - m|^2)^2] / 4`` in the log of the length T, by Adam, over the chains of a problem:
    with ``x', p'`` the end of a trajectory of duration ``U T``, the gradient is the mean, weighted by acceptance, of
    ``U T (|x' - m|^2 - |x - m|^2) (x' - m).p'``. On a fibre, distances in the input space are right as they are:
    where the model is linear, the posterior is standard normal along it.

    Args:
        length: ``[*batch]`` initial values.
    """

    # The criterion is about squared distances; means and modes gain from longer trajectories. On the completions of the
    # README, 1.6 times as long made the smallest bulk ESS of a draw 3.4 times as large for 1.2 times the work.
    stretch = 1.4
    # of the length over its initial value, either way
    most = 100.0

    def __init__(self, length: Tensor, *, rate: float = 0.05):
        self.log_length = length.log()
        self.low, self.high = self.log_length - math.log(self.most), self.log_length + math.log(self.most)
        self.mean: Tensor | float = 0.0
        self.rate = rate
        self.first = torch.zeros_like(length)
        self.second = torch.zeros_like(length)
        self.log_average = torch.zeros_like(length)
        self.count = 0

    def update(self, end: TrajectoryEnd, acceptance: Tensor) -> None:
        """Take in the trajectories of one transition, with acceptance probabilities ``[chains, *batch]``."""
        self.count += 1
        # a running mean over iterations: one iteration of few chains says little
        self.mean = self.mean + max(1 / self.count, 0.05) * (end.start.mean(0) - self.mean)
        after, before = end.position - self.mean, end.start - self.mean
        jump = after.square().sum(-1) - before.square().sum(-1)
        slope = (acceptance * jump * (after * end.momentum).sum(-1)).nan_to_num(0, 0, 0)
        gradient = end.fraction * slope.sum(0) / acceptance.sum(0).clamp_min(1e-8)
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.95 * self.second + 0.05 * gradient.square()
        scale = (self.second / (1 - 0.95**self.count)).sqrt().clamp_min(1e-30)
        ascent = self.first / (1 - 0.9**self.count) / scale
        log_length = self.log_length + self.rate / math.sqrt(1 + self.count / 20) * ascent.clamp(-1, 1)
        self.log_length = log_length.clamp(self.low, self.high)
        # an average over about the last quarter
        weight = min(1.0, 4 / (self.count + 3))
        self.log_average = weight * self.log_length + (1 - weight) * self.log_average

    @property
    def current(self) -> Tensor:
        return self.log_length.exp()

    @property
    def final(self) -> Tensor:
        """The averaged lengths ``[*batch]``, stretched."""
        return self.stretch * (self.log_average.exp() if self.count else self.current)


class SubSteps:
    """Geodesic sub-steps: more of them when a problem's trajectories fail too often, or need the second solver.

    Failures reject; the second solver costs time. The limits are on the share of transitions.

    Args:
        n: to begin with.
        window: iterations between decisions.
    """

    failures = 0.005
    retries = 0.05
    most = 20

    def __init__(self, n: int, window: int):
        self.n, self.window = n, max(window, 1)
        self._reset()

    def _reset(self) -> None:
        self.iterations = 0
        self.failed: Tensor | float = 0.0
        self.retried: Tensor | float = 0.0
        self.trials: Tensor | float = 0.0

    def update(self, info: Info, counted: Tensor) -> None:
        """Take in one iteration, for the problems ``counted [*batch]``."""
        failed = (info.status == Status.PROJECTION_FAILED) | (info.status == Status.REVERSAL_FAILED)
        self.failed = self.failed + failed.sum(0) * counted
        self.retried = self.retried + (0 if info.retried is None else info.retried.sum(0) * counted)
        self.trials = self.trials + len(failed) * counted
        self.iterations += 1
        if self.iterations < self.window:
            return
        if self._exceeds(self.failed, self.failures) or self._exceeds(self.retried, self.retries):
            self.n = min(self.n + max(1, self.n // 2), self.most)
        self._reset()

    def _exceeds(self, count: Tensor | float, limit: float) -> bool:
        # of as many problems as these, the limit itself lets one through as rarely as this (a Poisson count)
        count = torch.as_tensor(count, dtype=torch.float64)
        expected = limit * torch.as_tensor(self.trials, dtype=torch.float64)
        return bool((torch.special.gammainc(count, expected) < 0.02 / count.numel()).any())


class WarmUp:
    """The kernel of every warm-up iteration, and the frozen one that follows.

    Only fields that are None are adapted. Start-up phase (the first fifth, at most 60 iterations, unless the start is
    ``typical`` of the posterior already): prior draws projected onto a fibre have atypically high energy and every
    chain its own stiffness, so each chain has its own step size, quickly adapted, and takes one or two steps a
    transition (math 5.3). Then, for every problem, over its
    chains: the step size by dual averaging of the mean acceptance, the trajectory length by :class:`ChEES`; and for
    all problems :class:`SubSteps`, up to the last quarter.
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
        typical: bool = False,
    ):
        self._kernel, self._problem = kernel, problem
        self._target = target_acceptance
        self._iterations, self._done = iterations, 0
        self._adapts_step = kernel.step_size is None
        self._startup = min(iterations // 5, 60) if self._adapts_step and not typical else 0
        self._averaging: DualAveraging | None = None
        self._sub_steps: SubSteps | None = None
        if getattr(kernel, "n_geodesic", 0) is None:
            self._sub_steps = SubSteps(kernel.sub_steps(problem), iterations // 10)  # type: ignore[attr-defined]
        self._adapts_length = kernel.n_steps is None and kernel.trajectory_length is None
        self._like = state.position[0, ..., 0]
        self._chees: ChEES | None = None
        if self._adapts_step:
            self._chain_step_size = reasonable_step_size(self._with_sub_steps(kernel), problem, state, rng)

    @property
    def kernel(self) -> Kernel:
        """The kernel of the next warm-up iteration."""
        kernel = self._with_sub_steps(self._kernel)
        if self._done < self._startup:
            return kernel.replace(step_size=self._chain_step_size, n_steps=(1, 2), trajectory_length=None)
        if self._adapts_step:
            kernel = kernel.replace(step_size=self._dual_averaging().current)
        return kernel.replace(trajectory_length=self._lengths().current) if self._adapts_length else kernel

    def update(self, info: Info) -> None:
        """Learn from the iteration that ``kernel`` just made."""
        self._done += 1
        acceptance = info.acceptance_rate
        if self._done <= self._startup:
            log_step = self._chain_step_size.log() + 0.5 * (acceptance - self._target)
            self._chain_step_size = _bounded(log_step).exp()
            return
        settled = torch.ones_like(acceptance[0], dtype=torch.bool)
        if self._adapts_step:
            averaging = self._dual_averaging()
            # failures at steps that are only being tried out say nothing about those to come
            settled = averaging.current <= 1.2 * averaging.final
            # the energy error of a step goes with its square
            taken = (info.step_size.mean(0) / averaging.current).clamp_max(1)
            averaging.update(acceptance.mean(0), taken.square())
        if self._adapts_length and info.end is not None:
            self._lengths().update(info.end, acceptance)
        # not before the step size has settled, and early enough for it to settle again
        if self._sub_steps is not None and 0.4 < self._done / self._iterations <= 0.8:
            self._sub_steps.update(info, settled)

    def frozen(self) -> Kernel:
        """The adapted kernel: step size and trajectory length are tensors ``[*batch]``."""
        kernel = self._with_sub_steps(self._kernel)
        if self._adapts_step:
            step_size = self._dual_averaging().final.clamp_max(kernel.longest_step(self._problem))
            kernel = kernel.replace(step_size=step_size)
        return kernel.replace(trajectory_length=self._lengths().final) if self._adapts_length else kernel

    def _with_sub_steps(self, kernel: Kernel) -> Kernel:
        return kernel if self._sub_steps is None else kernel.replace(n_geodesic=self._sub_steps.n)

    def _dual_averaging(self) -> DualAveraging:
        if self._averaging is None:
            # the smaller of a problem's chains: a step that half of them reject adapts slowly; without a warm-up to
            # correct it, the smallest
            quantile = 0.25 if self._iterations else 0.0
            self._averaging = DualAveraging(self._chain_step_size.quantile(quantile, dim=0), self._target)
        return self._averaging

    def _lengths(self) -> ChEES:
        if self._chees is None:
            step_size = self._dual_averaging().current if self._adapts_step else self._kernel.step_size
            length = torch.as_tensor(step_size).to(self._like).expand_as(self._like)
            if math.isfinite(self._kernel.longest_step(self._problem)):
                # arcs are of a scale of 1; of others a step is about the smallest, and from more than one and a half
                # times the best length the criterion climbs to a lesser maximum
                length = torch.full_like(length, DEFAULT_LENGTH)
            self._chees = ChEES(length)
        return self._chees
