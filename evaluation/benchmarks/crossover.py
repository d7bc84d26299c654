"""Speed of samplers against the width of the noise: ``python -m evaluation.benchmarks.crossover`` draws it for docs."""

import os
from collections.abc import Mapping
from typing import Any

from dgm_infer.errors import extra

from ..figures.colours import COLOURS
from .documents import ROOT, read_record

with extra("train"):
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

__all__ = ["crossover"]

_NAMES = {"constrained": "constrained HMC, on the fibre", "lifted": "lifted HMC, noise integrated out"}


def crossover(path: str | os.PathLike, record: Mapping[str, Any]) -> None:
    """Smallest bulk ESS per second of constrained and lifted HMC for every width of the output noise.

    One panel per observation. Open markers are runs whose chains had not mixed (R-hat above 1.05); crosses at the lower
    edge are runs that made too few draws in the time.

    Args:
        path: path of the PNG.
        record: of ``dgm-infer bench images``, with a sweep.
    """
    sweep = record["sweep"].values()
    figure = Figure(figsize=(4.2 * len(sweep) + 0.6, 3.6), layout="constrained")
    axes = figure.subplots(1, len(sweep), sharey=True, squeeze=False)[0]
    for axis, entry in zip(axes, sweep, strict=True):
        for i, (label, by_width) in enumerate(entry["methods"].items()):
            colour, marker = COLOURS[i % len(COLOURS)], "os^D"[i % 4]
            widths = sorted(map(float, by_width))
            rows = [by_width[f"{width:g}"] for width in widths]
            drawn = [(width, row) for width, row in zip(widths, rows, strict=True) if row.get("min_ess_per_second")]
            rates = [row["min_ess_per_second"] for _, row in drawn]
            axis.plot([width for width, _ in drawn], rates, color=colour, lw=1.4, label=_NAMES.get(label, label))
            for width, row in drawn:
                face = colour if row["mixed"] == 1 else "white"
                rate = row["min_ess_per_second"]
                axis.plot(width, rate, marker=marker, ms=6, color=colour, markerfacecolor=face)
            for width in widths:
                if width not in [at for at, _ in drawn]:
                    # at the edge of the panel, whatever its scale
                    axis.plot(
                        width, 0.02 + 0.04 * i, "x", color=colour, transform=axis.get_xaxis_transform(), clip_on=False
                    )
        axis.set(xscale="log", yscale="log", xlabel="output noise (standard deviation)")
        axis.set_title(f"{entry['title']} observed", fontsize=9)
        axis.xaxis.set_major_locator(FixedLocator(sorted({float(sd) for by in entry["methods"].values() for sd in by})))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("smallest bulk ESS per second")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    # tells which record it is drawn from
    figure.savefig(path, dpi=150, facecolor="white", metadata={"Source": record["date"]})


if __name__ == "__main__":
    crossover(ROOT / "docs" / "crossover.png", read_record("images_cpu"))
