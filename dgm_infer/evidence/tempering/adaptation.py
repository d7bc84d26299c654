"""The base of parallel tempering, fitted to the target's draws in the rounds of tuning (math 6.16)."""

import torch
from torch import Tensor

__all__ = ["HalfMoments", "improved"]

# Shares of the draws' moments in a new base, of which the best by the other half of the chains is taken.
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


class HalfMoments:
    """Sums over states at the target, of the first and of the second half of the chains.

    Args:
        like: a state, ``[chains, legs, *batch, D]``, of two chains or more.
    """

    def __init__(self, like: Tensor):
        shape = like.shape[2:]
        self._middle = (len(like) + 1) // 2
        self._first = torch.zeros(2, *shape, dtype=torch.float64, device=like.device)
        self._second = torch.zeros(2, *shape, shape[-1], dtype=torch.float64, device=like.device)
        self._count = torch.zeros(2, dtype=torch.float64, device=like.device)

    def add(self, x: Tensor) -> None:
        """Add states ``[chains, legs, *batch, D]``."""
        for half, part in enumerate((x[: self._middle], x[self._middle :])):
            rows = part.flatten(0, 1).double()
            self._first[half] += rows.sum(0)
            self._second[half] += torch.einsum("n...i,n...j->...ij", rows, rows)
            self._count[half] += len(rows)

    def halves(self) -> tuple[Tensor, Tensor]:
        """Means ``[2, *batch, D]`` and covariances ``[2, *batch, D, D]``."""
        return _moments(self._first, self._second, self._count)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Mean ``[*batch, D]`` and covariance ``[*batch, D, D]`` of all."""
        sums = (part.sum(0, keepdim=True) for part in (self._first, self._second, self._count))
        mean, covariance = _moments(*sums)
        return mean[0], covariance[0]


def improved(mean: Tensor, covariance: Tensor, draws: HalfMoments) -> tuple[Tensor, Tensor, Tensor]:
    """A base of smaller cross-entropy to the target than the present one, by draws that it is not fitted to.

    Candidates have the moments of mixtures of the present base and of the draws, in several shares. Each is fitted to
    one half of the chains and judged by the other, ``E[psi]``, and the best share is then fitted to all.

    Args:
        mean, covariance: of the present base, ``[*batch, D]`` and ``[*batch, D, D]``, float64.
        draws: states at the target.

    Returns:
        mean and covariance of the new base, and whether it is another one than before, ``[*batch]``.
    """
    means, covariances = draws.halves()
    scores = []
    for share in _SHARES:
        fitted = _mixed(torch.full_like(mean[..., 0], share), mean, covariance, means, covariances)
        scores.append(_cross_entropy(*fitted, means.flip(0), covariances.flip(0)).mean(0))
    best = torch.stack(scores).nan_to_num(torch.inf).argmin(0)
    share = torch.tensor(_SHARES, dtype=mean.dtype, device=mean.device)[best]
    return *_mixed(share, mean, covariance, *draws.whole()), best > 0


def _moments(first: Tensor, second: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    n = count.reshape(-1, *[1] * (first.ndim - 1))
    mean = first / n
    return mean, second / n.unsqueeze(-1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)


def _mixed(
    share: Tensor, mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor
) -> tuple[Tensor, Tensor]:
    """Moments of a mixture of two densities; ``share [*batch]`` is that of the other."""
    row, matrix = share.unsqueeze(-1), share[..., None, None]
    apart = other_mean - mean
    spread = matrix * (1 - matrix) * apart.unsqueeze(-1) * apart.unsqueeze(-2)
    return mean + row * apart, torch.lerp(covariance, other_covariance, matrix) + spread


def _cross_entropy(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> Tensor:
    """``-E[log q]`` without its constant, for a normal q and a density of the other moments; infinite for no normal."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    unit = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    factor = torch.where((failed == 0)[..., None, None], factor, unit)
    apart = other_mean - mean
    second = other_covariance + apart.unsqueeze(-1) * apart.unsqueeze(-2)
    trace = torch.cholesky_solve(second, factor).diagonal(dim1=-2, dim2=-1).sum(-1)
    entropy = 0.5 * trace + factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(failed == 0, entropy, torch.inf)
