"""The path from a base to a target in base-whitened coordinates, and Hamiltonian moves along it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autodiff.captured import captured
from ..autodiff.randomness import normal, uniform
from ..errors import EvidenceError
from ..kernels.integrators import PhasePoint, leapfrog
from ..kernels.kernel import either
from ..references.density import GaussianDensity, Whitened
from ..sampling.execution import RepeatedCall
from ..target import Target


class PathPoint(NamedTuple):
    """Positions of chains, with the parts of energy and gradient at any temperature."""

    v: Tensor
    """Whitened positions, ``[chains, *batch, D]``."""
    energy: Tensor
    """Energy of the target, ``phi``: ``[chains, *batch]``."""
    gradient: Tensor
    """Its gradient in v, ``L^T grad phi``: ``[chains, *batch, D]``."""
    square: Tensor
    """Energy of the base less a constant, ``|v|^2/2`` for a Gaussian: ``[chains, *batch]``."""
    pull: Tensor
    """Its gradient in v, ``[chains, *batch, D]``; that of a Gaussian is v, and not stored: ``[chains, *batch, 0]``."""

    @property
    def slope(self) -> Tensor:
        """Gradient of the base's energy in v, ``[chains, *batch, D]``."""
        return self.pull if self.pull.shape[-1] else self.v

    def where(self, condition: Tensor, other: "PathPoint") -> "PathPoint":
        """These rows where the condition ``[chains, *batch]`` holds, elsewhere those of ``other``."""
        return either(condition, self, other)


class Move(NamedTuple):
    """Result of one Hamiltonian transition."""

    point: PathPoint
    acceptance: Tensor
    """``min(1, exp(H - H'))``, ``[chains, *batch]``."""


@dataclass(frozen=True)
class InsideSettings:
    """How the part of a base inside a target's support is measured, by energies at draws of the base."""

    parts: int = 10
    """Sets of draws that are looked at; a share outside that none of them shows is below 0.3 % (95 %)."""
    more: int = 200
    """The same where some are outside: the share inside is then known to a hundredth or better."""
    draws: int = 100
    """Draws in each set."""
    least: float = 0.05
    """Share inside below which another base is needed."""
    attempts: int = 200
    """Times that a draw is made again; a share of 1 in 30 000 stays outside at the least share."""


INSIDE = InsideSettings()


class Inside(NamedTuple):
    """The part of a base inside the target's support, from which chains start and which none of them leaves."""

    log_share: Tensor
    """Log of the base's mass there, float64, ``[*batch]``."""
    error: Tensor
    """Its standard error."""
    mean: Tensor
    """Mean of whitened coordinates there, ``[*batch, D]``."""
    variance: Tensor


class AnnealedPath:
    """Densities ``exp(-(1 - beta) psi - beta phi)`` between a base and a target, ``x = mean + L v`` (math 11.9).

    In v a Gaussian base is standard normal, and any other has its moments. An annealed energy and its gradient,
    ``L^T ((1 - beta) grad psi + beta grad phi)``, cost one gradient of the target at any temperature, and nothing when
    only the temperature changes. ``evaluations`` counts those gradients per chain and problem.
    """

    def __init__(self, target: Target, base: Whitened):
        self.target, self.evaluations = target, 0
        self._start_from(base)

    def __getstate__(self) -> dict[str, Any]:
        """What changes while a path is used."""
        return {"evaluations": self.evaluations, "_spent": dict(self._spent)}

    inside: Inside | None
    """The part that the base is restricted to, if it is."""

    def _start_from(self, base: Whitened) -> None:
        self.base, self.inside = base, None
        self._whitened = _Whitened(self.target, base)
        # code is that of one base
        self._spent: dict[str, float] = {}
        self._calls: dict[str, RepeatedCall] = {}
        self._normal_base = isinstance(base, GaussianDensity)
        # psi(x) = |v|^2/2 + this, for a Gaussian
        self.base_constant = base.log_det.double() + 0.5 * base.dim * math.log(2 * math.pi)

    @property
    def batch_shape(self) -> torch.Size:
        return self.base.batch_shape

    def normal(self, chains: int, rng: torch.Generator) -> Tensor:
        """Standard normal numbers ``[chains, *batch, D]``."""
        mean = self.base.mean
        return torch.randn(chains, *mean.shape, generator=rng, dtype=mean.dtype, device=mean.device)

    @torch.no_grad()
    def draws(self, chains: int, rng: torch.Generator) -> Tensor:
        """Draws of the base, or of what it is restricted to, in whitened coordinates, ``[chains, *batch, D]``."""
        v = self._base_draws(chains, rng)
        for _ in range(0 if self.inside is None else INSIDE.attempts):
            outside = self.differences(v).isposinf()
            if not outside.any():
                break
            v = torch.where(outside.unsqueeze(-1), self._base_draws(chains, rng), v)
        return v

    def _base_draws(self, n: int, rng: torch.Generator) -> Tensor:
        return self.normal(n, rng) if self._normal_base else self.base.whiten(self.base.sample((n,), rng))

    @torch.no_grad()
    def restrict(self, rng: torch.Generator) -> None:
        """Restrict the base to where the target has a density, if that is not everywhere.

        Chains never leave the support: they all agree on Z over the mass q of the base inside, and with few of them
        started outside, if any, the spread of their weights does not show the difference.

        Raises:
            EvidenceError: hardly any of the base is inside.
        """
        # a generator of its own: the run's random numbers do not depend on how many are drawn here
        own, mean = torch.Generator(rng.device).manual_seed(rng.initial_seed() + 1), self.base.mean
        count = torch.zeros(self.batch_shape, dtype=torch.float64, device=mean.device)
        first, second = (torch.zeros(mean.shape, dtype=torch.float64, device=mean.device) for _ in range(2))
        made = 0
        for parts in (INSIDE.parts, INSIDE.more):
            for _ in range(parts):
                v = self._base_draws(INSIDE.draws, own)
                inside = ~self.differences(v).isposinf()
                own_first = torch.where(inside.unsqueeze(-1), v, 0.0).double()
                count += inside.sum(0)
                first += own_first.sum(0)
                second += own_first.square().sum(0)
            made += parts * INSIDE.draws
            if bool((count == made).all()):
                return
        share = count / made
        if bool((share < INSIDE.least).any()):
            raise EvidenceError(
                f"the target has zero density at {100 * (1 - share.min().item()):.3g} % of the base's draws: use a "
                "base inside the target's support, Gaussian(mean, sd), or logs or logits of variables with bounds"
            )
        mean = first / count.unsqueeze(-1)
        variance = second / count.unsqueeze(-1) - mean.square()
        self.inside = Inside(share.log(), ((1 - share) / count).sqrt(), mean, variance)

    def at(self, v: Tensor) -> PathPoint:
        """Evaluate at ``v [chains, *batch, D]``; a non-finite energy becomes ``+inf``, a non-finite gradient zero."""
        self.evaluations += self.gradients(v)
        energy, gradient = captured(self._whitened).energy_and_gradient(v)
        # zero weight: no chain moves there
        energy = torch.where(energy.isfinite(), energy, math.inf)
        return PathPoint(v, energy.to(v.dtype), gradient.nan_to_num(0.0, 0.0, 0.0), *self._of_base(v))

    def gradients(self, v: Tensor) -> int:
        """Gradients of the target per chain and problem that an evaluation at ``v`` takes."""
        return 1

    def _of_base(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """``psi`` less the constant and its gradient in v, as a :class:`PathPoint` holds them."""
        if self._normal_base:
            return 0.5 * v.square().sum(-1), v[..., :0]
        energy, gradient = self.base.energy_and_gradient(self.base.unwhiten(v))
        return (energy - self.base_constant.to(energy)).to(v.dtype), self.base.scale.transpose(gradient)

    def difference(self, point: PathPoint) -> Tensor:
        """``phi - psi`` in float64, ``[chains, *batch]``; ``+inf`` where phi is not finite."""
        return self._difference(point.energy, point.square)

    @torch.no_grad()
    def differences(self, v: Tensor) -> Tensor:
        """``phi - psi`` at ``v [N, *batch, D]``, as :meth:`difference`, without a gradient."""
        x = self.base.unwhiten(v)
        if self._normal_base:
            return self._difference(self.target.energy(x), 0.5 * v.square().sum(-1))
        return self._difference(self.target.energy(x), self.base.energy(x) - self.base_constant)

    def _difference(self, energy: Tensor, square: Tensor) -> Tensor:
        energy = energy.double()
        return torch.where(energy.isfinite(), energy, math.inf) - square.double() - self.base_constant

    def move(
        self, point: PathPoint, beta: Tensor, step_size: Tensor, n_steps: int, rng: torch.Generator, times: int = 1
    ) -> Move:
        """One transition of Hamiltonian Monte Carlo that leaves the density at ``beta`` invariant.

        Steps are a random fraction, between a half and one, of the step size: with a fixed trajectory length chains
        can return to where they were. The transition is its own reversal.

        Args:
            beta: in [0, 1], broadcast to ``[chains, *batch]``.
            step_size: largest step, broadcast to ``[chains, *batch]``.
            n_steps: leapfrog steps.
            times: moves that are known to come, this one included; they are compiled where there are many.
        """
        v, arguments = point.v, (point, beta, step_size)
        function, after = partial(_moved, self, n_steps), self.evaluations + n_steps * self.gradients(v)
        if not self._normal_base:
            return function(arguments, rng)
        name = f"{n_steps} steps"
        call = self._calls.setdefault(name, RepeatedCall(function, self._whitened, n_steps))
        key = f"{name} {tuple(v.shape)} {tuple(beta.shape)} {tuple(step_size.shape)}"
        result = call(arguments, rng, key, v, self._spent, times)
        self.evaluations = after
        return result

    def moved(self, point: PathPoint, beta: Tensor, step_size: Tensor, n_steps: int, rng: torch.Generator) -> Move:
        """:meth:`move` as it stands, for functions that are compiled whole."""
        momentum = normal(point.v.shape, point.v, rng)
        step = self.random_step(point, step_size, rng)
        end, _, probability = self.trajectory(point, momentum, beta, step, n_steps)
        return Move(end.where(_uniform(point, rng) < probability, point), probability)

    def moved_on(
        self, point: PathPoint, momentum: Tensor, beta: Tensor, step: Tensor, rng: torch.Generator
    ) -> tuple[Move, Tensor]:
        """One leapfrog step with a persistent momentum ``[chains, *batch, D]``, negated if the step is rejected.

        With a standard normal momentum it leaves the density at ``beta`` invariant. Its reversal negates the momentum,
        takes such a step and negates the momentum again.

        Args:
            beta: as in :meth:`move`.
            step: length of the step, ``[chains, *batch]``.
        """
        end, p, probability = self.trajectory(point, momentum, beta, step, 1)
        accepted = _uniform(point, rng) < probability
        momentum = torch.where(accepted.unsqueeze(-1), p, -momentum)
        return Move(end.where(accepted, point), probability), momentum

    def several(
        self,
        name: str,
        function: Callable[[Any, Any], Any],
        n_steps: int,
        fixed: tuple[Tensor, ...],
        state: Any,
        rng: torch.Generator,
        most: int,
    ) -> tuple[Any, int]:
        """``state = function((fixed, state), rng)`` as often as is best done at once, and how often that is.

        Args:
            name: of the function, which may be compiled.
            n_steps: gradients that a call of it takes, at the positions ``state.point.v``.
            most: calls at most, that are known to come.
        """
        v = state.point.v
        before, each = self.evaluations, n_steps * self.gradients(v)
        if self._normal_base:
            call = self._calls.setdefault(name, RepeatedCall(function, self._whitened, n_steps, carries=True))
            key = f"{name} {tuple(v.shape)} {[tuple(t.shape) for t in fixed]}"
            state, made = call.several((fixed, state), rng, key, v, self._spent, most)
        else:
            state, made = function((fixed, state), rng), 1
        self.evaluations = before + made * each
        return state, made

    def random_step(self, point: PathPoint, step_size: Tensor, rng: torch.Generator) -> Tensor:
        """A uniform draw between half the step size and all of it: ``[chains, *batch]``."""
        return step_size * (0.5 + 0.5 * _uniform(point, rng))

    def trajectory(
        self, point: PathPoint, momentum: Tensor, beta: Tensor, step: Tensor, n_steps: int
    ) -> tuple[PathPoint, Tensor, Tensor]:
        """Leapfrog steps at ``beta``: the end, its momentum, and ``min(1, exp(H - H'))``."""
        beta = beta.to(point.v.dtype)
        weight = beta.unsqueeze(-1)

        def annealed(point: PathPoint, beta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, PathPoint]:
            return torch.lerp(point.square, point.energy, beta), torch.lerp(point.slope, point.gradient, weight), point

        given = (beta.expand(point.energy.shape), weight.expand(*point.energy.shape, 1))
        start = PhasePoint(point.v, momentum, *annealed(point, *given))
        end = leapfrog(lambda v, *given: annealed(self.at(v), *given), start, step, n_steps, given=given)
        # energies that are not finite give NaN: rejected
        probability = (start.hamiltonian - end.hamiltonian).clamp_max(0).exp().nan_to_num(0.0)
        return PathPoint(*end.extra), end.momentum, probability


class _Whitened(Target):
    """A target in the whitened coordinates of a base, ``phi(mean + L v)``."""

    def __init__(self, target: Target, base: Whitened):
        self._target, self._base = target, base
        super().__init__(dim=base.dim, batch_shape=tuple(base.batch_shape))

    def energy(self, x):
        return self._target.energy(self._base.unwhiten(x))

    def energy_and_gradient(self, x):
        energy, gradient = self._target.energy_and_gradient(self._base.unwhiten(x))
        return energy, self._base.scale.transpose(gradient)


def _moved(path: AnnealedPath, n_steps: int, arguments: tuple[PathPoint, Tensor, Tensor], rng: torch.Generator) -> Move:
    """:meth:`AnnealedPath.move`."""
    return path.moved(*arguments, n_steps, rng)


def _uniform(point: PathPoint, rng: torch.Generator) -> Tensor:
    return uniform(point.v.shape[:-1], point.v, rng)
