"""Independent units found in the sparsity of a Jacobian (math 4.6)."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["UnitSplit", "find_units"]

# Global inputs up to which inputs of the prior are not searched for local ones.
_FEW = 8
# Outputs per unit up to which units are searched.
_LARGEST = 64


class UnitSplit(NamedTuple):
    """A Jacobian whose columns, in another order, are ``[A | blockdiag(D_1, ..., D_U)]``."""

    n_global: int
    inputs: int
    """Local inputs per unit."""
    outputs: int
    """Consecutive outputs per unit."""
    order: Tensor
    """The columns in that order, ``[D]``."""


def find_units(pattern: Tensor, is_noise: Tensor) -> UnitSplit | None:
    """The cheapest split into units; None if there is none.

    The inputs of the prior are global, unless that makes many of them which belong to single units.

    Args:
        pattern: whether an output may depend on an input, ``[N, D]``.
        is_noise: whether an input is not one of the prior, ``[D]``.
    """
    split = _split(pattern, is_noise)
    if split is not None and split.n_global <= _FEW:
        return split
    wider = _split(pattern, torch.ones_like(is_noise))
    if split is None or (wider is not None and 2 * wider.n_global <= split.n_global):
        # inputs of the prior alone are not noise that a unit could be solved by
        return wider if is_noise.any() else None
    return split


def _split(pattern: Tensor, candidates: Tensor) -> UnitSplit | None:
    """The cheapest split whose local inputs are among the candidates."""
    n_outputs = len(pattern)
    sizes = [m for m in range(1, _LARGEST + 1) if n_outputs % m == 0 and m < max(n_outputs, 2)]
    splits = [split for m in sizes if (split := _units_of(m, pattern, candidates)) is not None]
    # entries per output, which the factorisation squares
    return min(splits, key=lambda split: split.n_global**2 + split.inputs * split.outputs, default=None)


def _units_of(size: int, pattern: Tensor, candidates: Tensor) -> UnitSplit | None:
    n_outputs, dim = pattern.shape
    n_units = n_outputs // size
    touched = pattern.unflatten(0, (n_units, size)).any(1)
    own = candidates & (touched.sum(0) == 1)
    unit = touched.to(torch.int8).argmax(0)
    inputs = int(torch.bincount(unit[own], minlength=n_units).min())
    if inputs < size or dim - n_units * inputs > n_outputs:
        return None
    # an equal number each: what a unit has beyond it is global
    local = torch.stack([torch.nonzero(own & (unit == i)).flatten()[-inputs:] for i in range(n_units)]).flatten()
    is_global = torch.ones(dim, dtype=torch.bool).index_fill(0, local, False)
    order = torch.cat([torch.nonzero(is_global).flatten(), local])
    return UnitSplit(int(is_global.sum()), inputs, size, order)
