"""Rates of generators at given distortions, from the record of ``dgm-infer reproduce rate_distortion``."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .tables import markdown

__all__ = ["LEVELS", "rate_at", "rates_table"]

LEVELS = (0.05, 0.02, 0.01)
"""Mean squared errors per pixel."""


def rate_at(curve: Mapping[str, Any], level: float) -> tuple[float, float] | None:
    """Rate and its standard error at a distortion, linear in its logarithm; None if the curve does not reach it."""
    points = list(zip(curve["distortion"], curve["rate"], curve["rate_error"], strict=True))
    for (d, rate, error), (next_d, next_rate, next_error) in pairwise(points):
        if d >= level > next_d:
            share = math.log(d / level) / math.log(d / next_d)
            return rate + share * (next_rate - rate), error + share * (next_error - error)
    return None


def rates_table(results: Mapping[str, Any]) -> str:
    """One row per generator: rates at the levels, and the end of its curve."""
    rows = []
    for name, each in results["sets"].items():
        for generator, curve in each["curves"].items():
            found = [rate_at(curve, level) for level in results["levels"]]
            cells = ["not reached" if pair is None else f"{pair[0]:.1f} ± {pair[1]:.1f}" for pair in found]
            end = f"{curve['rate'][-1]:.1f} ± {curve['rate_error'][-1]:.1f} at {curve['distortion'][-1]:.4f}"
            rows.append([name, generator, *cells, end, f"{min(curve['ess']):.1f}", f"{curve['seconds']:.0f}"])
    levels = [f"rate at {level:g}" for level in results["levels"]]
    return markdown(["images", "generator", *levels, "at the largest beta", "least ess", "seconds"], rows)
