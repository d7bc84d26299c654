"""Samplers of one posterior side by side: marginal densities, and effective samples per second."""

import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from .colours import COLOURS, TRUTH
from .saving import save_picture

__all__ = ["efficiency", "posteriors"]


def posteriors(
    path: str | os.PathLike,
    draws: Mapping[str, Mapping[str, np.ndarray]],
    truth: Mapping[str, float],
    notes: Mapping[str, Mapping[str, str]],
    *,
    bins: int = 60,
) -> None:
    """Histograms of marginal posteriors: a row per method, a column per parameter, shared ranges (J fig. 6, J fig. 10).

    A column shows the central 99 % of every method, at most three times as wide as that of the first; a panel says
    what share of its draws lies outside.

    Args:
        path: path of the PNG.
        draws: method -> parameter -> ``[n]``.
        truth: parameter -> the value that generated the data, drawn as a dashed line.
        notes: method -> parameter -> a few words over the panel.
        bins: bins per histogram, over the column's range.
    """
    methods, names = list(draws), list(truth)
    figure = Figure(figsize=(2.5 * len(names) + 0.6, 1.35 * len(methods) + 0.7), layout="constrained")
    axes = figure.subplots(len(methods), len(names), squeeze=False, sharex="col")
    for column, name in enumerate(names):
        low, high = _shared_range([draws[method][name] for method in methods], truth[name])
        edges = np.linspace(low, high, bins + 1)
        for row, method in enumerate(methods):
            axis, values = axes[row, column], draws[method][name]
            # density of all draws, also of those that the range leaves out
            counts, _ = np.histogram(values, edges)
            axis.stairs(counts / (len(values) * np.diff(edges)), edges, fill=True, color=COLOURS[row % 6], alpha=0.75)
            axis.axvline(truth[name], color=TRUTH, ls="--", lw=1.3)
            outside = 1 - counts.sum() / len(values)
            note = notes[method][name] + (f", {100 * outside:.0f} % outside" if outside > 0.02 else "")
            axis.set_title(note, loc="right", fontsize=7, color="0.25", pad=2)
            axis.set_yticks([])
            axis.set_xlim(low, high)
            axis.set_ylim(bottom=0)
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.tick_params(labelsize=8)
            axis.xaxis.set_major_locator(MaxNLocator(4))
        axes[-1, column].set_xlabel(_symbol(name))
    for row, method in enumerate(methods):
        axes[row, 0].set_ylabel(method.replace(", ", ",\n"), fontsize=9)
    figure.suptitle("posterior density by method; dashed: the value that generated the data", fontsize=9)
    save_picture(path, figure, 160)


def efficiency(
    path: str | os.PathLike,
    rates: Mapping[str, Mapping[str, float]],
    unmixed: Collection[str] = (),
    *,
    unit: str = "bulk ESS per second",
) -> None:
    """Bars of effective sample size per second, grouped by parameter, on a log scale (J fig. 7, J fig. 11).

    Args:
        path: path of the PNG.
        rates: method -> parameter -> bulk ESS per second of wall clock, or what ``unit`` says.
        unmixed: methods whose chains disagree, so that their estimates mean little: hatched.
        unit: label of the axis.
    """
    methods, names = list(rates), list(next(iter(rates.values())))
    figure = Figure(figsize=(1.9 * len(names) + 1.2, 3.4), layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(methods)
    for i, method in enumerate(methods):
        heights = np.array([rates[method][name] for name in names], dtype=float)
        centres = np.arange(len(names)) + (i - (len(methods) - 1) / 2) * width
        label, hatch = (f"{method} (not mixed)", "////") if method in unmixed else (method, None)
        axis.bar(centres, heights, 0.92 * width, color=COLOURS[i % 6], hatch=hatch, edgecolor="white", label=label)
        for x, height in zip(centres, heights, strict=True):
            if np.isfinite(height):
                text = f"{height:.2g}" if height < 100 else f"{height:.0f}"
                axis.annotate(text, (x, height), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    finite = np.array([h for method in methods for h in rates[method].values() if np.isfinite(h) and h > 0] or [1.0])
    axis.set_ylim(0.5 * finite.min(), 2.5 * finite.max())
    axis.set_xticks(range(len(names)), [_symbol(name) for name in names])
    axis.set_ylabel(unit)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=min(3, len(methods)), loc="upper center", bbox_to_anchor=(0.5, -0.1))
    save_picture(path, figure, 160)


def _shared_range(samples: Sequence[np.ndarray], truth: float) -> tuple[float, float]:
    """Where a column of histograms lies: every method's central 99 %, within three times that of the first."""
    ends = np.array([np.nanquantile(values, [0.005, 0.995]) for values in samples])
    (first_low, first_high), width = ends[0], ends[0, 1] - ends[0, 0]
    low = min(max(ends[:, 0].min(), first_low - width), truth)
    high = max(min(ends[:, 1].max(), first_high + width), truth)
    margin = 0.04 * (high - low) or 0.5
    return float(low - margin), float(high + margin)


def _symbol(name: str) -> str:
    """``z1`` as a subscripted symbol; other names as they are."""
    letter, digits = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
    return f"${letter}_{{{digits}}}$" if len(letter) == 1 and digits else name
