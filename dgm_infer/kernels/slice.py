"""Slice sampling along ellipses and lines (math 8.10, 8.11)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import finite, flag, optional_positive, positive_numbers, whole_number
from ..errors import ArgumentError
from ..linear_maps import IDENTITY
from ..settings import Settings, broadcasts
from ..target import Target
from .hmc import check_target, draw_momentum
from .kernel import Info, Trial, Tuning
from .metrics import Metric, check_metric, check_shape, metric_in_use, open_metric
from .metropolis import Point, broken, point_at, status_of

# Shrinkages after which a chain stays: a bracket of any width is then below rounding.
_MOST_SHRINKS = 200


class Slice(NamedTuple):
    """Points along one curve per chain, through the present ones at t = 0, with an energy above that of the slice."""

    problem: Target
    path: Callable[[Tensor], Tensor]
    """``[..., chains, *batch] -> [..., chains, *batch, D]``."""
    reference: Callable[[Tensor], Tensor]
    """The part of the energy that the curve already accounts for, ``[..., D] -> [...]``."""
    level: Tensor
    """Bound on the remaining energy, ``[chains, *batch]``."""

    def at(self, t: Tensor) -> tuple[Point, Tensor, Tensor]:
        """The points at t, whether they are in the slice, and whether their energies are broken."""
        point = point_at(self.problem, self.path(t))
        failed = broken(point.energy)
        return point, ~failed & (point.energy - self.reference(point.position) < self.level), failed


def narrowed(low: Tensor, high: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a bracket ``(low, high)`` on the side of t that holds the present point, t = 0."""
    return torch.where(t < 0, t, low), torch.where(t < 0, high, t)


def _shrink(line: Slice, here: Point, low: Tensor, high: Tensor, evaluations: Tensor, rng: torch.Generator):
    """Uniform draws from the bracket, narrowed after each that is outside the slice; the new points and Info."""
    point, active = here, torch.ones_like(here.energy, dtype=torch.bool)
    failed, t = ~active, torch.zeros_like(low)
    for _ in range(_MOST_SHRINKS):
        uniform = torch.rand(low.shape, generator=rng, dtype=low.dtype, device=low.device)
        # chains that are done stay where they are, for targets that remember the points that they were evaluated at
        t = torch.where(active, low + (high - low) * uniform, t)
        there, inside, bad = line.at(t)
        evaluations, failed = evaluations + active, failed | (bad & active)
        point = there.where(inside & active, point)
        active = active & ~inside
        if not active.any():
            break
        low, high = narrowed(low, high, t)
    stats = {"slice_evaluations": evaluations}
    tuning = Trial(position=point.position)
    return point, Info((~active).to(low.dtype), status_of(failed), point.energy, stats=stats, tuning=tuning)


def _level(energy: Tensor, rng: torch.Generator) -> Tensor:
    """Energy at a uniform height under the density."""
    uniform = torch.rand(energy.shape, generator=rng, dtype=energy.dtype, device=energy.device)
    # torch.rand can return exactly 0
    return energy - uniform.clamp_min(torch.finfo(energy.dtype).tiny).log()


@dataclass(frozen=True, eq=False)
class EllipticalSlice(Settings):
    """Elliptical slice sampling: along ``m + (x - m) cos t + (v - m) sin t``, ``v ~ N(m, s^2 I)`` (math 8.10).

    The energy needs no gradient and nothing is tuned. It is exact for every target, with the normal density as a
    reference, and efficient if the target is a normal prior times a likelihood that is not much narrower.

    Args:
        mean: m, a number or a tensor that broadcasts to ``[*batch, D]``.
        scale: s, positive, likewise.
    """

    mean: float | Tensor = 0.0
    scale: float | Tensor = 1.0

    def __post_init__(self):
        finite("EllipticalSlice", "mean", self.mean)
        positive_numbers("EllipticalSlice", "scale", self.scale)

    def check(self, problem) -> None:
        check_target("EllipticalSlice", problem)
        shape = torch.Size((*problem.batch_shape, problem.dim))
        for name in ("mean", "scale"):
            given = torch.as_tensor(getattr(self, name)).shape
            if not broadcasts(given, shape):
                raise ArgumentError(
                    f"EllipticalSlice({name} of shape {tuple(given)}): must broadcast to {tuple(shape)}"
                )

    def init(self, problem: Target, position: Tensor) -> Point:
        return point_at(problem, position)

    def step(self, problem: Target, state: Point, rng: torch.Generator) -> tuple[Point, Info]:
        x = state.position
        mean, scale = (torch.as_tensor(v, dtype=x.dtype, device=x.device) for v in (self.mean, self.scale))
        noise = scale * draw_momentum(x, rng)

        def path(t: Tensor) -> Tensor:
            t = t.unsqueeze(-1)
            return mean + (x - mean) * t.cos() + noise * t.sin()

        def reference(y: Tensor) -> Tensor:
            return 0.5 * ((y - mean) / scale).square().sum(-1)

        line = Slice(problem, path, reference, _level(state.energy - reference(x), rng))
        low = -2 * math.pi * torch.rand(state.energy.shape, generator=rng, dtype=x.dtype, device=x.device)
        none = torch.zeros_like(low, dtype=torch.int32)
        return _shrink(line, state, low, low + 2 * math.pi, none, rng)


@dataclass(frozen=True, eq=False)
class LinearSlice(Settings):
    """Slice sampling along ``x + t L n/|n|``, ``n ~ N(0, I)``, by stepping out and shrinking (math 8.11).

    The energy needs no gradient. A bracket that is too wide costs a few more shrinkages, one that is too narrow a few
    more steps outwards.

    Args:
        width: initial width of the bracket, a positive number or tensor ``[*batch]``.
        max_steps: the bracket is stepped out to at most this many widths; 1 for no stepping out.
        reflect: for targets on the unit cube: lines are reflected at its faces.
        metric: ``S = L L^T``, as in :class:`HMC`. Not used with ``reflect``, where directions must be symmetric.
    """

    width: float | Tensor = 2.0
    max_steps: int = 8
    reflect: bool = False
    metric: str | Metric = "low_rank"

    def __post_init__(self):
        if self.width is None:
            raise ArgumentError("LinearSlice(width=None): must be a positive number")
        optional_positive("LinearSlice", "width", self.width)
        whole_number("LinearSlice", "max_steps", self.max_steps)
        flag("LinearSlice", "reflect", self.reflect)
        check_metric("LinearSlice", self.metric)
        if self.reflect and isinstance(self.metric, Metric):
            raise ArgumentError("LinearSlice(reflect=True, metric=...): directions must be symmetric: omit metric")

    def check(self, problem) -> None:
        check_target("LinearSlice", problem)
        self.check_batch(problem.batch_shape, "width")
        check_shape("LinearSlice", self.metric, problem.batch_shape, problem.dim)

    def tuning(self, problem: Target) -> Tuning:
        return Tuning(metric=None if self.reflect else open_metric(self.metric))

    def probe(self, step_size: Tensor, n_steps: int) -> "LinearSlice":
        return self

    def init(self, problem: Target, position: Tensor) -> Point:
        inside = not self.reflect or bool(((position >= 0) & (position <= 1)).all())
        return point_at(problem, position if inside else reflected(position))

    def step(self, problem: Target, state: Point, rng: torch.Generator) -> tuple[Point, Info]:
        x, energy = state
        metric = IDENTITY if self.reflect else metric_in_use(self.metric)
        noise = draw_momentum(x, rng)
        direction = metric.apply(noise / noise.norm(dim=-1, keepdim=True))

        def path(t: Tensor) -> Tensor:
            y = x + t.unsqueeze(-1) * direction
            return reflected(y) if self.reflect else y

        line = Slice(problem, path, lambda y: y.new_zeros(()), _level(energy, rng))
        width = torch.as_tensor(self.width, dtype=x.dtype, device=x.device).expand_as(energy)
        uniform = torch.rand(2, *energy.shape, generator=rng, dtype=x.dtype, device=x.device)
        low = -width * uniform[0]
        low, high, evaluations = self._step_out(line, low, low + width, width, uniform[1])
        return _shrink(line, state, low, high, evaluations, rng)

    def _step_out(self, line: Slice, low: Tensor, high: Tensor, width: Tensor, share: Tensor):
        """Move the ends of brackets outwards until both are outside the slice, or the steps are used up."""
        # the steps are dealt out to the two ends at random, so that every bracket is as likely from any point in it
        left = (self.max_steps * share).floor().clamp_max(self.max_steps - 1)
        ends, steps = torch.stack([low, high]), torch.stack([left, self.max_steps - 1 - left])
        outwards = torch.stack([-width, width])
        evaluations = torch.zeros_like(low, dtype=torch.int32)
        active = steps > 0
        while active.any():
            _, inside, _ = line.at(ends)
            evaluations = evaluations + active.sum(0, dtype=torch.int32)
            active = active & inside
            ends = torch.where(active, ends + outwards, ends)
            steps = torch.where(active, steps - 1, steps)
            active = active & (steps > 0)
        return ends[0], ends[1], evaluations


def reflected(x: Tensor) -> Tensor:
    """Points reflected into the unit cube: ``r = x mod 2``, then r or ``2 - r`` (math 8.11)."""
    r = x.remainder(2)
    return torch.where(r > 1, 2 - r, r)
