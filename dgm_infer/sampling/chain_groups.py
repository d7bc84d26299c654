"""The pieces of a posterior that chains are in: groups that never overlap (math 5.7), basins of a fibre (math 5.9)."""

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..conditioning.projection import solver_tolerance
from ..conditioning.start_points import towards
from ..errors import ArgumentError


@dataclass(frozen=True)
class GroupSettings:
    """Settings of the draws by which groups are told apart; the shares are judged in math 5.7."""

    looks: int = 64
    """Draws of a chain that are looked at, evenly spaced."""
    blocks: int = 8
    """Blocks of consecutive ones."""
    fewest: int = 32
    """Fewest of them that say anything."""
    drift: float = 0.5
    """Share of the variance of a chain's draws, along the line to another group, that is between its blocks, up to
    which it moves about in its own place: 1/8 for independent draws, 7/8 on average for a random walk, 4 % of which
    stay below."""
    at_home: float = 0.9
    """Share of a chain's draws that have their nearest neighbour at home from which two chains do not overlap: 1/2
    where both draw from the same distribution."""
    most: int = 32
    """Groups that are told apart: more are chains that hardly move."""
    distances: int = 2**23
    """Distances computed at once."""


_SETTINGS = GroupSettings()


def looks(n: int) -> Tensor:
    """Indices of the draws that are looked at, of n per chain: evenly spaced, a multiple of the blocks, 64 at most."""
    kept = max(1, min(n, _SETTINGS.looks) // _SETTINGS.blocks * _SETTINGS.blocks)
    return torch.arange(kept) * n // kept


def side_by_side(latents: dict[str, Tensor], batch: int) -> Tensor:
    """Latents ``[chains, draws, *batch, *shape]`` as one ``[chains, draws, *batch, D]``."""
    return torch.cat([value.double().unsqueeze(-1).flatten(2 + batch) for value in latents.values()], -1)


def labels(latents: dict[str, Tensor], n_lead: int) -> list[str]:
    """Names of the entries of latents ``[*lead, *shape]``, such as ``z[3]``, in the order of :func:`side_by_side`."""
    return [
        f"{name}[{', '.join(map(str, index))}]" if index else name
        for name, shape in ((name, value.shape[n_lead:]) for name, value in latents.items())
        for index in product(*map(range, shape))
    ]


@torch.no_grad()
def group_chains(values: Tensor) -> Tensor:
    """Number of the group of each chain, by the draws ``values [chains, draws, *batch, D]``.

    Two chains *overlap* unless nine tenths of the draws of either have their nearest neighbour in their own chain, but
    another block, and not in the other chain. What is linked by chains that overlap is one group. A chain *settles*
    along the line between the means of two groups if at most half of its variance along it is between eight blocks of
    draws. Two groups are apart if most chains of each settle. Coordinates are measured in the median absolute deviation
    of a chain.

    Returns:
        ``[chains, *batch]``: 0 for the largest group, and so on; -1 for groups that may still meet the largest one, or
        for all chains if fewer than half of a problem's are in other groups, or there are too few draws, or more than
        32 groups.
    """
    chains, _, *batch = values.shape[:-1]
    x = values[:, looks(values.shape[1]).to(values.device)].double()
    labels = torch.full((chains, *batch), -1, device=x.device)
    if chains < 2 or x.shape[1] < _SETTINGS.fewest or not labels.numel():
        return labels
    x = _standardised(x.reshape(chains, x.shape[1], -1, x.shape[-1]).movedim(2, 0))
    size = max(1, _SETTINGS.distances // (chains * x.shape[2] ** 2))
    return torch.cat([_of_problems(part) for part in x.split(size)]).T.reshape(labels.shape)


def _standardised(x: Tensor) -> Tensor:
    """``[P, chains, draws, D]`` with coordinates in units of their spread within a chain; 0 where not finite."""
    spread = (x - x.median(2, keepdim=True).values).abs().median(2, keepdim=True).values.median(1, keepdim=True).values
    # what is constant in a chain may differ between chains
    widest = (x - x[:, :1, :1]).abs().amax((1, 2), keepdim=True)
    spread = spread.maximum(1e-3 * widest)
    return (x / torch.where(spread > 0, spread, 1)).nan_to_num(0, 0, 0)


def _of_problems(x: Tensor) -> Tensor:
    """The groups ``[P, chains]`` of ``[P, chains, draws, D]``."""
    problems, chains = x.shape[:2]
    linked = torch.eye(chains, dtype=torch.bool, device=x.device).repeat(problems, 1, 1)
    # each group by comparison with its first chain: linear in the chains where there is one group
    waiting = torch.ones(problems, chains, dtype=torch.bool, device=x.device)
    for _ in range(_SETTINGS.most):
        rows = waiting.any(1).nonzero().flatten()
        if not len(rows):
            break
        leader = waiting[rows].to(torch.int8).argmax(1)
        near = ~_at_home(x[rows], x[rows, leader].unsqueeze(1))
        near[torch.arange(len(rows), device=x.device), leader] = True
        linked[rows, leader] |= near
        waiting[rows] &= ~near
    linked = connected(linked | linked.mT)
    moves = (x.var(2, correction=0) > 0).any(-1)
    group = numbered(linked, moves)
    largest, known = group == 0, group == 0
    for number in range(1, int(group.amax()) + 1):
        other = group == number
        settled = _settle(x, _mean(x, other) - _mean(x, largest)) & moves
        known |= other & (_most(settled, other) & _most(settled, largest)).unsqueeze(1)
    known &= (2 * known.sum(1, keepdim=True) >= chains) & ~waiting.any(1, keepdim=True)
    return numbered(linked, known)


def _mean(x: Tensor, chains: Tensor) -> Tensor:
    """The mean draw of some chains, ``[P, D]``; NaN where there are none."""
    return (x.mean(2) * chains.unsqueeze(-1)).sum(1) / chains.sum(1, keepdim=True)


def _most(settled: Tensor, chains: Tensor) -> Tensor:
    """Whether most of some chains settle, ``[P]``."""
    return 2 * (settled & chains).sum(1) > chains.sum(1)


def _settle(x: Tensor, line: Tensor) -> Tensor:
    """Whether chains settle along a line ``[P, D]``, ``[P, chains]``."""
    along = (x * line[:, None, None]).sum(-1)
    between = along.unflatten(-1, (_SETTINGS.blocks, -1)).mean(-1).var(-1, correction=0)
    # what is constant in a chain does not drift
    return between <= _SETTINGS.drift * along.var(-1, correction=0) + 1e-12 * line.square().sum(-1, keepdim=True)


def _at_home(x: Tensor, first: Tensor) -> Tensor:
    """Whether each chain and the first of its problem have their own neighbours, ``[P, chains]``."""
    own, leading = (_nearest(y, y) for y in (x, first))
    across = torch.cdist(x, first.expand_as(x))
    block = _block(x.shape[2], x.device)
    across = across.masked_fill(block.unsqueeze(1) == block, torch.inf)
    home = (own < across.amin(-1)).double().mean(-1), (leading < across.amin(-2)).double().mean(-1)
    return torch.minimum(*home) >= _SETTINGS.at_home


def _nearest(x: Tensor, y: Tensor) -> Tensor:
    """Distance of each draw to the nearest of another block, ``[P, chains, draws]``."""
    block = _block(x.shape[2], x.device)
    return torch.cdist(x, y).masked_fill(block.unsqueeze(1) == block, torch.inf).amin(-1)


def _block(draws: int, device: torch.device) -> Tensor:
    return torch.arange(draws, device=device) // (draws // _SETTINGS.blocks)


def connected(linked: Tensor) -> Tensor:
    """Whether chains are linked by others, ``[P, chains, chains]``."""
    for _ in range(max(1, (linked.shape[-1] - 1).bit_length())):
        linked = (linked.double() @ linked.double()) > 0
    return linked


def numbered(linked: Tensor, known: Tensor) -> Tensor:
    """Numbers of the groups of linked chains by their size, ``[P, chains]``; -1 where not known."""
    chains = linked.shape[-1]
    first, size = linked.to(torch.int8).argmax(-1), linked.sum(-1)
    # groups in the order of size, then of their first chain
    key = torch.where(known, -size * chains + first, chains)
    earlier = (key.unsqueeze(-1) > key.unsqueeze(-2)) & known.unsqueeze(-2)
    is_first = first == torch.arange(chains, device=first.device)
    return torch.where(known, (earlier & is_first.unsqueeze(-2)).sum(-1), -1)


def longest_run(held: Tensor) -> Tensor:
    """Longest run of True along the second dimension, ``[chains, n, *batch] -> [chains, *batch]``."""
    run = longest = held.new_zeros((held.shape[0], *held.shape[2:]), dtype=torch.int64)
    for stayed in held.unbind(1):
        run = torch.where(stayed, run + 1, 0)
        longest = torch.maximum(longest, run)
    return longest


@dataclass(frozen=True)
class BasinSettings:
    """Settings of moves down a fibre; distances are root mean squares over the inputs."""

    rounds: int = 4
    """Rounds of moves after which a point is as low as it gets."""
    still: float = 0.01
    """Distance moved in a round below which it is before."""
    same: float = 0.1
    """Distance up to which two low points are the same: prior draws are 1.4 apart."""


_BASINS = BasinSettings()


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
    for _ in range(_BASINS.rounds):
        here = cheap.take(left)
        tolerance = solver_tolerance(point.dtype) * here.scale
        start, active = point[left], torch.ones_like(tolerance, dtype=torch.bool)
        point[left] = towards(here, start, torch.zeros_like(start), tolerance=tolerance, active=active)
        left = left[(point[left] - start).square().mean(-1).sqrt() > _BASINS.still]
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
    linked = torch.cdist(flat, flat) < _BASINS.same * math.sqrt(dim)
    # draws of one chain are linked by what it did between them
    chain = torch.arange(chains, device=point.device).repeat(looks)
    linked |= chain == chain.unsqueeze(-1)
    linked = connected(linked)[:, :chains, :chains]
    return numbered(linked, torch.ones_like(linked[..., 0]))
