"""Swaps between the temperatures of parallel tempering, and the trips of its replicas (math 6.11)."""

import torch
from torch import Tensor

__all__ = ["Trips", "exchanged", "swap_log_ratios", "swaps"]


def swap_log_ratios(betas: Tensor, differences: Tensor) -> Tensor:
    """Log of ``pi_k(x') pi_{k+1}(x)/(pi_k(x) pi_{k+1}(x'))``, ``[K, chains, *batch]``.

    It is ``(beta_{k+1} - beta_k) (d(x') - d(x))`` for x at ``beta_k``, x' at ``beta_{k+1}`` and ``d = phi - psi``;
    ``-inf`` where both states have zero density.

    Args:
        betas: ``[K + 1, *batch]``.
        differences: ``d``, ``[K + 1, chains, *batch]``.
    """
    return ((betas[1:] - betas[:-1]).unsqueeze(1) * differences.diff(dim=0)).nan_to_num(
        -torch.inf, posinf=torch.inf, neginf=-torch.inf
    )


def swaps(probabilities: Tensor, parity: int, rng: torch.Generator) -> Tensor:
    """Which row every temperature takes its new state from, ``[K + 1, chains, *batch]``.

    Only the pairs (k, k + 1) with k of this parity may swap: even and odd pairs in turn, never at random, which lets
    replicas travel without turning back (Syed et al. 2021).

    Args:
        probabilities: of acceptance, ``[K, chains, *batch]``.
    """
    n = len(probabilities)
    column = (-1, *[1] * (probabilities.ndim - 1))
    uniform = torch.rand(probabilities.shape, generator=rng, dtype=probabilities.dtype, device=probabilities.device)
    rungs = torch.arange(n + 1, device=probabilities.device)
    accepted = ((uniform < probabilities) & (rungs[:n] % 2 == parity).reshape(column)).long()
    none = torch.zeros_like(accepted[:1])
    return rungs.reshape(column) + torch.cat([accepted, none]) - torch.cat([none, accepted])


def exchanged(values: Tensor, source: Tensor) -> Tensor:
    """Values ``[K + 1, chains, *batch]``, or with one more dimension, rearranged as :func:`swaps` says."""
    if values.ndim > source.ndim:
        source = source.unsqueeze(-1).expand_as(values)
    return values.gather(0, source)


class Trips:
    """Counts of replicas that reach the target from a reference, and come back.

    Attributes:
        restarts: arrivals at the target since the last visit to a reference, ``[chains, legs, *batch]``.
        round_trips: returns to a reference after that.
    """

    def __init__(self, like: Tensor):
        # 1 after a visit to a reference, 2 after the target was reached from there, else 0
        self._past = torch.zeros(like.shape, dtype=torch.int8, device=like.device)
        self.restarts = torch.zeros(like.shape[1:], dtype=torch.int64, device=like.device)
        self.round_trips = torch.zeros_like(self.restarts)

    def follow(self, source: Tensor, crossed: Tensor | None) -> None:
        """Move the replicas' marks with their states; ``crossed [*batch]``, if any, is where the targets did."""
        past = exchanged(self._past, source)
        if crossed is not None:
            past[-1] = torch.where(crossed, past[-1].flip(1), past[-1])
        # not in place: who counts a part of a run keeps the earlier counts
        self.restarts = self.restarts + (past[-1] == 1)
        past[-1] = torch.where(past[-1] == 1, 2, past[-1])
        self.round_trips = self.round_trips + (past[0] == 2)
        past[0] = 1
        self._past = past
