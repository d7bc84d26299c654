"""The path from a base to a target in base-whitened coordinates, and Hamiltonian moves along it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..bases import Gaussian
from ..kernels.integrators import PhasePoint, leapfrog
from ..target import Target

__all__ = ["AnnealedPath", "Move", "Point"]


class Point(NamedTuple):
    """Positions of chains, with what any temperature's energy and gradient are made of."""

    v: Tensor
    """Whitened, ``[chains, *batch, D]``."""
    energy: Tensor
    """Of the target, ``phi``: ``[chains, *batch]``."""
    gradient: Tensor
    """``L^T grad phi``, in v: ``[chains, *batch, D]``."""
    square: Tensor
    """``|v|^2/2``: ``[chains, *batch]``."""

    def where(self, condition: Tensor, other: "Point") -> "Point":
        """Rows of this where the condition ``[chains, *batch]`` holds, else of the other."""
        rows = condition.unsqueeze(-1)
        return Point(
            torch.where(rows, self.v, other.v),
            torch.where(condition, self.energy, other.energy),
            torch.where(rows, self.gradient, other.gradient),
            torch.where(condition, self.square, other.square),
        )


class Move(NamedTuple):
    """What one Hamiltonian transition did."""

    point: Point
    acceptance: Tensor
    """``min(1, exp(H - H'))``, ``[chains, *batch]``."""


class AnnealedPath:
    """Densities ``exp(-(1 - beta) psi - beta phi)`` between a base and a target, ``x = mean + L v``.

    In v the base is standard normal, so that an annealed energy and its gradient, ``(1 - beta) v + beta L^T grad phi``,
    cost one gradient of the target, whatever the temperature, and nothing when only the temperature changes.
    ``evaluations`` counts those gradients, for a chain of a problem.
    """

    def __init__(self, target: Target, base: Gaussian):
        self.target, self.base = target, base
        # psi(x) = |v|^2/2 + this
        self.base_constant = base.log_det.double() + 0.5 * base.dim * math.log(2 * math.pi)
        self.evaluations = 0

    @property
    def batch_shape(self) -> torch.Size:
        return self.base.batch_shape

    def normal(self, chains: int, rng: torch.Generator) -> Tensor:
        """Standard normal numbers ``[chains, *batch, D]``."""
        mean = self.base.mean
        return torch.randn(chains, *mean.shape, generator=rng, dtype=mean.dtype, device=mean.device)

    def at(self, v: Tensor) -> Point:
        """``[chains, *batch, D]``; an energy that is not finite is taken as ``+inf``, such a gradient as zero."""
        self.evaluations += 1
        energy, gradient = self.target.energy_and_gradient(self.base.unwhiten(v))
        # has no weight, so that no chain may move to it
        energy = torch.where(energy.isfinite(), energy, math.inf)
        gradient = self.base.scale.transpose(gradient).nan_to_num_(0.0, 0.0, 0.0)
        return Point(v, energy.to(v.dtype), gradient, 0.5 * v.square().sum(-1))

    def difference(self, point: Point) -> Tensor:
        """``phi - psi`` in float64, ``[chains, *batch]``; ``+inf`` where phi is not a finite number."""
        return self._difference(point.energy, point.square)

    @torch.no_grad()
    def differences(self, v: Tensor) -> Tensor:
        """``phi - psi`` at ``v [N, *batch, D]``, as :meth:`difference`, without a gradient."""
        return self._difference(self.target.energy(self.base.unwhiten(v)), 0.5 * v.square().sum(-1))

    def _difference(self, energy: Tensor, square: Tensor) -> Tensor:
        energy = energy.double()
        return torch.where(energy.isfinite(), energy, math.inf) - square.double() - self.base_constant

    def move(self, point: Point, beta: Tensor, step_size: Tensor, n_steps: int, rng: torch.Generator) -> Move:
        """One transition of Hamiltonian Monte Carlo that leaves the density at ``beta`` invariant.

        Steps are a random part, between a half and all, of the step size: chains of a fixed trajectory length can
        return to where they were. The transition is its own reversal.

        Args:
            beta: in [0, 1], broadcast to ``[chains, *batch]``.
            step_size: the longest, broadcast to ``[chains, *batch]``.
            n_steps: of the leapfrog integrator.
        """
        like = point.v
        momentum = torch.randn(like.shape, generator=rng, dtype=like.dtype, device=like.device)
        step = self.random_step(point, step_size, rng)
        end, _, probability = self._trajectory(point, momentum, beta, step, n_steps)
        return Move(end.where(self._uniform(point, rng) < probability, point), probability)

    def move_on(
        self, point: Point, momentum: Tensor, beta: Tensor, step: Tensor, rng: torch.Generator
    ) -> tuple[Move, Tensor]:
        """One leapfrog step of a momentum ``[chains, *batch, D]`` that goes on, or is turned round where the step is
        not accepted.

        With the momentum standard normal it leaves the density at ``beta`` as it is. Its reversal is to turn the
        momentum round, to take such a step and to turn it round again.

        Args:
            beta: as in :meth:`move`.
            step: its length, ``[chains, *batch]``.
        """
        end, p, probability = self._trajectory(point, momentum, beta, step, 1)
        accepted = self._uniform(point, rng) < probability
        momentum = torch.where(accepted.unsqueeze(-1), p, -momentum)
        return Move(end.where(accepted, point), probability), momentum

    def random_step(self, point: Point, step_size: Tensor, rng: torch.Generator) -> Tensor:
        """Between a half and all of the step size: ``[chains, *batch]``."""
        return step_size * (0.5 + 0.5 * self._uniform(point, rng))

    def _trajectory(
        self, point: Point, momentum: Tensor, beta: Tensor, step: Tensor, n_steps: int
    ) -> tuple[Point, Tensor, Tensor]:
        """Leapfrog steps at ``beta``: the end, its momentum, and ``min(1, exp(H - H'))``."""
        beta = beta.to(point.v.dtype)
        weight = beta.unsqueeze(-1)

        def annealed(point: Point) -> tuple[Tensor, Tensor, Point]:
            return torch.lerp(point.square, point.energy, beta), torch.lerp(point.v, point.gradient, weight), point

        start = PhasePoint(point.v, momentum, *annealed(point))
        end = leapfrog(lambda v: annealed(self.at(v)), start, step, n_steps)
        # energies that are not finite give NaN: rejected
        probability = (start.hamiltonian - end.hamiltonian).clamp_max(0).exp().nan_to_num_(0.0)
        return Point(*end.extra), end.momentum, probability

    @staticmethod
    def _uniform(point: Point, rng: torch.Generator) -> Tensor:
        like = point.v
        return torch.rand(like.shape[:-1], generator=rng, dtype=like.dtype, device=like.device)
