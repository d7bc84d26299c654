"""How the chains of one run mixed: traces and ranks of single latents. One row per latent."""

import os
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from dgm_infer import Draws

from .saving import save_picture

__all__ = ["traces"]


def traces(
    path: str | os.PathLike, draws: Draws, labels: Sequence[tuple[str, tuple[int, ...]]], *, bins: int = 10
) -> None:
    """Trace and rank plots of some scalar latents, one row each.

    The rank plot shows how often each chain visits each range of the pooled ranks, relative to what equal chains
    would: a chain that stays in one place stands out as a coloured row (Vehtari et al. 2021).

    Args:
        path: path of the PNG.
        draws: draws of the run.
        labels: ``(name, index)`` into ``draws.latents[name][:, :, *index]``.
        bins: maximum bins of the ranks.
    """
    figure = Figure(figsize=(11, 1.8 * len(labels) + 0.5), layout="constrained")
    axes = figure.subplots(len(labels), 2, squeeze=False)
    for (trace_axis, rank_axis), (name, index) in zip(axes, labels, strict=True):
        values = draws.latents[name][(slice(None), slice(None), *index)].cpu().numpy()
        chains, n = values.shape
        trace_axis.plot(values.T, lw=0.5, alpha=0.7)
        trace_axis.set_ylabel(f"{name}[{', '.join(map(str, index))}]" if index else name)
        trace_axis.set_xlim(0, max(n - 1, 1))
        ranks = values.ravel().argsort().argsort().reshape(chains, n)
        columns = max(1, min(bins, n // 5))
        counts = np.stack([np.bincount(row * columns // (chains * n), minlength=columns) for row in ranks])
        picture = rank_axis.imshow(counts * columns / n, cmap="PuOr", vmin=0, vmax=2, aspect="auto", origin="lower")
        rank_axis.set_xticks([])
        rank_axis.set_ylabel("chain")
        figure.colorbar(picture, ax=rank_axis, label="visits", ticks=[0, 1, 2])
    axes[-1, 0].set_xlabel("draw")
    axes[-1, 1].set_xlabel("rank among the draws of all chains, low to high")
    axes[0, 0].set_title("trace, one colour per chain", fontsize=9)
    axes[0, 1].set_title("visits of each chain to each range of ranks: even when mixed", fontsize=9)
    save_picture(path, figure, 110)
