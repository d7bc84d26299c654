"""What warm-up adapts, by a rule each: step sizes, and those worth trying; trajectory lengths; metrics."""

import math
from typing import Any

import torch
from torch import Tensor

from ..arguments.values import of_problems
from ..errors import warn
from ..kernels.kernel import TrajectoryEnd, Tunable
from ..kernels.metrics import Metric, fitted


class DualAveraging:
    """Stochastic approximation of the step size that gives a target acceptance probability.

    Hoffman and Gelman 2014, section 3.2, with their constants, for a batch of problems.

    Args:
        step_size: ``[*batch]`` initial values, positive.
        target: target acceptance probability.
    """

    gamma, t0, kappa = 0.05, 10, 0.75

    def __init__(self, step_size: Tensor, target: float):
        self.target = target
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
        floor = self.floor.log()
        # what is held back is not made up for once the floor sinks
        held = (self.mu - floor) * self.gamma / math.sqrt(self.count)
        self.error = torch.where(log_step < floor, held, self.error)
        log_step = log_step.maximum(floor)
        share = self.count**-self.kappa
        self.log_average = share * log_step + (1 - share) * self.log_average
        self.current = log_step.exp()

    @property
    def final(self) -> Tensor:
        """The averaged step sizes ``[*batch]``."""
        return self.log_average.exp() if self.count else self.current


def reasonable_step_size(kernel: Tunable, problem: Any, state: Any, rng: torch.Generator) -> Tensor:
    """A step size per chain whose single step is accepted with probability near 1/2, ``[chains, *batch]``.

    Doubles or halves 0.1, at most 20 times, until the probability crosses 1/2 (Hoffman and Gelman 2014, algorithm 4).
    No chain moves.
    """
    position = state.position
    step_size = torch.full(position.shape[:-1], 0.1, dtype=position.dtype, device=position.device)
    direction = None
    for _ in range(20):
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

    # learning rate of Adam
    rate = 0.05

    def __init__(self, length: Tensor):
        self.log_length = length.log()
        self.low, self.high = self.log_length - math.log(self.most), self.log_length + math.log(self.most)
        self.mean: Tensor | float = 0.0
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


class MetricWindows:
    """The metric of the positions of a window, and of the gradients there, of all chains of a problem at its end.

    Windows double in length, the last one up to ``last``: early ones are typical of the posterior's scale only, and
    every metric is estimated from positions that the one before let chains reach, and refines it. (Stan Reference
    Manual, HMC algorithm parameters, automatic parameter tuning; there windows are of one chain, and of positions.)

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
        self._gradients: list[Tensor] = []
        self._ends = _ends(first, last, max(last - first, self.shortest) if single else self.shortest)
        self._first = first

    @property
    def last(self) -> int:
        """The iteration after which the last window ends; 0 without any."""
        return max(self._ends, default=0)

    def update(self, iteration: int, position: Tensor, gradient: Tensor | None, metric: Metric | None) -> Metric | None:
        """The new metric if a window ends after this iteration, counted from 1, at positions ``[chains, *batch, D]``
        with these gradients of the energy."""
        if not self._first < iteration <= self.last:
            return None
        self._positions.append(position)
        if gradient is not None:
            self._gradients.append(gradient)
        if iteration not in self._ends:
            return None
        positions = torch.cat(self._positions)
        gradients = torch.cat(self._gradients) if self._gradients else None
        self._positions.clear()
        self._gradients.clear()
        return fitted(self._name, positions, gradients, metric)


def _ends(first: int, last: int, shortest: int) -> set[int]:
    """Iterations after which windows of doubling length end; none if there is not room for one."""
    ends, length = set(), shortest
    while last - first >= shortest:
        # a rest that would not hold the next window belongs to this one
        end = first + length if last - first >= 3 * length else last
        ends.add(end)
        first, length = end, 2 * length
    return ends


class AcceptancePlateau:
    """Acceptance by step size, and the step sizes that are worth trying.

    The energy error of an integrator vanishes with its steps, that of jumps of the density (math 5.6) or of noise in it
    does not: smaller steps then cost time and gain nothing. Every problem keeps the acceptance of its chains in bins of
    step sizes, each half the one before. No step is shorter than the bin after those already tried. If over four bins
    at least half the chains move, but are accepted less often than the target, and by less than 0.15 and a third more
    often with the two smaller ones than with the two larger ones, steps stay in the second of these bins or above, and
    double again, up to four times the first ones, unless that costs a fifth of the acceptance. If they are accepted
    half as often before they double, there was no plateau but few trials: steps shrink on, by four bins at least.
    Chains that do not move do not count: they may be stiffer than the rest.

    Args:
        step_size: ``[*batch]`` initial values.
        target: acceptance probability.
    """

    # bins over which acceptance must respond: a factor of 8 in the step size
    window = 4
    # the rise that counts as a response, and as a share of the acceptance: of a smooth density it rises to about 1
    rise, ratio = 0.15, 0.3
    # Acceptance below which a chain does not move, and distance from the target that is near enough.
    moves, slack = 0.05, 0.1
    # Trials of a bin, over the chains of a problem, and the range of iterations for these.
    trials, fewest, most = 24, 2, 6
    bins = 40
    # share of the acceptance that a doubling of the steps must leave, and how many first steps they grow to
    left, growth = 0.8, 4.0
    # share of the acceptance of a plateau below which there was none
    none = 0.5

    def __init__(self, step_size: Tensor, target: float):
        self._first, self._target = step_size, target
        self._sums: Tensor | None = None
        self._counts = step_size.new_zeros(self.bins, *step_size.shape)
        self._plateau = torch.zeros_like(step_size, dtype=torch.bool)
        self._acceptance = torch.zeros_like(step_size)
        self._grown = torch.zeros_like(step_size, dtype=torch.bool)
        # the first bin of which a plateau may be made
        self._from = torch.zeros_like(step_size, dtype=torch.int64)
        # since the steps of a plateau were last doubled; without an end once they are not to be
        self._sum, self._made = torch.zeros_like(step_size), torch.zeros_like(step_size)
        self.floor = step_size
        """Step sizes below which none is to be tried next, ``[*batch]``."""

    def update(self, step_size: Tensor, acceptance: Tensor) -> None:
        """Learn from the acceptance probabilities ``[chains, *batch]`` of step sizes ``[*batch]``."""
        if self._sums is None:
            self._sums = acceptance.new_zeros(self.bins, *acceptance.shape)
        index = (self._first / step_size).log2().round().clamp(0, self.bins - 1).to(torch.int64)
        self._sums.scatter_add_(0, index.expand_as(acceptance).unsqueeze(0), acceptance.nan_to_num(0).unsqueeze(0))
        self._counts.scatter_add_(0, index.unsqueeze(0), torch.ones_like(step_size).unsqueeze(0))
        enough = min(max(math.ceil(self.trials / len(acceptance)), self.fewest), self.most)
        order = torch.arange(self.bins, device=step_size.device).reshape(-1, *[1] * step_size.ndim)
        # the smallest step size tried often enough; -1 if none is
        deepest = torch.where(self._counts >= enough, order, -1).amax(0)
        window = deepest + torch.arange(1 - self.window, 1, device=step_size.device).reshape(order[: self.window].shape)
        flat, level = self._is_flat(window, enough)
        flat = flat & ~self._plateau & (window[0] >= self._from)
        self._acceptance = torch.where(flat, level, self._acceptance)
        wrong = self._grow(acceptance.nan_to_num(0), step_size, 2 * enough)
        self._plateau, self._from = self._plateau & ~wrong, torch.where(wrong, deepest + 1, self._from)
        self.floor = torch.where(flat, self._first * 0.5 ** window[1].clamp_min(0), self.floor)
        self._plateau = self._plateau | flat
        self.floor = torch.where(self._plateau, self.floor, self._first * 0.5 ** (deepest + 1))

    def _grow(self, acceptance: Tensor, step_size: Tensor, enough: int) -> Tensor:
        """Double the least steps of a plateau, once enough of them were tried, unless that has cost acceptance.

        Returns:
            Where they are accepted so much less often that there is no plateau, ``[*batch]``.
        """
        here = self._plateau & (step_size < 1.5 * self.floor)
        self._sum, self._made = self._sum + acceptance.mean(0) * here, self._made + here
        mean, ready = self._sum / self._made.clamp_min(1), self._made >= enough
        # up to the chance of so many trials
        before, trials = self._acceptance, self._made.clamp_min(1) * len(acceptance)
        good = mean >= self.left * before - 1.64 * (before * (1 - before) / trials).sqrt()
        good &= self.floor < self.growth * self._first
        # one doubling too many is taken back
        factor = torch.where(good, 2.0, torch.where(self.floor < self.growth * self._first, 0.5, 1.0))
        self.floor = torch.where(ready, self.floor * factor, self.floor)
        wrong = ready & ~self._grown & (mean < self.none * before)
        self._grown = self._grown | (ready & good)
        self._sum = torch.where(ready, 0.0, self._sum)
        self._made = torch.where(ready, torch.where(good | wrong, 0.0, -torch.inf), self._made)
        return wrong

    def _is_flat(self, window: Tensor, enough: int) -> tuple[Tensor, Tensor]:
        """Whether acceptance does not respond over a window of bins ``[4, *batch]``, and its mean over all chains at
        the smaller step sizes; each ``[*batch]``."""
        assert self._sums is not None
        at = window.clamp_min(0)
        counts = self._counts.gather(0, at)
        tried = ((counts >= enough) & (window >= 0)).all(0)
        sums = self._sums.gather(0, at.unsqueeze(1).expand(-1, *self._sums.shape[1:]))
        middle = self.window // 2
        # [chains, *batch]
        large, small = (
            sums[part].sum(0) / counts[part].sum(0).clamp_min(1) for part in (slice(middle), slice(middle, None))
        )
        short = ((small > self.moves) & (small < self._target - self.slack)).to(sums.dtype)
        share = short.sum(0).clamp_min(1)
        level = (small * short).sum(0) / share
        rise = level - (large * short).sum(0) / share
        flat = tried & (2 * short.sum(0) >= len(short)) & (rise < self.rise) & (rise < self.ratio * level)
        return flat, small.mean(0)

    def told(self, acceptance: Tensor) -> Tensor:
        """Acceptance ``[chains, *batch]`` as it is to be judged, ``[*batch]``: the target where no step reaches it."""
        return torch.where(self._plateau, self._target, acceptance.mean(0))

    def say(self, remedy: str) -> None:
        """Warn where steps have stopped shrinking."""
        if not self._plateau.any():
            return
        first = int(self._plateau.reshape(-1).nonzero()[0])
        where = of_problems(self._plateau)
        acceptance, floor = self._acceptance.reshape(-1)[first], self.floor.reshape(-1)[first]
        warn(
            f"warm-up stopped shrinking steps at {floor:.2g}: acceptance{where} stays at about {acceptance:.2f}, "
            f"however small they are: the density has jumps or noise that its gradient does not show; {remedy}",
        )
