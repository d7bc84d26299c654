"""A check of what a run has not seen: searches for modes that none of its draws has visited (math 6.15)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..references.minimise import minimise
from ..references.modes import in_units_of, laplace_masses, same_minimum, same_mode, spread_out
from .method import Outcome
from .path import AnnealedPath

__all__ = ["Components", "Unseen", "count_minima", "look_for_unseen", "widened"]

# Share of the run's gradients that the searches may take, in all and one after the other; and bounds of their size.
_SHARE, _SEQUENTIAL = 0.1, 0.05
_STARTS, _ITERATIONS, _FEWEST = 32, 100, 8
# Modes whose Hessians are computed, those of the lowest energies; and rows of them, over all problems.
_CANDIDATES, _ROWS = 4, 2**14
# Standard deviations of the squared distance within which a draw has visited a mode.
_WITHIN = 5.0


class Components(NamedTuple):
    """Laplace's approximations at modes."""

    means: Tensor
    """``[M, *batch, D]``."""
    covariances: Tensor
    """``[M, *batch, D, D]``; of any value where there is no mass."""
    log_masses: Tensor
    """``[M, *batch]``, float64, ``-inf`` for what is no unseen mode."""


class Unseen(NamedTuple):
    """Modes that searches found and no draw has visited, each ``[*batch]``."""

    modes: Tensor
    shift: Tensor
    """``log(1 + mass/Z)``, by their Laplace masses: what they would add to log Z."""
    found: Tensor
    """Different minima that the searches ended in, visited or not."""
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
    iterations = min(_ITERATIONS, int(_SEQUENTIAL * path.evaluations))
    starts = min(_STARTS, int(_SHARE * path.evaluations * chains / max(iterations, 1)))
    usable = log_z.isfinite().all() and outcome.draws.shape[1] > 0 and not outcome.interrupted
    if iterations < _FEWEST or starts < 1 or base.mean.numel() > _ROWS or not usable:
        return Unseen.none(log_z)
    try:
        return _searched(path, outcome, starts, iterations, rng)
    except (RuntimeError, ValueError, ArithmeticError):
        return Unseen.none(log_z)


def count_minima(path: AnnealedPath, rng: torch.Generator) -> Tensor:
    """Different minima that searches from widely spread starts end in, ``[*batch]``; 0 where they cannot be made."""
    try:
        _, energy = _minima(path, _STARTS, _ITERATIONS, rng)
    except (RuntimeError, ValueError, ArithmeticError):
        return torch.zeros(path.batch_shape, dtype=torch.int64)
    return energy.isfinite().sum(0)


def widened(std_error: Tensor, unseen: Unseen) -> tuple[Tensor, Unseen]:
    """The standard error with a shift that exceeds it added in squares, and what is unseen beyond the error."""
    large = unseen.shift > std_error
    components = unseen.components
    if components is not None:
        components = components._replace(log_masses=torch.where(large, components.log_masses, -math.inf))
    kept = Unseen(torch.where(large, unseen.modes, 0), torch.where(large, unseen.shift, 0.0), unseen.found, components)
    return torch.where(large, (std_error.square() + unseen.shift.square()).sqrt(), std_error), kept


def _searched(path: AnnealedPath, outcome: Outcome, starts: int, iterations: int, rng: torch.Generator) -> Unseen:
    base, log_z = path.base, outcome.estimate.log_z
    position, energy = _minima(path, starts, iterations, rng)
    found = energy.isfinite().sum(0)
    most = min(_CANDIDATES, int(found.max()))
    if not most:
        return Unseen.none(log_z)
    order = energy.argsort(0)[:most]
    x = base.unwhiten(position).gather(0, order.unsqueeze(-1).expand(most, *position.shape[1:]))
    energy = energy.gather(0, order)
    masses, covariances = laplace_masses(path.target, x, energy)
    same = same_mode(x, energy, covariances, energy.isfinite())
    draws, log_weights = outcome.draws.flatten(0, 1), outcome.log_weights.flatten(0, 1)
    for i in range(most):
        known = (same[i] != i) | _visited(draws, log_weights, x[i], covariances[i])
        masses[i] = torch.where(known, -math.inf, masses[i])
    shift = (masses.logsumexp(0) - log_z).exp().log1p().to(log_z)
    return Unseen((masses > -math.inf).sum(0), shift, found, Components(x, covariances, masses))


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
    near = squares < dim + _WITHIN * math.sqrt(2 * dim)
    return (near & (log_weights > -math.inf)).any(0) | (failed != 0)
