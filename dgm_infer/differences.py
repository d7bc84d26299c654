"""Central differences of a function along a direction, and whether they say anything."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Differences", "differences", "disagreement"]

# By type: the step, near its cube root of rounding or above it, as energies are large sums; and the relative difference
# up to which differences with two steps, and their rounding, count as agreeing.
_STEPS = {torch.float64: 6e-6, torch.float32: 3e-2}
_TOLERANCE = {torch.float64: 3e-4, torch.float32: 3e-2}


class Differences(NamedTuple):
    """``J v`` of a function ``[n, ..., D] -> [n, ..., N]`` by values, at n points."""

    values: Tensor
    """The function's values near the points, ``[n, ..., N]``."""
    products: Tensor
    """``J v``, ``[n, ..., N]``."""
    combined: Tensor
    """``w . J v``, ``[n, ...]``."""
    size: Tensor
    """``|w| |J v|``, the size of the terms of :attr:`combined`."""
    is_known: Tensor
    """Whether two steps agree and rounding does not matter: not at kinks, jumps or where the function overflows."""


@torch.no_grad()
def differences(function: Callable[[Tensor], Tensor], u: Tensor, v: Tensor, w: Tensor | None = None) -> Differences:
    """Differences along ``v``, from one call of the function with four rows a point.

    Args:
        function: row by row.
        u: points ``[n, ..., D]``.
        v: a direction, which broadcasts with them, of the length over which the function varies.
        w: weights ``[N]`` of its values; None for ones.
    """
    eps = torch.finfo(u.dtype).eps
    step = _STEPS.get(u.dtype, 0.1)
    plus, minus, far_plus, far_minus = function(
        torch.cat([u + step * v, u - step * v, u + 2 * step * v, u - 2 * step * v])
    ).chunk(4)
    w = torch.ones_like(plus) if w is None else w.expand_as(plus)
    near, far = (plus - minus) / (2 * step), (far_plus - far_minus) / (4 * step)
    norm = torch.linalg.vector_norm
    size = norm(near, dim=-1) * norm(w, dim=-1)
    rounding = 4 * eps / step * norm(plus * w, dim=-1)
    apart = ((near - far) * w).sum(-1).abs() + rounding
    combined = (near * w).sum(-1)
    is_known = combined.isfinite() & (apart <= _TOLERANCE.get(u.dtype, 0.1) * size)
    return Differences(plus, near, combined, size, is_known)


def disagreement(found: Differences, exact: Tensor) -> float:
    """By how much derivatives ``w . J v`` differ from known differences, relative to their size; 0 if none is known.

    The second largest over points, of which one may be right beside a kink.
    """
    scale = found.size.maximum(exact.abs()).clamp_min(1e-30)
    apart = ((exact - found.combined).abs() / scale)[found.is_known]
    largest = apart.nan_to_num(torch.inf).flatten().sort(descending=True).values
    return largest[min(1, len(largest) - 1)].item() if len(largest) else 0.0
