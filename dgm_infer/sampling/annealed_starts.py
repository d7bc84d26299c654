"""Starting points typical of a posterior: prior draws, annealed while noise narrows or a likelihood gains weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..kernels import HMC, LiftedHMC
from ..kernels.kernel import Tunable, Tuning
from ..kernels.mode_jumps import Jumps
from ..models import DirectedModel
from ..target import Posterior, Target
from .adaptation import reasonable_step_size
from .allocation import affordable, allocate_chains
from .execution import evaluation


@dataclass(frozen=True)
class AnnealingSettings:
    """Settings of the annealing of noise, or of a likelihood."""

    population: int = 16
    """Fewest points annealed per problem: weights compare them with each other. With 256 descents from the prior beside
    them, 64 find no more (ablations.md)."""
    effective: float = 0.5
    """Share of the points that the weights of one increment leave effective."""
    lost: float = 50.0
    """Nats of annealing weight behind the best: weights of points in good modes differ by tens, since few transitions
    per increment do not equilibrate; points further behind have stranded."""
    most: int = 300
    """Increments after which the last one goes to 1."""
    increments: int = 30
    """The same of usual observations: what compiling the gradient is weighed against."""


_SETTINGS = AnnealingSettings()


class Start(NamedTuple):
    """Starting points of the chains of a run."""

    position: Tensor
    """``[chains, *batch, D]``."""
    ancestors: Tensor | None = None
    """``[chains, *batch]``, the index of the prior draw that each descends from; None if each has its own."""
    typical: bool = False
    """Whether the points are as typical of the posterior as draws of it."""
    jumps: Jumps | None = None
    """Between the modes that the points were found in; None where these are not known, or no problem has several."""


def anneal_noise(
    problem: Fibre,
    kernel: Tunable,
    chains: int,
    rng: torch.Generator,
    *,
    tolerance: float,
    target_acceptance: float | None,
    report: Callable[[str], None] = lambda text: None,
) -> Start:
    """Points of high density from prior draws, for models whose local inputs are standard normal noise.

    If every unit has one normal local input, a prior draw of ``u1`` with the ``u2`` that gives the observation is a
    draw from the posterior under infinitely wide noise. The inverse variance ``beta``, in units of the model's, then
    rises from 0 to 1. Each increment is the largest that leaves half the points effective; every point then makes short
    transitions, with its own step size, on the fibre of the model with that noise: those of :class:`LiftedHMC` where
    the noise is additive, which cost a small part of the kernel's own, else one of the kernel. Points whose weights
    ``prod exp(-(beta' - beta) |u2|^2 / 2)`` fall more than 50 nats behind the best of their problem have stranded in a
    negligible mode, and restart from another point. (Tempering of an ABC kernel, J 7, with the weights of annealed
    importance sampling, math 7.1, which serve no other purpose: points are not resampled by them, as too few would
    remain.) Where the noise is additive, chains are shared out over the modes that the points have ended in
    (:func:`allocate_chains`); else the share of chains in one of several modes is not its posterior weight.

    Args:
        problem: a fibre with ``observed.can_scale_noise``.
        kernel: kernel whose probes move the points where the noise is not additive.
        chains: number of chains; at least 16 points per problem are annealed, at least 64 where that costs little.
        tolerance: relative tolerance of the starting points.
        target_acceptance: acceptance probability that step sizes are adapted to; None for 0.8.
        report: called with a line of progress after every increment.

    Raises:
        StartError: no points on the fibre were found.
    """

    def told(beta: Tensor) -> None:
        report(f"start-up, noise x {beta.rsqrt().max().item():.3g}")

    marginal = problem.marginal
    if marginal is None:
        points = _OnFibre(problem, kernel)
        u = problem.start(max(chains, _SETTINGS.population), rng, tolerance=tolerance, report=report)
        found = _annealed(points, u, rng, target_acceptance, told)
        return Start(found.position[:chains], found.ancestors[:chains], typical=True)
    lifted = kernel if isinstance(kernel, LiftedHMC) else LiftedHMC()
    points = _Tempered(marginal, lifted.marginal(problem), lifted.unlifted, chains, compiles=_compiles(kernel))
    u1 = marginal.start(points.most, rng)
    if not points.square(u1).isfinite().all():
        u1 = problem.start(points.most, rng, tolerance=tolerance, report=report)[..., : marginal.dim]
    start = _tempered(points, u1, chains, rng, target_acceptance, told, report)
    return start._replace(position=marginal.lift(start.position, rng))


def anneal_likelihood(
    problem: Posterior,
    kernel: Any,
    chains: int,
    rng: torch.Generator,
    *,
    target_acceptance: float | None,
    report: Callable[[str], None] = lambda text: None,
) -> Start:
    """Points of high density from prior draws, for any posterior whose likelihood can be raised to a power.

    As :func:`anneal_noise`, with the power in the place of the inverse variance, by transitions of :class:`HMC`. Prior
    draws stay where they are if a likelihood is not finite.

    Args:
        kernel: that will sample the problem, if only to know whether gradients may be compiled.
        chains, rng, target_acceptance, report: as there.
    """
    points = _Tempered(problem, problem, HMC(), chains, compiles=_compiles(kernel))
    x = problem.start(points.most, rng)
    if not points.square(x).isfinite().all():
        return Start(x[:chains])

    def told(beta: Tensor) -> None:
        report(f"start-up, likelihood x {beta.max().item():.3g}")

    return _tempered(points, x, chains, rng, target_acceptance, told, report)


def _compiles(kernel: Any) -> bool:
    """Whether the gradients of a kernel may be compiled."""
    return getattr(kernel, "compile", None) is not False


class _Population(NamedTuple):
    """Points ``[points, *batch, D]`` after annealing, and the prior draws that they descend from."""

    position: Tensor
    ancestors: Tensor


def _annealed(
    points: "_OnFibre | _Tempered",
    x: Tensor,
    rng: torch.Generator,
    target_acceptance: float | None,
    told: Callable[[Tensor], None],
) -> _Population:
    """Prior draws ``x``, moved while the inverse variance of the noise, or the power of the likelihood, rises to 1, of
    which every value ``[*batch]`` is told."""
    shape = x.shape[:-1]
    beta = x.new_zeros(shape[1:])
    log_weight = x.new_zeros(shape)
    ancestors = torch.arange(len(x), device=x.device).view(-1, *[1] * (x.ndim - 2)).expand(shape)
    step_size: Any = None
    # of whatever kernel: these points are not draws yet
    acceptance = target_acceptance or Tuning.usual_acceptance
    for count in range(1, _SETTINGS.most + 1):
        square = points.square(x)
        target = _next_beta(beta, square) if count < _SETTINGS.most else torch.ones_like(beta)
        log_weight = log_weight - 0.5 * (target - beta) * square
        beta = target
        source = _survivors(log_weight, rng)
        log_weight, ancestors = log_weight.gather(0, source), ancestors.gather(0, source)
        widened, position = points.widened(x.gather(0, source.unsqueeze(-1).expand_as(x)), beta)
        state = points.kernel.init(widened, position)
        if step_size is None:
            step_size = reasonable_step_size(points.kernel, widened, state, rng)
        step_size = step_size.gather(0, source).clamp_max(points.kernel.tuning(widened).longest_step)
        # points that the last increments left behind catch up
        for _ in range(points.at_last if (beta == 1).all() else points.transitions):
            state, info = points.kernel.probe(step_size, points.n_steps).step(widened, state, rng)
            # in which the noise, and with it the step, may shrink by half
            step_size = step_size * (info.acceptance_rate - acceptance).exp()
        told(beta)
        x = points.narrowed(state.position, beta)
        if (beta == 1).all():
            break
    return _Population(x, ancestors)


def _tempered(
    points: "_Tempered",
    x: Tensor,
    chains: int,
    rng: torch.Generator,
    target_acceptance: float | None,
    told: Callable[[Tensor], None],
    report: Callable[[str], None],
) -> Start:
    """Chains at prior draws ``x`` after annealing, shared out over the modes."""
    found = _annealed(points, x, rng, target_acceptance, told)
    report("start-up, masses of modes")
    x, posterior = found.position, points.posterior
    chosen, there, jumps = allocate_chains(posterior, x, chains, rng, points.unwidened)
    point = chosen.clamp_max(len(x) - 1)
    position = x.gather(0, point.unsqueeze(-1).expand(*point.shape, posterior.dim))
    ancestors = found.ancestors.gather(0, point)
    if there is not None:
        again = point != chosen
        position = torch.where(again.unsqueeze(-1), there, position)
        ancestors = torch.where(again, chosen, ancestors)
    return Start(position, ancestors, typical=True, jumps=jumps)


class _OnFibre:
    """Points ``u`` on the fibre of a model whose noise is not additive, moved by the kernel itself."""

    n_steps, transitions, at_last = 2, 1, 1

    def __init__(self, problem: Fibre, kernel: Tunable):
        self._problem, self.kernel = problem, kernel
        assert isinstance(problem.model, DirectedModel)
        self._split = problem.model.split

    def square(self, u: Tensor) -> Tensor:
        """``|u2|^2``, ``[points, *batch]``."""
        return self._split(u)[1].square().sum(-1)

    def widened(self, u: Tensor, beta: Tensor) -> tuple[Any, Tensor]:
        """What the kernel samples under noise of this inverse variance, and the points in its coordinates."""
        u1, u2 = self._split(u)
        return self._problem.with_noise_scale(beta.rsqrt()), torch.cat([u1, u2 * beta.sqrt().unsqueeze(-1)], -1)

    def narrowed(self, position: Tensor, beta: Tensor) -> Tensor:
        """The points, from those coordinates."""
        u1, u2 = self._split(position)
        return torch.cat([u1, u2 * beta.rsqrt().unsqueeze(-1)], -1)


class _Tempered:
    """Points under a posterior whose likelihood is raised to a power, moved by steps without a Jacobian: enough of them
    that few points strand where it is narrow.

    Args:
        posterior: what is sampled.
        computed: the same, as the kernel computes it.
        kernel: that moves the points.
        chains: fewest points.
        compiles: whether gradients may be compiled.
    """

    n_steps = 10

    def __init__(self, posterior: Posterior, computed: Posterior, kernel: Any, chains: int, *, compiles: bool):
        self.posterior, self.kernel = posterior, kernel
        slow = posterior.convolves
        self.most = max(chains, min(_SETTINGS.population, affordable(posterior)))
        self.transitions, self.at_last = (1, 5) if slow else (2, 10)
        annealed = AnnealedPosterior(computed)
        example = posterior.initial_draws(self.most, torch.Generator(posterior.values.device))
        gradients = _SETTINGS.increments * self.transitions * (1 + self.n_steps) // 2
        self._evaluated = evaluation(annealed, _with(example, 1.0), gradients if compiles else 0)
        self.unwidened: Any = None
        if annealed.is_exact:
            own = torch.ones(posterior.batch_shape, dtype=example.dtype, device=example.device)
            self.unwidened = _AtBeta(self._evaluated, posterior.dim, own).energy_and_gradient
        elif not compiles:
            self.unwidened = posterior.to(torch.float64).energy_and_gradient

    def square(self, x: Tensor) -> Tensor:
        """Twice the misfit, of noise that explains the observation what the observation fixes, ``[points, *batch]``."""
        return 2 * self._evaluated(_with(x, 0.0))[1][..., -1]

    def widened(self, x: Tensor, beta: Tensor) -> tuple[Any, Tensor]:
        return _AtBeta(self._evaluated, x.shape[-1], beta), x

    def narrowed(self, position: Tensor, beta: Tensor) -> Tensor:
        return position


class AnnealedPosterior(Target):
    """A posterior at a power ``beta`` of its likelihood: of additive normal noise, its inverse variance in units of the
    noise's own.

    With beta the last coordinate, ``energy(u, beta) = -beta log p(y | u) - log p(u)``, up to a constant of u. Its
    derivative in beta is the misfit ``-log p(y | u)``, up to a constant.
    """

    def __init__(self, posterior: Posterior):
        self._posterior = posterior
        self.values = posterior.values
        coarse: Any = posterior.coarse
        self.coarse: Any = None if coarse is None else type(self)(coarse)
        super().__init__(None, posterior.dim + 1, tuple(posterior.batch_shape))

    @property
    def is_exact(self) -> bool:
        """Whether gradients are computed in float64."""
        return self.coarse is None and self.values.dtype == torch.float64

    def energy(self, x):
        return self._posterior.tempered_energy(x[..., :-1], x[..., -1])

    def energy_and_gradient(self, x):
        # distributions that check their parameters would raise for the whole batch where one trajectory has diverged
        finite = x.isfinite().all(-1)
        x = torch.where(finite.unsqueeze(-1), x, 0.0)
        if self.coarse is None:
            energy, gradient = super().energy_and_gradient(x)
        else:
            with torch.no_grad():
                energy = self.energy(x)
            gradient = self.coarse.gradient(x.float()).to(x)
        return torch.where(finite, energy, torch.nan), gradient


class _AtBeta(Target):
    """A posterior at powers ``beta [*batch]`` of its likelihood, as it is evaluated."""

    def __init__(self, evaluated: Callable[[Tensor], tuple[Tensor, Tensor]], dim: int, beta: Tensor):
        self._evaluated, self._beta = evaluated, beta
        super().__init__(None, dim, tuple(beta.shape))

    def energy(self, x):
        return self.energy_and_gradient(x)[0]

    def energy_and_gradient(self, x):
        energy, gradient = self._evaluated(_with(x, self._beta))
        return energy, gradient[..., :-1]


def _with(u1: Tensor, beta: Tensor | float) -> Tensor:
    """Positions of :class:`AnnealedPosterior`."""
    return torch.cat([u1, torch.as_tensor(beta).to(u1).expand(u1.shape[:-1]).unsqueeze(-1)], -1)


def _next_beta(beta: Tensor, square: Tensor) -> Tensor:
    """The largest value up to 1 at which weights ``exp(-(beta' - beta) square / 2)`` leave half the points effective.

    Args:
        beta: ``[*batch]``.
        square: ``|u2|^2``, ``[points, *batch]``.
    """
    # prior draws can miss by any factor: bisect the order of magnitude
    low, high = torch.full_like(beta, -80 * math.log(2)), torch.zeros_like(beta)
    for _ in range(40):
        middle = 0.5 * (low + high)
        weight = torch.softmax(-0.5 * middle.exp() * square, 0)
        enough = weight.square().sum(0) * len(square) * _SETTINGS.effective <= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return (beta + high.exp()).clamp_max(1)


def _survivors(log_weight: Tensor, rng: torch.Generator) -> Tensor:
    """The point from which each continues, itself unless it has stranded: ``[points, *batch]``."""
    flat = log_weight.nan_to_num(nan=-torch.inf).reshape(len(log_weight), -1)
    lost = flat < flat.amax(0) - _SETTINGS.lost
    others = torch.multinomial((~lost).T.to(flat.dtype), len(flat), replacement=True, generator=rng).T
    own = torch.arange(len(flat), device=flat.device).unsqueeze(-1)
    return torch.where(lost, others, own).reshape(log_weight.shape)
