"""Basins of a fibre: to which low point the draws of each chain belong (math 5.9)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..conditioning.projection import solver_tolerance
from ..conditioning.start_points import towards
from ..errors import ArgumentError
from .chain_groups import connected, numbered

__all__ = ["Basins", "basins"]

# Rounds of moves after which a point is as low as it gets, and the distance moved in a round, root mean square over the
# inputs, below which it is before.
_ROUNDS, _STILL = 4, 0.01
# Distance, root mean square over the inputs, up to which two low points are the same: prior draws are 1.4 apart.
_SAME = 0.1


class Basins(NamedTuple):
    """Where the draws of each chain lead to when they go down the fibre."""

    mode: Tensor
    """``[chains, *batch]``: number of the mode that each chain is in, 0 for that of most chains. Modes are basins, and
    those that a chain has gone between are one."""
    energy: Tensor
    """``[looks, chains, *batch]``: energy at the low point of each draw that was looked at."""
    point: Tensor
    """``[looks, chains, *batch, D]``: the low points."""


def basins(fibre: Fibre, position: Tensor) -> Basins:
    """The modes that chains are in, by the low points below some of their draws.

    From each draw a point moves along the fibre towards the origin, as far as that goes (math 5.5, 5.8). Draws whose
    low points coincide are in one basin. It tells modes apart by few draws, in which chains need not have mixed.

    Args:
        fibre: of a model with standard normal inputs.
        position: ``[looks, chains, *batch, D]``, draws that are some transitions apart.

    Raises:
        ArgumentError: the inputs are not standard normal.
    """
    if not fibre.model.input_density.is_standard_normal:
        raise ArgumentError("basins of a fibre need standard normal inputs, whose mode is the origin")
    looks, chains = position.shape[:2]
    rows = fibre.rows(looks * chains)
    cheap = rows.for_searches.computed(gram_force=False)
    point = position.reshape(-1, fibre.dim).clone()
    left = torch.arange(len(point), device=point.device)
    for _ in range(_ROUNDS):
        here = cheap.take(left)
        tolerance = solver_tolerance(point.dtype) * here.scale
        start, active = point[left], torch.ones_like(tolerance, dtype=torch.bool)
        point[left] = towards(here, start, torch.zeros_like(start), tolerance=tolerance, active=active)
        left = left[(point[left] - start).square().mean(-1).sqrt() > _STILL]
        if not len(left):
            break
    energy = cheap.evaluate(type(cheap).linearise, point).energy
    mode = _modes(point.reshape(looks, chains, -1, fibre.dim).movedim(2, 0))
    shape = position.shape
    return Basins(mode.T.reshape(shape[1:-1]), energy.reshape(shape[:-1]), point.reshape(shape))


def _modes(point: Tensor) -> Tensor:
    """Numbers of the modes ``[P, chains]`` of low points ``[P, looks, chains, D]``."""
    _, looks, chains, dim = point.shape
    flat = point.flatten(1, 2)
    linked = torch.cdist(flat, flat) < _SAME * math.sqrt(dim)
    # draws of one chain are linked by what it did between them
    chain = torch.arange(chains, device=point.device).repeat(looks)
    linked |= chain == chain.unsqueeze(-1)
    linked = connected(linked)[:, :chains, :chains]
    return numbered(linked, torch.ones_like(linked[..., 0]))
