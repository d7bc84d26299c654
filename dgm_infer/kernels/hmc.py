"""Hamiltonian Monte Carlo on R^D (math 8.1, T Algorithm 6), and what all Hamiltonian kernels share.

Momenta, trajectory schedules, acceptance, and the state on a target.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..arguments import choice, counts, optional_positive
from ..autodiff.captured import CapturedTarget, captured
from ..autodiff.randomness import normal
from ..autodiff.randomness import uniform as random_uniform
from ..errors import ArgumentError, Status
from ..settings import Settings
from ..target import Target
from .integrators import PhasePoint, leapfrog
from .kernel import Info, TrajectoryEnd, Trial, Tuning, either
from .metrics import Metric, check_metric, check_shape, chosen_metric, first_metric, metric_in_use, open_metric


@dataclass(frozen=True)
class TrajectorySettings:
    """Settings of trajectories whose kernel leaves them open."""

    length: float = math.pi / 2
    """Initial trajectory length: on a standard normal density it makes the next position independent of this one."""
    most_steps: int = 200
    """Maximum steps per transition, however small they are: a bound on its time."""
    acceptance: float = 0.9
    """Mean acceptance probability that step sizes are adapted to. It is seen in a warm-up, which visits few of the
    narrow regions of a density, and steps too long for these cost more than shorter ones: beside 0.8 (Hoffman and
    Gelman 2014), 0.8 to 10 times the effective draws a second over 28 runs of eight kinds of problems, 1.4 times in the
    median. Solvers of constraints take more updates for longer steps, and fail at more of them."""
    divergence: float = 1000.0
    """Energy error, in nats, above which a trajectory is a divergence (Stan's)."""


TRAJECTORY = TrajectorySettings()


class HMCState(NamedTuple):
    """Positions on R^D ``[chains, *batch, D]``, with their energy and its gradient."""

    position: Tensor
    energy: Tensor
    gradient: Tensor
    extra: tuple[Tensor, ...] = ()
    """What else the target keeps at the positions, ``[chains, *batch]`` or ``[chains, *batch, E]``."""

    def where(self, condition: Tensor, other: "HMCState") -> "HMCState":
        """This state where the condition ``[chains, *batch]`` holds, else the other."""
        return either(condition, self, other)


def check_target(name: str, problem: object) -> None:
    """Raise ArgumentError unless the problem is a target."""
    if not isinstance(problem, Target):
        raise ArgumentError(
            f"{name} samples a Target, not a {type(problem).__name__}: use LiftedHMC (noise) or ConstrainedHMC, or "
            "condition(..., tolerance=eps)"
        )


def draw_momentum(position: Tensor, rng: torch.Generator) -> Tensor:
    """Standard normal momentum, ``[..., D]``."""
    return normal(position.shape, position, rng)


def accept(h_old: Tensor, h_new: Tensor, status: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Metropolis decision on the Hamiltonian, per chain.

    Returns:
        accepted, acceptance probability and status, each ``[...]``.
    """
    error = h_new - h_old
    # false for NaN, as is an infinite energy
    fine = (error < TRAJECTORY.divergence) & (h_new > -math.inf)
    ok = status == Status.OK
    status = torch.where(ok & ~fine, int(Status.DIVERGED), status)
    probability = torch.where(ok & fine, error.neg().clamp_max(0).exp(), 0.0)
    uniform = random_uniform(error.shape, error, rng)
    return uniform < probability, probability, status


class Schedule(NamedTuple):
    """Number and size of the steps of one transition."""

    n_steps: Tensor
    """``[chains, *batch]``."""
    step_size: Tensor
    """``[chains, *batch]``."""
    fraction: Tensor
    """Duration over the trajectory length, ``[*batch]``."""


def given_step_size(step_size: float | Tensor | None, like: Tensor) -> Tensor:
    """The step size per chain, ``[chains, *batch]``.

    Raises:
        ArgumentError: it is None.
    """
    if step_size is None:
        raise ArgumentError("step_size=None is chosen by sample(); to call step() directly, set it to a number")
    return torch.as_tensor(step_size, dtype=like.dtype, device=like.device).expand_as(like)


@dataclass(frozen=True, eq=False)
class Scheduled(Settings):
    """Settings of kernels with trajectories of so many steps, or of a length; arguments as in :class:`HMC`."""

    step_size: float | Tensor | None = None
    n_steps: int | tuple[int, int] | None = None
    trajectory_length: float | Tensor | None = None

    def __post_init__(self):
        name = type(self).__name__
        optional_positive(name, "step_size", self.step_size)
        if self.n_steps is not None:
            counts(name, "n_steps", self.n_steps)
            if self.trajectory_length is not None:
                raise ArgumentError(f"{name}(n_steps={self.n_steps}, trajectory_length=...): give one of them")
        optional_positive(name, "trajectory_length", self.trajectory_length)

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        return self.replace(step_size=step_size, n_steps=(1, n_steps), trajectory_length=None)

    def draw_schedule(self, longest_step: float, like: Tensor, rng: torch.Generator) -> Schedule:
        """Draw the steps of one transition.

        ``n_steps`` is one number for all chains and problems, uniform on the inclusive range. If that is None, a
        trajectory lasts ``t = U T``, with ``T`` the trajectory length of a problem and ``U ~ Uniform(1/2, 3/2)`` shared
        by all, since the longest trajectory sets the pace, in the fewest equal steps that do not exceed the step size.

        Args:
            longest_step: upper bound on the step size.
            like: ``[chains, *batch]``.
        """
        step_size = given_step_size(self.step_size, like).clamp_max(longest_step)
        batch = like.shape[1:]
        if self.n_steps is not None:
            low, high = counts(type(self).__name__, "n_steps", self.n_steps)
            steps = like.new_full((), low)
            if low < high:
                steps = steps + ((high - low + 1) * random_uniform((), like, rng)).floor().clamp_max(high - low)
            return Schedule(steps.to(torch.int64).expand(like.shape), step_size, like.new_ones(batch))
        length = TRAJECTORY.length if self.trajectory_length is None else self.trajectory_length
        length = torch.as_tensor(length, dtype=like.dtype, device=like.device)
        fraction = 0.5 + random_uniform((), like, rng).expand(batch)
        time = (fraction * length).expand_as(like)
        steps = (time / step_size).ceil().clamp(1, TRAJECTORY.most_steps)
        return Schedule(steps.to(torch.int64), torch.minimum(time / steps, step_size), fraction)

    @property
    def constant_steps(self) -> int | None:
        """The steps of every transition, which no host need ask its device for; None if they vary."""
        if self.n_steps is None:
            return None
        low, high = counts(type(self).__name__, "n_steps", self.n_steps)
        return low if low == high else None

    def schedule_tuning(self, longest_step: float = math.inf) -> Tuning:
        """What is left for warm-up to tune."""
        # arcs have a scale of 1; otherwise a step is about the smallest scale, and from above 1.5 times the best length
        # the criterion climbs to an inferior maximum
        given = None if self.step_size is None else torch.as_tensor(self.step_size)
        return Tuning(
            step_size=self.step_size is None,
            longest_step=longest_step,
            trajectory_length=self.n_steps is None and self.trajectory_length is None,
            initial_length=TRAJECTORY.length if math.isfinite(longest_step) else given,
            usual_acceptance=TRAJECTORY.acceptance,
        )


@dataclass(frozen=True, eq=False)
class HMC(Scheduled):
    """Hamiltonian Monte Carlo with leapfrog trajectories of random length.

    Args:
        step_size: positive number or tensor ``[*batch]``, fixed; None adapts it per problem in warm-up.
        n_steps: leapfrog steps per transition, or the inclusive range they are drawn from; None derives them from the
            trajectory length.
        trajectory_length: mean duration of a trajectory, a number or ``[*batch]``; None adapts it per problem in
            warm-up. Durations are uniform between 0.5 and 1.5 times this.
        metric: covariance that the target is taken to have, whose inverse is the mass: ``"identity"``, or
            ``"diagonal"``, ``"dense"`` or ``"low_rank"`` (plus diagonal), which warm-up adapts per problem to the
            positions of all chains and the gradients there, or an adapted metric of another run. Lengths are in units
            of the metric. None for ``"diagonal"`` of a density, ``"dense"`` of a posterior of up to 512 latents, and
            ``"identity"`` otherwise, and where a length is given.
        compile: whether transitions are compiled to machine code as one program, which takes two to ten seconds in
            every run, or on a GPU are recorded as CUDA graphs; None if transitions to come take as long as that, by
            count.
    """

    metric: str | Metric | None = None
    compile: bool | None = None

    def __post_init__(self):
        super().__post_init__()
        check_metric("HMC", self.metric, (None,))
        choice("HMC", "compile", self.compile, (True, False, None))

    def check(self, problem) -> None:
        check_target("HMC", problem)
        self.check_batch(problem.batch_shape, "step_size", "trajectory_length")
        check_shape("HMC", self.metric, problem.batch_shape, problem.dim)

    def is_program(self, problem: Target) -> bool:
        """Whether :meth:`step` can be captured as one program."""
        return True

    def _chosen_metric(self, problem: Target) -> str | Metric:
        return chosen_metric(self.metric, problem, self.step_size, self.trajectory_length)

    def tuning(self, problem: Target) -> Tuning:
        return dataclasses.replace(self.schedule_tuning(), metric=open_metric(self._chosen_metric(problem)))

    def metric_at(self, problem: Target, position: Tensor) -> Metric | None:
        return first_metric(self._chosen_metric(problem), problem, position)

    def init(self, problem: Target, position: Tensor) -> HMCState:
        return HMCState(position, *captured(problem).energy_gradient_and_extra(position))

    def step(self, problem: Target, state: HMCState, rng: torch.Generator) -> tuple[HMCState, Info]:
        problem, metric = captured(problem), metric_in_use(self.metric)
        momentum = draw_momentum(state.position, rng)
        n_steps, step_size, fraction = self.draw_schedule(math.inf, state.position[..., 0], rng)
        start = PhasePoint(state.position, momentum, state.energy, state.gradient, state.extra)
        steps = self.constant_steps or n_steps
        # the gradient of a loop takes as long as all there is
        whole = isinstance(problem, CapturedTarget) and problem.is_loop(state.position)
        gradient = None if whole else problem.gradient
        end = leapfrog(problem.energy_gradient_and_extra, start, step_size, steps, metric, gradient)
        h_old, h_new = start.hamiltonian, end.hamiltonian
        status = torch.full_like(h_old, int(Status.OK), dtype=torch.int8)
        accepted, probability, status = accept(h_old, h_new, status, rng)
        there = HMCState(end.position, end.energy, end.gradient, end.extra).where(accepted, state)
        info = Info(
            acceptance_rate=probability,
            status=status,
            energy=torch.where(accepted, h_new, h_old),
            stats={"n_steps": n_steps.to(torch.int32), "step_size": step_size},
            tuning=Trial(
                step_size,
                TrajectoryEnd(metric.solve(start.position), metric.solve(end.position), end.momentum, fraction),
                position=there.position,
                gradient=there.gradient,
            ),
        )
        return there, info
