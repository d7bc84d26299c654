"""Data and noise on another scale than a model's outputs: pixels of another range, noise wider than all it makes."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..diagnosis import Finding
from ..models import GenerativeModel, WithNoise
from ..settings import Settings
from .faults import SETTINGS as FAULTS
from .faults import said_interval
from .observed import MeasuredOutputs, ObservedModel, made_by


@dataclass(frozen=True)
class ScaleSettings(Settings):
    """From where data are on another scale."""

    noises: float = 4.0
    """Standard deviations of noise by which data may leave the declared range: one value in 30 000 leaves it more."""
    outside: float = 0.01
    """Share of the values outside it beyond which they are of another range; fewer are those of dead pixels."""
    pixels: int = 16
    """Values from which they tell the range that they are on."""
    slack: float = 0.25
    """Share of a range's width by which noise may carry values out of it, and outputs are clearly beyond it."""
    information: float = 0.01
    """Sum of the squared ratios of signal to noise, over all observed values, below which they say nothing: standard
    deviations of the posterior are within half a percent of the prior's."""


SETTINGS = ScaleSettings()


class Beneath(NamedTuple):
    """What noise is added to."""

    model: GenerativeModel
    u: Tensor
    """The model's inputs, ``[..., L]``."""
    square: Tensor
    """Variance of the noise, a number or one per output; 0 for none."""


def beneath_noise(model: GenerativeModel, u: Tensor) -> Beneath:
    """The model beneath all noise of a given width that is added to it, as by ``WithNoise`` or ``noise=``."""
    square = u.new_zeros(())
    while isinstance(model, WithNoise) or (isinstance(model, MeasuredOutputs) and model.operator is None):
        if isinstance(model, WithNoise):
            u, square = model.split(u)[0], square + model.sd.square()
        model = model.model
    return Beneath(model, u, square)


@torch.no_grad()
def pixels_of_another_range(observed: ObservedModel, values: Tensor, u: Tensor) -> Finding | None:
    """The finding on values ``[*batch, n]`` that leave the declared range, or fill another one alone.

    Args:
        u: prior draws ``[k, Du]``.
    """
    beneath = beneath_noise(observed.model, u)
    declared = beneath.model.output_range
    if declared is None or not observed.operator.keeps_range or not all(map(math.isfinite, declared)):
        return None
    if values.numel() < SETTINGS.pixels:
        return None
    sd = beneath.square.max().sqrt().item()
    what = _outside(values, declared, sd) if sd else None
    if what is None:
        what = _inside_another(values, declared, made_by(observed.operator, values, _outputs(beneath)), sd)
    if what is None:
        return None
    remedy = "map the data to that range; dgm.image(picture, like=model) reads pictures so"
    return Finding("warning", what, remedy, code="observations_range")


def _outputs(beneath: Beneath) -> Tensor:
    return beneath.model.observed(beneath.u)


def _outside(values: Tensor, declared: tuple[float, float], sd: float) -> str | None:
    """Of values that leave the declared range by more than noise of standard deviation ``sd``."""
    low, high = declared
    by = SETTINGS.noises * sd
    beyond = (values < low - by) | (values > high + by)
    if beyond.double().mean() < SETTINGS.outside:
        return None
    return (
        f"{int(beyond.sum())} of {values.numel()} observed values, of {values.min().item():.3g} to "
        f"{values.max().item():.3g}, are more than {SETTINGS.noises:g} standard deviations of the noise outside the "
        f"model's output_range {said_interval(low, high)}"
    )


def _inside_another(values: Tensor, declared: tuple[float, float], made: Tensor, sd: float) -> str | None:
    """Of values that all lie in (0, 1) or (-1, 1) and vary there, as no output of a model of a wider range does."""
    low, high = declared
    least, largest = values.min().item(), values.max().item()
    for black, white in ((0.0, 1.0), (-1.0, 1.0)):
        slack = SETTINGS.slack * (white - black)
        by = min(SETTINGS.noises * sd, slack)
        inside = black - by <= least and largest <= white + by
        if not inside or largest - least < slack or high - low < white - black + slack:
            continue
        if ((made < black - slack) | (made > white + slack)).flatten(1).any(1).all():
            return (
                f"all {values.numel()} observed values lie between {least:.3g} and {largest:.3g}, as pixels in "
                f"{said_interval(black, white)} do, and the model's output_range is {said_interval(low, high)}, of "
                f"which each of {len(made)} prior draws uses more"
            )
    return None


@torch.no_grad()
def drowned_by_noise(observed: ObservedModel, values: Tensor, u: Tensor) -> Finding | None:
    """The finding on noise that hides what a model makes: wider than its pixels spread, or than anything tells.

    Args:
        values: ``[*batch, n]``.
        u: prior draws ``[k, Du]``.
    """
    beneath = beneath_noise(observed.model, u)
    if not (beneath.square > 0).any():
        return None
    x = _outputs(beneath)
    square = observed.operator(beneath.square.expand(x.shape[-1]))
    variance = made_by(observed.operator, values, x).var(0)
    spread, sd = (each.mean().sqrt().item() for each in (variance, square))
    information = (variance / square).sum(-1).max().item()
    # of pixels such a width is a mistake of units; other data may have little signal
    wide = sd > spread and _has_pixels(beneath.model, x)
    if not math.isfinite(spread) or not (wide or information < SETTINGS.information):
        return None
    told = "all of the data together say" if information < 1 else "single values say"
    return Finding(
        "warning",
        f"the noise, of standard deviation {sd:.3g}, is wider than the observed outputs spread at prior draws, "
        f"{spread:.3g}",
        f"{told} next to nothing: give noise= or sd= in units of the model's outputs",
        code="noise",
    )


def _has_pixels(model: GenerativeModel, x: Tensor) -> bool:
    """Whether outputs ``x`` are those of an image: of a declared finite range, or of a picture's shape and size."""
    if model.output_range is not None:
        return all(map(math.isfinite, model.output_range))
    return len(model.output_shape) > 1 and bool(x.abs().max() <= FAULTS.pixel)
