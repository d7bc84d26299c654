"""Data of another unit than the generator's outputs: 8-bit pixels for a generator of pixels in (0, 1)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..models import GenerativeModel
from .operators import Operator

__all__ = ["FarData", "far_data"]

# Widths of what the model generates, beyond which data are far outside. Prior draws of a few images reach several
# standard deviations, so that a posterior far in the tail of the prior is still within.
_WIDTHS = 3.0
# Share of the values beyond which they are of another unit; a few far values are those of a model with heavy tails.
_SHARE = 0.1
# Largest output of a generator of pixels in (0, 1) or (-1, 1).
_PIXEL_OUTPUT = 2.0


class FarData(NamedTuple):
    """Observed values far outside what the model generates."""

    certain: bool
    """Whether no posterior is meant: values beyond the declared range, or 8-bit pixels for a generator of images."""
    words: str


def far_data(model: GenerativeModel, operator: Operator, values: Tensor, x: Tensor) -> FarData | None:
    """Compare observed values with the outputs of a model; None if they are not far outside.

    Far outside is further than three widths of the range of its outputs: the declared range, or that at prior draws,
    where at least a tenth of the values must be (images aside).

    Args:
        model: a frozen copy.
        operator: A.
        values: ``[*batch, Dy]``.
        x: outputs at prior draws, ``[n, Dx]``.
    """
    name, declared = type(model).__name__, model.output_range if operator.keeps_range else None
    if declared is not None and math.isfinite(declared[1] - declared[0]):
        low, high = declared
        where = f"its output_range is ({low:g}, {high:g})"
    else:
        declared = None
        # an operator may have data of each problem, with which draws broadcast
        made = x if operator.keeps_range else operator(x.reshape(len(x), *[1] * (values.ndim - 1), -1))
        made = made[made.isfinite()]
        if not len(made):
            return None
        low, high = made.min().item(), made.max().item()
        where = f"its outputs lie between {low:.3g} and {high:.3g} at {len(x)} prior draws"
    least, largest = values.min().item(), values.max().item()
    beyond = torch.maximum(low - values, values - high) > _WIDTHS * (high - low)
    if not beyond.any() or high == low:
        return None
    what = f"observed values from {least:.3g} to {largest:.3g} are far outside what {name} generates: {where}"
    images = len(model.output_shape) >= 2 and operator.keeps_range and max(-low, high) <= _PIXEL_OUTPUT
    if not images and declared is None and beyond.double().mean() < _SHARE:
        return None
    if not images or least < 0 or largest > 255:
        return FarData(declared is not None, f"{what}; check the units of the data")
    if low < -0.5:
        return FarData(True, f"{what}; scale 8-bit pixels to (-1, 1), values / 127.5 - 1")
    divisor = "255" if largest > 16 else "16, or by 255 if these are dark 8-bit pixels"
    return FarData(True, f"{what}; divide by {divisor}")
