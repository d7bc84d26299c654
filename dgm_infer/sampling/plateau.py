"""Where smaller steps gain nothing, as of densities with jumps: which step sizes warm-up still tries."""

import math

import torch
from torch import Tensor

from ..arguments.values import of_problems
from ..errors import warn


class AcceptancePlateau:
    """Acceptance by step size, and the step sizes that are worth trying.

    The energy error of an integrator vanishes with its steps, that of jumps of the density (math 5.6) or of noise in it
    does not: smaller steps then cost time and gain nothing. Every problem keeps the acceptance of its chains in bins of
    step sizes, each half the one before. No step is shorter than the bin after those already tried. If over four bins
    at least half the chains move, but are accepted less often than the target, and by less than 0.15 and a third more
    often with the two smaller ones than with the two larger ones, steps stay in the second of these bins or above, and
    double again, up to four times the first ones, unless that costs a fifth of the acceptance. Chains that do not move
    do not count: they may be stiffer than the rest.

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

    def __init__(self, step_size: Tensor, target: float):
        self._first, self._target = step_size, target
        self._sums: Tensor | None = None
        self._counts = step_size.new_zeros(self.bins, *step_size.shape)
        self._plateau = torch.zeros_like(step_size, dtype=torch.bool)
        self._acceptance = torch.zeros_like(step_size)
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
        flat = flat & ~self._plateau
        self._acceptance = torch.where(flat, level, self._acceptance)
        self._grow(acceptance.nan_to_num(0), step_size, 2 * enough)
        self.floor = torch.where(flat, self._first * 0.5 ** window[1].clamp_min(0), self.floor)
        self._plateau = self._plateau | flat
        self.floor = torch.where(self._plateau, self.floor, self._first * 0.5 ** (deepest + 1))

    def _grow(self, acceptance: Tensor, step_size: Tensor, enough: int) -> None:
        """Double the least steps of a plateau, once enough of them were tried, unless that has cost acceptance."""
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
        self._sum = torch.where(ready, 0.0, self._sum)
        self._made = torch.where(ready, torch.where(good, 0.0, -torch.inf), self._made)

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

    def say(self) -> None:
        """Warn where steps have stopped shrinking."""
        if not self._plateau.any():
            return
        first = int(self._plateau.reshape(-1).nonzero()[0])
        where = of_problems(self._plateau)
        acceptance, floor = self._acceptance.reshape(-1)[first], self.floor.reshape(-1)[first]
        warn(
            f"warm-up stopped shrinking steps at {floor:.2g}: acceptance{where} stays at about {acceptance:.2f}, "
            "however small they are: the density has jumps or noise that its gradient does not show; check(model) "
            "names kinks of activations, from_module(smooth=10) removes them; gram_force=False does this too",
        )
