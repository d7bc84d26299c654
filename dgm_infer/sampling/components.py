"""Groups of chains that never overlap: what a run shows of a posterior in several pieces (math 5.7)."""

import torch
from torch import Tensor

__all__ = ["chain_groups", "looks", "side_by_side"]

# Draws of a chain that are looked at, evenly spaced, and blocks of consecutive ones.
_LOOKS, _BLOCKS = 64, 8
# Fewest of them that say anything.
_FEWEST = 32
# Share of the variance of a chain's draws that is between its blocks, up to which it moves about in its own place:
# 1/8 for independent draws, 7/8 on average for a random walk, 4 % of which stay below this.
_DRIFT = 0.5
# Share of a chain's draws that have their nearest neighbour at home from which two chains are apart: 1/2 where both
# draw from the same distribution.
_AT_HOME = 0.9
# Groups that are told apart: more are chains that hardly move.
_MOST = 32
# Distances computed at once.
_DISTANCES = 2**23


def looks(n: int) -> Tensor:
    """Indices of the draws that are looked at, of n per chain: evenly spaced, a multiple of the blocks, 64 at most."""
    kept = max(1, min(n, _LOOKS) // _BLOCKS * _BLOCKS)
    return torch.arange(kept) * n // kept


def side_by_side(latents: dict[str, Tensor], batch: int) -> Tensor:
    """Latents ``[chains, draws, *batch, *shape]`` as one ``[chains, draws, *batch, D]``."""
    return torch.cat([value.double().unsqueeze(-1).flatten(2 + batch) for value in latents.values()], -1)


@torch.no_grad()
def chain_groups(values: Tensor) -> Tensor:
    """Number of the group of each chain, by the draws ``values [chains, draws, *batch, D]``.

    A chain *settles* if at most half of the variance of each coordinate is between eight blocks of its draws. Two
    settled chains are *apart* if nine tenths of the draws of either have their nearest neighbour in their own chain,
    but another block, and not in the other chain. Chains that are not apart are in one group, and so is what is linked
    through other chains. Coordinates are measured in the median absolute deviation of a chain.

    Returns:
        ``[chains, *batch]``: 0 for the largest group, and so on; -1 for chains that do not settle, or for all of them
        if fewer than half of a problem's do, or there are too few draws, or more than 32 groups.
    """
    chains, _, *batch = values.shape[:-1]
    x = values[:, looks(values.shape[1]).to(values.device)].double()
    labels = torch.full((chains, *batch), -1, device=x.device)
    if chains < 2 or x.shape[1] < _FEWEST or not labels.numel():
        return labels
    x = _standardised(x.reshape(chains, x.shape[1], -1, x.shape[-1]).movedim(2, 0))
    size = max(1, _DISTANCES // (chains * x.shape[2] ** 2))
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
    settled = _settles(x)
    settled &= 2 * settled.sum(1, keepdim=True) >= chains
    linked = torch.eye(chains, dtype=torch.bool, device=x.device).repeat(problems, 1, 1)
    # each group by comparison with its first chain: linear in the chains where there is one group
    waiting = settled.clone()
    for _ in range(_MOST):
        rows = waiting.any(1).nonzero().flatten()
        if not len(rows):
            break
        leader = waiting[rows].to(torch.int8).argmax(1)
        near = ~_apart(x[rows], leader) & settled[rows]
        linked[rows, leader] |= near
        waiting[rows] &= ~near
        waiting[rows, leader] = False
    settled &= ~waiting.any(1, keepdim=True)
    return _numbered(linked | linked.mT, settled)


def _settles(x: Tensor) -> Tensor:
    """Whether chains move about in their own place, ``[P, chains]``."""
    means = x.unflatten(2, (_BLOCKS, -1)).mean(3)
    total = x.var(2, correction=0)
    # a latent that is constant in a chain does not drift
    return (means.var(2, correction=0) <= _DRIFT * total + 1e-12).all(-1) & (total > 0).any(-1)


def _apart(x: Tensor, leader: Tensor) -> Tensor:
    """Whether each chain and the leader of its problem are apart, ``[P, chains]``."""
    first = x[torch.arange(len(x), device=x.device), leader].unsqueeze(1)
    own, leading = (_nearest(y, y) for y in (x, first))
    across = torch.cdist(x, first.expand_as(x))
    block = _block(x.shape[2], x.device)
    across = across.masked_fill(block.unsqueeze(1) == block, torch.inf)
    home = (own < across.amin(-1)).double().mean(-1), (leading < across.amin(-2)).double().mean(-1)
    return torch.minimum(*home) >= _AT_HOME


def _nearest(x: Tensor, y: Tensor) -> Tensor:
    """Distance of each draw to the nearest of another block, ``[P, chains, draws]``."""
    block = _block(x.shape[2], x.device)
    return torch.cdist(x, y).masked_fill(block.unsqueeze(1) == block, torch.inf).amin(-1)


def _block(draws: int, device: torch.device) -> Tensor:
    return torch.arange(draws, device=device) // (draws // _BLOCKS)


def _numbered(linked: Tensor, settled: Tensor) -> Tensor:
    """Numbers of the groups by their size, ``[P, chains]``; -1 where not settled."""
    chains = linked.shape[-1]
    for _ in range(max(1, (chains - 1).bit_length())):
        linked = (linked.double() @ linked.double()) > 0
    first = linked.to(torch.int8).argmax(-1)
    size = torch.where(settled, linked.sum(-1), 0)
    # groups in the order of size, then of their first chain
    key = torch.where(settled, -size * chains + first, chains)
    earlier = (key.unsqueeze(-1) > key.unsqueeze(-2)) & settled.unsqueeze(-2)
    is_first = first == torch.arange(chains, device=first.device)
    return torch.where(settled, (earlier & is_first.unsqueeze(-2)).sum(-1), -1)
