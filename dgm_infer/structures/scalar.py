"""Equations of scalar units, each solved for its own local input."""

from collections.abc import Callable

import torch
from torch import Tensor

from .jacobian import push_forward

__all__ = ["solve_local_inputs"]


def solve_local_inputs(
    constraint: Callable[[Tensor], Tensor],
    u: Tensor,
    n_global: int,
    tolerance: Tensor,
    *,
    newton: int = 20,
    bisections: int = 80,
) -> Tensor:
    """Solve ``c_i(u1, u2_i) = 0`` for every local input, with ``u1`` fixed.

    Newton first (one step suffices for additive noise), then bisection in the units that have not converged, from a
    bracket grown around 0. A unit without a sign change keeps its best iterate.

    Args:
        constraint: ``[R, L + N] -> [R, N]``; unit i depends on ``u1`` and ``u2_i``.
        u: ``[R, L + N]``.
        tolerance: ``[R]``, on ``|c_i|``.
    """
    u1, best = u[:, :n_global], u[:, n_global:]
    tolerance = tolerance.unsqueeze(-1)

    def units(v: Tensor) -> Tensor:
        return constraint(torch.cat([u1.expand(*v.shape[:-1], -1), v], -1))

    smallest = units(best).abs().nan_to_num(nan=torch.inf)

    def keep_better(v: Tensor) -> Tensor:
        nonlocal best, smallest
        value = units(v)
        better = value.abs() < smallest
        best, smallest = torch.where(better, v, best), torch.where(better, value.abs(), smallest)
        return value

    for _ in range(newton):
        value, (slope,) = push_forward(units, best, best.new_ones(1, best.shape[-1]))
        previous = smallest
        keep_better(best - (value / slope).nan_to_num(0, 0, 0))
        if not (smallest < 0.5 * previous).any():
            break
    if (smallest < tolerance).all():
        return torch.cat([u1, best], -1)

    low, high = torch.full_like(best, -1.0), torch.full_like(best, 1.0)
    for _ in range(10):
        at_low = units(low)
        outside = at_low.sign() * units(high).sign() > 0
        if not outside.any():
            break
        low, high = torch.where(outside, 2 * low, low), torch.where(outside, 2 * high, high)
    at_low = units(low)
    for _ in range(bisections):
        middle = 0.5 * (low + high)
        left = keep_better(middle).sign() == at_low.sign()
        low, high = torch.where(left, middle, low), torch.where(left, high, middle)
    return torch.cat([u1, best], -1)
