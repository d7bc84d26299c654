"""Continuous tempering (Graham and Storkey 2017; T 5): Hamiltonian moves of x and its temperature together."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...arguments import whole_number
from ...errors import ArgumentError
from ...kernels.trees import Leaf, deepest, grow
from ...sampling.warmup import DualAveraging
from ..path import AnnealedPath, Point
from ..pilot import StepSizes
from .record import TemperedState
from .tempering import Tempering, draw_beta

__all__ = ["ContinuousTempering"]


@dataclass(frozen=True, eq=False)
class ContinuousTempering(Tempering):
    """Continuous tempering by Hamiltonian moves of x and ``beta = sigmoid(xi/scale)`` together.

    The potential is that of :class:`GibbsTempering` plus ``-log beta - log(1 - beta)``; the estimates are the same.
    The control xi has its own mass; ``mass`` times c squared is equivalent to ``scale`` times c.

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
    """

    mass: float = 1.0
    scale: float = 1.0
    nuts: int | None = None

    def __post_init__(self):
        super().__post_init__()
        for field in ("mass", "scale"):
            value = getattr(self, field)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ArgumentError(f"ContinuousTempering({field}={value!r}): must be a positive number")
        if self.nuts is not None:
            whole_number("ContinuousTempering", "nuts", self.nuts)
        if self.step_size is None and self.warmup < 20:
            raise ArgumentError(
                f"ContinuousTempering(warmup={self.warmup}): too short to adapt step_size: use >= 20, or set it"
            )

    def _chain(self, path, pilot, log_zeta, point, rng):
        adapts = self.step_size is None
        rate = 1 / (self.scale * math.sqrt(self.mass))
        target = self.target_acceptance if adapts else None
        if self.nuts is not None:
            return _JointTrees(path, pilot.step_sizes, log_zeta, point, rng, deepest(self.nuts), rate, target)
        return _JointChain(path, pilot.step_sizes, log_zeta, point, rng, self.n_steps, rate, target)


class _JointChain:
    """State (v, t) with ``beta = sigmoid(t)``; the velocity of t is ``rate`` times a standard normal momentum."""

    def __init__(
        self, path: AnnealedPath, step_sizes: StepSizes, log_zeta, point: Point, rng, n_steps: int, rate: float, target
    ):
        self.path, self.rng, self.n_steps, self.rate = path, rng, n_steps, rate
        self.point = point
        # energies at the two ends up to a common constant: |v|^2/2 and phi + offset
        self.offset = (log_zeta - path.base_constant).to(point.energy.dtype)
        beta = draw_beta(path.difference(point) + log_zeta, rng)
        self.t = torch.logit(beta.clamp(1e-4, 1 - 1e-4)).to(point.energy.dtype)
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
        point, t, rng = self.point, self.t, self.rng
        p = torch.randn(point.v.shape, generator=rng, dtype=point.v.dtype, device=point.v.device)
        q, jitter, uniform = self._numbers(t)
        step = self.step_size * (0.5 + 0.5 * jitter)
        wide = step.unsqueeze(-1)
        start = self._potential(point, t) + 0.5 * (p.square().sum(-1) + q.square())
        force, force_t = self._forces(point, t)
        p, q = p - 0.5 * wide * force, q - 0.5 * step * force_t
        end, t_end = point, t
        v = point.v
        for i in range(self.n_steps):
            v, t_end = torch.addcmul(v, wide, p), t_end + self.rate * step * q
            end = self.path.at(v)
            force, force_t = self._forces(end, t_end)
            part = 1.0 if i < self.n_steps - 1 else 0.5
            p.addcmul_(wide, force, value=-part)
            q = q - part * step * force_t
        error = self._potential(end, t_end) + 0.5 * (p.square().sum(-1) + q.square()) - start
        acceptance = error.neg().clamp_max(0).exp().nan_to_num_(0.0)
        accepted = uniform < acceptance
        self.point, self.t = end.where(accepted, point), torch.where(accepted, t_end, t)
        return TemperedState(self.point, self.t.double().sigmoid(), acceptance)

    def _numbers(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(like.shape, generator=self.rng, dtype=like.dtype, device=like.device)
        jitter, uniform = torch.rand((2, *like.shape), generator=self.rng, dtype=like.dtype, device=like.device)
        return q, jitter, uniform

    def _potential(self, point: Point, t: Tensor) -> Tensor:
        """``(1 - beta) psi + beta (phi + log zeta) - log beta - log(1 - beta)``, up to a constant."""
        softplus = torch.nn.functional.softplus
        energy = torch.lerp(point.square, point.energy + self.offset, t.sigmoid())
        return energy + softplus(t) + softplus(-t)

    def _forces(self, point: Point, t: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the potential in v and in ``xi``: in t it is ``beta (1 - beta) Delta + 2 beta - 1``."""
        beta, rest = t.sigmoid(), (-t).sigmoid()
        delta = point.energy + self.offset - point.square
        slope = beta * rest * delta + beta - rest
        return torch.lerp(point.v, point.gradient, beta.unsqueeze(-1)), self.rate * slope


class _JointTrees(_JointChain):
    """The same with trajectories that end at a U-turn; ``n_steps`` is the depth of their trees.

    Coordinates are v and ``t/rate``, whose momenta have unit mass.
    """

    def step(self) -> TemperedState:
        point, rate, rng = self.point, self.rate, self.rng
        position = torch.cat([point.v, self.t.unsqueeze(-1) / rate], -1)
        p = torch.randn(position.shape, generator=rng, dtype=position.dtype, device=position.device)
        start = Leaf(position, p, *self._leaf(point, self.t))

        def evaluate(x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
            return self._leaf(self.path.at(x[..., :-1]), rate * x[..., -1])

        tree = grow(start, evaluate, self.step_size.expand(self.t.shape), self.n_steps, rng)
        x, (energy, gradient, square) = tree.draw.position, tree.draw.extra
        self.point, self.t = Point(x[..., :-1], energy, gradient, square), rate * x[..., -1]
        return TemperedState(self.point, self.t.double().sigmoid(), tree.acceptance)

    def _leaf(self, point: Point, t: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        force, force_t = self._forces(point, t)
        gradient = torch.cat([force, force_t.unsqueeze(-1)], -1)
        return self._potential(point, t), gradient, (point.energy, point.gradient, point.square)
