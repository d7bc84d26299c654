"""Minima of an energy: which of them are one mode, and what mass it has (math 11.8)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..target import Target
from .laplace import Descended, curvature, descended

__all__ = ["Settled", "laplace_masses", "places", "same_minimum", "same_mode", "settled"]

# Distance of minima, in sds of the coordinates, and difference of energies below which they are the same.
_NEAR, _LEVEL = 1e-2, 1e-2
# Squared distance in standard deviations of a mode, and nats, within which another minimum is the same mode.
_WITHIN = 0.1
# Rows of Hessians that are computed at once.
_ROWS = 8192
# Newton's steps at a time from where a descent ended, until they promise, or bring, no more than so many nats.
_STEPS, _DECREASE, _FALL = 10, 1e-6, 1e-3


class Settled(NamedTuple):
    """Minima, as exact as Newton's steps make them."""

    position: Tensor
    """``[N, *batch, D]``."""
    energy: Tensor
    """``[N, *batch]``."""
    log_mass: Tensor
    """Laplace's, ``[N, *batch]``, float64; ``-inf`` where the Hessian is not positive definite."""
    covariance: Tensor
    """Inverse Hessians, ``[N, *batch, D, D]``, NaN where there is no mass."""
    counts: Tensor
    """Whether each is a minimum, or the best there is, ``[N, *batch]``."""
    evaluations: int
    """Gradients per problem."""


def settled(target: Target, x: Tensor, counts: Tensor, gradients: int) -> Settled:
    """Newton's steps from where descents ended, ``x [N, *batch, D]``, for those that count, ``[N, *batch]``.

    A descent ends where it sees no slope any more, which in a narrow and curved valley is anywhere along its floor.
    What still goes down after about so many gradients is no minimum, and has no mass where its problem has others. What
    no step lowers is one, at a kink.
    """
    ends, evaluations = _newton(target, x, 0), len(x) * target.dim
    on_its_way = counts & ~ends.converged & ends.energy.isfinite()
    while on_its_way.any() and evaluations < gradients:
        rows = on_its_way.flatten(1).any(1) if on_its_way.ndim > 1 else on_its_way
        moved = _newton(target, ends.position[rows], _STEPS)
        evaluations += _STEPS * len(moved.position) * target.dim
        falling = ~moved.converged & (ends.energy[rows] - moved.energy > _FALL)
        own, ends = on_its_way[rows], Descended(*(part.clone() for part in ends))
        for part, new in zip(ends, moved, strict=True):
            part[rows] = torch.where(own.reshape(*own.shape, *[1] * (part.ndim - own.ndim)), new, part[rows])
        on_its_way = on_its_way.clone()
        on_its_way[rows] &= falling
    energy = torch.where(counts, ends.energy, math.inf)
    mass, covariance = _masses(energy, ends.hessian)
    # what has no mass takes none from others
    others = (counts & ~on_its_way & mass.isfinite()).any(0)
    counts = counts & ~(on_its_way & others)
    return Settled(ends.position, energy, torch.where(counts, mass, -math.inf), covariance, counts, evaluations)


def _newton(target: Target, x: Tensor, steps: int) -> Descended:
    relative = 8 * torch.finfo(x.dtype).eps
    parts = [descended(target, part, steps, _DECREASE, relative) for part in x.split(_at_once(x))]
    return Descended(*(torch.cat(part) for part in zip(*parts, strict=True)))


def same_minimum(v: Tensor, energy: Tensor) -> Tensor:
    """The first of the minima that are the same as each, ``[N, *batch]`` indices.

    The same are those whose whitened positions ``v [N, *batch, D]`` are less than a hundredth apart in root mean square
    and whose energies ``[N, *batch]`` are as near.
    """
    index = places(energy)
    first = index.clone()
    for i in range(1, len(v)):
        near = (v[i] - v[:i]).square().mean(-1) < _NEAR**2
        level = (energy[i] - energy[:i]).abs() < _LEVEL * energy[i].abs().clamp_min(1).log1p()
        same = near & level & (first[:i] == index[:i])
        first[i] = torch.where(same.any(0), same.long().argmax(0), i)
    return first


def same_mode(x: Tensor, energy: Tensor, covariance: Tensor, counts: Tensor) -> Tensor:
    """The first of the minima that are in the same mode as each, ``[N, *batch]`` indices, by their curvatures.

    Descents along a wide direction of a narrow energy end some way from each other: what lies within a third of a
    standard deviation and a tenth of a nat of a minimum is the same mode.

    Args:
        x: ``[N, *batch, D]``, in the order of their energies.
        energy: ``[N, *batch]``.
        covariance: inverse Hessians ``[N, *batch, D, D]``, NaN where one is not positive definite.
        counts: whether each is a minimum at all, ``[N, *batch]``; those that are not stand for none but themselves.
    """
    unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    counts = counts & covariance.flatten(-2).isfinite().all(-1)
    factor = torch.linalg.cholesky_ex(torch.where(counts[..., None, None], covariance, unit)).L
    index = places(energy)
    first = index.clone()
    for i in range(1, len(x)):
        distance = torch.linalg.solve_triangular(factor[:i], (x[i] - x[:i]).unsqueeze(-1), upper=False)
        same = (distance.square().sum((-2, -1)) < _WITHIN) & (energy[i] - energy[:i] < _WITHIN)
        same &= counts[:i] & (first[:i] == index[:i])
        first[i] = torch.where(same.any(0), same.long().argmax(0), i)
    return first


def laplace_masses(target: Target, x: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Laplace's log masses of minima ``x [N, *batch, D]`` of these energies, and inverse Hessians.

    ``-inf`` and a matrix of NaN where the Hessian is not positive definite.
    """
    hessians = [curvature(target, part)[2] for part in x.split(_at_once(x))]
    return _masses(energy, torch.cat(hessians))


def _at_once(x: Tensor) -> int:
    """Rows of ``[N, *batch, D]`` whose Hessians are computed together."""
    return max(1, _ROWS // max(1, x[:1].numel()))


def _masses(energy: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    dim = hessian.shape[-1]
    factor, failed = torch.linalg.cholesky_ex(hessian.nan_to_num(0.0, 0.0, 0.0))
    definite = (failed == 0) & energy.isfinite()
    wide = definite[..., None, None]
    safe = torch.where(wide, factor, torch.eye(dim, dtype=hessian.dtype, device=hessian.device))
    log_det = safe.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    masses = torch.where(definite, 0.5 * dim * math.log(2 * math.pi) - energy - log_det, -math.inf).double()
    return masses, torch.where(wide, torch.cholesky_inverse(safe), math.nan)


def places(values: Tensor) -> Tensor:
    """The place of each in dimension 0, ``[N, *batch]``."""
    return torch.arange(len(values), device=values.device).reshape(-1, *[1] * (values.ndim - 1)).expand_as(values)
