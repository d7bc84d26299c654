"""Starting points of chains on the fibre; the noise of models that have it is annealed from wide to its own width."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import default_type
from ..conditioning.abc_kernels import InputPosterior
from ..conditioning.fibre import Fibre
from ..conditioning.marginal import AnnealedMarginal
from ..conditioning.projection import damped_gauss_newton, solver_tolerance
from ..errors import ArgumentError, EvidenceError
from ..kernels import Kernel, LiftedHMC
from ..kernels.kernel import FibreKernel, Tunable, Tuning
from ..kernels.mode_jumps import Jumps, ModeJumps, innermost
from ..models import DirectedModel
from ..references import Gaussian, modes
from ..target import Target
from .adaptation import reasonable_step_size
from .allocation import allocate_chains
from .execution import evaluation
from .low_points import low_points


@dataclass(frozen=True)
class AnnealingSettings:
    """Settings of the annealing of noise, and of given and searched starts."""

    population: int = 16
    """Fewest points annealed per problem: weights compare them with each other."""
    large_population: int = 64
    """The same where a step takes little time: of few points none may be in the good modes when the noise begins to
    tell them from others."""
    effective: float = 0.5
    """Share of the points that the weights of one increment leave effective."""
    lost: float = 50.0
    """Nats of annealing weight behind the best: weights of points in good modes differ by tens, since few transitions
    per increment do not equilibrate; points further behind have stranded."""
    most: int = 300
    """Increments after which the last one goes to 1."""
    increments: int = 30
    """The same of usual observations: what compiling the gradient is weighed against."""
    searches: int = 256
    """Minimisations per round of a search for the modes of a target: a mode that is missed may be missed for good."""
    nearby: float = 0.1
    """Distance, root mean square over the inputs, up to which given points are moved onto the fibre."""


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


def starting_points(
    problem: Fibre | Target,
    kernel: Kernel,
    chains: int,
    rng: torch.Generator,
    initial: Tensor | None,
    *,
    anneal: bool,
    target_acceptance: float | None,
    report: Callable[[str], None],
) -> Start:
    """The given points, moved onto the fibre, or points near prior draws, annealed or near modes if requested.

    Raises:
        ArgumentError: the given points have another shape, or are far from the fibre.
        StartError: no points were found.
    """
    if not isinstance(problem, Fibre):
        given = None if initial is None else _given(problem, chains, initial)
        if isinstance(kernel, ModeJumps) and kernel.modes is None:
            report("start-up, modes")
            return _near_modes(problem, chains, rng, given)
        return Start(problem.start(chains, rng) if given is None else given)
    tolerance, annealing, kernel = solver_tolerance(problem.values.dtype), None, innermost(kernel)
    if isinstance(kernel, FibreKernel):
        tolerance, annealing = kernel.relative_tolerance(problem.values.dtype), kernel.annealing()
    if initial is not None:
        return Start(_on_fibre(problem, _given(problem, chains, initial), tolerance))
    if anneal and annealing is not None and problem.observed.can_scale_noise:
        return anneal_noise(
            problem, annealing, chains, rng, tolerance=tolerance, target_acceptance=target_acceptance, report=report
        )
    if anneal and problem.has_low_points:
        position, ancestors = low_points(problem, chains, rng, tolerance=tolerance, report=report)
        own = torch.arange(chains, device=position.device).view(-1, *[1] * (ancestors.ndim - 1))
        return Start(position, None if (ancestors == own).all() else ancestors)
    return Start(problem.start(chains, rng, tolerance=tolerance, report=report))


def _near_modes(problem: Target, chains: int, rng: torch.Generator, given: Tensor | None) -> Start:
    """Draws from the normal approximations of the modes of a target, or the given points; and jumps between them.

    Raises:
        EvidenceError: no mode was found.
    """
    start = problem.start(chains, rng) if given is None else given
    seed = int(torch.randint(2**31, (), generator=rng, device=rng.device))
    try:
        found = modes(problem, _SETTINGS.searches, start=Gaussian(torch.zeros_like(start[0]), 1.0), seed=seed)
    except EvidenceError as error:
        raise EvidenceError(
            f"ModeJumps: {error}; give modes=dgm.modes(target, start=...), or use the kernel alone"
        ) from error
    jumps = Jumps.between(found.positions, found.covariances, found.log_masses)
    if given is not None:
        return Start(given, jumps=jumps)
    centre, position = jumps.draws(chains, rng)
    with torch.no_grad():
        inside = problem.energy(position).isfinite().unsqueeze(-1)
    return Start(torch.where(inside, position, centre), jumps=jumps)


def _given(problem: Fibre | Target, chains: int, initial: Tensor) -> Tensor:
    initial = torch.as_tensor(initial).detach()
    if isinstance(problem, Fibre | InputPosterior):
        initial = initial.to(problem.values)
    elif not initial.is_floating_point():
        initial = initial.to(default_type())
    shape = (chains, *problem.batch_shape, problem.dim)
    if tuple(initial.shape) != shape:
        raise ArgumentError(f"initial has shape {tuple(initial.shape)}; expected {shape}: [chains, *batch, D]")
    return initial


def _on_fibre(problem: Fibre, initial: Tensor, tolerance: float) -> Tensor:
    """The given points, those off the fibre moved to points on it nearby."""
    error = problem.constraint_error(initial) / (tolerance * problem.scale)
    if (error < 1).all():
        return initial
    fibre, flat = problem.rows(len(initial)), initial.reshape(-1, problem.dim)
    point, residual = damped_gauss_newton(fibre, flat, tolerance=tolerance * fibre.scale)
    far = ~(residual < tolerance * fibre.scale) | ((point - flat).square().mean(-1).sqrt() > _SETTINGS.nearby)
    if far.any():
        raise ArgumentError(
            f"initial violates the constraint at {int(far.sum())} of {len(far)} points, by up to {error.max():.3g} "
            "times the tolerance, and no point of the fibre is near: omit initial to have points found"
        )
    return point.reshape(initial.shape)


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
    points = _OnFibre(problem, kernel) if problem.marginal is None else _Integrated(problem, kernel, chains)
    x = points.start(max(chains, points.fewest), rng, tolerance, report)
    shape = x.shape[:-1]
    beta = x.new_zeros(problem.batch_shape)
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
        report(f"start-up, noise x {beta.rsqrt().max().item():.3g}")
        x = points.narrowed(state.position, beta)
        if (beta == 1).all():
            break
    marginal = problem.marginal
    if marginal is None:
        return Start(x[:chains], ancestors[:chains], typical=True)
    report("start-up, masses of modes")
    chosen, there, jumps = allocate_chains(marginal, x, chains, rng, points.unwidened)
    point = chosen.clamp_max(len(x) - 1)
    u1 = x.gather(0, point.unsqueeze(-1).expand(*point.shape, marginal.dim))
    ancestors = ancestors.gather(0, point)
    if there is not None:
        again = point != chosen
        u1 = torch.where(again.unsqueeze(-1), there, u1)
        ancestors = torch.where(again, chosen, ancestors)
    return Start(marginal.lift(u1, rng), ancestors, typical=True, jumps=jumps)


class _OnFibre:
    """Points ``u`` on the fibre of a model whose noise is not additive, moved by the kernel itself."""

    fewest, n_steps, transitions, at_last = _SETTINGS.population, 2, 1, 1
    unwidened = None

    def __init__(self, problem: Fibre, kernel: Tunable):
        self._problem, self.kernel = problem, kernel
        assert isinstance(problem.model, DirectedModel)
        self._split = problem.model.split

    def start(self, n: int, rng: torch.Generator, tolerance: float, report: Callable[[str], None]) -> Tensor:
        return self._problem.start(n, rng, tolerance=tolerance, report=report)

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


class _Integrated:
    """Points ``u1`` under the density with the noise integrated out, moved by steps without a Jacobian: enough of them
    that few points strand where the noise is small."""

    n_steps = 10

    def __init__(self, problem: Fibre, kernel: Tunable, chains: int):
        assert problem.marginal is not None
        self._problem, self._marginal = problem, problem.marginal
        lifted = kernel if isinstance(kernel, LiftedHMC) else LiftedHMC()
        self.kernel: Any = lifted.unlifted
        slow = problem.observed.convolves
        self.fewest = _SETTINGS.population if slow else _SETTINGS.large_population
        self.transitions, self.at_last = (1, 5) if slow else (2, 10)
        annealed = AnnealedMarginal(lifted.marginal(problem))
        example = self._marginal.initial_draws(max(chains, self.fewest), torch.Generator(problem.values.device))
        gradients = _SETTINGS.increments * self.transitions * (1 + self.n_steps) // 2
        compiles = getattr(kernel, "compile", None) is not False
        self._evaluated = evaluation(annealed, _with(example, 1.0), gradients if compiles else 0)
        self.unwidened: Any = None
        if annealed.is_exact:
            own = torch.ones(problem.batch_shape, dtype=example.dtype, device=example.device)
            self.unwidened = _AtBeta(self._evaluated, self._marginal.dim, own).energy_and_gradient
        elif not compiles:
            self.unwidened = self._marginal.to(torch.float64).energy_and_gradient

    def start(self, n: int, rng: torch.Generator, tolerance: float, report: Callable[[str], None]) -> Tensor:
        """Prior draws of u1."""
        u1 = self._marginal.start(n, rng)
        if self.square(u1).isfinite().all():
            return u1
        return self._problem.start(n, rng, tolerance=tolerance, report=report)[..., : self._marginal.dim]

    def square(self, u1: Tensor) -> Tensor:
        """``|R^-1 r|^2``, ``[points, *batch]``: of noise that explains the observation, what the observation fixes."""
        return 2 * self._evaluated(_with(u1, 0.0))[1][..., -1]

    def widened(self, u1: Tensor, beta: Tensor) -> tuple[Any, Tensor]:
        return _AtBeta(self._evaluated, u1.shape[-1], beta), u1

    def narrowed(self, position: Tensor, beta: Tensor) -> Tensor:
        return position


class _AtBeta(Target):
    """The density with the noise integrated out, at inverse variances ``beta [*batch]`` of it."""

    def __init__(self, evaluated: Callable[[Tensor], tuple[Tensor, Tensor]], dim: int, beta: Tensor):
        self._evaluated, self._beta = evaluated, beta
        super().__init__(None, dim, tuple(beta.shape))

    def energy(self, x):
        return self.energy_and_gradient(x)[0]

    def energy_and_gradient(self, x):
        energy, gradient = self._evaluated(_with(x, self._beta))
        return energy, gradient[..., :-1]


def _with(u1: Tensor, beta: Tensor | float) -> Tensor:
    """Positions of an :class:`AnnealedMarginal`."""
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
