"""Pictures of a sampling run."""

import os
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dgm_infer import Draws
from dgm_infer.extras import extra

with extra("train"):
    from matplotlib.figure import Figure

__all__ = ["completions", "traces"]

_HIDDEN = (0.82, 0.87, 0.95)


def completions(
    path: str | os.PathLike, originals: Tensor, mask: Tensor, outputs: Tensor, *, n_shown: int = 12
) -> None:
    """One row an image: original, observed part, completions, posterior mean and standard deviation.

    Args:
        path: of the PNG.
        originals: ``[images, *shape]``, shape ``(H, W)``, ``(1, H, W)`` or ``(3, H, W)``, values in [0, 1].
        mask: ``[*shape]`` or ``[images, *shape]``, True = observed.
        outputs: ``[chains, draws, images, *shape]``; the completions shown are the last draws of different chains,
            then earlier ones.
        n_shown: completions a row.
    """
    n_images = originals.shape[0]
    # last draw of every chain first: neighbours in the row are independent
    shown = outputs.flip(1).transpose(0, 1).flatten(0, 1)[:n_shown]
    mean, sd = outputs.mean((0, 1)), outputs.std((0, 1))
    headings = ["original", "observed", *[""] * len(shown), "mean", "sd"]
    figure = Figure(figsize=(0.75 * len(headings), 0.78 * n_images + 0.4))
    axes = figure.subplots(n_images, len(headings), squeeze=False, gridspec_kw={"wspace": 0.06, "hspace": 0.06})
    sd_scale = max(float(sd.max()), 1e-6)
    for i in range(n_images):
        own_mask = mask[i] if mask.ndim == originals.ndim else mask
        hidden = ~_image(own_mask.expand(originals.shape[1:])).astype(bool)
        observed = _rgb(_image(originals[i]))
        observed[hidden.any(-1) if hidden.ndim == 3 else hidden] = _HIDDEN
        pictures = [_rgb(_image(originals[i])), observed, *(_rgb(_image(s[i])) for s in shown), _rgb(_image(mean[i]))]
        for axis, picture in zip(axes[i], pictures, strict=False):
            axis.imshow(picture, interpolation="nearest")
        spread = _image(sd[i])
        axes[i, -1].imshow(
            spread.mean(-1) if spread.ndim == 3 else spread,
            cmap="magma",
            vmin=0,
            vmax=sd_scale,
            interpolation="nearest",
        )
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_visible(False)
    for axis, heading in zip(axes[0], headings, strict=True):
        axis.set_title(heading, fontsize=8)
    middle = axes[0, 2 + len(shown) // 2]
    middle.set_title("completions, each from another chain" if len(shown) > 1 else "completion", fontsize=8)
    figure.savefig(path, dpi=160, bbox_inches="tight", facecolor="white")


def traces(
    path: str | os.PathLike, draws: Draws, labels: Sequence[tuple[str, tuple[int, ...]]], *, bins: int = 10
) -> None:
    """Trace and rank plots of some scalar latents, one row each.

    The rank plot shows how often each chain visits each range of the pooled ranks, relative to what equal chains
    would: a chain that stays in one place stands out as a coloured row (Vehtari et al. 2021).

    Args:
        path: of the PNG.
        draws: of the run.
        labels: ``(name, index)`` into ``draws.latents[name][:, :, *index]``.
        bins: of the ranks, at most.
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
    axes[0, 0].set_title("trace, one colour a chain", fontsize=9)
    axes[0, 1].set_title("visits of each chain to each range of ranks: even when mixed", fontsize=9)
    figure.savefig(path, dpi=110, facecolor="white")


def _image(x: Tensor) -> np.ndarray:
    """``(H, W)``, ``(1, H, W)`` or ``(C, H, W)`` as an array ``[H, W]`` or ``[H, W, C]``."""
    x = x.detach().cpu()
    if x.ndim == 3:
        x = x[0] if x.shape[0] == 1 else x.permute(1, 2, 0)
    return x.numpy()


def _rgb(image: np.ndarray) -> np.ndarray:
    image = np.clip(np.nan_to_num(image, nan=0.0), 0, 1)
    return np.repeat(image[..., None], 3, -1) if image.ndim == 2 else image.copy()
