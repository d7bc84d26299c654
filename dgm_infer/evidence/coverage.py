"""A check of what a run has not seen: searches for modes that none of its draws has visited (math 6.15)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..bases.descent import minimise
from ..bases.modes import laplace_masses, same_minimum
from .method import Outcome
from .path import AnnealedPath

__all__ = ["Unseen", "look_for_unseen", "widened"]

# Share of the run's gradients that the searches may take, in all and one after the other; and bounds of their size.
_SHARE, _SEQUENTIAL = 0.1, 0.05
_STARTS, _ITERATIONS, _FEWEST = 64, 100, 8
# Factors by which starts from the base are spread out.
_FACTORS = (1.0, 2.0, 4.0, 8.0)
# Modes whose Hessians are computed, those of the lowest energies; standard deviations of |.|^2 within a visit.
_CANDIDATES, _WITHIN = 4, 5.0


class Unseen(NamedTuple):
    """Modes that searches found and no draw has visited, each ``[*batch]``."""

    count: Tensor
    shift: Tensor
    """``log(1 + mass/Z)``, by their Laplace masses: what they would add to log Z."""

    @classmethod
    def none(cls, like: Tensor) -> "Unseen":
        return cls(torch.zeros(like.shape, dtype=torch.int64, device=like.device), torch.zeros_like(like))


def look_for_unseen(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> Unseen:
    """Minimise the energy from draws of the run and from widely spread starts, and compare where they end.

    A mode is unseen if no minimisation from a weighted draw ends in it, and no draw lies where a normal with its inverse
    Hessian has its draws. The searches take at most a tenth of the run's gradients, and none where that is too few.
    An energy that fails far from the base, or is not twice differentiable, leaves the question open: none is reported.
    """
    log_z = outcome.estimate.log_z
    iterations = min(_ITERATIONS, int(_SEQUENTIAL * path.evaluations))
    chains = len(outcome.draws)
    starts = min(_STARTS, int(_SHARE * path.evaluations * chains / max(iterations, 1))) // 2
    usable = log_z.isfinite().all() and outcome.draws.shape[1] > 0 and not outcome.interrupted
    if iterations < _FEWEST or starts < 2 or not usable:
        return Unseen.none(log_z)
    try:
        return _searched(path, outcome, starts, iterations, rng)
    except (RuntimeError, ValueError, ArithmeticError):
        return Unseen.none(log_z)


def widened(std_error: Tensor, unseen: Unseen) -> tuple[Tensor, Unseen]:
    """The standard error with a shift that exceeds it added in squares, and what is unseen beyond the error."""
    large = unseen.shift > std_error
    kept = Unseen(torch.where(large, unseen.count, 0), torch.where(large, unseen.shift, 0.0))
    return torch.where(large, (std_error.square() + unseen.shift.square()).sqrt(), std_error), kept


def _searched(path: AnnealedPath, outcome: Outcome, starts: int, iterations: int, rng: torch.Generator) -> Unseen:
    base, log_z = path.base, outcome.estimate.log_z
    draws, log_weights = outcome.draws.flatten(0, 1), outcome.log_weights.flatten(0, 1)
    first = torch.cat([base.whiten(_drawn(draws, log_weights, starts, rng)), _spread(path, starts, rng)])

    def evaluate(v: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = path.target.energy_and_gradient(base.unwhiten(v))
        return energy, base.scale.transpose(gradient)

    minima = minimise(evaluate, first, iterations=iterations)
    energy = torch.where(minima.converged, minima.energy, math.inf)
    leaders = same_minimum(minima.position, energy)
    index = torch.arange(len(energy), device=energy.device).reshape(-1, *[1] * (energy.ndim - 1))
    # each of the later, spread ones that is the first to end where it does
    new = (leaders == index) & (index >= starts) & energy.isfinite()
    most = min(_CANDIDATES, int(new.sum(0).max()))
    if most == 0:
        return Unseen.none(log_z)
    order = torch.where(new, energy, math.inf).argsort(0)[:most]
    x = base.unwhiten(minima.position).gather(0, order.unsqueeze(-1).expand(most, *minima.position.shape[1:]))
    masses, covariances = laplace_masses(path.target, x, torch.where(new, energy, math.inf).gather(0, order))
    inside = torch.stack(
        [_visited(draws, log_weights, mode, covariance) for mode, covariance in zip(x, covariances, strict=True)]
    )
    masses = torch.where(inside, -math.inf, masses.to(log_z))
    return Unseen((masses > -math.inf).sum(0), (masses.logsumexp(0) - log_z).exp().log1p())


def _drawn(draws: Tensor, log_weights: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """``n`` of the weighted draws ``[N, *batch, D]``, by their weights."""
    weights = log_weights.flatten(1).softmax(0).nan_to_num(0.0).mT if log_weights.ndim > 1 else log_weights.softmax(0)
    chosen = torch.multinomial(weights.clamp_min(1e-300), n, replacement=True, generator=rng)
    chosen = (chosen.mT if chosen.ndim > 1 else chosen).reshape(n, *log_weights.shape[1:], 1)
    return draws.gather(0, chosen.expand(n, *draws.shape[1:]))


def _spread(path: AnnealedPath, n: int, rng: torch.Generator) -> Tensor:
    """Whitened starts ``[n, *batch, D]``: draws of the prior where there is one, else the base spread out."""
    if path.target.standardised:
        return path.base.whiten(path.target.initial_draws(n, rng).to(path.base.mean))
    v = path.normal(n, rng)
    factors = torch.tensor(_FACTORS, dtype=v.dtype, device=v.device).repeat(-(-n // len(_FACTORS)))[:n]
    return v * factors.reshape(-1, *[1] * (v.ndim - 1))


def _visited(draws: Tensor, log_weights: Tensor, mode: Tensor, covariance: Tensor) -> Tensor:
    """Whether a draw of positive weight is within reach of a mode ``[*batch, D]`` of this covariance, ``[*batch]``."""
    dim = mode.shape[-1]
    factor, failed = torch.linalg.cholesky_ex(covariance.nan_to_num(0.0))
    factor = torch.where((failed == 0)[..., None, None], factor, torch.eye(dim, dtype=mode.dtype, device=mode.device))
    apart = (draws - mode).movedim(0, -1)
    squares = torch.linalg.solve_triangular(factor, apart, upper=False).square().sum(-2).movedim(-1, 0)
    near = squares < dim + _WITHIN * math.sqrt(2 * dim)
    return (near & (log_weights > -math.inf)).any(0) | (failed != 0)
