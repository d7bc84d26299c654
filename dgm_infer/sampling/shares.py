"""Starts shared out over the modes of a posterior by their masses (math 5.10)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..bases.descent import minimise
from ..bases.minima import laplace_masses, places, same_minimum, same_mode
from ..conditioning.marginal import NoiseMarginal
from ..kernels.jumps import Jumps
from ..kernels.lifted import curvature_metric
from ..kernels.metrics import IDENTITY

__all__ = ["Shares", "shared_out"]

# Gradients of a descent, at most.
_ITERATIONS = 100
# Share of the mass of all modes below which a mode needs no chain.
_SHARE = 1e-3
# Nats above the lowest minimum, beyond which curvatures make up for no energy.
_WITHIN = 30.0
# Points that have to remain, for R-hat to compare chains, and points per mode, of an energy that is not a ridge.
_FEWEST, _EACH = 4, 4
# Largest g^T H^-1 g at a minimum of a smooth energy, and ratio of its curvatures.
_LEVEL, _DEGENERATE = 1e-2, 1e8
# Numbers in the second derivatives of all points, and in the images they take, up to which they are worth their time.
_NUMBERS = 2**24


class Shares(NamedTuple):
    """Where chains start."""

    chosen: Tensor
    """The point of each, ``[chains, *batch]`` indices."""
    jumps: Jumps | None = None
    """Between the modes that the points ended in; None where no problem has several."""


def shared_out(marginal: NoiseMarginal, position: Tensor, chains: int, rng: torch.Generator) -> Shares:
    """The point that each chain starts from, so that modes hold chains in proportion to their Laplace masses.

    The energy is minimised from every point. Minima within a third of a standard deviation are one mode, whose mass its
    points share evenly, and the chains are a systematic sample of the points. Every chain keeps its own point where
    this tells nothing: descents do not end, or end at kinks or along ridges, fewer than four points would remain,
    numbers have 32 bits, second derivatives are missing or take long.

    Args:
        marginal: what the positions are of.
        position: ``[points, *batch, D]``, at least as many as chains.
        chains: number of chains.
        rng: random numbers of the systematic sample.
    """
    n, batch, dim = len(position), position.shape[1:-1], marginal.dim
    index = places(position[..., 0])
    own, size = index[:chains], dim * max(dim, math.prod(marginal.model.output_shape))
    if position.dtype != torch.float64 or n * size > _NUMBERS:
        return Shares(own)
    metric = curvature_metric(marginal, position) or IDENTITY

    def evaluate(v: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = marginal.energy_and_gradient(metric.velocity(v))
        return energy, metric.force(gradient)

    # in units of the curvature: a third of the gradients
    minima = minimise(evaluate, metric.whiten(position), iterations=_ITERATIONS)
    # the lowest first, which then stand for their modes
    energy, order = torch.where(minima.converged, minima.energy, torch.inf).sort(0)
    x = metric.velocity(minima.position).gather(0, order.unsqueeze(-1).expand_as(position))
    first = same_minimum(x, energy)
    hopeful = (first == index) & (energy < energy.amin(0) + _WITHIN)
    told = minima.converged.all(0) & (first > 0).any(0)
    n_modes = int((hopeful & told).sum(0).max())
    if n_modes == 0 or n_modes * size * batch.numel() > _NUMBERS:
        return Shares(own)
    # the hopeful ones of every problem, still in the order of their energies
    front = (~hopeful).to(torch.int8).argsort(dim=0, stable=True)[:n_modes]
    counts = hopeful.gather(0, front)
    try:
        found = _weighed(marginal, x.gather(0, front.unsqueeze(-1).expand(*front.shape, dim)), counts)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # an operation of the model has no second derivative
        return Shares(own)
    first = index.scatter(0, front, torch.where(counts, front.gather(0, found.same), front)).gather(0, first)
    hits = torch.zeros_like(energy).scatter_add(0, first, torch.ones_like(energy))
    share = (torch.zeros_like(energy).scatter(0, front, found.mass) / hits).gather(0, first)
    told &= found.sound & ((share > 0).sum(0) >= min(_FEWEST, chains)) & (_EACH * (found.mass > 0).sum(0) <= n)
    ends = share.reshape(n, -1).cumsum(0)
    comb = own.reshape(chains, -1) + torch.rand(ends.shape[1:], generator=rng, dtype=ends.dtype, device=ends.device)
    chosen = torch.searchsorted((ends / ends[-1]).T.contiguous(), (comb / chains).T.contiguous()).T.clamp_max(n - 1)
    chosen = torch.where(told, order.gather(0, chosen.reshape(chains, *batch)), own)
    return Shares(chosen, found.jumps if (found.jumps.counts > 1).any() else None)


class _Weighed(NamedTuple):
    mass: Tensor
    """Shares of the mass, ``[M, *batch]``: 0 of minima that do not count, are another one's mode or hardly any."""
    same: Tensor
    """The first minimum that is the same mode as each, ``[M, *batch]``."""
    sound: Tensor
    """Whether all modes are minima of a smooth energy, and none is a ridge, ``[*batch]``."""
    jumps: Jumps
    """Between those of mass, sound or not."""


def _weighed(marginal: NoiseMarginal, x: Tensor, counts: Tensor) -> _Weighed:
    """Masses of minima ``x [M, *batch, D]`` in the order of their energies, of which some count, ``[M, *batch]``."""
    energy, gradient = marginal.energy_and_gradient(x)
    log_mass, covariance = laplace_masses(marginal, x, energy)
    definite = log_mass.isfinite()
    same = same_mode(x, energy, covariance, counts)
    unit = torch.eye(x.shape[-1]).to(x)
    spread = torch.linalg.eigvalsh(torch.where(definite[..., None, None], covariance, unit))
    level = (gradient * (covariance @ gradient.unsqueeze(-1)).squeeze(-1)).sum(-1) < _LEVEL
    sound = definite & level & (spread[..., 0] * _DEGENERATE > spread[..., -1])
    modes = counts & (same == places(counts))
    mass = torch.softmax(torch.where(modes, log_mass.to(energy), -torch.inf), 0).nan_to_num()
    mass = torch.where(mass < _SHARE, 0.0, mass)
    return _Weighed(mass, same, (sound | ~modes).all(0), Jumps.between(x, covariance, mass.log()))
