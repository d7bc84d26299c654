"""Groups of chains that never overlap: what a run shows of a posterior in several pieces (math 5.7)."""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor


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


def labels(latents: dict[str, Tensor], batch: int) -> list[str]:
    """Names of the D columns of :func:`side_by_side`, such as ``z[3]``."""
    shapes = {name: value.shape[2 + batch :] for name, value in latents.items()}
    return [
        f"{name}[{', '.join(map(str, index))}]" if index else name
        for name, shape in shapes.items()
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
