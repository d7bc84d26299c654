"""Rate against distortion, a panel per data set and a curve per generator (math 7.9)."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .colours import COLOURS
from .saving import save_picture

__all__ = ["rates"]


def rates(path: str | os.PathLike, panels: Mapping[str, Mapping[str, Mapping[str, Sequence[Any]]]]) -> None:
    """Mean rates against mean distortions; bands are two standard errors of the rate.

    Args:
        path: path of the PNG.
        panels: title -> label of a curve -> its ``distortion``, ``rate`` and ``rate_error``, by growing beta.
    """
    figure = Figure(figsize=(5.2 * len(panels) + 0.4, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for i, (label, curve) in enumerate(curves.items()):
            distortion, rate, error = (np.asarray(curve[key], float) for key in ("distortion", "rate", "rate_error"))
            axis.plot(distortion, rate, color=COLOURS[i], lw=1.4, label=label)
            axis.fill_between(distortion, rate - 2 * error, rate + 2 * error, color=COLOURS[i], alpha=0.25, lw=0)
            # where the curve ends, at the largest beta
            axis.plot(distortion[-1], rate[-1], color=COLOURS[i], marker="os^Dv"[i % 5], ms=5)
        axis.set(xscale="log", xlabel="mean squared error per pixel", title=title)
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(which="both", lw=0.4, color="0.9")
        axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("rate (nats per image), upper bound")
    save_picture(path, figure, 150)
