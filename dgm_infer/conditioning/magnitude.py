"""How large data are beside a generator's outputs: data of another unit, outputs that vary in small units."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..models import GenerativeModel
from .operators import Operator

__all__ = ["FarData", "check_tolerance", "constraint_units", "far_data", "far_values", "magnitude", "solver_tolerance"]

# Widths of what the model generates, beyond which data are far outside. Prior draws of a few images reach several
# standard deviations, so that a posterior far in the tail of the prior is still within.
_WIDTHS = 3.0
# Share of the values beyond which they are of another unit; a few far values are those of a model with heavy tails.
_SHARE = 0.1
# Largest output of a generator of pixels in (0, 1) or (-1, 1).
_PIXEL_OUTPUT = 2.0
# Variation, in scales of the data, below which an output is measured in units of it: the tolerance 1e-8 is then at most
# 1e-5 of what an output varies by.
_HARDLY = 1e-3
# The least unit, in rounding errors of the output per default tolerance of a kernel: solvers get no nearer.
_ROUNDING, _TOLERANCE = 64, 1e-8
# Largest misfits at prior draws, beyond which a kernel tells no inputs apart.
_BLIND = 1e3


def magnitude(values: Tensor) -> Tensor:
    """``max(1, |y|_max)`` per problem: ``[*batch, Dy] -> [*batch]``."""
    return values.abs().amax(-1).clamp_min(1)


def solver_tolerance(dtype: torch.dtype) -> float:
    """What constraints are solved to unless something else is asked for, relative to :func:`magnitude`."""
    return 1e-8 if dtype == torch.float64 else 1e-5


@torch.no_grad()
def constraint_units(operator: Operator, values: Tensor, x: Tensor) -> Tensor | None:
    """What the constraints are measured in, ``[*batch, Dy]``, so that one tolerance suits all; None if all by 1.

    An output whose range r over prior draws is small beside the scale ``s = max(1, |y|_max)`` has the unit ``r / s``
    (math 3.3), others have 1.

    Args:
        operator: A.
        values: ``[*batch, Dy]``.
        x: outputs at prior draws, ``[n, Dx]``.
    """
    made = _made(operator, values, x)
    # a simulator may overflow at some prior draws
    lost = ~made.isfinite()
    high, low = made.masked_fill(lost, -torch.inf).amax(0), made.masked_fill(lost, torch.inf).amin(0)
    scale = magnitude(values).unsqueeze(-1)
    size = torch.maximum(values.abs(), torch.maximum(high.abs(), low.abs()))
    least = _ROUNDING * torch.finfo(values.dtype).eps / _TOLERANCE * size / scale
    ratio = torch.maximum((high - low) / scale, least)
    # an output that does not vary at all is named where the search for a start fails
    hardly = (high > low) & (ratio < _HARDLY)
    return torch.where(hardly, ratio, 1.0).expand_as(values).clone() if hardly.any() else None


@torch.no_grad()
def check_tolerance(operator: Operator, values: Tensor, x: Tensor, tolerance: float) -> None:
    """Raise :class:`ArgumentError` for the tolerance of an ABC kernel that is as good as infinite at outputs x."""
    misfit = (_made(operator, values, x) - values).norm(dim=-1)
    misfit = misfit[misfit.isfinite()]
    if len(misfit) and tolerance > _BLIND * misfit.max():
        raise ArgumentError(
            f"condition(tolerance={tolerance:g}): outputs at prior draws miss the data by {misfit.max().item():.3g} at "
            "most, so that the data would count for nothing; use a tolerance well below that"
        )


def _made(operator: Operator, values: Tensor, x: Tensor) -> Tensor:
    """What is observed of outputs ``x [n, Dx]``: ``[n, *batch, Dy]``, or with dimensions of 1 for the batch."""
    # an operator may have data of each problem, with which draws broadcast
    return operator(x.reshape(len(x), *[1] * (values.ndim - 1), -1))


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
    declared = model.output_range if operator.keeps_range else None
    if declared is not None and not math.isfinite(declared[1] - declared[0]):
        declared = None
    made = x if operator.keeps_range else _made(operator, values, x)
    return far_values(
        type(model).__name__, model.output_shape if operator.keeps_range else (), values, made, declared=declared
    )


def far_values(
    name: str,
    image_shape: Sequence[int],
    values: Tensor,
    made: Tensor,
    *,
    declared: tuple[float, float] | None = None,
) -> FarData | None:
    """:func:`far_data` of values ``[*batch, n]`` and what a model made in their place, ``[k, ...]``.

    Args:
        name: of the model.
        image_shape: shape of the outputs, if the values are some of them.
        declared: the finite range that the model declares.
    """
    if declared is not None:
        low, high = declared
        where = f"its output_range is ({low:g}, {high:g})"
    else:
        n, made = len(made), made[made.isfinite()]
        if not len(made):
            return None
        low, high = made.min().item(), made.max().item()
        where = f"its outputs lie between {low:.3g} and {high:.3g} at {n} prior draws"
    least, largest = values.min().item(), values.max().item()
    beyond = torch.maximum(low - values, values - high) > _WIDTHS * (high - low)
    if not beyond.any() or high == low:
        return None
    what = f"observed values from {least:.3g} to {largest:.3g} are far outside what {name} generates: {where}"
    images = len(image_shape) >= 2 and max(-low, high) <= _PIXEL_OUTPUT
    if not images and declared is None and beyond.double().mean() < _SHARE:
        return None
    if not images or least < 0 or largest > 255:
        return FarData(declared is not None, f"{what}; check the units of the data")
    if low < -0.5:
        return FarData(True, f"{what}; scale 8-bit pixels to (-1, 1), values / 127.5 - 1")
    divisor = "255" if largest > 16 else "16, or by 255 if these are dark 8-bit pixels"
    return FarData(True, f"{what}; divide by {divisor}")
