"""Starts shared out over the modes of a posterior by their masses (math 5.10)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.metrics import curvature_metric
from ..kernels.mode_jumps import Jumps
from ..linear_maps import IDENTITY
from ..references.minimise import minimise, places, same_minimum, same_mode
from ..references.modes import laplace_masses
from ..target import Posterior
from .execution import evaluation

Evaluated = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class AllocationSettings:
    """Settings of the descents to the modes, and of when their masses are reliable."""

    searches: int = 256
    """Descents from prior draws at most: 6 % of them reach the best mode of the hardest digit that was looked at (math
    5.10)."""
    slow_searches: int = 64
    """The same of networks with convolutions, whose gradients take long."""
    iterations: int = 100
    """Gradients of a descent, at most."""
    few: int = 8
    """Descents from prior draws of a problem that are made first: enough to tell nearly all from hardly any."""
    converging: float = 0.5
    """Share of descents that converge, of points or of these few, below which no further ones are made: of seven
    generators' posteriors it was above three quarters or below a tenth."""
    share: float = 1e-3
    """Share of the mass of all modes below which a mode needs no chain."""
    within: float = 30.0
    """Nats above the lowest minimum, beyond which curvature cannot offset the energy gap."""
    fewest: int = 4
    """Points of a mode, for R-hat to compare chains: else some begin at draws of its normal approximation."""
    each: int = 4
    """Points per mode, of an energy that is not a ridge."""
    level: float = 1e-2
    """Largest g^T H^-1 g at a minimum of a smooth energy, in nats."""
    degenerate: float = 1e8
    """Largest ratio of the curvatures at a minimum."""
    numbers: int = 2**24
    """Numbers in second derivatives up to which they are worth their time and memory."""
    outputs: int = 2**26
    """Outputs of all points and problems together above which there are fewer points: half a gigabyte in float64, and
    several times that with a gradient."""


_SETTINGS = AllocationSettings()


class Allocation(NamedTuple):
    """Where chains start."""

    chosen: Tensor
    """The point of each, ``[chains, *batch]`` indices; beyond the last point those of the prior draws."""
    position: Tensor | None = None
    """Where each starts, ``[chains, *batch, D]``, if it begins with a prior draw; None if none does."""
    jumps: Jumps | None = None
    """Between the modes that the points ended in; None where no problem has several."""


def allocate_chains(
    posterior: Posterior,
    position: Tensor,
    chains: int,
    rng: torch.Generator,
    evaluated: Evaluated | None = None,
) -> Allocation:
    """The point that each chain starts from, so that modes hold chains in proportion to their Laplace masses.

    The energy is minimised from every point and, as long as at least half of the descents converge, from up to 256
    draws of the prior, which may lead to modes without a point. Minima within a third of a standard deviation are one
    mode, whose mass its points share evenly, and the chains are a systematic sample of the points; in modes of fewer
    than four points some start at draws of the normal approximation. Every chain keeps its own point where masses are
    not reliable: descents of points that may lead to modes of mass do not converge, or descents end at kinks or along
    ridges, second derivatives are missing or take long.

    Args:
        posterior: what the positions are of.
        position: ``[points, *batch, D]``, at least as many as chains.
        chains: number of chains.
        rng: random numbers of the systematic sample.
        evaluated: the energy, up to a constant, and gradient in float64, if they are at hand; None for the posterior's.
    """
    n, batch, dim = len(position), position.shape[1:-1], posterior.dim
    index = places(position[..., 0])
    own, size = index[:chains], dim * max(dim, posterior.n_outputs)
    if n * size > _SETTINGS.numbers:
        return Allocation(own)
    # descents and second derivatives of 32 bits would end anywhere near a minimum
    like = position
    if position.dtype != torch.float64:
        exact, position = posterior.to(torch.float64), position.double()
        try:
            with torch.no_grad():
                exact.energy(position[:1])
        except RuntimeError:
            # layers that compute in no other type, for which the user chose this one
            return Allocation(own)
        posterior = exact
    left = min(_SETTINGS.numbers // size, affordable(posterior)) - n
    searches = min(_SETTINGS.slow_searches if posterior.convolves else _SETTINGS.searches, max(0, left))
    pool = torch.cat([position, posterior.initial_draws(searches, rng)])
    evaluated = evaluated or evaluation(posterior, pool, 2 * _SETTINGS.iterations)
    descents: list[tuple[Tensor, ...]] = []
    for part in pool.split([n, min(_SETTINGS.few, searches), searches - min(_SETTINGS.few, searches)]):
        if len(part) and (not descents or descents[-1][-1].double().mean() >= _SETTINGS.converging):
            descents.append(_descended(posterior, part, evaluated))
    pool = pool[: sum(len(minima) for minima, *_ in descents)]
    index = places(pool[..., 0])
    is_point = index < n
    minimum, reached, converged = (torch.cat(part) for part in zip(*descents, strict=True))
    # the lowest first, which then stand for their modes
    energy, order = torch.where(converged, reached, torch.inf).sort(0)
    x = minimum.gather(0, order.unsqueeze(-1).expand_as(pool))
    is_point = is_point.gather(0, order)
    first = same_minimum(x, energy)
    hopeful = (first == index) & (energy < energy.amin(0) + _SETTINGS.within)
    several = (energy.isfinite() & (first > 0)).any(0)
    # of points whose descents take longer, those far above have stranded
    told = several & (converged[:n] | (reached[:n] > energy[0] + _SETTINGS.within)).all(0)
    n_modes = int((hopeful & several).sum(0).max())
    if n_modes == 0 or n_modes * dim**2 * batch.numel() > _SETTINGS.numbers:
        return Allocation(own)
    # the hopeful ones of every problem, still in the order of their energies
    front = (~hopeful).to(torch.int8).argsort(dim=0, stable=True)[:n_modes]
    counts = hopeful.gather(0, front)
    try:
        found = _weighed(posterior, x.gather(0, front.unsqueeze(-1).expand(*front.shape, dim)), counts)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # an operation of the model has no second derivative
        return Allocation(own)
    first = index.scatter(0, front, torch.where(counts, front.gather(0, found.same), front)).gather(0, first)
    # points are typical of their modes; where a mode has fewer than chains need, any descent that led to it counts
    n_points = torch.zeros_like(energy).scatter_add(0, first, is_point.to(energy)).gather(0, first)
    counted = (is_point | (n_points < min(_SETTINGS.fewest, chains))) & energy.isfinite()
    hits = torch.zeros_like(energy).scatter_add(0, first, counted.to(energy)).gather(0, first).clamp_min(1)
    share = torch.zeros_like(energy).scatter(0, front, found.mass).gather(0, first) / hits * counted
    told &= found.sound & (_SETTINGS.each * (found.mass > 0).sum(0) <= len(pool))
    ends = share.reshape(len(pool), -1).cumsum(0)
    comb = own.reshape(chains, -1) + torch.rand(ends.shape[1:], generator=rng, dtype=ends.dtype, device=ends.device)
    chosen = torch.searchsorted((ends / ends[-1]).T.contiguous(), (comb / chains).T.contiguous()).T
    chosen = chosen.clamp_max(len(pool) - 1).reshape(chains, *batch)
    mode = (front.unsqueeze(1) == first.gather(0, chosen)).to(torch.int8).argmax(0)
    drawn = _drawn(posterior, x.gather(0, front.unsqueeze(-1).expand(*front.shape, dim)), found.covariance, mode, rng)
    chosen = torch.where(told, order.gather(0, chosen), own)
    jumps = found.jumps.to(like) if (found.jumps.counts > 1).any() else None
    if (chosen < n).all():
        return Allocation(chosen, jumps=jumps)
    kept = like.gather(0, chosen.clamp_max(n - 1).unsqueeze(-1).expand(*chosen.shape, dim))
    return Allocation(chosen, torch.where((chosen < n).unsqueeze(-1), kept, drawn.to(like)), jumps)


def affordable(posterior: Posterior) -> int:
    """Points per problem whose outputs memory holds."""
    return _SETTINGS.outputs // (posterior.n_outputs * max(1, posterior.batch_shape.numel()))


def _drawn(posterior: Posterior, x: Tensor, covariance: Tensor, mode: Tensor, rng: torch.Generator) -> Tensor:
    """Draws ``[chains, *batch, D]`` of the normal approximations of modes, or the modes where these lead too high.

    Args:
        x: the modes, ``[M, *batch, D]``.
        covariance: ``[M, *batch, D, D]``.
        mode: of each chain, ``[chains, *batch]``.
    """
    dim = x.shape[-1]
    unit = torch.eye(dim).to(x)
    usable = covariance.flatten(-2).isfinite().all(-1)[..., None, None]
    factor = torch.linalg.cholesky_ex(torch.where(usable, covariance, unit)).L * usable
    centre = x.gather(0, mode.unsqueeze(-1).expand(*mode.shape, dim))
    factor = factor.gather(0, mode[..., None, None].expand(*mode.shape, dim, dim))
    noise = torch.randn(centre.shape, generator=rng, dtype=x.dtype, device=x.device)
    draw = centre + (factor @ noise.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        near = posterior.energy(draw) < posterior.energy(centre) + _SETTINGS.within
    return torch.where(near.unsqueeze(-1), draw, centre)


def _descended(posterior: Posterior, x: Tensor, evaluated: Evaluated) -> tuple[Tensor, Tensor, Tensor]:
    """Where descents from ``x [N, *batch, D]`` end, the energies there, and whether they have converged."""
    # in units of the curvature where they start: of the prior's draws four times as many then reach the best mode
    metric = curvature_metric(posterior, x) or IDENTITY

    def evaluate(v: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = evaluated(metric.apply(v))
        return energy, metric.transpose(gradient)

    minima = minimise(evaluate, metric.solve(x), iterations=_SETTINGS.iterations)
    return metric.apply(minima.position), minima.energy, minima.converged


class _Weighed(NamedTuple):
    mass: Tensor
    """Allocation of the mass, ``[M, *batch]``: 0 of minima that do not count, are another one's mode or hardly any."""
    same: Tensor
    """The first minimum that is the same mode as each, ``[M, *batch]``."""
    sound: Tensor
    """Whether all modes are minima of a smooth energy, and none is a ridge, ``[*batch]``."""
    covariance: Tensor
    """Inverse Hessians, ``[M, *batch, D, D]``; NaN where there is none."""
    jumps: Jumps
    """Between those of mass, sound or not."""


def _weighed(posterior: Posterior, x: Tensor, counts: Tensor) -> _Weighed:
    """Masses of minima ``x [M, *batch, D]`` in the order of their energies, of which some count, ``[M, *batch]``."""
    energy, gradient = posterior.energy_and_gradient(x)
    log_mass, covariance = laplace_masses(posterior, x, energy)
    definite = log_mass.isfinite()
    same = same_mode(x, energy, covariance, counts)
    unit = torch.eye(x.shape[-1]).to(x)
    spread = torch.linalg.eigvalsh(torch.where(definite[..., None, None], covariance, unit))
    level = (gradient * (covariance @ gradient.unsqueeze(-1)).squeeze(-1)).sum(-1) < _SETTINGS.level
    sound = definite & level & (spread[..., 0] * _SETTINGS.degenerate > spread[..., -1])
    modes = counts & (same == places(counts))
    mass = torch.softmax(torch.where(modes, log_mass.to(energy), -torch.inf), 0).nan_to_num()
    mass = torch.where(mass < _SETTINGS.share, 0.0, mass)
    return _Weighed(mass, same, (sound | ~modes).all(0), covariance, Jumps.between(x, covariance, mass.log()))
