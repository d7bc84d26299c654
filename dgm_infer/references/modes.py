"""Modes of a target: minimisations from many starts, which minima are one mode, and its mass (math 11.8)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import allocatable, context, instance, random_seed, whole_number
from ..errors import EvidenceError
from ..target import Target, as_target
from .density import GaussianDensity, Whitened, mixture_moments, origin
from .minimise import Descended, curvature, descended, minimise, same_minimum, same_mode


@dataclass(frozen=True)
class ModeSearch:
    """What a search for modes takes for one mode, and how long it goes on."""

    spread: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Factors by which starts are spread out, in turn: modes up to eight standard deviations outside are reached."""
    rounds: int = 4
    """Rounds of minimisations at most; most searches end after two."""
    share: float = 1e-3
    """Share of the mass that new modes must add for another round: a thousandth of a nat of log Z."""
    power: float = 0.25
    """Power of the masses by which a Gaussian covers modes: 1 would rest on the few deepest, 0 on all alike."""
    degenerate: float = 1e8
    """Ratio of curvatures above which a minimum is a spike: half of the digits of float64."""
    most: int = 256
    """Modes that are kept, those of the lowest energies."""
    newton: int = 10
    """Newton steps at a time from where a descent ended, for as long as they bring ``fall``."""
    decrease: float = 1e-6
    """Decrease in nats that a Newton step must promise to be taken."""
    fall: float = 1e-3
    rows: int = 2**13
    """Rows of Hessians that are computed at once: 0.5 GB in 1000 dimensions."""


SEARCH = ModeSearch()


@dataclass(frozen=True, eq=False)
class Modes:
    """Local minima of an energy, the largest Laplace mass first, for every problem of a batch.

    Missing modes of problems that have fewer have mass ``-inf`` and no hits.

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
) -> Modes:
    """The modes of a target that minimisations from widely spread starts reach, with their Laplace masses.

    In rounds of ``starts`` minimisations by L-BFGS, drawn from a Gaussian that covers what was found, spread out up to
    eightfold, until a round finds no new mode of a thousandth of the mass. What no start leads to is not found.

    Args:
        target: anything with ``energy``, twice differentiable, ``dim`` and ``batch_shape``.
        starts: minimisations per round and problem.
        start: Gaussian over ``[*batch, D]`` for the first round; None for standard normals, in the target's type or
            else float64.
        iterations: gradients per minimisation, at most.
        seed: seed of all randomness; None draws one.

    Raises:
        ArgumentError: an argument is outside its range.
        EvidenceError: no minimisation of some problem reached a mode with a positive definite Hessian.
    """
    call = "modes"
    context(call)
    target = as_target(target)
    starts, iterations = whole_number(call, "starts", starts), whole_number(call, "iterations", iterations)
    if start is None:
        start = GaussianDensity(origin(target, torch.float64), 1.0)
    instance(call, "start", start, Whitened, "Gaussian(mean, sd)")
    allocatable(call, "starts", starts, 8 * starts * start.mean.numel(), "fewer starts", like=start.mean)
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
    for _ in range(SEARCH.rounds):
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
        # a round that adds too little, in every problem, was the last
        if lost.all() or (before is not None and not (before.log_z < found.log_z + math.log1p(-SEARCH.share)).any()):
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


class _Found(NamedTuple):
    """Minima of every problem, ``[N, *batch, ...]``, with masses of NaN where they are not known."""

    position: Tensor
    energy: Tensor
    hits: Tensor
    mass: Tensor
    covariance: Tensor

    def taken(self, order: Tensor) -> "_Found":
        """Those of an order ``[M, *batch]``."""

        def rows(values: Tensor) -> Tensor:
            index = order.reshape(*order.shape, *[1] * (values.ndim - order.ndim))
            return values.gather(0, index.expand(len(order), *values.shape[1:]))

        return _Found(*(rows(part) for part in self))


def _merged(target: Target, reach: Whitened, v: Tensor, iterations: int, known: Modes | None) -> Modes:
    """The modes known, and those that minimisations from ``v [starts, *batch, D]`` in whitened coordinates reach."""
    minima = minimise(in_units_of(reach, target), v, iterations=iterations)
    x, energy = reach.unwhiten(minima.position), torch.where(minima.converged, minima.energy, math.inf)
    unknown = torch.full_like(energy, math.nan, dtype=torch.float64)
    covariances = x.new_full((*x.shape, x.shape[-1]), math.nan)
    found = _Found(x, energy, energy.isfinite().long(), unknown, covariances).taken(energy.argsort(0))
    evaluations = len(v) * minima.evaluations
    if known is not None:
        # first, so that what is found again is counted there, unless that is not a mode
        known_energy = torch.where(known.hits > 0, known.energies, math.inf)
        before = _Found(known.positions, known_energy, known.hits, known.log_masses, known.covariances)
        found = _Found(*(torch.cat(pair) for pair in zip(before, found, strict=True)))
        evaluations += known.evaluations
    first = same_minimum(reach.whiten(found.position), found.energy)
    hits = torch.zeros_like(found.hits).scatter_add(0, first, found.hits)
    hits = torch.where(found.energy.isfinite(), hits, 0)
    order = torch.where(hits > 0, found.energy, math.inf).argsort(0)
    found = found._replace(hits=hits).taken(order[: int((hits > 0).sum(0).max().clamp(1, SEARCH.most))])
    new = found.mass.isnan() & (found.hits > 0)
    rows = new.flatten(1).any(1) if new.ndim > 1 else new
    if rows.any():
        own = settled(target, found.position[rows], new[rows], len(v), minima.evaluations)
        evaluations += own.evaluations
        moved = (own.position, own.energy, torch.where(own.counts, found.hits[rows], 0), own.log_mass, own.covariance)
        found = _Found(*(_with_rows(part, rows, new, there) for part, there in zip(found, moved, strict=True)))
    found = found.taken(torch.where(found.hits > 0, found.energy, math.inf).argsort(0))
    alike = same_mode(found.position, found.energy, found.covariance, found.hits > 0)
    hits = torch.zeros_like(found.hits).scatter_add(0, alike, found.hits)
    found = found._replace(hits=hits, mass=torch.where(hits > 0, found.mass, -math.inf))
    x, energy, hits, masses, covariances = found.taken(found.mass.argsort(0, descending=True))
    return Modes(x, energy, masses, hits, covariances, evaluations)


def spread_out(v: Tensor) -> Tensor:
    """Starts of a search from draws ``[N, *batch, D]`` of standard normals: 1, 2, 4 and 8 times as far, in turn."""
    factors = torch.tensor(SEARCH.spread, dtype=v.dtype, device=v.device)
    factors = factors[torch.arange(len(v), device=v.device) % len(factors)]
    return v * factors.reshape(-1, *[1] * (v.ndim - 1))


def in_units_of(base: Whitened, target: Target) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Energy and gradient of a target in the whitened coordinates of a base."""

    def evaluate(v: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = target.energy_and_gradient(base.unwhiten(v))
        # an energy may compute in 64 bits whatever it is given
        return energy.to(v), base.scale.transpose(gradient)

    return evaluate


def _with_rows(values: Tensor, rows: Tensor, new: Tensor, moved: Tensor) -> Tensor:
    """``values [N, *batch, ...]``, with ``moved`` in these rows where they are ``new [N, *batch]``."""
    values, where = values.clone(), new[rows].reshape(*new[rows].shape, *[1] * (values.ndim - new.ndim))
    values[rows] = torch.where(where, moved, values[rows])
    return values


def _without_spikes(found: Modes, start: Whitened) -> Modes:
    """The same, with mass zero for minima of degenerate curvature or out of all proportion to ``start``."""
    # whitened twice: L^-1 C L^-T
    half = start.scale.solve(found.covariances.movedim(-1, 0)).movedim(0, -1)
    whitened = start.scale.solve(half.movedim(-2, 0)).movedim(0, -2)
    sound = whitened.flatten(-2).isfinite().all(-1) & (found.log_masses > -math.inf)
    unit = torch.eye(whitened.shape[-1], dtype=whitened.dtype, device=whitened.device)
    values = torch.linalg.eigvalsh(torch.where(sound[..., None, None], whitened, unit))
    sound &= values[..., 0] * SEARCH.degenerate > values[..., -1]
    return replace(found, log_masses=torch.where(sound, found.log_masses, -math.inf))


def cover(found: Modes) -> tuple[Tensor, Tensor]:
    """Mean ``[*batch, D]`` and covariance of a mixture of modes whose weights are fourth roots of their masses.

    Weights equal to the masses would rest on the few deepest modes, and modes that are found are not all there are.
    """
    there = found.log_masses > -math.inf
    covariances = torch.where(there[..., None, None], found.covariances, 0.0)
    log_weights = torch.where(there, SEARCH.power * found.log_masses, -math.inf).to(found.positions)
    moments = mixture_moments(found.positions, covariances, log_weights)
    return moments.mean, moments.covariance


class Settled(NamedTuple):
    """Minima ``[N, *batch, D]``, as exact as Newton's steps make them, and their energies ``[N, *batch]``."""

    position: Tensor
    energy: Tensor
    log_mass: Tensor
    """Laplace's, ``[N, *batch]``, float64; ``-inf`` where the Hessian is not positive definite."""
    covariance: Tensor
    """Inverse Hessians, ``[N, *batch, D, D]``, NaN where there is no mass."""
    counts: Tensor
    """Whether each is a minimum, or the best there is, ``[N, *batch]``."""
    evaluations: int
    """Gradients per problem."""


def settled(target: Target, x: Tensor, counts: Tensor, starts: int, steps: int) -> Settled:
    """Newton's steps from where descents ended, ``x [N, *batch, D]``, for those that count, ``[N, *batch]``.

    A descent ends where it sees no slope any more, which in a narrow and curved valley is anywhere along its floor.
    What still goes down after as many gradients as ``starts`` descents of so many steps took, or as many steps, is no
    minimum, and has no mass where its problem has others. What no step lowers is one, at a kink.
    """
    ends, evaluations, made = _newton(target, x, 0), len(x) * target.dim, 0
    on_its_way = counts & ~ends.converged & ends.energy.isfinite()
    while on_its_way.any() and evaluations < starts * steps and made < steps:
        made += SEARCH.newton
        rows = on_its_way.flatten(1).any(1) if on_its_way.ndim > 1 else on_its_way
        moved = _newton(target, ends.position[rows], SEARCH.newton)
        evaluations += SEARCH.newton * len(moved.position) * target.dim
        falling = ~moved.converged & (ends.energy[rows] - moved.energy > SEARCH.fall)
        own, ends = on_its_way[rows], Descended(*(part.clone() for part in ends))
        for part, new in zip(ends, moved, strict=True):
            part[rows] = torch.where(own.reshape(*own.shape, *[1] * (part.ndim - own.ndim)), new, part[rows])
        on_its_way = on_its_way.clone()
        on_its_way[rows] &= falling
    energy = torch.where(counts, ends.energy, math.inf)
    mass, covariance = _masses(energy, ends.hessian)
    # what has no mass takes none from others
    others = (counts & ~on_its_way & mass.isfinite()).any(0)
    counts = counts & ~(on_its_way & others)
    return Settled(ends.position, energy, torch.where(counts, mass, -math.inf), covariance, counts, evaluations)


def _newton(target: Target, x: Tensor, steps: int) -> Descended:
    relative = 8 * torch.finfo(x.dtype).eps
    parts = [descended(target, part, steps, SEARCH.decrease, relative) for part in x.split(_at_once(x))]
    return Descended(*(torch.cat(part) for part in zip(*parts, strict=True)))


def laplace_masses(target: Target, x: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Laplace's log masses of minima ``x [N, *batch, D]`` of these energies, and inverse Hessians.

    ``-inf`` and a matrix of NaN where the Hessian is not positive definite.
    """
    hessians = [curvature(target, part)[2] for part in x.split(_at_once(x))]
    return _masses(energy, torch.cat(hessians))


def _at_once(x: Tensor) -> int:
    """Rows of ``[N, *batch, D]`` whose Hessians are computed together."""
    return max(1, SEARCH.rows // max(1, x[:1].numel()))


def _masses(energy: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    dim = hessian.shape[-1]
    factor, failed = torch.linalg.cholesky_ex(hessian.nan_to_num(0.0, 0.0, 0.0))
    definite = (failed == 0) & energy.isfinite()
    wide = definite[..., None, None]
    safe = torch.where(wide, factor, torch.eye(dim, dtype=hessian.dtype, device=hessian.device))
    log_det = safe.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    masses = torch.where(definite, 0.5 * dim * math.log(2 * math.pi) - energy - log_det, -math.inf).double()
    return masses, torch.where(wide, torch.cholesky_inverse(safe), math.nan)
