"""Central differences of a function, their errors, and how far derivatives are from them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Errors of differences, by two steps and rounding, up to which they say nothing: those of 5 refuse right networks of
# 512 clamped units in 32 bits.
_ERRORS = 10.0
# By type: the step, near its cube root of rounding or above it, as energies are large sums.
_STEPS = {torch.float64: 6e-6, torch.float32: 3e-2}
# By type: errors of differences, as a share of their size, up to which they count as known, and how far they may be
# from a derivative then. Kinks of a wide network within a step make errors of a few hundredths in 32 bits.
_KNOWN = {torch.float64: (3e-4, 0.0), torch.float32: (3e-2, 5e-2)}


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
    combined_error: Tensor
    """Difference of two steps, at least its median over the points, and rounding, ``[n, ...]``: large at kinks and
    jumps, NaN where a function overflows."""
    products_error: Tensor
    """The same of :attr:`products`."""


@torch.no_grad()
def differences(
    function: Callable[[Tensor], Tensor], u: Tensor, v: Tensor, w: Tensor | None = None, *, step: float | None = None
) -> Differences:
    """Differences along ``v``, from one call of the function with four rows a point.

    Args:
        function: row by row.
        u: points ``[n, ..., D]``.
        v: a direction, which broadcasts with them, of the length over which the function varies.
        w: weights ``[N]`` of its values; None for ones.
        step: as a share of ``v``; None for what suits the type.
    """
    eps = torch.finfo(u.dtype).eps
    step = _STEPS.get(u.dtype, 0.1) if step is None else step
    plus, minus, far_plus, far_minus = function(
        torch.cat([u + step * v, u - step * v, u + 2 * step * v, u - 2 * step * v])
    ).chunk(4)
    w = torch.ones_like(plus) if w is None else w.expand_as(plus)
    near, far = (plus - minus) / (2 * step), (far_plus - far_minus) / (4 * step)
    norm, rounding = torch.linalg.vector_norm, 4 * eps / step

    def error(change: Tensor) -> Tensor:
        # at a single point two steps may agree by chance
        return change.abs().maximum(change.abs().nanmedian(0).values)

    combined_error = error(((near - far) * w).sum(-1)) + rounding * norm(plus * w, dim=-1)
    # one output may be a small difference of terms of the others' size
    products_error = error(near - far) + rounding * norm(plus, dim=-1, keepdim=True)
    size = norm(near, dim=-1) * norm(w, dim=-1)
    return Differences(plus, near, (near * w).sum(-1), size, combined_error, products_error)


def sharper(one: Differences, other: Differences) -> Differences:
    """The differences of the step with the smaller error, point by point."""
    first = ~(other.combined_error < one.combined_error)

    def chosen(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(first if a.ndim == first.ndim else first.unsqueeze(-1), a, b)

    return Differences(*map(chosen, one, other))


def disagreement(found: Differences, exact: Tensor) -> float:
    """By how much derivatives ``w . J v`` differ from known differences, relative to their size; 0 if none is known.

    The second largest over points, of which one may be right beside a kink.
    """
    apart = relative_error(found.combined, exact, found.size, found.combined_error)
    largest = apart.flatten().sort(descending=True).values
    return largest[min(1, len(largest) - 1)].item() if len(largest) else 0.0


def relative_error(differences: Tensor, exact: Tensor, size: Tensor, error: Tensor) -> Tensor:
    """``|differences - exact|`` beyond ten errors of the differences, as a share of the size of a derivative.

    That is the exact one's if it is larger. Where the errors are small beside it, a fixed share is allowed at most. 0
    where differences are not finite; infinite where the exact derivative is not.
    """
    scale = size.maximum(exact.abs().nan_to_num(0.0, 0.0))
    known, most = _KNOWN.get(size.dtype, (0.1, 0.1))
    allowed = torch.where(error <= known * scale, (_ERRORS * error).minimum(most * scale), _ERRORS * error)
    apart = ((differences - exact).abs() - allowed).clamp_min(0) / scale.clamp_min(1e-30)
    return apart.nan_to_num(torch.inf, torch.inf).where(differences.isfinite() & error.isfinite(), 0)
