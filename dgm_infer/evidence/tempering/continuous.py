"""Continuous tempering (Graham and Storkey 2017; T 5): Hamiltonian moves of x and its temperature together."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...arguments import choice, fraction, positive, whole_number
from ...errors import ArgumentError
from ...kernels.integrators import PhasePoint, leapfrog
from ...kernels.nuts import deepest, grow
from ...sampling.adaptation import DualAveraging
from .. import schedules
from ..path import AnnealedPath, Point
from ..pilot import StepSizes
from .controls import Control, Plateaus, Sigmoid
from .record import TemperedState
from .tempering import Tempering, draw_beta
from .warped import Warped

__all__ = ["ContinuousTempering"]


@dataclass(frozen=True, eq=False)
class ContinuousTempering(Tempering):
    """Continuous tempering by Hamiltonian moves of x and ``beta = sigmoid(xi/scale)`` together.

    The potential is that of :class:`GibbsTempering` plus ``-log beta - log(1 - beta)``; the estimates are the same.
    The control xi has its own mass; ``mass`` times c squared is equivalent to ``scale`` times c.

    With ``plateau`` it is the extended Hamiltonian of Gobbo and Leimkuhler (2015), beside a base: xi moves on a circle,
    where beta is 1 on one part and 0 on another, so that states rest at both ends (T (5.19), math 6.20).

    Args:
        draws: states kept per chain.
        warmup: states discarded before them, which adapt the step size if it is None.
        n_steps: leapfrog steps per state.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per problem.
        log_zeta: guess of log Z, as in :class:`GibbsTempering`.
        thin: states per draw of x in the result.
        target_acceptance: mean acceptance probability that the step size is adapted to.
        pilot_temperatures: temperatures of the annealing run that starts the chains, spread over all of them.
        mass: mass of xi, positive.
        scale: scale of xi, positive.
        nuts: maximum leapfrog steps of a trajectory that ends at a U-turn in (x, xi), as in :class:`NUTS`; None for
            trajectories of ``n_steps``. Chains step together, and those that have ended wait.
        plateau: share of the circle where beta is 1, and where it is 0, below 1/2; None for ``beta = sigmoid``.
        schedule: density of the temperatures: ``"linear"``, uniform on [0, 1], or by the pilot as the temperatures of
            :class:`SimulatedTempering`, ``"equalised"`` or ``"barrier"`` (math 6.21).
    """

    mass: float = 1.0
    scale: float = 1.0
    nuts: int | None = None
    plateau: float | None = None
    schedule: Literal["linear", "equalised", "barrier"] = "linear"

    def __post_init__(self):
        super().__post_init__()
        for field in ("mass", "scale"):
            positive("ContinuousTempering", field, getattr(self, field))
        if self.nuts is not None:
            whole_number("ContinuousTempering", "nuts", self.nuts)
        if self.plateau is not None:
            fraction("ContinuousTempering", "plateau", self.plateau)
            if self.plateau >= 0.5:
                raise ArgumentError(
                    f"ContinuousTempering(plateau={self.plateau}): the two plateaus leave no way between them; use a "
                    "share below 0.5"
                )
        choice("ContinuousTempering", "schedule", self.schedule, ("linear", *schedules.TUNED))
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
        adapts = self.step_size is None
        rate = 1 / (self.scale * math.sqrt(self.mass))
        target = self.target_acceptance if adapts else None
        control = Sigmoid() if self.plateau is None else Plateaus(self.plateau)
        if self.schedule != "linear":
            control = Warped(self.schedule, pilot, log_zeta)
        if self.nuts is not None:
            return _JointTrees(path, pilot.step_sizes, log_zeta, point, rng, deepest(self.nuts), rate, target, control)
        return _JointChain(path, pilot.step_sizes, log_zeta, point, rng, self.n_steps, rate, target, control)


class _JointChain:
    """State (v, t) with a temperature ``beta(t)``; moves are of v and ``t/rate``, whose momenta have unit mass."""

    log_prior = None

    def __init__(
        self,
        path: AnnealedPath,
        step_sizes: StepSizes,
        log_zeta,
        point: Point,
        rng,
        n_steps: int,
        rate: float,
        target,
        control: Control,
    ):
        self.control = control
        self.path, self.rng, self.n_steps, self.rate = path, rng, n_steps, rate
        self.point = point
        # energies at the two ends up to a common constant: that of the base and phi + offset
        self.offset = (log_zeta - path.base_constant).to(point.energy.dtype)
        beta = draw_beta(path.difference(point) + log_zeta, rng)
        self.log_zeta = log_zeta
        self.t = control.inverse(beta).to(point.energy.dtype)
        self.step_size = step_sizes.log_step.amin(0).exp()
        self.averaging = None if target is None else DualAveraging(self.step_size, target)

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
        end = leapfrog(self._evaluate, start, self.step_size * (0.5 + 0.5 * jitter), self.n_steps)
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

    def _energies(self, point: Point, t: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        force, force_t = self._forces(point, t)
        gradient = torch.cat([force, force_t.unsqueeze(-1)], -1)
        return self._potential(point, t), gradient, (point.energy, point.gradient, point.square, point.pull)

    def _go_to(self, there: PhasePoint) -> None:
        self.point, self.t = Point(there.position[..., :-1], *there.extra), self.rate * there.position[..., -1]

    def _state(self, acceptance: Tensor) -> TemperedState:
        ends = self.control.log_ends(self.path.difference(self.point) + self.log_zeta)
        return TemperedState(self.point, self.control.temperature(self.t.double()).beta, acceptance, ends)

    def _potential(self, point: Point, t: Tensor) -> Tensor:
        """``(1 - beta) psi + beta (phi + log zeta) - log p(t)``, up to a constant."""
        energy = torch.lerp(point.square, point.energy + self.offset, self.control.temperature(t).beta)
        return energy + self.control.energy(t)

    def _forces(self, point: Point, t: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the potential in v and in ``t/rate``."""
        at = self.control.temperature(t)
        delta = point.energy + self.offset - point.square
        slope = at.slope * delta + self.control.force(t, at)
        return torch.lerp(point.slope, point.gradient, at.beta.unsqueeze(-1)), self.rate * slope


class _JointTrees(_JointChain):
    """The same with trajectories that end at a U-turn; ``n_steps`` is the depth of their nuts."""

    def step(self) -> TemperedState:
        shape = (*self.t.shape, self.point.v.shape[-1] + 1)
        start = self._start(torch.randn(shape, generator=self.rng, dtype=self.t.dtype, device=self.t.device))
        tree = grow(start, self._evaluate, self.step_size.expand(self.t.shape), self.n_steps, self.rng)
        self._go_to(tree.draw)
        return self._state(tree.acceptance)
