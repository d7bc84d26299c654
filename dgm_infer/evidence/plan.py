"""How a run along the path is tuned: temperatures and step sizes, by a pilot (math 7.4, math 6.11)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..arguments import fraction, numbers, optional_positive, whole_number
from ..arguments.values import shown
from ..errors import ArgumentError, cause
from ..progress import Progress
from ..settings import Settings
from .estimators import finite_or_zero, log_mean
from .method import EstimateStatus, check_held
from .path import AnnealedPath, PathPoint


@dataclass(frozen=True)
class TuningSettings:
    """How pilots and rounds of tuning measure and adapt."""

    gain: float = 0.4
    """Change of the log step size per unit of error in the mean acceptance."""
    first: int = 8
    """Moves at the first temperature, in which the step finds its size before the path leaves the base."""
    regions: int = 12
    """Parts of the path over which log step sizes are averaged."""
    half: int = 3
    """Neighbours on either side in running means of what few chains measure."""
    even: float = 0.1
    """Share of a tuned schedule that keeps the old spacing, whatever was measured: estimates are noisy, some zero."""


TUNING = TuningSettings()


def even_schedule(n: int) -> Tensor:
    """``beta_k = k/K``, ``[K + 1]``."""
    return torch.arange(n + 1, dtype=torch.float64) / n


def sigmoid(n: int) -> Tensor:
    """``s_k = sigmoid(4 (2k - K)/K)`` rescaled to [0, 1], ``[K + 1]``: dense at both ends (math 7.4, T (5.53))."""
    s = torch.sigmoid(4 * (2 * torch.arange(n + 1, dtype=torch.float64) - n) / n)
    return (s - s[0]) / (s[-1] - s[0])


def equal_distances(n: int, betas: Tensor, lengths: Tensor) -> Tensor:
    """Temperatures at equal distances along a path whose parts have these lengths, ``[n + 1, *batch]`` (math 6.11).

    With the communication barrier as length, swaps between neighbours are rejected equally often (Syed et al. 2021).

    Args:
        n: intervals of the new schedule.
        betas: temperatures at the ends of the parts, ``[J + 1, *batch]``, increasing from 0 to 1.
        lengths: of the parts, ``[J, *batch]``; all zero for any schedule.
    """
    total, even = lengths.sum(0), 1 / len(lengths)
    share = torch.where(total > 0, lengths / total.clamp_min(1e-300), even)
    travelled = ((1 - TUNING.even) * share + TUNING.even * even).cumsum(0)
    travelled = torch.cat([torch.zeros_like(travelled[:1]), travelled])
    at = torch.linspace(0, 1, n + 1, dtype=betas.dtype, device=betas.device)
    new = interpolated(_column(at, betas).expand(n + 1, *betas.shape[1:]), travelled, betas)
    new[0], new[-1] = 0, 1
    return new


def interpolated(at: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Linear interpolation at ``at [M, *batch]`` of ``values`` at increasing ``knots``, both ``[J, *batch]``."""
    rows, own, known = (x.flatten(1).mT.contiguous() if x.ndim > 1 else x[None] for x in (at, knots, values))
    right = torch.searchsorted(own, rows).clamp(1, own.shape[1] - 1)
    low, high = own.gather(1, right - 1), own.gather(1, right)
    part = ((rows - low) / (high - low).clamp_min(1e-30)).clamp(0, 1)
    result = torch.lerp(known.gather(1, right - 1), known.gather(1, right), part.to(known.dtype))
    return result.mT.reshape(at.shape)


def _column(values: Tensor, like: Tensor) -> Tensor:
    """``[J]`` as ``[J, 1, ...]``, with the dimensions of ``like``."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


TUNED = "barrier"
"""The schedule that a pilot's estimates determine."""

SCHEDULES: dict[str, Callable[[int], Tensor]] = {"linear": even_schedule, "sigmoid": sigmoid}

Schedule = str | Tensor | Callable[[int], Tensor]
"""A name, the K + 1 values, or a function of K that returns them."""


def check_temperatures(name: str, schedule: Schedule, n: int, also: tuple[str, ...] = ()) -> None:
    """Raise ArgumentError unless a schedule gives values from 0 to 1 for ``n``, or is a name that is known."""
    if not isinstance(schedule, str):
        values_of(name, schedule, n)
    elif schedule not in (*SCHEDULES, TUNED, *also):
        names = ", ".join([*SCHEDULES, TUNED, *also])
        raise ArgumentError(f"{name}(schedule={shown(schedule)}): must be one of {names}, a function or values")


def values_of(name: str, schedule: Any, n: int) -> Tensor:
    """Values ``[K + 1]`` of a schedule that needs no pilot; ``n`` is K, unless the schedule lists its values.

    Raises:
        ArgumentError: they do not rise from 0 to 1.
    """
    if isinstance(schedule, str):
        return SCHEDULES[schedule](n)
    try:
        given = schedule(n) if callable(schedule) else schedule
    except Exception as error:
        raise ArgumentError(
            f"{name}(schedule={shown(schedule)}): fails for {n} temperatures: {cause(error)}"
        ) from error
    betas = numbers(name, "schedule", given, torch.float64)
    rises = betas.ndim == 1 and len(betas) >= 2 and bool((betas[1:] >= betas[:-1]).all())
    if not (rises and betas[0] == 0 and betas[-1] == 1):
        raise ArgumentError(
            f"{name}(schedule=...): must rise from 0 to 1, as a vector of two or more values; this one has shape "
            f"{tuple(betas.shape)}"
            + (f", from {betas.flatten()[0]:g} to {betas.flatten()[-1]:g}" if betas.numel() else "")
        )
    return betas


class StepSizes(NamedTuple):
    """Step sizes per problem as a function of the inverse temperature: log-linear between knots."""

    knots: Tensor
    """``[R]``, rising from 0 to 1."""
    log_step: Tensor
    """``[R, *batch]``."""

    @classmethod
    def constant(cls, step_size: float | Tensor, batch_shape: torch.Size, like: Tensor) -> "StepSizes":
        """The same step size at all temperatures.

        Raises:
            ArgumentError: the shape does not fit the batch.
        """
        step = torch.as_tensor(step_size, dtype=like.dtype, device=like.device)
        try:
            step = step.expand(batch_shape)
        except RuntimeError:
            raise ArgumentError(
                f"step_size of shape {tuple(step.shape)} does not fit the problems, {tuple(batch_shape)}: give a "
                "number, or one per problem"
            ) from None
        knots = torch.tensor([0.0, 1.0], dtype=like.dtype, device=like.device)
        return cls(knots, step.log().expand(2, *batch_shape))

    def at(self, beta: Tensor) -> Tensor:
        """Step sizes at ``beta``: ``[..., *batch] -> [..., *batch]``."""
        batch = self.log_step.shape[1:]
        flat = beta.to(self.knots).reshape(-1, *batch)
        return (
            interpolated(flat, _column(self.knots, flat).expand_as(self.log_step), self.log_step).exp().view(beta.shape)
        )


class Pilot(NamedTuple):
    """Result of a pilot run."""

    step_sizes: StepSizes
    betas: Tensor
    """``[J + 1]``."""
    rates: Tensor
    """Half the mean difference of Delta between two chains at every temperature, the speed of the communication barrier
    (math 6.11), ``[J + 1, *batch]``."""
    log_weights: Tensor
    """Log weights of the pilot itself, ``[chains, *batch]``; biased, since the steps were adapted on the way."""
    point: PathPoint
    """States of its chains at temperatures spread evenly over [0, 1], one per chain."""
    log_z_path: Tensor
    """Estimates of ``log Z(beta)`` at every temperature, ``[J + 1, *batch]``, from 0 to ``log_z``."""

    @property
    def log_z(self) -> Tensor:
        """Estimate of log Z, ``[*batch]``."""
        return log_mean(self.log_weights).log_z

    @property
    def columns(self) -> Tensor:
        """The temperatures for every problem, ``[J + 1, *batch]``, float64."""
        return _column(self.betas.double(), self.rates).expand(self.rates.shape)

    def barrier(self, n: int) -> Tensor:
        """``n + 1`` temperatures at equal distances along the communication barrier, ``[n + 1, *batch]``."""
        rates = self.rates.double()
        lengths = 0.5 * (rates[1:] + rates[:-1]) * _column(self.betas.diff(), rates)
        return equal_distances(n, self.columns, lengths)


@dataclass(frozen=True, eq=False, kw_only=True)
class Piloted(Settings):
    """Settings of Hamiltonian moves along the path, whose step sizes a pilot tunes; arguments as in :class:`AIS`."""

    n_steps: int = 5
    step_size: float | Tensor | None = None
    target_acceptance: float = 0.8
    pilot_temperatures: int = 100

    def __post_init__(self):
        name = type(self).__name__
        for field in ("n_steps", "pilot_temperatures"):
            whole_number(name, field, getattr(self, field))
        optional_positive(name, "step_size", self.step_size)
        fraction(name, "target_acceptance", self.target_acceptance)

    @property
    def status(self) -> EstimateStatus:
        return "consistent"

    def pilot(
        self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress, betas: Tensor | None = None
    ) -> Pilot:
        """Anneal once, with four chains or more, and adapt the step size to the acceptance on the way, if it is None.

        Args:
            betas: ``[J + 1]``; None for the sigmoid schedule of ``pilot_temperatures``.
        """
        betas = (sigmoid(self.pilot_temperatures) if betas is None else betas).to(path.base.mean.device)
        point = path.at(path.draws(max(chains, 4), rng))
        adapts = self.step_size is None
        start = 1.2 * path.base.dim**-0.25 if self.step_size is None else self.step_size
        log_weights = torch.zeros(point.energy.shape, dtype=torch.float64, device=betas.device)
        keep_at = _spread(point.energy, rng)
        at = SimpleNamespace(
            point=point,
            log_step=StepSizes.constant(start, path.batch_shape, point.v).log_step[0].clone(),
            log_weights=log_weights,
            kept=point,
            rates=[_mean_gap(path.difference(point))],
            log_steps=[],
            log_z_path=[torch.zeros_like(log_weights[0])],
        )
        last = len(betas) - 1
        for k in progress.steps("pilot", last, (at, path, rng)):
            at.log_weights -= (betas[k + 1] - betas[k]) * path.difference(at.point)
            at.log_z_path.append(log_mean(finite_or_zero(at.log_weights)).log_z)
            for _ in range(TUNING.first if k == 0 and adapts else 1):
                beta = betas[k + 1].expand(at.point.energy.shape)
                move = path.move(at.point, beta, at.log_step.exp(), self.n_steps, rng, last - k)
                at.point = move.point
                if adapts:
                    error = move.acceptance.mean(0).to(at.log_step) - self.target_acceptance
                    at.log_step = (at.log_step + TUNING.gain * error).clamp(-10, math.log(2))
            at.log_steps.append(at.log_step)
            at.rates.append(_mean_gap(path.difference(at.point)))
            at.kept = at.point.where((keep_at > betas[k]) & (keep_at <= betas[k + 1]), at.kept)
        steps = _by_regions(betas.to(at.log_step), torch.stack([at.log_steps[0], *at.log_steps]))
        rates = _running_mean(torch.stack(at.rates))
        return Pilot(steps, betas, rates, finite_or_zero(at.log_weights), at.kept, torch.stack(at.log_z_path))


def _spread(like: Tensor, rng: torch.Generator) -> Tensor:
    """Stratified uniform numbers in [0, 1], one per chain: ``[chains, *batch]``."""
    part = _column(torch.arange(len(like), device=like.device), like)
    return (part + torch.rand(like.shape, generator=rng, dtype=torch.float64, device=like.device)) / len(like)


def _mean_gap(difference: Tensor) -> Tensor:
    """``E|d - d'|/2`` over pairs of chains of non-zero weight, ``[*batch]``.

    With ``d_1 <= ... <= d_n`` it is ``sum_i (2 i - n - 1) d_i/(n (n - 1))``.
    """
    finite = difference.isfinite()
    n = finite.sum(0)
    # what is not finite comes last
    ordered = torch.where(finite, difference, math.inf).sort(0).values
    rank = _column(torch.arange(1, len(difference) + 1, device=difference.device), difference)
    terms = torch.where(rank <= n, (2 * rank - n - 1) * ordered, 0.0)
    return terms.sum(0) / (n * (n - 1)).clamp_min(1)


def _running_mean(values: Tensor) -> Tensor:
    """Means over neighbouring rows: what few chains measure is noisy."""
    n = len(values)
    sums = torch.cat([torch.zeros_like(values[:1]), values.cumsum(0)])
    index = torch.arange(n, device=values.device)
    low, high = (index - TUNING.half).clamp_min(0), (index + TUNING.half + 1).clamp_max(n)
    return (sums[high] - sums[low]) / _column(high - low, values)


def _by_regions(betas: Tensor, log_steps: Tensor) -> StepSizes:
    """Means over regions of equally many temperatures; the ends take the nearest region's mean."""
    regions = min(TUNING.regions, len(betas))
    knots, means = (torch.stack([part.mean(0) for part in x.tensor_split(regions)]) for x in (betas, log_steps))
    knots = torch.cat([betas.new_zeros(1), knots, betas.new_ones(1)])
    return StepSizes(knots, torch.cat([means[:1], means, means[-1:]]))


class Plan(NamedTuple):
    """A frozen annealing run, ``beta_0 = 0`` to ``beta_K = 1``."""

    betas: Tensor
    """``[K + 1, *batch]``, float64."""
    step_sizes: Tensor
    """``[K + 1, *batch]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Planned(Piloted):
    """The same with temperatures that are listed, or tuned by the pilot; arguments as in :class:`AIS`."""

    own_schedules: ClassVar[tuple[str, ...]] = ()
    """Names of schedules that the method determines itself."""
    temperatures: int = 400
    schedule: Schedule = TUNED

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        whole_number(name, "temperatures", self.temperatures)
        check_temperatures(name, self.schedule, self.temperatures, self.own_schedules)

    def tuned_steps(
        self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress
    ) -> tuple[StepSizes, Pilot | None]:
        """Step sizes, and the pilot if one was needed; along listed temperatures if there are any, at fewer of them."""
        problems, listed = path.batch_shape.numel(), None
        if not isinstance(self.schedule, str):
            listed = values_of(type(self).__name__, self.schedule, self.temperatures)
            fewer = min(self.pilot_temperatures, len(listed) - 1)
            listed = listed[torch.linspace(0, len(listed) - 1, fewer + 1).long()]
        # of other schedules the number of temperatures is a limit, or not used
        elif self.schedule in (*SCHEDULES, TUNED):
            check_held(self, path, temperatures=self.temperatures * problems)
        pilot = None
        if self.step_size is None or self._is_tuned:
            check_held(self, path, pilot_temperatures=self.pilot_temperatures * problems)
            progress.expect(self.pilot_temperatures)
            pilot = self.pilot(path, chains, rng, progress, listed)
            if self.step_size is None:
                return pilot.step_sizes, pilot
        return StepSizes.constant(self.step_size, path.batch_shape, path.base.mean), pilot

    def betas(self, path: AnnealedPath, pilot: Pilot | None) -> Tensor:
        """Inverse temperatures ``[K + 1, *batch]``, float64, from the pilot if that determines the schedule."""
        if self._is_tuned:
            assert pilot is not None
            return pilot.barrier(self.temperatures)
        betas = values_of(type(self).__name__, self.schedule, self.temperatures).to(path.base.mean.device)
        return betas.reshape(-1, *[1] * len(path.batch_shape)).expand(len(betas), *path.batch_shape)

    def plan(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Plan:
        """Schedule and step sizes, tuned on a pilot of ``chains`` chains if needed."""
        sizes, pilot = self.tuned_steps(path, chains, rng, progress)
        betas = self.betas(path, pilot)
        return Plan(betas, sizes.at(betas))

    @property
    def _is_tuned(self) -> bool:
        return isinstance(self.schedule, str) and self.schedule == TUNED
