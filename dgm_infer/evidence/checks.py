"""Checks after a run: searches for modes that no draw has visited, and cross-checks by other methods."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DgmInferError
from ..kernels.mode_jumps import reach
from ..progress import Progress
from ..references.minimise import beside_mode, minimise, places, same_minimum, same_mode
from ..references.modes import in_units_of, laplace_masses, spread_out
from ..target import Posterior, Target
from .estimators import exceeded, welch
from .method import Outcome
from .necks import neck_sample
from .path import AnnealedPath
from .tempering.parallel import ParallelTempering
from .wide_sample import CrossCheck, wide_sample


@dataclass(frozen=True)
class SearchesAfterwards:
    """Sizes of the searches for unseen modes."""

    share: float = 0.1
    """Share of the run's gradients that they may take in all."""
    sequential: float = 0.05
    """The same, one after the other: as seconds where a batch costs as much as a point."""
    starts: int = 32
    """Minimisations at most."""
    iterations: int = 100
    """Gradients of each at most."""
    fewest: int = 8
    """Gradients of each below which no search is made."""
    candidates: int = 4
    """Modes whose Hessians are computed, those of the lowest energies."""
    rows: int = 2**14
    """Rows of Hessians, over all problems, above which no search is made."""


@dataclass(frozen=True)
class CrossCheckSettings:
    """Sizes of the parallel tempering that checks others."""

    share: float = 0.25
    """Share of the run's gradients that it may take."""
    sizes: tuple[tuple[int, int], ...] = ((64, 4), (64, 2), (32, 4), (32, 2))
    """Sweeps and chains, of which the first that is affordable is taken."""
    pilot: int = 20
    """Temperatures of its pilot."""
    n_steps: int = 3
    """Leapfrog steps, fewer than by default, so that one is affordable sooner."""
    false: float = 0.05
    """Probability of a warning where there is nothing to warn of, over all problems."""


@dataclass(frozen=True)
class PlateauSettings:
    """Where a likelihood has nothing that leads to its mass."""

    draws: int = 64
    """Prior draws that are looked at."""
    step: float = 0.1
    """Standard deviations of the prior to the point beside each."""
    flat: float = 0.01
    """Change of log likelihood, in nats, up to which it is flat between them."""
    below: float = 3.0
    """Nats below the draws of the posterior from which a plateau is not where these are."""
    still: float = 1e-9
    """Slope of the log likelihood up to which an input has none: differences of priors round."""
    rounds: int = 32
    """Inputs without a gradient that are redrawn at the best draw of every chain, one at a time."""


SEARCHES, CROSS, PLATEAUS = SearchesAfterwards(), CrossCheckSettings(), PlateauSettings()


class Components(NamedTuple):
    """Laplace's approximations at modes."""

    means: Tensor
    """``[M, *batch, D]``."""
    covariances: Tensor
    """``[M, *batch, D, D]``; of any value where there is no mass."""
    log_masses: Tensor
    """``[M, *batch]``, float64, ``-inf`` for modes already visited."""


class Unseen(NamedTuple):
    """Modes that searches found and no draw has visited, each ``[*batch]``."""

    modes: Tensor
    shift: Tensor
    """``log(1 + mass/Z)``, by their Laplace masses: what they would add to log Z."""
    found: Tensor
    """Different modes that the searches ended in, visited or not."""
    components: Components | None = None
    """The unseen modes themselves."""

    @classmethod
    def none(cls, like: Tensor) -> "Unseen":
        nothing = torch.zeros(like.shape, dtype=torch.int64, device=like.device)
        return cls(nothing, torch.zeros_like(like), nothing)


def look_for_unseen(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> Unseen:
    """Minimise the energy from widely spread starts, and see whether any draw is near where they end.

    A mode is unseen if no draw of positive weight lies where a normal with its inverse Hessian has its draws. The
    searches take at most a tenth of the run's gradients, and none where that is too few, or Hessians too large. An
    energy that fails far from the base, or is not twice differentiable, leaves the question open: none is reported.
    """
    log_z, base = outcome.estimate.log_z, path.base
    chains = len(outcome.draws)
    iterations = min(SEARCHES.iterations, int(SEARCHES.sequential * path.evaluations))
    starts = min(SEARCHES.starts, int(SEARCHES.share * path.evaluations * chains / max(iterations, 1)))
    usable = log_z.isfinite().all() and outcome.draws.shape[1] > 0 and not outcome.interrupted
    if iterations < SEARCHES.fewest or starts < 1 or base.mean.numel() > SEARCHES.rows or not usable:
        return Unseen.none(log_z)
    try:
        return _searched(path, outcome, starts, iterations, rng)
    except (RuntimeError, ValueError, ArithmeticError):
        return Unseen.none(log_z)


def count_minima(path: AnnealedPath, rng: torch.Generator) -> Tensor:
    """Different modes that searches from widely spread starts end in, ``[*batch]``; 0 where they cannot be made."""
    try:
        return _modes(path, SEARCHES.starts, SEARCHES.iterations, rng).found
    except (RuntimeError, ValueError, ArithmeticError):
        return torch.zeros(path.batch_shape, dtype=torch.int64)


def plateaus(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> Tensor:
    """Share of prior draws where the likelihood is flat, far below where it is at the posterior's, ``[*batch]``.

    Neither searches nor moves find what is narrow between plateaus, as of a softmax at a low temperature. For a target
    without a standardised prior it is 0, unknown.
    """
    target, nothing = path.target, torch.zeros_like(outcome.estimate.log_z)
    if not target.standardised or not outcome.draws.shape[1]:
        return nothing
    try:
        x = target.initial_draws(PLATEAUS.draws, rng).to(path.base.mean)
        beside = x + PLATEAUS.step * torch.randn(x.shape, generator=rng, dtype=x.dtype, device=x.device)
        there = _loss(target, x)
        flat = (_loss(target, beside) - there).abs() < PLATEAUS.flat
        usual = _loss(target, _best(outcome).to(x)).median(0).values
    except (RuntimeError, ValueError, ArithmeticError):
        return nothing
    return (flat & (there > usual + PLATEAUS.below)).double().mean(0)


def switches(path: AnnealedPath, outcome: Outcome) -> Tensor:
    """Share of the inputs without a gradient, of those redrawn, that change the likelihood by nats, ``[*batch]``.

    They are compared with a threshold, as by ``where(u < 0.3, ...)``: no slope leads to the right side of it. 0 where
    every input has a gradient, and, unknown, as for :func:`plateaus`.
    """
    target, nothing = path.target, torch.zeros_like(outcome.estimate.log_z)
    if not (target.standardised and target.has_gradient and outcome.draws.shape[1]):
        return nothing
    # of its own: runs are those without this look
    rng, jumps = torch.Generator(path.base.mean.device).manual_seed(0), []
    try:
        with torch.enable_grad():
            x = _best(outcome).to(path.base.mean).requires_grad_()
            there = _loss(target, x)
            (gradient,) = torch.autograd.grad(there.sum(), x)
        x, still = x.detach(), gradient.abs() <= PLATEAUS.still
        if not still.any():
            return nothing
        for _ in range(PLATEAUS.rounds):
            order = torch.rand(x.shape, generator=rng, dtype=x.dtype, device=x.device)
            chosen = (order * still).argmax(-1, keepdim=True)
            redrawn = target.initial_draws(len(x), rng).to(x).gather(-1, chosen)
            change = _loss(target, x.scatter(-1, chosen, redrawn)) - there.detach()
            jumps.append((change.abs() > PLATEAUS.below) & still.any(-1))
    except (RuntimeError, ValueError, ArithmeticError):
        return nothing
    return torch.stack(jumps).double().mean((0, 1))


def _loss(target: Target, x: Tensor) -> Tensor:
    """``-log p(y | x)`` up to a constant, ``[..., *batch]``, where the prior is standardised."""
    if isinstance(target, Posterior):
        prior = target.tempered_energy(x, x.new_zeros(x.shape[:-1]))
    else:
        prior = 0.5 * x.square().sum(-1)
    return (target.energy(x) - prior).double()


def _best(outcome: Outcome) -> Tensor:
    """The draw of the largest weight of every chain, ``[chains, *batch, D]``."""
    index = outcome.log_weights.argmax(1)[:, None, ..., None]
    return outcome.draws.gather(1, index.expand(-1, 1, *outcome.draws.shape[2:]))[:, 0]


def widened(std_error: Tensor, unseen: Unseen) -> tuple[Tensor, Unseen]:
    """The standard error with a shift that exceeds it added in squares, and what is unseen beyond the error."""
    large = unseen.shift > std_error
    components = unseen.components
    if components is not None:
        components = components._replace(log_masses=torch.where(large, components.log_masses, -math.inf))
    kept = Unseen(torch.where(large, unseen.modes, 0), torch.where(large, unseen.shift, 0.0), unseen.found, components)
    return torch.where(large, (std_error.square() + unseen.shift.square()).sqrt(), std_error), kept


def _searched(path: AnnealedPath, outcome: Outcome, starts: int, iterations: int, rng: torch.Generator) -> Unseen:
    log_z = outcome.estimate.log_z
    x, masses, covariances, same, found = _modes(path, starts, iterations, rng)
    if not len(x):
        return Unseen.none(log_z)
    draws, log_weights = outcome.draws.flatten(0, 1), outcome.log_weights.flatten(0, 1)
    for i in range(len(x)):
        known = (same[i] != i) | _visited(draws, log_weights, x[i], covariances[i])
        masses[i] = torch.where(known, -math.inf, masses[i])
    shift = (masses.logsumexp(0) - log_z).exp().log1p().to(log_z)
    return Unseen((masses > -math.inf).sum(0), shift, found, Components(x, covariances, masses))


class _Modes(NamedTuple):
    """The lowest modes of searches, M of them, and how many there are in all."""

    x: Tensor
    """``[M, *batch, D]``."""
    masses: Tensor
    covariances: Tensor
    same: Tensor
    """The first of them that is in the same mode as each, ``[M, *batch]``."""
    found: Tensor
    """``[*batch]``; descents that end beside one of the lowest, as at kinks, are of its mode."""


def _modes(path: AnnealedPath, starts: int, iterations: int, rng: torch.Generator) -> _Modes:
    position, energy = _minima(path, starts, iterations, rng)
    most = min(SEARCHES.candidates, int(energy.isfinite().sum(0).max()))
    order = energy.argsort(0)
    every = path.base.unwhiten(position).gather(0, order.unsqueeze(-1).expand_as(position))
    energy = energy.gather(0, order)
    found = energy.isfinite()
    if not most:
        return _Modes(every[:0], energy[:0], every[:0], order[:0], found.sum(0))
    x = every[:most]
    masses, covariances = laplace_masses(path.target, x, energy[:most])
    same = same_mode(x, energy[:most], covariances, found[:most])
    rest = [beside_mode(every[most:], energy[most:], *mode) for mode in zip(x, energy, covariances, strict=False)]
    alike = torch.cat([same != places(same), torch.stack(rest).any(0)])
    return _Modes(x, masses, covariances, same, (found & ~alike).sum(0))


def _minima(path: AnnealedPath, starts: int, iterations: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Whitened minima ``[starts, *batch, D]`` and their energies, infinite for what is the same as one before."""
    minima = minimise(in_units_of(path.base, path.target), _starts(path, starts, rng), iterations=iterations)
    energy = torch.where(minima.converged, minima.energy, math.inf)
    index = torch.arange(starts, device=energy.device).reshape(-1, *[1] * (energy.ndim - 1))
    return minima.position, torch.where(same_minimum(minima.position, energy) == index, energy, math.inf)


def _starts(path: AnnealedPath, n: int, rng: torch.Generator) -> Tensor:
    """Whitened starts ``[n, *batch, D]``: the base spread out; and, whatever the base, broad draws of x.

    These are draws of the prior where there is one, or else those of :func:`~dgm_infer.modes`.
    """
    near, broad = spread_out(path.normal(n, rng)), path.normal(n, rng)
    x = path.target.initial_draws(n, rng).to(broad) if path.target.standardised else spread_out(broad)
    half = n - n // 2
    return torch.cat([near[:half], path.base.whiten(x)[: n - half]])


def _visited(draws: Tensor, log_weights: Tensor, mode: Tensor, covariance: Tensor) -> Tensor:
    """Whether a draw of positive weight is within reach of a mode ``[*batch, D]`` of this covariance, ``[*batch]``."""
    dim = mode.shape[-1]
    factor, failed = torch.linalg.cholesky_ex(covariance.nan_to_num(0.0))
    factor = torch.where((failed == 0)[..., None, None], factor, torch.eye(dim, dtype=mode.dtype, device=mode.device))
    apart = (draws - mode).movedim(0, -1)
    squares = torch.linalg.solve_triangular(factor, apart, upper=False).square().sum(-2).movedim(-1, 0)
    near = squares < reach(dim)
    return (near & (log_weights > -math.inf)).any(0) | (failed != 0)


def cross_check(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> CrossCheck:
    """By how much log Z is larger after a short parallel tempering, for at most a quarter of the run's gradients.

    The difference has an error from both. What it exceeds 1.5 of these by, in squares, is a variance that the run does
    not claim; it counts as a shift beyond the quantile of Student's t by which one batch in twenty has one by chance.
    Short runs give too small a log Z rather than too large, so that a smaller one says nothing. None is made where the
    gradients do not suffice for one.
    """
    estimate = outcome.estimate
    nothing = CrossCheck.none(estimate.log_z)
    affordable = CROSS.share * path.evaluations * len(outcome.draws)
    for draws, chains in CROSS.sizes:
        method = ParallelTempering(draws=draws, n_steps=CROSS.n_steps, pilot_temperatures=CROSS.pilot)
        # rounds of tuning take as many sweeps as the last
        if chains * method.n_steps * method.particles * 2 * draws <= affordable:
            break
    else:
        return nothing
    # a path of its own, so that the run's gradients stay its own
    own = AnnealedPath(path.target, path.base)
    try:
        with Progress(False) as silent:
            other = method.run(own, chains, rng, silent).estimate
    except (DgmInferError, RuntimeError, ValueError, ArithmeticError):
        return nothing
    errors = torch.stack([other.std_error, estimate.std_error]).double()
    variance, dof = welch(errors, (chains - 1, len(outcome.draws) - 1))
    quantile = exceeded(CROSS.false / variance.numel(), dof.clamp_min(1.0)).to(variance)
    difference = (other.log_z - estimate.log_z).double().clamp_min(0.0).nan_to_num(0.0)
    return CrossCheck.of(difference, difference, variance, quantile, estimate.log_z)


def checked(
    path: AnnealedPath, outcome: Outcome, rng: torch.Generator, *, compare: bool = True
) -> tuple[Outcome, Unseen]:
    """The outcome with what its draws have not seen, or too rarely, in its error and diagnostics; and the unseen.

    Args:
        compare: whether to cross-check where there are several modes.
    """
    rare = spread = torch.zeros_like(outcome.estimate.log_z)
    wide = neck = CrossCheck.none(rare)
    try:
        unseen = look_for_unseen(path, outcome, rng)
        if compare and (unseen.found > 1).any():
            second = cross_check(path, outcome, rng)
            rare, spread = (torch.where(unseen.found > 1, each, 0.0) for each in second)
        wide = wide_sample(path, outcome, rng)
        neck = neck_sample(path, outcome, rng)
        spread = torch.maximum(spread, torch.maximum(wide.spread, neck.spread))
    except KeyboardInterrupt:
        # the estimates are whole, and are kept; further chunks are not begun
        outcome, unseen = outcome._replace(interrupted=True), Unseen.none(outcome.estimate.log_z)
    error, unseen = widened(outcome.estimate.std_error, unseen)
    # the two are of the same mass: the larger counts
    error = torch.maximum(error, (outcome.estimate.std_error.square() + spread.square()).sqrt())
    found = {
        "plateaus": plateaus(path, outcome, rng),
        "switches": switches(path, outcome),
        "minima": unseen.found,
        "unseen_modes": unseen.modes,
        "unseen_shift": unseen.shift,
        "rare_shift": rare,
        "wide_shift": wide.shift,
        "neck_shift": neck.shift,
    }
    estimate = outcome.estimate._replace(std_error=error)
    return outcome._replace(estimate=estimate, diagnostics=outcome.diagnostics | found), unseen
