"""Continuous tempering (Graham and Storkey 2017; T 5): chains over x and a temperature of its own for each."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...errors import ArgumentError, EvidenceError
from ...kernels.kernel import Settings, check_count, check_step_size
from ...kernels.trees import Leaf, deepest, grow
from ...sampling.warmup import DualAveraging
from ..importance import importance_log_z
from ..method import Outcome, Status, check_acceptance
from ..path import AnnealedPath, Point
from ..pilot import Pilot, StepSizes, anneal_pilot
from ..progress import Progress
from .record import Record, TemperedState

__all__ = ["ContinuousTempering", "GibbsTempering", "Tempering", "draw_beta"]

# Draws of the base that a first guess of log Z is made of.
_GUESS = 100
# And that the target must have a density at, in batches of the former.
_INSIDE = 1000
_NO_DENSITY = (
    "the target has no density at {share} of the base's draws, which tempering has no weights for: use AIS or "
    "ImportanceSampling, or a base inside the target's support"
)


@dataclass(frozen=True, eq=False)
class Tempering(Settings):
    """What methods of tempering share: a pilot, a warm-up, and the estimates from every state of the chains."""

    draws: int = 400
    warmup: int = 100
    n_steps: int = 5
    step_size: float | Tensor | None = None
    log_zeta: str | float | Tensor | None = None
    thin: int = 1
    target_acceptance: float = 0.8
    pilot_temperatures: int = 100

    @property
    def status(self) -> Status:
        return "consistent"

    def __post_init__(self):
        name = type(self).__name__
        for field in ("draws", "n_steps", "thin", "pilot_temperatures"):
            check_count(name, field, getattr(self, field))
        if not (hasattr(self.warmup, "__index__") and self.warmup >= 0):
            raise ArgumentError(f"{name}(warmup={self.warmup!r}): must be a whole number, 0 or more")
        if self.thin > self.draws:
            raise ArgumentError(f"{name}(thin={self.thin}): must be at most draws={self.draws}")
        check_step_size(name, self.step_size)
        check_acceptance(name, self.target_acceptance)
        if isinstance(self.log_zeta, str) and self.log_zeta not in ("importance", "pilot"):
            raise ArgumentError(
                f"{name}(log_zeta={self.log_zeta!r}): must be 'pilot', 'importance', a number or one a problem"
            )
        if isinstance(self.log_zeta, int | float | Tensor) and not torch.as_tensor(self.log_zeta).isfinite().all():
            raise ArgumentError(f"{name}(log_zeta={self.log_zeta!r}): must be finite")

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        record, spent = self.recorded(path, chains, rng, progress)
        return record.outcome(spent)

    def recorded(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> tuple[Record, int]:
        """All states of the chains, and the gradients that tuning took."""
        progress.expect(self.pilot_temperatures + self.warmup + self.draws)
        pilot = anneal_pilot(
            path,
            max(chains, 4),
            rng,
            temperatures=self.pilot_temperatures,
            n_steps=self.n_steps,
            target_acceptance=self.target_acceptance,
            step_size=self.step_size,
            progress=progress,
        )
        log_zeta = self._log_zeta(path, pilot, rng)
        # at all temperatures: chains that do not travel then disagree, and their spread shows it
        start = torch.linspace(0, len(pilot.point.v) - 1, chains, device=pilot.point.v.device).long()
        point = Point(*(part[start] for part in pilot.point))
        if not point.energy.isfinite().all():
            raise EvidenceError(_NO_DENSITY.format(share="some"))
        chain = self._chain(path, pilot, log_zeta, point, rng)
        for _ in range(self.warmup):
            chain.warm()
            progress.update("warm-up")
        chain.freeze()
        spent = path.evaluations
        record = Record(path, log_zeta, chains, self.draws, self.thin)
        for _ in range(self.draws):
            record.add(chain.step())
            progress.update("tempering", lambda: record.estimate().log_z)
        return record, spent

    def _log_zeta(self, path: AnnealedPath, pilot: Pilot, rng: torch.Generator) -> Tensor:
        """``[*batch]``, float64.

        Raises:
            EvidenceError: the target has no density at draws of the base.
        """
        guess, _ = importance_log_z(path, _GUESS, rng)
        lost = self._outside(path, pilot, rng)
        if (lost > 0).any():
            raise EvidenceError(_NO_DENSITY.format(share=f"{100 * lost.max().item():.2g} %"))
        if isinstance(self.log_zeta, str):
            return pilot.log_z if self.log_zeta == "pilot" else guess
        if self.log_zeta is not None:
            return _fitting(type(self).__name__, self.log_zeta, guess)
        return pilot.log_z if path.base.log_zeta is None else path.base.log_zeta.to(guess)

    def _outside(self, path: AnnealedPath, pilot: Pilot, rng: torch.Generator) -> Tensor:
        """Share of the base's draws at which the target has no density, ``[*batch]``.

        A chain never leaves the support, so that the base's mass outside would be a bias that no spread shows.
        """
        # numbers of their own: those of the run do not depend on how many are looked at
        own = torch.Generator(rng.device).manual_seed(rng.initial_seed() + 1)
        shares = [importance_log_z(path, _GUESS, own)[1] for _ in range(_INSIDE // _GUESS)]
        return torch.stack([*shares, pilot.log_weights.isneginf().double().mean(0)]).mean(0)

    def _chain(
        self, path: AnnealedPath, pilot: Pilot, log_zeta: Tensor, point: Point, rng: torch.Generator
    ) -> "TemperedChain":
        raise NotImplementedError


class TemperedChain(Protocol):
    """Chains at work."""

    def step(self) -> TemperedState:
        """One transition."""
        ...

    def warm(self) -> None:
        """A transition that may adapt."""
        ...

    def freeze(self) -> None:
        """The end of adaptation."""
        ...


@dataclass(frozen=True, eq=False)
class GibbsTempering(Tempering):
    """Continuous tempering that alternates a Hamiltonian move of x at beta with an exact draw of beta given x.

    ``p(x, beta) ~ exp(-beta (phi + log zeta) - (1 - beta) psi)``; ``log Z = log zeta + log sum w1 - log sum w0`` over
    all draws of all chains, with ``w1 = p(beta = 1 | x)`` and ``w0 = p(beta = 0 | x)``: consistent.

    Args:
        draws: kept states of a chain.
        warmup: states before them that are not kept.
        n_steps: leapfrog steps a state.
        step_size: longest step in whitened coordinates, a number or ``[*batch]``; None to adapt it to every
            temperature and problem on a pilot.
        log_zeta: guess of log Z, a number or ``[*batch]``; ``"pilot"`` from the pilot's annealing,
            ``"importance"`` from 100 draws of the base; None for the base's own, else ``"pilot"``. A guess that is off
            by much costs draws at one end of the temperatures, not correctness.
        thin: states a draw of x that the result holds; the estimates use all of them.
        target_acceptance: mean acceptance probability that step sizes adapt to.
        pilot_temperatures: of the annealing run that tunes step sizes and starts the chains, at temperatures
            of all sizes.
    """

    def _chain(self, path, pilot, log_zeta, point, rng):
        return _GibbsChain(path, pilot.step_sizes, log_zeta, point, rng, self.n_steps)


@dataclass(frozen=True, eq=False)
class ContinuousTempering(Tempering):
    """Continuous tempering by Hamiltonian moves of x and ``beta = sigmoid(xi/scale)`` together.

    The potential is that of :class:`GibbsTempering` plus ``-log beta - log(1 - beta)``; estimates are the same. The
    control xi has a mass of its own; ``mass`` times c squared is the same as ``scale`` times c.

    Args:
        draws: kept states of a chain.
        warmup: states before them that are not kept; they adapt the step size that is left open.
        n_steps: leapfrog steps a state.
        step_size: longest step in whitened coordinates, a number or ``[*batch]``; None to adapt it per problem.
        log_zeta: guess of log Z, as in :class:`GibbsTempering`.
        thin: states a draw of x that the result holds.
        target_acceptance: mean acceptance probability that the step size adapts to.
        pilot_temperatures: of the annealing run that starts the chains, at temperatures of all sizes.
        mass: of xi, positive.
        scale: of xi, positive.
        nuts: most leapfrog steps of a trajectory that ends where it turns back in (x, xi), as those of
            :class:`NUTS`; None for trajectories of ``n_steps``. Chains take their steps together, those that have
            ended wait.
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
            check_count("ContinuousTempering", "nuts", self.nuts)
        if self.step_size is None and self.warmup < 20:
            raise ArgumentError(
                f"ContinuousTempering(warmup={self.warmup}): too short to adapt the step size; 20 or more, or give it"
            )

    def _chain(self, path, pilot, log_zeta, point, rng):
        adapts = self.step_size is None
        rate = 1 / (self.scale * math.sqrt(self.mass))
        target = self.target_acceptance if adapts else None
        if self.nuts is not None:
            return _JointTrees(path, pilot.step_sizes, log_zeta, point, rng, deepest(self.nuts), rate, target)
        return _JointChain(path, pilot.step_sizes, log_zeta, point, rng, self.n_steps, rate, target)


def _fitting(name: str, log_zeta: float | Tensor, like: Tensor) -> Tensor:
    try:
        return torch.as_tensor(log_zeta).to(like).expand(like.shape)
    except RuntimeError:
        raise ArgumentError(
            f"{name}(log_zeta of shape {tuple(torch.as_tensor(log_zeta).shape)}): expected a number or "
            f"{tuple(like.shape)}"
        ) from None


def draw_beta(delta: Tensor, rng: torch.Generator) -> Tensor:
    """An exact draw of ``beta`` given x: exponential of rate Delta, truncated to [0, 1].

    With ``a = |Delta|``, ``t = -log1p(U expm1(-a))/a`` (``t = U`` when a < 1e-8), and beta is t where Delta >= 0, else
    ``1 - t``.
    """
    uniform = torch.rand(delta.shape, generator=rng, dtype=delta.dtype, device=delta.device)
    a = delta.abs()
    t = torch.where(a < 1e-8, uniform, -(uniform * torch.expm1(-a)).log1p() / a.clamp_min(1e-8))
    return torch.where(delta >= 0, t, 1 - t)


class _GibbsChain:
    def __init__(self, path, step_sizes: StepSizes, log_zeta, point: Point, rng, n_steps: int):
        self.path, self.step_sizes, self.log_zeta, self.rng, self.n_steps = path, step_sizes, log_zeta, rng, n_steps
        self.point = point

    def step(self) -> TemperedState:
        beta = draw_beta(self.path.difference(self.point) + self.log_zeta, self.rng)
        self.point, acceptance = self.path.move(self.point, beta, self.step_sizes.at(beta), self.n_steps, self.rng)
        return TemperedState(self.point, beta, acceptance)

    def warm(self) -> None:
        self.step()

    def freeze(self) -> None:
        pass


class _JointChain:
    """State (v, t) with ``beta = sigmoid(t)``; the velocity of t is ``rate`` times a standard normal momentum."""

    def __init__(
        self, path: AnnealedPath, step_sizes: StepSizes, log_zeta, point: Point, rng, n_steps: int, rate: float, target
    ):
        self.path, self.rng, self.n_steps, self.rate = path, rng, n_steps, rate
        self.point = point
        # energies of the two ends up to what is the same: |v|^2/2 and phi + offset
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
    """The same by trajectories that end where they turn back; ``n_steps`` is the depth of their trees.

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
