"""Samplers of estimated densities: efficiency against the scale of their moves, and chains that stick or do not."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .colours import COLOURS, TRUTH
from .saving import save_picture

__all__ = ["against_scale", "chain_rows", "r_hat_against_time"]


def against_scale(path: str | os.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
    """Efficiency and acceptance against the step, and efficiency against the bracket's width: a row for every N.

    T fig. 3.3, T fig. 3.5, T fig. 3.7 and T fig. 3.9 in one. Open markers are runs whose chains had not mixed (R-hat
    above 1.05).

    Args:
        path: path of the PNG.
        rows: of every sampler, N and scale, as the experiment keeps them.
    """
    samplers = list(dict.fromkeys(row["sampler"] for row in rows))
    samples = sorted({row["samples"] for row in rows})
    figure = Figure(figsize=(11, 2.5 * len(samples) + 0.7), layout="constrained")
    axes = figure.subplots(len(samples), 3, squeeze=False, sharex="col")
    for n, (walks, acceptance, slices) in zip(samples, axes, strict=True):
        for i, sampler in enumerate(samplers):
            own = [row for row in rows if row["sampler"] == sampler and row["samples"] == n]
            axis = slices if sampler.endswith("+SS") else walks
            _marked(axis, own, "ess_per_1000_evaluations", i, sampler)
            if axis is walks:
                _marked(acceptance, own, "target_acceptance", i, None)
        for axis in (walks, slices):
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
        low, high = (op([a.get_ylim()[k] for a in (walks, slices)]) for k, op in ((0, min), (1, max)))
        for axis in (walks, slices):
            axis.set_ylim(low, high)
        walks.set_ylabel(f"N = {n}\neffective draws\nper 1000 evaluations", fontsize=8)
        acceptance.set_ylabel("acceptance of the walk", fontsize=8)
        acceptance.set_ylim(0, 1)
    for axis, words in zip(axes[-1], ("step size", "step size", "width of the bracket"), strict=True):
        axis.set_xlabel(words)
    named = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named), fontsize=8, frameon=False)
    save_picture(path, figure, 150)


def chain_rows(
    path: str | os.PathLike,
    rows: Mapping[str, np.ndarray],
    *,
    quantity: str,
    exact: tuple[float, float] | None = None,
    bins: int = 60,
) -> None:
    """A trace of one chain, and the histogram of all: a row per sampler (T fig. 3.4, T fig. 3.8, T fig. 3.12).

    The chain shown is the one that stood still the longest.

    Args:
        path: path of the PNG.
        rows: label -> draws of one coordinate, ``[chains, draws]``.
        quantity: its name.
        exact: mean and standard deviation of its normal density, if it is known, drawn over the histograms.
        bins: bins per histogram, over a range that all share.
    """
    figure = Figure(figsize=(11, 1.5 * len(rows) + 0.5), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False, sharey="row", width_ratios=(3, 1))
    pooled = np.concatenate([values.ravel() for values in rows.values()])
    low, high = np.quantile(pooled, [0.001, 0.999])
    if exact is not None:
        low, high = min(low, exact[0] - 4 * exact[1]), max(high, exact[0] + 4 * exact[1])
    edges = np.linspace(low, high, bins + 1)
    for i, ((label, values), (trace, marginal)) in enumerate(zip(rows.items(), axes, strict=True)):
        still = (np.diff(values, axis=1) == 0).sum(1)
        trace.plot(values[still.argmax()], lw=0.5, color=COLOURS[i % 6])
        trace.set_xlim(0, values.shape[1])
        trace.set_ylim(low, high)
        trace.set_ylabel(quantity)
        trace.set_title(label, fontsize=8, loc="left", pad=2)
        density, _ = np.histogram(values, edges, density=True)
        marginal.stairs(density, edges, orientation="horizontal", fill=True, color=COLOURS[i % 6], alpha=0.75)
        if exact is not None:
            at = np.linspace(low, high, 300)
            z = (at - exact[0]) / exact[1]
            marginal.plot(np.exp(-0.5 * z**2) / (exact[1] * np.sqrt(2 * np.pi)), at, color=TRUTH, lw=1.2)
        marginal.set_xticks([])
        for axis in (trace, marginal):
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
    axes[-1, 0].set_xlabel("draw")
    axes[-1, 1].set_xlabel("density, all chains" + ("" if exact is None else "; line: exact"), fontsize=8)
    save_picture(path, figure, 150)


def r_hat_against_time(path: str | os.PathLike, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """``R-hat - 1`` of growing parts of the chains, against seconds and against cubic operations (T fig. 3.11).

    Args:
        path: path of the PNG.
        curves: sampler -> ``seconds``, ``cubic_operations`` of one chain, and ``r_hat``, of equal lengths.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, key in zip(axes, ("seconds", "cubic_operations"), strict=True):
        for i, (label, curve) in enumerate(curves.items()):
            excess = np.asarray(curve["r_hat"]) - 1
            # a split R-hat can be a little below 1, and is infinite while no chain moves
            excess = np.where(np.isfinite(excess), excess.clip(1e-4), np.nan)
            colour, marker = COLOURS[i % 6], "os^Dv"[i % 5]
            axis.plot(curve[key], excess, color=colour, marker=marker, ms=4, lw=1.2, label=label)
        axis.set(xscale="log", yscale="log")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].set(xlabel="wall clock, all chains (s)", ylabel="largest R-hat, minus 1")
    axes[1].set_xlabel("cubic operations of one chain")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    save_picture(path, figure, 150)


def _marked(axis: Axes, rows: Sequence[Mapping[str, Any]], key: str, i: int, label: str | None) -> None:
    """One sampler's curve over the scales, with open markers where its chains disagree."""
    if not rows:
        return
    colour, marker = COLOURS[i % 6], "os^Dv"[i % 5]
    axis.plot([row["scale"] for row in rows], [row[key] for row in rows], color=colour, lw=1.2)
    for row in rows:
        face = colour if row["r_hat"] <= 1.05 else "white"
        axis.plot(row["scale"], row[key], marker=marker, ms=5, color=colour, markerfacecolor=face)
    if label is not None:
        axis.plot([], [], color=colour, marker=marker, ms=5, lw=1.2, label=label)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
