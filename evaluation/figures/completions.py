"""Completed images: what was observed, single completions, their mean and spread. One row per image."""

import os

import numpy as np
from torch import Tensor

from dgm_infer.extras import extra

from .saving import save_picture

with extra("train"):
    from matplotlib.figure import Figure

__all__ = ["completions", "image", "rgb"]

_HIDDEN = (0.82, 0.87, 0.95)


def completions(
    path: str | os.PathLike, originals: Tensor, mask: Tensor, outputs: Tensor, *, n_shown: int = 12
) -> None:
    """One row per image: original, observed part, completions, posterior mean and standard deviation.

    Args:
        path: path of the PNG.
        originals: ``[images, *shape]``, shape ``(H, W)``, ``(1, H, W)`` or ``(3, H, W)``, values in [0, 1].
        mask: ``[*shape]`` or ``[images, *shape]``, True = observed.
        outputs: ``[chains, draws, images, *shape]``; the completions shown are the last draws of different chains,
            then earlier ones.
        n_shown: completions per row.
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
        hidden = ~image(own_mask.expand(originals.shape[1:])).astype(bool)
        observed = rgb(image(originals[i]))
        observed[hidden.any(-1) if hidden.ndim == 3 else hidden] = _HIDDEN
        pictures = [rgb(image(originals[i])), observed, *(rgb(image(s[i])) for s in shown), rgb(image(mean[i]))]
        for axis, picture in zip(axes[i], pictures, strict=False):
            axis.imshow(picture, interpolation="nearest")
        spread = image(sd[i])
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
    middle.set_title(_heading(len(shown), outputs.shape[0]), fontsize=8)
    save_picture(path, figure, 160, tight=True)


def _heading(n_shown: int, n_chains: int) -> str:
    """The heading of the completions, which says how many chains they come from."""
    if n_shown == 1:
        return "completion"
    if n_shown <= n_chains:
        return "completions, each from another chain"
    return f"completions from {n_chains} chains" if n_chains > 1 else "completions from one chain"


def image(x: Tensor) -> np.ndarray:
    """``(H, W)``, ``(1, H, W)`` or ``(C, H, W)`` as an array ``[H, W]`` or ``[H, W, C]``."""
    x = x.detach().cpu()
    if x.ndim == 3:
        x = x[0] if x.shape[0] == 1 else x.permute(1, 2, 0)
    return x.numpy()


def rgb(picture: np.ndarray) -> np.ndarray:
    """An array ``[H, W]`` or ``[H, W, 3]`` as colours ``[H, W, 3]`` in [0, 1]."""
    picture = np.clip(np.nan_to_num(picture, nan=0.0), 0, 1)
    return np.repeat(picture[..., None], 3, -1) if picture.ndim == 2 else picture.copy()
