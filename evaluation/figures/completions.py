"""Completed images as files: the sheet of all of them, one row per image, and every picture by itself."""

import io
import os
from pathlib import Path

import numpy as np
from torch import Tensor

from dgm_infer.files import writable_folder, write_file
from dgm_infer.sampling.show import array_of, mask_of, rgb, sheet, visible

from .saving import save_picture

__all__ = ["completions", "single_pictures"]


def completions(
    path: str | os.PathLike,
    originals: Tensor | None,
    mask: Tensor | None,
    outputs: Tensor,
    *,
    observed: Tensor | None = None,
    n_shown: int = 12,
) -> None:
    """Write the :func:`~dgm_infer.sampling.show.sheet` of these images as a PNG."""
    save_picture(path, sheet(originals, mask, outputs, observed=observed, n_shown=n_shown), 160, tight=True)


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
        named = {} if originals is None else {"original": rgb(array_of(originals[i]))}
        named |= {} if observed is None else {"observed": visible(observed[i], own)}
        named |= {"mean": rgb(array_of(mean[i]))} | {
            f"completion_{k + 1}": rgb(array_of(s[i])) for k, s in enumerate(shown)
        }
        for name, colours in named.items():
            file = io.BytesIO()
            Image.fromarray(np.round(255 * colours).astype(np.uint8)).save(file, format="PNG")
            write_file(writable_folder(folder) / f"{i:03d}_{name}.png", file)
