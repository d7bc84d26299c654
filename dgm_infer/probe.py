"""Faults of a target's energy, found at a few points before a run spends time on it."""

import warnings

import torch
from torch import Tensor

from .errors import DgmInferError, cause
from .target import Target

__all__ = ["energy_fault", "nan_energies", "probe_points"]

# Energies computed at once, and the fewest and most points per problem.
_ENERGIES, _FEWEST, _MOST = 1024, 2, 32
# Share of the points at which an energy may be NaN without a word: chains reject them like divergences.
_NAN = 0.1
# Distances in units of the points' spread: over such a range a density with a finite integral falls.
_NEAR, _FAR = 1e4, 1e8
# Where the slope of an energy that overflows before that is taken.
_SLOPE = 2.0, 20.0


def probe_points(target: Target) -> int:
    """Number of points to probe per problem: fewer in a large batch."""
    return min(max(_ENERGIES // max(target.batch_shape.numel(), 1), _FEWEST), _MOST)


@torch.no_grad()
def energy_fault(target: Target, x: Tensor, remedy: str = "") -> str | None:
    """Describe a fault of the energy at points ``x [n, *batch, D]`` or far from them; None if there is none.

    It must be one real number per point, the same at every call, and must not fall without end, as ``exp(-energy)``
    would have no integral. An energy that is NaN or infinite at all points is left to the search for a start or a base,
    which reports more about it; one that is NaN at some, to :func:`nan_energies`.

    Args:
        remedy: added where the energy fails, such as how to have other points.
    """
    try:
        energy, again = target.energy(x), target.energy(x)
    except DgmInferError:
        raise
    except Exception as error:
        return f"the energy fails at x of shape {tuple(x.shape)}, {x.dtype} on {x.device}{remedy}: {cause(error, 150)}"
    if not isinstance(energy, Tensor):
        return f"the energy is a {type(energy).__name__}: must be a tensor, one value per point"
    if energy.shape != x.shape[:-1] or not energy.is_floating_point():
        what = f"of shape {tuple(energy.shape)}" if energy.is_floating_point() else energy.dtype
        expected = f"one real value per point, shape {tuple(x.shape[:-1])}"
        return f"the energy at x of shape {tuple(x.shape)} is {what}: expected {expected}"
    apart = _difference(energy, again)
    if apart > 0:
        return (
            f"the energy differs from call to call at the same points, by {apart:.3g}: it must not draw random numbers"
        )
    if _falls(target, x):
        return "the energy falls without end far from the origin, so that exp(-energy) has no integral: check its sign"
    return None


@torch.no_grad()
def nan_energies(target: Target, x: Tensor) -> str | None:
    """Describe an energy that is NaN at more than a tenth of the points ``x [n, *batch, D]``, though not at all.

    Chains never move to such a point and its weight counts as zero, as with an infinite energy: right where the density
    is zero, and otherwise a part of the density that is lost.
    """
    lost = target.energy(x).isnan()
    if not _NAN * lost.numel() < lost.sum() < lost.numel():
        return None
    return (
        f"the energy is NaN at {int(lost.sum())} of {lost.numel()} points tried: these count as points without "
        "density; return inf where that is so, and mend the energy elsewhere"
    )


def _difference(energy: Tensor, again: Tensor) -> float:
    """Largest difference of two evaluations, 0 up to rounding."""
    both = energy.isfinite() & again.isfinite()
    if not torch.equal(energy.isfinite(), again.isfinite()):
        return float("inf")
    difference = (energy - again).abs()[both]
    rounding = 1e3 * torch.finfo(energy.dtype).eps * energy.abs()[both].clamp_min(1)
    return difference[difference > rounding].max().item() if (difference > rounding).any() else 0.0


def _falls(target: Target, x: Tensor) -> bool:
    """Whether the energy still falls at distances where that of any density rises."""
    center = x.mean(0)
    directions = (x - center)[:8]
    try:
        with warnings.catch_warnings():
            # overflows are expected out there
            warnings.simplefilter("ignore")
            inner, outer, near, far = (
                target.energy(center + distance * directions) for distance in (*_SLOPE, _NEAR, _FAR)
            )
    except Exception:
        # a model may refuse such points
        return False
    falling = near.isfinite() & (far < near - near.abs().mul(0.1).clamp_min(1))
    # minus infinity beyond an edge is not a fall: no chain moves there
    overflown = near.isneginf() & outer.isfinite() & (outer < inner - 1)
    return bool((falling | overflown).any())
