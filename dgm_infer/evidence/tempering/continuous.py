"""Continuous tempering (Graham and Storkey 2017; T 5), by Gibbs steps or joint moves; path sampling on its states."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...arguments import choice, fraction, positive, whole_number
from ...arguments.values import shown
from ...errors import ArgumentError, EvidenceError
from ...kernels.integrators import PhasePoint, leapfrog
from ...kernels.nuts import deepest, grow
from ...progress import Progress
from ...sampling.adaptation import DualAveraging
from ...settings import Settings
from ..estimators import Estimate, known_where, log_ratios, log_weights_at_ends
from ..method import EstimateStatus, Outcome, of_whole_base
from ..path import AnnealedPath, PathPoint
from ..plan import TUNED, StepSizes
from .temperatures import Control, Ladder, Plateaus, Sigmoid, Warped, draw_beta
from .tempering import Record, TemperedChain, TemperedState, Tempering


@dataclass(frozen=True, eq=False)
class GibbsTempering(Tempering):
    """Continuous tempering that alternates a Hamiltonian move of x at beta with an exact draw of beta given x.

    ``p(x, beta) ~ exp(-beta (phi + log zeta) - (1 - beta) psi)``; ``log Z = log zeta + log sum w1 - log sum w0`` over
    all draws of all chains, with ``w1 = p(beta = 1 | x)`` and ``w0 = p(beta = 0 | x)``: consistent.

    Args:
        draws: states kept per chain.
        warmup: states discarded before them.
        n_steps: leapfrog steps per state.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per temperature and
            problem on a pilot.
        log_zeta: guess of log Z, a number or ``[*batch]``; ``"pilot"`` takes the pilot's estimate, ``"importance"``
            that of 100 draws of the base; None takes the base's own guess if it has one, else ``"pilot"``. A poor
            guess costs draws at one end of the temperatures, not correctness.
        thin: states per draw of x in the result; the estimates use all states.
        target_acceptance: mean acceptance probability that step sizes are adapted to.
        pilot_temperatures: temperatures of the annealing run that tunes step sizes and starts the chains, spread over
            all of them.
        schedule: density of the temperatures: ``"linear"``, uniform on [0, 1], or ``"barrier"``, at equal distances
            along the communication barrier that the pilot measures (math 6.19).
    """

    schedule: Literal["linear", "barrier"] = "linear"

    def __post_init__(self):
        super().__post_init__()
        choice("GibbsTempering", "schedule", self.schedule, ("linear", TUNED))

    def _chain(self, path, pilot, log_zeta, point, rng):
        ladder = Warped(pilot, log_zeta) if self.schedule == TUNED else Sigmoid(log_zeta)
        return LadderChain(path, pilot.step_sizes, ladder, point, rng, self.n_steps)


class LadderChain(TemperedChain):
    """Chains that alternate a Hamiltonian move of x with an exact draw of its temperature."""

    def __init__(
        self,
        path: AnnealedPath,
        step_sizes: StepSizes,
        ladder: Ladder,
        point: PathPoint,
        rng: torch.Generator,
        n_steps: int,
    ):
        self.path, self.step_sizes, self.ladder, self.rng, self.n_steps = path, step_sizes, ladder, rng, n_steps
        self.point, self.log_prior = point, ladder.log_prior
        self.beta = ladder.draw(path.difference(point), rng).beta

    def step(self) -> TemperedState:
        step_size = self.step_sizes.at(self.beta)
        self.point, acceptance = self.path.move(self.point, self.beta, step_size, self.n_steps, self.rng)
        rung = self.ladder.draw(self.path.difference(self.point), self.rng)
        self.beta = rung.beta
        return TemperedState(self.point, rung.beta, acceptance, (rung.log_p1, rung.log_p0))


@dataclass(frozen=True, eq=False)
class ContinuousTempering(Tempering):
    """Continuous tempering by Hamiltonian moves of x and ``beta = sigmoid(xi)`` together.

    The potential is that of :class:`GibbsTempering` plus ``-log beta - log(1 - beta)``; the estimates are the same.
    The control xi has its own mass; a scale c of xi, as published, is a mass of c squared.

    With ``plateau`` it is the extended Hamiltonian of Gobbo and Leimkuhler (2015), beside a base: xi moves on a circle,
    where beta is 1 on one part and 0 on another, so that states rest at both ends (T (5.19), math 6.18).

    Args:
        draws, n_steps, log_zeta, thin, target_acceptance, pilot_temperatures: as in :class:`GibbsTempering`.
        warmup: states discarded before the draws, which adapt the step size if it is None.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per problem.
        mass: mass of xi, positive.
        nuts: maximum leapfrog steps of a trajectory that ends at a U-turn in (x, xi), as in :class:`NUTS`; None for
            trajectories of ``n_steps``. Chains step together, and those that have ended wait.
        plateau: share of the circle where beta is 1, and where it is 0, below 1/2; None for ``beta = sigmoid``.
        schedule: density of the temperatures, as in :class:`GibbsTempering`.
    """

    mass: float = 1.0
    nuts: int | None = None
    plateau: float | None = None
    schedule: Literal["linear", "barrier"] = "linear"

    def __post_init__(self):
        super().__post_init__()
        positive("ContinuousTempering", "mass", self.mass)
        if self.nuts is not None:
            whole_number("ContinuousTempering", "nuts", self.nuts)
        if self.plateau is not None:
            fraction("ContinuousTempering", "plateau", self.plateau)
            if self.plateau >= 0.5:
                raise ArgumentError(
                    f"ContinuousTempering(plateau={self.plateau}): the two plateaus leave no way between them; use a "
                    "share below 0.5"
                )
        choice("ContinuousTempering", "schedule", self.schedule, ("linear", TUNED))
        if self.schedule != "linear" and self.plateau is not None:
            raise ArgumentError(
                f"ContinuousTempering(plateau={self.plateau}, schedule={self.schedule!r}): both say how beta "
                "depends on its control; use one of them"
            )
        if self.step_size is None and self.warmup < 20:
            raise ArgumentError(
                f"ContinuousTempering(warmup={self.warmup}): too short to adapt step_size: use >= 20, or set it"
            )

    def _chain(self, path, pilot, log_zeta, point, rng):
        control = Sigmoid(log_zeta) if self.plateau is None else Plateaus(self.plateau, log_zeta)
        if self.schedule == TUNED:
            control = Warped(pilot, log_zeta)
        kind = _JointChain if self.nuts is None else _JointTrees
        return kind(self, path, pilot.step_sizes, control, point, rng)


class _JointChain(TemperedChain):
    """State (v, t) with a temperature ``beta(t)``; moves are of v and ``t/rate``, whose momenta have unit mass."""

    def __init__(self, method: ContinuousTempering, path: AnnealedPath, sizes: StepSizes, control: Control, point, rng):
        self.method, self.path, self.control, self.point, self.rng = method, path, control, point, rng
        self.rate = 1 / math.sqrt(method.mass)
        # energies at the two ends up to a common constant: that of the base and phi + offset
        self.offset = (control.log_zeta - path.base_constant).to(point.energy.dtype)
        beta = draw_beta(path.difference(point) + control.log_zeta, rng)
        self.t = control.inverse(beta).to(point.energy.dtype)
        self.step_size = sizes.log_step.amin(0).exp()
        adapts = method.step_size is None
        self.averaging = DualAveraging(self.step_size, method.target_acceptance) if adapts else None

    def warm(self) -> None:
        if self.averaging is not None:
            self.step_size = self.averaging.current
        acceptance = self.step().acceptance
        if self.averaging is not None:
            self.averaging.update(acceptance.mean(0))

    def freeze(self) -> None:
        if self.averaging is not None:
            self.step_size = self.averaging.final

    def step(self) -> TemperedState:
        point, rng = self.point, self.rng
        p = torch.randn(point.v.shape, generator=rng, dtype=point.v.dtype, device=point.v.device)
        q, jitter, uniform = self._numbers(self.t)
        start = self._start(torch.cat([p, q.unsqueeze(-1)], -1))
        end = leapfrog(self._evaluate, start, self.step_size * (0.5 + 0.5 * jitter), self.method.n_steps)
        acceptance = (start.hamiltonian - end.hamiltonian).clamp_max(0).exp().nan_to_num_(0.0)
        self._go_to(end.where(uniform < acceptance, start))
        return self._state(acceptance)

    def _numbers(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(like.shape, generator=self.rng, dtype=like.dtype, device=like.device)
        jitter, uniform = torch.rand((2, *like.shape), generator=self.rng, dtype=like.dtype, device=like.device)
        return q, jitter, uniform

    def _start(self, momentum: Tensor) -> PhasePoint:
        """Where the chains are, with a momentum ``[chains, *batch, D + 1]``."""
        position = torch.cat([self.point.v, self.t.unsqueeze(-1) / self.rate], -1)
        return PhasePoint(position, momentum, *self._energies(self.point, self.t))

    def _evaluate(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self._energies(self.path.at(x[..., :-1]), self.rate * x[..., -1])

    def _energies(self, point: PathPoint, t: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        force, force_t = self._forces(point, t)
        gradient = torch.cat([force, force_t.unsqueeze(-1)], -1)
        return self._potential(point, t), gradient, (point.energy, point.gradient, point.square, point.pull)

    def _go_to(self, there: PhasePoint) -> None:
        self.point, self.t = PathPoint(there.position[..., :-1], *there.extra), self.rate * there.position[..., -1]

    def _state(self, acceptance: Tensor) -> TemperedState:
        ends = self.control.log_ends(self.path.difference(self.point))
        return TemperedState(self.point, self.control.temperature(self.t.double()).beta, acceptance, ends)

    def _potential(self, point: PathPoint, t: Tensor) -> Tensor:
        """``(1 - beta) psi + beta (phi + log zeta) - log p(t)``, up to a constant."""
        energy = torch.lerp(point.square, point.energy + self.offset, self.control.temperature(t).beta)
        return energy + self.control.energy(t)

    def _forces(self, point: PathPoint, t: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the potential in v and in ``t/rate``."""
        at = self.control.temperature(t)
        delta = point.energy + self.offset - point.square
        slope = at.slope * delta + self.control.force(t, at)
        return torch.lerp(point.slope, point.gradient, at.beta.unsqueeze(-1)), self.rate * slope


class _JointTrees(_JointChain):
    """The same with trajectories that end at a U-turn."""

    def step(self) -> TemperedState:
        shape = (*self.t.shape, self.point.v.shape[-1] + 1)
        start = self._start(torch.randn(shape, generator=self.rng, dtype=self.t.dtype, device=self.t.device))
        depth = deepest(self.method.nuts or 1)
        tree = grow(start, self._evaluate, self.step_size.expand(self.t.shape), depth, self.rng)
        self._go_to(tree.draw)
        return self._state(tree.acceptance)


@dataclass(frozen=True, eq=False)
class PathSampling(Settings):
    """``log Z = -integral of E_beta[phi - psi] d beta`` over [0, 1], from the states of chains in parts of it.

    In a part ``[a, a + h]`` the temperature given x is exponential with rate Delta(x), truncated to the part; averaged
    over it, the integral over the part is ``log sum p(a + h | x) - log sum p(a | x)`` over the states in the part,
    without quadrature error: consistent for any number of parts. One part gives the estimate of tempering; with many,
    each term is ``-h`` times the mean of Delta. Every part uses only its own states, so that the error reveals poorly
    visited parts; it is infinite where no chain was in one. Among the diagnostics, ``mean_difference`` is the mean of
    ``phi - psi`` per part, the integrand, and ``tempering_log_z`` the estimate from the same chains with one part.

    Args:
        tempering: method that runs the chains; None for ``GibbsTempering()``.
        parts: number of equal parts of [0, 1].
    """

    tempering: GibbsTempering | ContinuousTempering | None = None
    parts: int = 10

    def __post_init__(self):
        whole_number("PathSampling", "parts", self.parts)
        if not isinstance(self.tempering, GibbsTempering | ContinuousTempering | None):
            raise ArgumentError(
                f"PathSampling(tempering={shown(self.tempering)}): must be a GibbsTempering or a ContinuousTempering, "
                "whose temperatures are continuous, or None"
            )
        for field, plain in (("plateau", None), ("schedule", "linear")):
            value = getattr(self.tempering, field, plain)
            if value != plain:
                raise ArgumentError(
                    f"PathSampling(tempering={type(self.tempering).__name__}({field}={value!r})): its temperatures "
                    f"are not uniform; leave {field} out"
                )

    @property
    def status(self) -> EstimateStatus:
        return "consistent"

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        tempering = GibbsTempering() if self.tempering is None else self.tempering
        record, spent = tempering.recorded(path, chains, rng, progress)
        outcome = record.outcome(spent)
        estimate, means = _integral(record, self.parts)
        estimate = known_where(means.isfinite().all(0), estimate, outcome.estimate)
        diagnostics = outcome.diagnostics | {
            "mean_difference": means,
            "tempering_log_z": of_whole_base(outcome, path.inside).estimate.log_z,
        }
        return of_whole_base(outcome._replace(estimate=estimate, diagnostics=diagnostics), path.inside)


def _integral(record: Record, parts: int) -> tuple[Estimate, Tensor]:
    """The estimate, and the mean of ``phi - psi`` in every part, ``[parts, *batch]``, NaN where no chain was in it.

    Raises:
        EvidenceError: in every problem some part was not visited.
    """
    delta = record.log_w0 - record.log_w1
    w1, w0 = log_weights_at_ends(delta / parts)
    part = (record.beta * parts).long().clamp_max(parts - 1)
    numerators, denominators, means = [], [], []
    for b in range(parts):
        inside = part == b
        count = inside.sum((0, 1))
        if (count == 0).all():
            raise EvidenceError(
                f"PathSampling(parts={parts}): no chain visited temperatures between {b / parts:g} and "
                f"{(b + 1) / parts:g}; use fewer parts, more draws or a better log_zeta"
            )
        numerators.append(torch.where(inside, w1, -torch.inf).logsumexp(1))
        denominators.append(torch.where(inside, w0, -torch.inf).logsumexp(1))
        means.append(torch.where(inside, delta, 0.0).sum((0, 1)) / count - record.log_zeta)
    estimate = log_ratios(torch.stack(numerators, 1), torch.stack(denominators, 1))
    return estimate._replace(log_z=record.log_zeta + estimate.log_z), torch.stack(means)
