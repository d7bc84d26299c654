"""Many local minimisations at once: limited-memory BFGS with a line search of its own per row (math 11.7)."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Minima", "minimise"]

_ARMIJO, _SHRINK = 1e-4, 0.3
# A step before curvature is known has at most this length, in the units of the coordinates.
_FIRST_STEP = 0.5


class Minima(NamedTuple):
    """Where minimisations ended."""

    position: Tensor
    """``[..., D]``."""
    energy: Tensor
    """``[...]``; ``+inf`` where no point of the path had a finite energy."""
    converged: Tensor
    """Whether the predicted decrease of another step is negligible, ``[...]``."""
    evaluations: int
    """Gradients per row."""


class _Pair(NamedTuple):
    """A step and the change of the gradient along it; ``rho = 1/(s . y)``, 0 for rows that did not move."""

    s: Tensor
    y: Tensor
    rho: Tensor


def minimise(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    iterations: int = 100,
    memory: int = 8,
    tolerance: float | None = None,
) -> Minima:
    """Minimise an energy from every row of ``start [..., D]`` by L-BFGS (Nocedal 1980).

    All rows take one gradient per iteration: those whose energy does not fall enough halve their step, the others go
    on from where they are.

    Args:
        evaluate: energy ``[...]`` and gradient ``[..., D]`` at ``[..., D]``.
        start: first positions, in coordinates of about unit scale.
        iterations: gradients per row, at most.
        memory: pairs of steps and gradients that curvature is learned from.
        tolerance: predicted decrease, relative to ``max(1, |energy|)``, at which a row has converged; None for 1e-9 in
            float64 and 1e-6 in float32.
    """
    if tolerance is None:
        tolerance = 1e-9 if start.dtype == torch.float64 else 1e-6
    x, (energy, gradient) = start, _finite(*evaluate(start))
    pairs: deque[_Pair] = deque(maxlen=memory)
    scale = _FIRST_STEP / gradient.norm(dim=-1).clamp_min(_FIRST_STEP)
    direction, step = -scale.unsqueeze(-1) * gradient, torch.ones_like(energy)
    converged = torch.zeros_like(energy, dtype=torch.bool)
    resolution = 4 * torch.finfo(start.dtype).eps
    done = 1
    while done < iterations and not converged.all():
        there = x + step.unsqueeze(-1) * direction
        new_energy, new_gradient = _finite(*evaluate(there))
        done += 1
        slope = (gradient * direction).sum(-1)
        limit = energy + _ARMIJO * step * slope + resolution * energy.abs().nan_to_num(0.0, 0.0, 0.0)
        moved = ((new_energy <= limit) | energy.isinf()) & ~converged & new_energy.isfinite()
        row = moved.unsqueeze(-1)
        pair = _pair(torch.where(row, there - x, 0.0), torch.where(row, new_gradient - gradient, 0.0))
        pairs.append(pair)
        known = pair.rho > 0
        scale = torch.where(known, 1 / (pair.rho * pair.y.square().sum(-1)).clamp_min(1e-30), scale)
        x, gradient = torch.where(row, there, x), torch.where(row, new_gradient, gradient)
        energy = torch.where(moved, new_energy, energy)
        proposal = _direction(gradient, pairs, scale)
        # a row that stays keeps its direction and shortens its step
        direction = torch.where(row, proposal, direction)
        step = torch.where(moved, 1.0, _SHRINK * step)
        decrease = -(gradient * direction).sum(-1)
        converged = converged | (energy.isfinite() & (decrease <= tolerance * energy.abs().clamp_min(1)))
    return Minima(x, energy, converged, done)


def _finite(energy: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    inside = energy.isfinite() & gradient.isfinite().all(-1)
    return torch.where(inside, energy, torch.inf), torch.where(inside.unsqueeze(-1), gradient, 0.0)


def _pair(s: Tensor, y: Tensor) -> _Pair:
    product = (s * y).sum(-1)
    positive = product > 1e-10 * s.norm(dim=-1) * y.norm(dim=-1)
    return _Pair(s, y, torch.where(positive, 1 / product.clamp_min(1e-300), 0.0))


def _direction(gradient: Tensor, pairs: deque[_Pair], scale: Tensor) -> Tensor:
    """``-H g`` by the two loops over the pairs; ``-scale g`` where that does not go down."""
    q, shares = gradient, []
    for pair in reversed(pairs):
        a = pair.rho * (pair.s * q).sum(-1)
        q = q - a.unsqueeze(-1) * pair.y
        shares.append(a)
    q = scale.unsqueeze(-1) * q
    for pair, a in zip(pairs, reversed(shares), strict=True):
        b = pair.rho * (pair.y * q).sum(-1)
        q = q + (a - b).unsqueeze(-1) * pair.s
    down = (q * gradient).sum(-1) > 0
    return -torch.where(down.unsqueeze(-1), q, scale.unsqueeze(-1) * gradient)
