"""Time series: observed ones against those that a posterior simulates. One column per posterior."""

import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from .colours import COLOURS, TRUTH
from .saving import save_picture

__all__ = ["series"]


def series(
    path: str | os.PathLike,
    observed: np.ndarray,
    simulations: Mapping[str, np.ndarray],
    components: Sequence[str],
    *,
    paths_shown: int = 3,
) -> None:
    """Observed series against simulated ones: one column per set of series, one row per component.

    A panel has the pointwise median and central 50 % and 95 % of the simulations, a few of them, and the data.
    Simulations may have exploded: values that are not numbers count as above all others.

    Args:
        path: path of the PNG.
        observed: ``[steps, components]``, steps 1, 2, ...
        simulations: title -> ``[n, steps, components]``.
        components: names, the rows' labels.
        paths_shown: simulated series drawn as lines.
    """
    lowest, highest = observed.min(0), observed.max(0)
    spread = highest - lowest
    # far out of sight, where quantiles stay finite though a simulation may not
    simulations = {
        title: np.clip(np.nan_to_num(x, nan=np.inf), lowest - 100 * spread, highest + 100 * spread)
        for title, x in simulations.items()
    }
    figure = Figure(figsize=(3.6 * len(simulations) + 0.5, 2.3 * len(components) + 0.6), layout="constrained")
    axes = figure.subplots(len(components), len(simulations), squeeze=False, sharex=True, sharey="row")
    steps = np.arange(1, len(observed) + 1)
    for row, component in enumerate(components):
        ends = [lowest[row], highest[row]]
        for axis, simulated in zip(axes[row], simulations.values(), strict=True):
            low, lower, median, upper, high = np.quantile(simulated[..., row], [0.025, 0.25, 0.5, 0.75, 0.975], 0)
            axis.fill_between(steps, low, high, color=COLOURS[0], alpha=0.18, lw=0, label="95 %")
            axis.fill_between(steps, lower, upper, color=COLOURS[0], alpha=0.35, lw=0, label="50 %")
            axis.plot(steps, median, color=COLOURS[0], lw=1.2, label="median")
            chosen = np.linspace(0, len(simulated) - 1, min(paths_shown, len(simulated))).astype(int)
            axis.plot(steps, simulated[chosen, :, row].T, color="0.45", lw=0.5)
            axis.plot(steps, observed[:, row], color=TRUTH, lw=0, marker=".", ms=4.5, label="observed")
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
            ends += [low.min(), high.max()]
        # simulations that go wild must not flatten the data
        low, high = max(min(ends), lowest[row] - spread[row]), min(max(ends), highest[row] + spread[row])
        axes[row, 0].set_ylim(low - 0.03 * spread[row], high + 0.03 * spread[row])
        axes[row, 0].set_ylabel(component)
    axes[0, 0].set_xlim(1, len(observed))
    for column, title in enumerate(simulations):
        axes[0, column].set_title(title, fontsize=9)
        axes[-1, column].set_xlabel("time")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    save_picture(path, figure, 160)
