"""Estimates of log evidence: methods side by side image by image, against time, and over the fit of a base."""

import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator, MaxNLocator, NullFormatter

from ..reports.estimates import Estimates
from .colours import COLOURS
from .saving import save_picture

__all__ = ["against_time", "by_image", "over_training", "relative_errors"]

# Markers by status: a bound points towards the truth.
_MARKERS = {"unbiased": "o", "consistent": "s", "lower": "^", "upper": "v", "heuristic": "x"}


def by_image(path: str | os.PathLike, rows: Sequence[Estimates], reference: Estimates) -> None:
    """Every method's log p(x) less a reference's: means over the images, and image by image.

    Bars are two standard errors. A triangle is a bound and points to the side on which the truth is.

    Args:
        path: path of the PNG.
        rows: one per method.
        reference: what is subtracted, image by image; usually the row of smallest error that is not a bound.
    """
    n = len(reference.log_z)
    figure = Figure(figsize=(11, 0.33 * len(rows) + 3.1), layout="constrained")
    means, images = figure.subplots(1, 2, width_ratios=[1, 1.6])
    offsets = np.linspace(-0.3, 0.3, len(rows)) if len(rows) > 1 else np.zeros(1)
    for i, row in enumerate(rows):
        colour, marker = COLOURS[i % len(COLOURS)], _MARKERS[row.status]
        difference, error = (row.log_z - reference.log_z).numpy(), row.std_error.numpy()
        means.errorbar(row.mean, i, xerr=2 * _finite(row.mean_error), color=colour, marker=marker, ms=6, capsize=3)
        images.errorbar(
            np.arange(n) + offsets[i],
            difference,
            yerr=2 * _finite(error),
            color=colour,
            marker=marker,
            ms=3.5,
            lw=0,
            elinewidth=0.9,
            label=f"{row.label} ({row.status})",
        )
    means.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    means.invert_yaxis()
    means.set_xlabel(f"log p(x), mean of {n} image{'s' if n > 1 else ''} (nats)")
    images.axhline(0, color="0.6", lw=0.8, zorder=0)
    images.set_xlim(-0.6, n - 0.4)
    if max(float((row.log_z - reference.log_z).abs().max()) for row in rows) > 2:
        # bounds are far off where the others agree to a tenth
        images.set_yscale("symlog", linthresh=0.5, linscale=1.5)
        images.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    means.xaxis.set_major_locator(MaxNLocator(5))
    images.xaxis.set_major_locator(MaxNLocator(integer=True))
    images.set_xlabel("image")
    images.set_ylabel(f"less {reference.label} (nats)")
    images.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    for axis in (means, images):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    save_picture(path, figure, 140)


def against_time(
    path: str | os.PathLike,
    curves: Mapping[str, Sequence[Estimates]],
    levels: Mapping[str, float],
    band: tuple[float, float] | None,
    *,
    title: str,
) -> None:
    """Means over images against seconds, one curve per method: beside bounds as lines, and alone (T fig. 5.4).

    Args:
        path: path of the PNG.
        curves: method -> its estimates for growing effort; bars are two standard errors.
        levels: label -> bound, drawn as dashed lines.
        band: between a lower and an upper bound on all images' mean, shaded; None for none.
        title: title of the picture.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis in axes:
        if band is not None:
            axis.axhspan(min(band), max(band), color="0.8", lw=0, label="between the bidirectional bounds")
        for i, (label, rows) in enumerate(curves.items()):
            points = [(row.seconds, row.mean, 2 * _finite(row.mean_error)) for row in rows]
            _curve(axis, i, label, points)
        axis.set(xscale="log", xlabel="wall clock (s)")
        for ticks in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
            ticks(LogFormatter(minor_thresholds=(1.5, 0.5)))
        axis.spines[["top", "right"]].set_visible(False)
    for i, (label, value) in enumerate(levels.items()):
        axes[0].axhline(value, color="0.35", ls=("--", ":", "-.")[i % 3], lw=1)
        axes[0].annotate(f"{label} {value:.2f}", (0.995, value), xycoords=("axes fraction", "data"), ha="right",
                         va="bottom", fontsize=7.5, color="0.35")  # fmt: skip
    axes[0].set_ylabel("log p(x), mean over the images (nats)")
    axes[1].set_title("the methods alone", fontsize=9)
    _finish(figure, axes[0], path, title)


def relative_errors(
    path: str | os.PathLike,
    curves: Mapping[str, Sequence[Mapping]],
    levels: Mapping[str, Mapping[str, float]],
    *,
    title: str,
) -> None:
    """Errors of log Z, mean and covariance in units of the base's, against seconds (T fig. 5.2).

    Bars are three standard errors. Below 1 a method improves on the base that it started from.

    Args:
        path: path of the PNG.
        curves: method -> one entry per length: ``seconds``, and ``value`` and ``error`` of each quantity.
        levels: quantity -> ``value`` of a plain chain on the target, a dotted line.
        title: title of the picture.
    """
    names = {"log_z": "log Z", "mean": "mean", "covariance": "covariance"}
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, (name, words) in zip(axes, names.items(), strict=True):
        for i, (label, entries) in enumerate(curves.items()):
            _curve(axis, i, label, [(e["seconds"], e[name]["value"], 3 * e[name]["error"]) for e in entries])
        axis.axhline(1, color="0.35", ls="--", lw=1)
        if name in levels:
            axis.axhline(levels[name]["value"], color="#d55e00", ls=":", lw=1.3, label="plain HMC")
        axis.set(xscale="log", yscale="log", xlabel="wall clock (s)", title=words)
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            side.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("error in units of the base's")
    _finish(figure, axes[1], path, title)


def over_training(
    path: str | os.PathLike,
    trace: tuple[float, Sequence[float]],
    bound: float,
    curves: Mapping[str, Sequence[Mapping]],
    reference: Estimates,
    *,
    title: str,
) -> None:
    """The bound while a base is fitted, and estimates that start from it, against seconds (T fig. 5.6).

    Bars are three standard errors of the mean over runs, the band of the reference two of its own.

    Args:
        path: path of the PNG.
        trace: seconds of the fit, and the bound's noisy estimate at every step of it.
        bound: what the fit came to.
        curves: label -> one entry per length: ``seconds``, ``mean`` and ``error``.
        reference: one problem's estimate by a long run.
        title: title of the picture.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    seconds, values = trace
    value, error = float(reference.log_z[0]), float(reference.std_error[0])
    axes[0].plot(np.linspace(0, seconds, len(values)), values, color="0.55", lw=0.5, label="ELBO while fitting")
    for axis in axes:
        axis.axhline(bound, color="0.35", ls="-.", lw=1, label=f"ELBO {bound:.1f}")
        axis.axhspan(value - 2 * error, value + 2 * error, color="0.88", lw=0)
        axis.axhline(value, color="k", ls="--", lw=1, label=f"{reference.label} {value:.1f}")
        for i, (label, entries) in enumerate(curves.items()):
            _curve(axis, i, label, [(e["seconds"], e["mean"], 3 * e["error"]) for e in entries])
        axis.set_xlabel("wall clock, the fit included (s)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bound - 40, value + 8)
    axes[0].set_ylabel("log evidence (nats)")
    spread = max([abs(e["mean"] - value) + 3 * e["error"] for entries in curves.values() for e in entries])
    axes[1].set_ylim(value - 1.1 * spread, value + 1.1 * spread)
    axes[1].set_title("the estimates alone", fontsize=9)
    _finish(figure, axes[0], path, title)


def _curve(axis, i: int, label: str, points: Sequence[tuple[float, float, float]]) -> None:
    """The i-th method's estimates: seconds, value, half a bar."""
    seconds, values, bars = zip(*points, strict=True)
    colour, marker = COLOURS[i % len(COLOURS)], "os^Dv"[i % 5]
    axis.errorbar(seconds, values, yerr=bars, color=colour, marker=marker, ms=4.5, lw=1.2, capsize=2.5, label=label)


def _finish(figure: Figure, labelled, path: str | os.PathLike, title: str) -> None:
    """Title, one legend for all axes, and the file."""
    figure.suptitle(title, fontsize=10)
    handles, labels = labelled.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    save_picture(path, figure, 150)


def _finite(error):
    """No bar if there is no error."""
    return np.nan_to_num(error, nan=0.0, posinf=0.0)
