"""What warm-up adapts, by a rule each: step sizes, trajectory lengths, sub-steps, metrics; and when it ends."""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import Status
from ..kernels import Info
from ..kernels.kernel import TrajectoryEnd, Tunable
from ..kernels.metrics import Metric, refitted


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

    Doubles or halves until the probability crosses 1/2 (Hoffman and Gelman 2014, algorithm 4). No chain moves.
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


class ChEES:
    """The trajectory length that changes the squared distance from the mean most (Hoffman, Radul and Sountsov 2021).

    Ascends ``E[(|x' - m|^2 - |x - m|^2)^2] / 4`` in the log of the length T, by Adam, over the chains of a problem:
    with ``x', p'`` the end of a trajectory of duration ``U T``, the gradient is the mean, weighted by acceptance, of
    ``U T (|x' - m|^2 - |x - m|^2) (x' - m).p'``. On a fibre, distances in the input space need no scaling.

    Args:
        length: ``[*batch]`` initial values.
    """

    # The criterion concerns squared distances; means and modes gain from longer trajectories. On the completions of the
    # README, 1.6 times the length gave 3.4 times the smallest bulk ESS per draw for 1.2 times the work.
    stretch = 1.4
    # bound on the ratio of the length to its initial value, and on the inverse
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
        """Learn from the trajectories of one transition, with acceptance probabilities ``[chains, *batch]``."""
        self.count += 1
        # a running mean over iterations: a single iteration of few chains is uninformative
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
    """Adds geodesic sub-steps when a problem's trajectories fail too often, or need the second solver.

    Failures are rejected; the second solver costs time. The limits are shares of transitions; ``window`` iterations
    are between decisions. Where many trajectories fail, and by more sub-steps no fewer, as beyond a kink of the
    constraint, which no root is behind, the last ones are taken back and no others added.
    """

    failures = 0.005
    retries = 0.05
    most = 20
    # share of failures that more sub-steps should lower, and to which share of itself
    many, cured = 0.1, 0.7

    def __init__(self, n: int, window: int):
        self.n, self.window = n, max(window, 1)
        self.is_steady = False
        """Whether the latest window asked for no more."""
        self._before: tuple[int, float] | None = None
        self._is_vain = False
        self._reset()

    def _reset(self) -> None:
        self.iterations = 0
        self.failed: Tensor | float = 0.0
        self.retried: Tensor | float = 0.0
        self.trials: Tensor | float = 0.0

    def update(self, info: Info, counted: Tensor) -> None:
        """Learn from one iteration of the problems ``counted [*batch]``."""
        failed = (info.status == Status.PROJECTION_FAILED) | (info.status == Status.REVERSAL_FAILED)
        self.failed = self.failed + failed.sum(0) * counted
        retried = None if info.tuning is None else info.tuning.retried
        self.retried = self.retried + (0 if retried is None else retried.sum(0) * counted)
        self.trials = self.trials + len(failed) * counted
        self.iterations += 1
        if self.iterations < self.window:
            return
        share = float(torch.as_tensor(self.failed).sum() / torch.as_tensor(self.trials).sum().clamp_min(1))
        if self._before is not None and share > max(self.many, self.cured * self._before[1]):
            self.n, self._is_vain = self._before[0], True
        self._before = None
        self.is_steady = self._is_vain or not (
            self._exceeds(self.failed, self.failures) or self._exceeds(self.retried, self.retries)
        )
        if not self.is_steady:
            self._before = self.n, share
            self.n = min(self.n + max(1, self.n // 2), self.most)
        self._reset()

    def _exceeds(self, count: Tensor | float, limit: float) -> bool:
        # a problem at the limit exceeds this with a probability of 0.02 over the number of problems (a Poisson count)
        count = torch.as_tensor(count, dtype=torch.float64)
        expected = limit * torch.as_tensor(self.trials, dtype=torch.float64)
        return bool((torch.special.gammainc(count, expected) < 0.02 / count.numel()).any())


class MetricWindows:
    """The covariance of the positions of a window, of all chains of a problem, at the end of each (as in Stan).

    Windows double in length, the last one up to ``last``: early ones are typical of the posterior's scale only, and
    every metric is estimated from positions that the one before let chains reach, and refines it. (Stan Reference
    Manual, HMC algorithm parameters, automatic parameter tuning; there windows are of one chain.)

    Args:
        name: of the metric, as kernels take it.
        first: iteration at which the first window begins.
        last: iteration at which the last one ends.
        single: one window instead, if there is room for one, to refine a metric that chains have from elsewhere: the
            way to the posterior, which early windows see, would make it worse.
    """

    shortest = 10

    def __init__(self, name: str, first: int, last: int, *, single: bool = False):
        self._name = name
        self._positions: list[Tensor] = []
        self._ends = _ends(first, last, max(last - first, self.shortest) if single else self.shortest)
        self._first = first

    @property
    def last(self) -> int:
        """The iteration after which the last window ends; 0 without any."""
        return max(self._ends, default=0)

    def update(self, iteration: int, position: Tensor, metric: Metric | None) -> Metric | None:
        """The new metric if a window ends after this iteration, counted from 1, at ``[chains, *batch, D]``."""
        if not self._first < iteration <= self.last:
            return None
        self._positions.append(position)
        if iteration not in self._ends:
            return None
        positions = torch.stack(self._positions)
        self._positions.clear()
        return refitted(self._name, metric, positions)


def _ends(first: int, last: int, shortest: int) -> set[int]:
    """Iterations after which windows of doubling length end; none if there is not room for one."""
    ends, length = set(), shortest
    while last - first >= shortest:
        # a rest that would not hold the next window belongs to this one
        end = first + length if last - first >= 3 * length else last
        ends.add(end)
        first, length = end, 2 * length
    return ends


# Transitions in each of the two windows whose energies are compared.
_WINDOW = 10


class Settling:
    """Whether adapted values and energies have stopped moving.

    The efficiency of a kernel is flat about its best step size and length, which are not known better than the changes
    that a few chains' acceptance makes in them: a value has settled when it moved by less than a fifth over the latest
    third of its adaptation, on every problem.
    """

    fewest = 40
    """Transitions before anything counts as settled."""
    movement = 0.2
    """Largest range of a settled value, in its log."""

    def __init__(self):
        self._values: list[Tensor] = []
        self._energies: list[Tensor] = []

    def update(self, values: Tensor, energy: Tensor) -> None:
        """Learn from adapted values, positive, ``[K, *batch]``, and energies ``[chains, *batch]``."""
        self._values.append(values.log())
        self._energies.append(energy)

    @property
    def reached(self) -> bool:
        """Whether everything has settled."""
        made = len(self._values)
        if made < self.fewest or not is_level(self._energies):
            return False
        latest = torch.stack(self._values[-(made // 3) :])
        return bool((latest.amax(0) - latest.amin(0) < self.movement).all())


def is_level(energies: list[Tensor]) -> bool:
    """Whether the energies of chains, ``[chains, *batch]`` of every transition, have stopped rising or falling.

    Their means over the latest ten transitions and over the ten before are compared, in units of what two such means
    of one chain differ by: 0.8 standard deviations, if the correlation of successive ones is a half. One of twenty
    settled batches is wrongly judged not to have settled.
    """
    if len(energies) < 2 * _WINDOW:
        return False
    before, after = (torch.stack(part) for part in (energies[-2 * _WINDOW : -_WINDOW], energies[-_WINDOW:]))
    chains, problems = after.shape[1], after[0, 0].numel()
    deviation = after.flatten(0, 1).std(0) / chains**0.5
    level = torch.special.ndtri(torch.tensor(1 - 0.025 / problems, dtype=torch.float64)).item()
    # a NaN is not level
    return bool(((after.mean((0, 1)) - before.mean((0, 1))).abs() <= 0.8 * level * deviation).all())
