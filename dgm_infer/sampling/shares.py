"""Starts shared out over the modes of a posterior by their masses (math 5.10)."""

import math

import torch
from torch import Tensor

from ..bases.descent import minimise
from ..bases.modes import laplace_masses, same_minimum
from ..conditioning.marginal import NoiseMarginal

__all__ = ["shared_out"]

# Gradients of a descent, at most.
_ITERATIONS = 100
# Share of the mass of all modes below which a mode needs no chain.
_SHARE = 1e-3
# Nats above the lowest minimum, beyond which curvatures make up for no energy.
_WITHIN = 30.0
# Points that have to remain, for R-hat to compare chains.
_FEWEST = 4
# Points whose minimisation has to end, as a share.
_MOST = 0.75
# Numbers in the second derivatives of all points, and in the images they take, up to which they are worth their time.
_NUMBERS = 2**24


def shared_out(marginal: NoiseMarginal, position: Tensor, chains: int, rng: torch.Generator) -> Tensor:
    """The point that each chain starts from, so that modes hold chains in proportion to their Laplace masses.

    The energy is minimised from every point. Minima that are the same are one mode, whose mass its points share evenly,
    and the chains are a systematic sample of the points. Of a rugged energy, in which fewer than four points would
    remain, or of a model without second derivatives, or one where these take long, every chain keeps its own point.

    Args:
        marginal: what the positions are of.
        position: ``[points, *batch, D]``, at least as many as chains.
        chains: number of chains.
        rng: random numbers of the systematic sample.

    Returns:
        indices of points, ``[chains, *batch]``.
    """
    n, batch = len(position), position.shape[1:-1]
    index = torch.arange(n, device=position.device).view(-1, *[1] * len(batch))
    own = index[:chains].expand(chains, *batch)
    if n * marginal.dim * max(marginal.dim, math.prod(marginal.model.output_shape)) > _NUMBERS:
        return own
    minima = minimise(marginal.energy_and_gradient, position, iterations=_ITERATIONS)
    # the lowest first, which then stand for their modes
    energy, order = torch.where(minima.converged, minima.energy, torch.inf).sort(0)
    x = minima.position.gather(0, order.unsqueeze(-1).expand_as(position))
    first = same_minimum(x, energy)
    modes = first == index
    try:
        share = _masses(marginal, x, energy, modes).gather(0, first)
    except RuntimeError:
        # an operation of the model has no second derivative
        return own
    share = share / torch.zeros_like(share).scatter_add(0, first, torch.ones_like(share)).gather(0, first)
    told = (modes.sum(0) > 1) & ((share > 0).sum(0) >= min(_FEWEST, chains))
    told &= minima.converged.double().mean(0) >= _MOST
    ends = (share / share.sum(0)).cumsum(0).reshape(n, -1)
    comb = own.reshape(chains, -1) + torch.rand(ends.shape[1:], generator=rng, dtype=ends.dtype, device=ends.device)
    chosen = torch.searchsorted(ends.T.contiguous(), (comb / chains).T.contiguous()).T.clamp_max(n - 1)
    return torch.where(told, order.gather(0, chosen.reshape(chains, *batch)), own)


def _masses(marginal: NoiseMarginal, x: Tensor, energy: Tensor, modes: Tensor) -> Tensor:
    """Shares of the mass, ``[points, *batch]``, of modes at ``x [points, *batch, D]``; 0 where there is none, or a
    negligible one."""
    hopeful = modes & (energy < energy.amin(0) + _WITHIN)
    log_mass = torch.where(hopeful, 0.0, -torch.inf).to(energy)
    if (hopeful.sum(0) > 1).any():
        rows = hopeful.reshape(len(x), -1).any(1)
        laplace = laplace_masses(marginal, x[rows], energy[rows])[0]
        log_mass[rows] = torch.where(hopeful[rows], laplace.to(energy), -torch.inf)
    mass = torch.softmax(log_mass, 0).nan_to_num()
    return torch.where(mass < _SHARE, 0.0, mass)
