"""Modes of a target by minimisation from many starts, and a Gaussian that covers them (math 11.8)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..arguments import instance, random_seed, whole_number
from ..errors import EvidenceError
from ..target import Target, as_target
from .density import GaussianDensity, Whitened
from .descent import minimise
from .minima import same_minimum, same_mode, settled
from .moments import mixture_moments
from .origin import origin

__all__ = ["Modes", "cover", "in_units_of", "modes", "search", "spread_out"]

# Factors by which the starts of a search are spread out.
_FACTORS = (1.0, 2.0, 4.0, 8.0)
# Share of the mass above which new modes let a search go on, and the power of the masses by which a Gaussian covers.
_SHARE, _POWER = 1e-3, 0.25
_ROUNDS = 4
# Ratio of the curvatures of a minimum above which it is a spike or a ridge.
_DEGENERATE = 1e8
# Modes that are kept, those of the lowest energies, as many as have this many numbers in their covariances.
_FEWEST, _MOST, _NUMBERS = 64, 256, 2**24


@dataclass(frozen=True, eq=False)
class Modes:
    """Local minima of an energy, the largest Laplace mass first, for every problem of a batch.

    Problems have different numbers of modes: missing ones have mass ``-inf`` and no hits.

    Attributes:
        positions: ``[M, *batch, D]``.
        energies: ``[M, *batch]``.
        log_masses: ``-energy + D/2 log 2 pi - 1/2 log|H|``, ``[M, *batch]``.
        hits: minimisations that ended there, ``[M, *batch]``.
        covariances: inverse Hessians, ``[M, *batch, D, D]``.
        evaluations: gradients per problem that the search took.
    """

    positions: Tensor
    energies: Tensor
    log_masses: Tensor
    hits: Tensor
    covariances: Tensor
    evaluations: int

    @property
    def counts(self) -> Tensor:
        """Number of modes found, ``[*batch]``."""
        return (self.hits > 0).sum(0)

    @property
    def log_z(self) -> Tensor:
        """Log of the sum of the masses, ``[*batch]``: Laplace's approximation of the log evidence, mode by mode."""
        return self.log_masses.logsumexp(0)

    def __repr__(self):
        counts = self.counts
        number = f"{int(counts)} found" if counts.numel() == 1 else f"{counts.double().mean():.1f} found on average"
        return (
            f"Modes(*batch, D = {tuple(self.positions.shape[1:])}; {number}, log masses sum to {self.log_z.mean():.2f})"
        )


def modes(
    target,
    starts: int = 64,
    *,
    start: Whitened | None = None,
    iterations: int = 200,
    seed: int | None = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Modes:
    """The modes of a target that minimisations from widely spread starts reach, with their Laplace masses.

    In rounds of ``starts`` minimisations by L-BFGS, drawn from a Gaussian that covers what was found, spread out up to
    eightfold, until a round finds no new mode of a thousandth of the mass. What no start leads to is not found.

    Args:
        target: anything with ``energy``, twice differentiable, ``dim`` and ``batch_shape``.
        starts: minimisations per round and problem.
        start: Gaussian over ``[*batch, D]`` for the first round; None for standard normals.
        iterations: gradients per minimisation, at most.
        seed: seed of all randomness; None draws one.
        dtype, device: used only when ``start`` is None; None for those of the target's ``values``, or float64.

    Raises:
        ArgumentError: an argument is outside its range.
        EvidenceError: no minimisation of some problem reached a mode with a positive definite Hessian.
    """
    call = "modes"
    target = as_target(target)
    starts, iterations = whole_number(call, "starts", starts), whole_number(call, "iterations", iterations)
    if start is None:
        start = GaussianDensity(origin(call, target, dtype, device, torch.float64), 1.0)
    instance(call, "start", start, Whitened, "Gaussian(mean, sd)")
    rng = torch.Generator(start.mean.device).manual_seed(random_seed(call, seed))
    return search(target, start, starts, iterations, rng)


def search(
    target: Target, start: Whitened, starts: int, iterations: int, rng: torch.Generator, *, required: bool = True
) -> Modes:
    """Rounds of minimisations: see :func:`modes`.

    Args:
        required: whether a problem without a mode is an error. Else its next rounds start where the first did, and
            minima whose curvatures, in units of ``start``, differ by more than a factor of 1e8 do not count: a density
            without bound has them where the numbers end, and they have no mass.

    Raises:
        EvidenceError: no mode of some problem was found, and modes are required.
    """
    found: Modes | None = None
    reach = start
    for _ in range(_ROUNDS):
        noise = torch.randn(starts, *start.mean.shape, generator=rng, dtype=start.mean.dtype, device=start.mean.device)
        before = found
        found = _merged(target, reach, spread_out(noise), iterations, found)
        if not required:
            found = _without_spikes(found, start)
        lost = found.log_z.isneginf()
        if required and lost.any():
            raise EvidenceError(
                f"no mode was found for {int(lost.sum())} of {lost.numel()} problems: start nearer to one, or the "
                "energy has no minimum with a positive definite Hessian"
            )
        if lost.all() or (before is not None and not _adds(found, before)):
            break
        mean, covariance = cover(found)
        sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        if lost.any():
            rows, first = lost.unsqueeze(-1), start.moments
            mean = torch.where(rows, first.mean, mean)
            sd = torch.where(rows, first.covariance.diagonal(dim1=-2, dim2=-1).sqrt(), sd)
        reach = GaussianDensity(mean, sd)
    assert found is not None
    return found


def _merged(target: Target, reach: Whitened, v: Tensor, iterations: int, known: Modes | None) -> Modes:
    """The modes known, and those that minimisations from ``v [starts, *batch, D]`` in whitened coordinates reach."""
    minima = minimise(in_units_of(reach, target), v, iterations=iterations)
    energy = torch.where(minima.converged, minima.energy, math.inf)
    order = energy.argsort(0)
    x, energy = _taken(reach.unwhiten(minima.position), order), energy.gather(0, order)
    hits, masses = energy.isfinite().long(), torch.full_like(energy, math.nan, dtype=torch.float64)
    covariances = x.new_full((*x.shape, x.shape[-1]), math.nan)
    evaluations = len(v) * minima.evaluations
    if known is not None:
        # first, so that what is found again is counted there, unless that is no mode
        known_energy = torch.where(known.hits > 0, known.energies, math.inf)
        x, energy = torch.cat([known.positions, x]), torch.cat([known_energy, energy])
        hits, masses = torch.cat([known.hits, hits]), torch.cat([known.log_masses, masses])
        covariances = torch.cat([known.covariances, covariances])
        evaluations += known.evaluations
    first = same_minimum(reach.whiten(x), energy)
    hits = torch.zeros_like(hits).scatter_add(0, first, hits)
    hits = torch.where(energy.isfinite(), hits, 0)
    most = min(_MOST, max(_FEWEST, _NUMBERS // max(1, covariances[:1].numel())))
    order = torch.where(hits > 0, energy, math.inf).argsort(0)[: int((hits > 0).sum(0).max().clamp(1, most))]
    x, energy, hits, masses, covariances = (_taken(part, order) for part in (x, energy, hits, masses, covariances))
    new = masses.isnan() & (hits > 0)
    rows = new.flatten(1).any(1) if new.ndim > 1 else new
    if rows.any():
        own = settled(target, x[rows], new[rows], len(v) * minima.evaluations)
        evaluations += own.evaluations
        x, energy, masses, covariances, hits = (
            _with_rows(part, rows, new, moved)
            for part, moved in (
                (x, own.position),
                (energy, own.energy),
                (masses, own.log_mass),
                (covariances, own.covariance),
                (hits, torch.where(own.counts, hits[rows], 0)),
            )
        )
    order = torch.where(hits > 0, energy, math.inf).argsort(0)
    x, energy, hits, masses, covariances = (_taken(part, order) for part in (x, energy, hits, masses, covariances))
    hits = torch.zeros_like(hits).scatter_add(0, same_mode(x, energy, covariances, hits > 0), hits)
    masses = torch.where(hits > 0, masses, -math.inf)
    order = masses.argsort(0, descending=True)
    parts = (_taken(part, order) for part in (x, energy, masses, hits, covariances))
    return Modes(*parts, evaluations=evaluations)


def spread_out(v: Tensor) -> Tensor:
    """Starts of a search from draws ``[N, *batch, D]`` of standard normals: 1, 2, 4 and 8 times as far, in turn."""
    factors = torch.tensor(_FACTORS, dtype=v.dtype, device=v.device).repeat(-(-len(v) // len(_FACTORS)))[: len(v)]
    return v * factors.reshape(-1, *[1] * (v.ndim - 1))


def in_units_of(base: Whitened, target: Target) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Energy and gradient of a target in the whitened coordinates of a base."""

    def evaluate(v: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = target.energy_and_gradient(base.unwhiten(v))
        return energy, base.scale.transpose(gradient)

    return evaluate


def _with_rows(values: Tensor, rows: Tensor, new: Tensor, moved: Tensor) -> Tensor:
    """``values [N, *batch, ...]``, with ``moved`` in these rows where they are ``new [N, *batch]``."""
    values, where = values.clone(), new[rows].reshape(*new[rows].shape, *[1] * (values.ndim - new.ndim))
    values[rows] = torch.where(where, moved, values[rows])
    return values


def _taken(values: Tensor, order: Tensor) -> Tensor:
    """Rows ``[N, *batch, ...]`` in an order ``[M, *batch]``."""
    index = order.reshape(*order.shape, *[1] * (values.ndim - order.ndim))
    return values.gather(0, index.expand(len(order), *values.shape[1:]))


def _without_spikes(found: Modes, start: Whitened) -> Modes:
    """The same, with mass zero for minima of degenerate curvature or out of all proportion to ``start``."""
    # whitened twice: L^-1 C L^-T
    half = start.scale.solve(found.covariances.movedim(-1, 0)).movedim(0, -1)
    whitened = start.scale.solve(half.movedim(-2, 0)).movedim(0, -2)
    sound = whitened.flatten(-2).isfinite().all(-1) & (found.log_masses > -math.inf)
    unit = torch.eye(whitened.shape[-1], dtype=whitened.dtype, device=whitened.device)
    values = torch.linalg.eigvalsh(torch.where(sound[..., None, None], whitened, unit))
    sound &= values[..., 0] * _DEGENERATE > values[..., -1]
    return replace(found, log_masses=torch.where(sound, found.log_masses, -math.inf))


def _adds(found: Modes, before: Modes) -> bool:
    """Whether modes beyond those known before have more than a thousandth of the mass in some problem."""
    return bool((before.log_z < found.log_z + math.log1p(-_SHARE)).any())


def cover(found: Modes) -> tuple[Tensor, Tensor]:
    """Mean ``[*batch, D]`` and covariance of a mixture of modes whose weights are fourth roots of their masses.

    Weights equal to the masses would rest on the few deepest modes, and modes that are found are not all there are.
    """
    there = found.log_masses > -math.inf
    covariances = torch.where(there[..., None, None], found.covariances, 0.0)
    log_weights = torch.where(there, _POWER * found.log_masses, -math.inf).to(found.positions)
    moments = mixture_moments(found.positions, covariances, log_weights)
    return moments.mean, moments.covariance
