"""Human figures in three dimensions, and the error of their joints against time."""

import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from .saving import save_picture

__all__ = ["joint_errors", "poses"]

# one per method
_COLOURS = ("#0072b2", "#d55e00")


def joint_errors(
    path: str | os.PathLike, curves: Mapping[str, tuple[Sequence[float], np.ndarray]], start: float, *, title: str
) -> None:
    """Errors of posterior-mean joints against seconds, single scenes thin and their mean bold (J fig. 13).

    Args:
        path: path of the PNG.
        curves: method -> seconds ``[n]``, of which the first is the start, and errors ``[n, scenes]`` in metres.
        start: mean error at the start; a dashed line marks a tenth of it.
        title: title of the picture.
    """
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    for colour, (label, (seconds, errors)) in zip(_COLOURS, curves.items(), strict=True):
        # from the start to the first draws nothing was measured
        axis.plot(seconds[:2], errors[:2].mean(-1), color=colour, lw=1.2, ls=":")
        axis.plot(seconds[1:], errors[1:], color=colour, lw=0.6, alpha=0.5)
        axis.plot(seconds[1:], errors[1:].mean(-1), color=colour, lw=2.2, label=label)
    axis.axhline(0.1 * start, color="0.5", ls="--", lw=1)
    axis.annotate("a tenth of the start", (0.02, 0.1 * start), xycoords=("axes fraction", "data"), va="bottom",
                  fontsize=8, color="0.4")  # fmt: skip
    axis.set(yscale="log", xlabel="wall clock (s)", ylabel="RMSE of the posterior-mean joints (m)")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=9)
    save_picture(path, figure, 140)


def poses(path: str | os.PathLike, nodes: np.ndarray, bones: Sequence[tuple[int, int]]) -> None:
    """One row per scene: the figure that generated the picture, then one of each chain (J fig. 14).

    Args:
        path: path of the PNG.
        nodes: positions ``[1 + chains, scenes, nodes, 3]``, metres.
        bones: pairs of nodes that a bone joins.
    """
    columns, scenes = nodes.shape[:2]
    figure = Figure(figsize=(2.3 * columns, 2.5 * scenes), layout="constrained")
    for scene in range(scenes):
        for column in range(columns):
            axis = figure.add_subplot(scenes, columns, scene * columns + column + 1, projection="3d")
            _draw_figure(axis, nodes[column, scene], bones, "0.2" if column == 0 else _COLOURS[0])
            if scene == 0:
                axis.set_title("generated the picture" if column == 0 else f"chain {column}", fontsize=9)
    save_picture(path, figure, 140)


def _draw_figure(axis, nodes: np.ndarray, bones: Sequence[tuple[int, int]], colour: str) -> None:
    # height up the page, depth towards the reader
    for parent, node in bones:
        x, y, z = nodes[[parent, node]].T
        axis.plot(x, z, y, color=colour, lw=2, solid_capstyle="round")
    centre, reach = nodes.mean(0), np.abs(nodes - nodes.mean(0)).max()
    x, y, z = centre
    axis.set(xlim=(x - reach, x + reach), ylim=(z - reach, z + reach), zlim=(y - reach, y + reach))
    axis.set_box_aspect((1, 1, 1))
    axis.view_init(elev=12, azim=-60)
    axis.set(xticks=[], yticks=[], zticks=[])
