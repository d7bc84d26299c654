"""Warm-up: a start-up phase, then step size and trajectory length until they have settled; then frozen."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import Info, Kernel
from ..kernels.hmc import TRAJECTORY
from ..kernels.kernel import Preconditioned, State, Trial, Tunable, Tuning
from ..kernels.metrics import Metric
from ..kernels.mode_jumps import ModeJumps
from ..target import Target
from .adaptation import (
    AcceptancePlateau,
    ChEES,
    DualAveraging,
    MetricWindows,
    bounded,
    reasonable_step_size,
)

# Early stopping: transitions of adaptation after which positions correct a metric, over how many of them at least, and
# positions for every dimension of a metric: with four or two the noisy series of 104 unknowns has 0.8 to 1.0 times the
# effective draws a second.
_OPEN_FIRST, _OPEN_WINDOW, _PER_DIMENSION = 20, 20, 10


class WarmUp:
    """The kernel of every warm-up iteration, and the frozen one that follows.

    It adapts only what the kernel declares open (:class:`Tuning`). The start-up phase (the first fifth, at most 60
    iterations, unless the start is already ``typical`` of the posterior) exists because prior draws projected onto a
    fibre have atypically high energy and every chain its own stiffness: each chain has its own step size, quickly
    adapted, and takes one or two steps per transition (math 5.3). After it, warm-up adapts per problem, over its
    chains, the step size by dual averaging of the mean acceptance, the trajectory length by :class:`ChEES`, and the
    metric, in :class:`MetricWindows` up to the last third, after each of which the step size and the trajectory length
    start again in its units; a metric that the kernel finds by itself is refined once, by the positions of the second
    third. Step sizes stop shrinking where acceptance does not respond (:class:`AcceptancePlateau`), and grow again
    while that costs little.

    Args:
        kernel: the kernel with what is open in it.
        problem: what it samples.
        state: of the chains, where they start.
        rng: random numbers of the search for first step sizes.
        iterations: of the warm-up, the most of one that is open.
        target_acceptance: mean acceptance probability that step sizes are adapted to, unless the kernel names its own;
            None for the kernel's usual one.
        typical: whether the chains start at typical points of the posterior.
        is_open: whether the warm-up may end as soon as everything has settled (:class:`Settling`), and its start-up
            phase as soon as energies no longer move. A metric that the kernel finds by itself is then refined by ten
            positions for every dimension. A warm-up that adapts no step size, or a metric from nothing, whose windows
            take their time, does not end sooner.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Any,
        state: State,
        rng: torch.Generator,
        *,
        iterations: int,
        target_acceptance: float | None = None,
        typical: bool = False,
        is_open: bool = False,
    ):
        # a kernel that is not Tunable leaves nothing open
        self._kernel: Any = kernel
        self._problem, self._rng = problem, rng
        self._tuning = kernel.tuning(problem) if isinstance(kernel, Tunable) else Tuning()
        self._target = self._tuning.target_acceptance or target_acceptance or self._tuning.usual_acceptance
        self._iterations, self._done = iterations, 0
        self._startup = min(iterations // 5, 60) if self._tuning.step_size and not typical else 0
        self._open = is_open and self._tuning.step_size
        self._settling, self._energies = Settling(), []
        self._averaging: DualAveraging | None = None
        self._acceptance_plateau: AcceptancePlateau | None = None
        self._metric: Metric | None = None
        self._windows: MetricWindows | None = None
        self._knows_metric = False
        self._like = state.position[0, ..., 0]
        self._chees: ChEES | None = None
        if self._tuning.step_size:
            self._chain_step_size = reasonable_step_size(self._kernel, problem, state, rng)
        if iterations and not self._startup:
            self._precondition(state)

    @property
    def kernel(self) -> Kernel:
        """The kernel of the next warm-up iteration."""
        kernel = self._kernel
        if self._done < self._startup:
            return kernel.probe(self._chain_step_size, 2)
        if self._tuning.step_size:
            kernel = kernel.replace(step_size=self._dual_averaging().current)
        if self._tuning.trajectory_length:
            kernel = kernel.replace(trajectory_length=self._lengths().current)
        return kernel

    def update(self, info: Info, state: State) -> None:
        """Learn from the iteration that ``kernel`` just made, and the state it led to."""
        self._done += 1
        # of the positions' digits: energies may have more
        acceptance, trial = info.tuned_acceptance.to(self._like.dtype), info.tuning or Trial()
        if isinstance(self._kernel, ModeJumps):
            trial = self._kernel.within_modes(trial)
        if self._done <= self._startup:
            log_step = self._chain_step_size.log() + 0.5 * (acceptance - self._target)
            self._chain_step_size = bounded(log_step).exp()
            if self._open:
                self._energies.append(state.energy)
                if is_level(self._energies):
                    self._startup = self._done
            if self._done == self._startup:
                self._precondition(state)
            return
        if self._tuning.step_size:
            averaging = self._dual_averaging()
            # what was made of longer ones
            taken = averaging.current.clamp_max(self._tuning.longest_step)
            plateau = self._plateau(taken)
            plateau.update(taken, acceptance)
            averaging.floor = plateau.floor.clamp_max(self._tuning.longest_step)
            averaging.update(acceptance.mean(0), _told(trial, averaging.current))
        if self._tuning.trajectory_length and trial.end is not None:
            self._lengths().update(trial.end, acceptance)
        if self._tuning.metric is not None and trial.position is not None:
            self._windows = self._windows or self._metric_windows(self._tuning.metric, trial.position)
            metric = self._windows.update(self._done, trial.position, trial.gradient, self._metric)
            if metric is not None:
                self._change(metric, state)
        if self._open:
            told = acceptance.mean(0) if self._acceptance_plateau is None else self._acceptance_plateau.told(acceptance)
            self._settling.update(self._adapted(), state.energy, told / self._target)

    @property
    def keeps_form(self) -> bool:
        """Whether the kernel will change in the values of its tensors alone."""
        if self._done < self._startup:
            return False
        return (
            self._tuning.metric is None
            or self._knows_metric
            or (self._windows is not None and self._metric is not None)
        )

    @property
    def is_over(self) -> bool:
        """Whether the kernel is adapted."""
        if self._done >= self._iterations:
            return True
        if not self._open or self._done <= self._startup:
            return False
        refined = self._windows is None or self._done >= self._windows.last
        return refined and self._settling.reached

    @property
    def ahead(self) -> int:
        """Transitions that it makes yet, at least."""
        most = self._iterations - self._done
        if not self._open:
            return most
        # once a metric is refined, everything settles again
        refining = 0 if self._windows is None else self._windows.last - self._done
        return min(most, refining + Settling.fewest if refining > 0 else self._settling.left)

    def _adapted(self) -> Tensor:
        """The values that are adapted, positive, ``[K, *batch]``."""
        values = [self._dual_averaging().final.clamp_max(self._tuning.longest_step)]
        if self._tuning.trajectory_length:
            values.append(self._lengths().final)
        return torch.stack(values)

    def resume(self, problem: Any, rng: torch.Generator) -> None:
        """Go on from a pickle, which holds neither the problem nor the random numbers."""
        self._problem, self._rng = problem, rng

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_problem": None, "_rng": None}

    def _precondition(self, state: State) -> None:
        """Take the metric that the kernel finds where the chains are, if it does."""
        if isinstance(self._kernel, Preconditioned):
            metric = self._kernel.metric_at(self._problem, state.position)
            if metric is not None:
                self._change(metric, state)
                self._knows_metric = True
        self._open &= self._knows_metric or self._tuning.metric is None

    def _metric_windows(self, name: str, position: Tensor) -> MetricWindows:
        """Windows for positions ``[chains, *batch, D]``; one to refine a metric that is known."""
        third = self._iterations // 3
        if not self._knows_metric:
            return MetricWindows(name, self._startup, 2 * self._iterations // 3)
        first, last = max(third, self._startup), 2 * third
        if self._open:
            first = self._startup + _OPEN_FIRST
            last = first + max(_OPEN_WINDOW, math.ceil(_PER_DIMENSION * position.shape[-1] / len(position)))
        return MetricWindows(name, first, last, single=True)

    def _change(self, metric: Metric, state: State) -> None:
        """Take a new metric, in whose units the step size and the trajectory length are found again."""
        self._metric, self._kernel = metric, self._kernel.replace(metric=metric)
        self._settling = Settling()
        if self._tuning.step_size:
            self._chain_step_size = reasonable_step_size(self._kernel, self._problem, state, self._rng)
            self._averaging = self._acceptance_plateau = None
        if self._tuning.trajectory_length:
            self._tuning = replace(self._tuning, initial_length=TRAJECTORY.length)
            self._chees = None

    def frozen(self) -> Kernel:
        """The adapted kernel: step size and trajectory length are tensors ``[*batch]``."""
        kernel = self._kernel
        if self._tuning.step_size:
            if self._acceptance_plateau is not None:
                self._acceptance_plateau.say(_remedy(self._kernel, self._problem))
            kernel = kernel.replace(step_size=self._dual_averaging().final.clamp_max(self._tuning.longest_step))
        if self._tuning.trajectory_length:
            kernel = kernel.replace(trajectory_length=self._lengths().final)
        return kernel

    def _plateau(self, step_size: Tensor) -> AcceptancePlateau:
        if self._acceptance_plateau is None:
            self._acceptance_plateau = AcceptancePlateau(step_size, self._target)
        return self._acceptance_plateau

    def _dual_averaging(self) -> DualAveraging:
        if self._averaging is None:
            # a lower quantile over a problem's chains: a step that half of them reject adapts slowly; the smallest if
            # there is no warm-up to correct it
            quantile = 0.25 if self._iterations else 0.0
            self._averaging = DualAveraging(self._chain_step_size.quantile(quantile, dim=0), self._target)
        return self._averaging

    def _lengths(self) -> ChEES:
        if self._chees is None:
            initial = self._tuning.initial_length
            length = self._dual_averaging().current if initial is None else initial
            length = torch.as_tensor(length, dtype=self._like.dtype, device=self._like.device)
            self._chees = ChEES(length.expand_as(self._like))
        return self._chees


def _remedy(kernel: Any, problem: Any) -> str:
    """What helps against jumps of a density."""
    if isinstance(problem, Target) and not problem.standardised:
        return "a smooth function in place of where() or clamp() removes them, kernels.RandomWalk() needs no gradient"
    smooth = "check(model) names kinks of activations, from_module(smooth=10) removes them"
    return f"{smooth}; gram_force=False does this too" if hasattr(kernel, "gram_force") else smooth


def _told(trial: Trial, asked: Tensor) -> Tensor | float:
    """How informative an iteration is about the requested step sizes, ``[*batch]``: less if it took shorter ones."""
    if trial.step_size is None:
        return 1.0
    # the energy error of a step scales with its square
    return (trial.step_size.mean(0) / asked).clamp_max(1).square()


# Transitions in each of the two windows whose energies are compared.
_WINDOW = 10


class Settling:
    """Whether adapted values and energies have stopped moving, and chains have not.

    The efficiency of a kernel is flat about its best step size and length, which are not known better than the changes
    that a few chains' acceptance makes in them: a value has settled when it moved by less than a fifth over the latest
    third of its adaptation, on every problem. Nothing has settled where less than half of the acceptance that is wanted
    is reached: chains that never move have level energies.
    """

    fewest = 40
    """Transitions before anything counts as settled."""
    movement = 0.2
    """Largest range of a settled value, in its log."""
    accepted = 0.5
    """Least acceptance over the latest third, as a share of what is wanted."""

    def __init__(self):
        self._values: list[Tensor] = []
        self._energies: list[Tensor] = []
        self._accepted: list[Tensor] = []

    def update(self, values: Tensor, energy: Tensor, accepted: Tensor) -> None:
        """Learn from adapted values, positive, ``[K, *batch]``, energies ``[chains, *batch]`` and the acceptance of the
        target's ``[*batch]``."""
        self._values.append(values.log())
        self._energies.append(energy)
        self._accepted.append(accepted)

    @property
    def left(self) -> int:
        """Transitions before which nothing counts as settled."""
        return max(0, self.fewest - len(self._values))

    @property
    def reached(self) -> bool:
        """Whether everything has settled."""
        made = len(self._values)
        if made < self.fewest or not is_level(self._energies):
            return False
        latest, accepted = (torch.stack(each[-(made // 3) :]) for each in (self._values, self._accepted))
        if not (accepted.nan_to_num(0).mean(0) >= self.accepted).all():
            return False
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
