"""The communication barrier of a path, and temperatures at equal distances along it (math 6.12)."""

import torch
from torch import Tensor

__all__ = ["equalised", "interpolated_rows"]

# Share of the temperatures that follow the old ones, whatever the rejections: they are noisy, and some are zero.
_EVEN = 0.05


def equalised(betas: Tensor, rejections: Tensor) -> Tensor:
    """Temperatures between which swaps are rejected equally often, ``[K + 1, *batch]``.

    ``Lambda(beta_k) = sum_{i<k} r_i`` is interpolated linearly and inverted at K + 1 even values (Syed et al. 2021).

    Args:
        betas: present temperatures, ``[K + 1, *batch]``, increasing from 0 to 1.
        rejections: mean rejection probabilities of swaps between neighbours, ``[K, *batch]``.
    """
    n = len(rejections)
    total = rejections.sum(0)
    share = torch.where(total > 0, rejections / total.clamp_min(1e-300), 1 / n)
    travelled = ((1 - _EVEN) * share + _EVEN / n).cumsum(0)
    travelled = torch.cat([torch.zeros_like(travelled[:1]), travelled])
    even = torch.linspace(0, 1, n + 1, dtype=betas.dtype, device=betas.device)
    new = interpolated_rows(even.reshape(-1, *[1] * (betas.ndim - 1)).expand_as(betas), travelled, betas)
    new[0], new[-1] = 0, 1
    return new


def interpolated_rows(at: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Linear interpolation per problem: ``at [M, *batch]``, increasing ``knots`` and ``values [J, *batch]``."""
    shape = at.shape
    rows, own, known = (x.flatten(1).mT.contiguous() if x.ndim > 1 else x[None] for x in (at, knots, values))
    right = torch.searchsorted(own, rows).clamp(1, own.shape[1] - 1)
    low, high = own.gather(1, right - 1), own.gather(1, right)
    fraction = ((rows - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
    a, b = known.gather(1, right - 1), known.gather(1, right)
    return torch.lerp(a, b, fraction.to(known.dtype)).mT.reshape(shape)
