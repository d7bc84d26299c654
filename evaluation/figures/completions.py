"""Completed images: what was observed, single completions, their mean and spread. One row per image."""

import io
import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from dgm_infer.files import writable_folder, write_file

from .saving import save_picture

__all__ = ["completions", "image", "rgb", "single_pictures"]

_HIDDEN = (0.82, 0.87, 0.95)


def completions(
    path: str | os.PathLike,
    originals: Tensor | None,
    mask: Tensor | None,
    outputs: Tensor,
    *,
    observed: Tensor | None = None,
    n_shown: int = 12,
) -> None:
    """One row per image: original, what was observed, completions, posterior mean and standard deviation.

    Args:
        path: path of the PNG.
        originals: ``[images, *shape]``, shape ``(H, W)``, ``(1, H, W)`` or ``(3, H, W)``, values in [0, 1]; None if
            they are unknown.
        mask: ``[H, W]``, ``[*shape]`` or ``[images, *shape]``, True = observed; None for all pixels.
        outputs: ``[chains, draws, images, *shape]``; the completions shown are the last draws of different chains,
            then earlier ones.
        observed: what was observed, ``[images, *shape]``, if it is not a part of the originals.
        n_shown: completions per row.
    """
    n_images = outputs.shape[2]
    # last draw of every chain first: neighbours in the row are independent
    shown = outputs.flip(1).transpose(0, 1).flatten(0, 1)[:n_shown]
    mean, sd = outputs.mean((0, 1)), outputs.std((0, 1))
    seen = originals if observed is None else observed
    first = [*([] if originals is None else ["original"]), *([] if seen is None else ["observed"])]
    headings = [*first, *[""] * len(shown), "mean", "sd"]
    figure = Figure(figsize=(0.75 * len(headings), 0.78 * n_images + 0.4))
    axes = figure.subplots(n_images, len(headings), squeeze=False, gridspec_kw={"wspace": 0.06, "hspace": 0.06})
    sd_scale = max(float(sd.max()), 1e-6)
    for i in range(n_images):
        pictures = [] if originals is None else [rgb(image(originals[i]))]
        pictures += [] if seen is None else [visible(seen[i], mask_of(mask, i, outputs.shape[3:]))]
        pictures += [*(rgb(image(s[i])) for s in shown), rgb(image(mean[i]))]
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
    middle = axes[0, len(first) + len(shown) // 2]
    middle.set_title(_heading(len(shown), outputs.shape[0]), fontsize=8)
    save_picture(path, figure, 160, tight=True)


def mask_of(mask: Tensor | None, i: int, shape: tuple[int, ...]) -> Tensor | None:
    """The mask of image ``i``, ``[*shape]``, of one for all or one each; None for none."""
    if mask is None:
        return None
    return (mask[i] if mask.ndim > len(shape) else mask).expand(shape)


def visible(picture: Tensor, mask: Tensor | None) -> np.ndarray:
    """Colours ``[H, W, 3]`` of a picture, those of the hidden pixels marked."""
    colours = rgb(image(picture))
    if mask is not None:
        hidden = ~image(mask).astype(bool)
        colours[hidden.any(-1) if hidden.ndim == 3 else hidden] = _HIDDEN
    return colours


def single_pictures(
    folder: Path,
    originals: Tensor | None,
    observed: Tensor | None,
    mask: Tensor | None,
    outputs: Tensor,
    *,
    n: int = 4,
) -> None:
    """Every picture as a PNG of its own size: ``000_original``, ``000_observed``, ``000_mean``, ``000_completion_1``.

    Args:
        folder: where they go; made if need be.
        originals: as for :func:`completions`.
        observed: as for :func:`completions`.
        mask: as for :func:`completions`.
        outputs: ``[chains, draws, images, *shape]``, of which the last draws of ``n`` chains are written.
        n: completions per image.
    """
    from PIL import Image

    shown, mean = outputs[:n, -1], outputs.mean((0, 1))
    for i in range(outputs.shape[2]):
        own = mask_of(mask, i, outputs.shape[3:])
        named = {} if originals is None else {"original": rgb(image(originals[i]))}
        named |= {} if observed is None else {"observed": visible(observed[i], own)}
        named |= {"mean": rgb(image(mean[i]))} | {f"completion_{k + 1}": rgb(image(s[i])) for k, s in enumerate(shown)}
        for name, colours in named.items():
            file = io.BytesIO()
            Image.fromarray(np.round(255 * colours).astype(np.uint8)).save(file, format="PNG")
            write_file(writable_folder(folder) / f"{i:03d}_{name}.png", file)


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
