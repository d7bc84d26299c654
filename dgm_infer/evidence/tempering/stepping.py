"""Stepping stones between neighbouring temperatures, and Bennett's ratio of them (math 6.13)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..estimators import Estimate, log_ratios

__all__ = ["SteppingStones"]


class SteppingStones:
    """Sums, per chain and pair of neighbours, from which ``log Z(beta_{k+1}) - log Z(beta_k)`` is estimated.

    With ``f = -(beta_{k+1} - beta_k) d`` at a state of ``beta_k``, ``r = (beta_{k+1} - beta_k) d`` at one of
    ``beta_{k+1}`` and ``d = phi - psi``: forward ``log mean exp f``, backward ``-log mean exp r``, and Bennett's
    ``c + log sum sigmoid(f - c) - log sum sigmoid(r + c)``, right for any c and best near the answer. c comes from
    earlier states, so that sums are all that is stored.

    Args:
        betas: ``[K + 1, *batch]``.
        centre: c, ``[K, *batch]``.
        chains: independent chains.
    """

    def __init__(self, betas: Tensor, centre: Tensor, chains: int):
        self.widths, self.centre = betas.diff(dim=0).unsqueeze(1), centre.unsqueeze(1)
        shape = (len(centre), chains, *centre.shape[1:])
        self._sums = torch.full((4, *shape), -torch.inf, dtype=torch.float64, device=betas.device)
        self.count = 0

    def add(self, differences: Tensor) -> None:
        """Add states with these ``d``, ``[K + 1, chains, *batch]``."""
        # an infinite difference over no distance is none
        forward = torch.where(self.widths > 0, -self.widths * differences[:-1], 0.0)
        reverse = torch.where(self.widths > 0, self.widths * differences[1:], 0.0)
        bennett = logsigmoid(forward - self.centre), logsigmoid(reverse + self.centre)
        new = torch.stack([forward, reverse, *bennett])
        torch.logaddexp(self._sums, new, out=self._sums)
        self.count += 1

    @property
    def bennett(self) -> Tensor:
        """Bennett's estimate for every pair from all chains, ``[K, *batch]``."""
        _, _, up, down = self._sums.logsumexp(2)
        return self.centre.squeeze(1) + up - down

    def estimates(self, powers: Tensor) -> dict[str, Estimate]:
        """Estimates ``forward``, ``backward`` and ``bennett`` of log Z, with jackknife errors over the chains.

        Args:
            powers: shares of the legs in the estimate, ``[legs, *batch]`` with sum 1; the sums are of
                ``[K, chains, legs, *batch]``.
        """
        log_n = torch.full_like(self._sums[0], 0.0) + torch.tensor(float(self.count)).log()
        forward, reverse, up, down = self._sums
        pairs = {"forward": (forward, log_n), "backward": (log_n, reverse), "bennett": (up + self.centre, down)}
        share = powers.expand(len(log_n), *powers.shape).flatten(0, 1)
        # [chains, K * legs, *batch]
        flat = {name: tuple(part.movedim(1, 0).flatten(1, 2) for part in pair) for name, pair in pairs.items()}
        return {name: log_ratios(above, below, share) for name, (above, below) in flat.items()}
