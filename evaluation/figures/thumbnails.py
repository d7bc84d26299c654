"""Images that share their block means: the images, their thumbnails, and the difference from the observed ones."""

import os

from matplotlib.figure import Figure
from torch import Tensor

from dgm_infer import downsample
from dgm_infer.sampling.show import array_of, heading_of, rgb

from .saving import save_picture

__all__ = ["thumbnails"]


def thumbnails(path: str | os.PathLike, originals: Tensor, factor: int, outputs: Tensor, *, n_shown: int = 12) -> None:
    """Three rows per problem: the original and completions, their thumbnails, and how these differ from the observed.

    Args:
        path: path of the PNG.
        originals: ``[images, *shape]``, shape ``(H, W)``, ``(1, H, W)`` or ``(3, H, W)``, values in [0, 1].
        factor: side of the blocks whose means are observed.
        outputs: ``[chains, draws, images, *shape]``; shown are the last draws of different chains.
        n_shown: completions per row, at most one per chain.
    """
    shown = outputs[:n_shown, -1]
    block_means = downsample(factor)
    observed = block_means(originals.to(shown))
    figure = Figure(figsize=(0.9 * (len(shown) + 1) + 0.6, 2.75 * len(originals)))
    axes = figure.subplots(
        3 * len(originals), len(shown) + 1, squeeze=False, gridspec_kw={"wspace": 0.06, "hspace": 0.06}
    )
    for i, original in enumerate(originals):
        own = block_means(shown[:, i])
        difference = (own - observed[i]).abs()
        # one unit for all of a problem, so that the eye compares chains
        unit = max(difference.max().item(), 1e-300)
        rows = [
            [original, *shown[:, i]],
            [observed[i], *own],
            [difference[0] * 0, *(difference / unit)],
        ]
        labels = ["image", "thumbnail", f"difference\n/ {unit:.0e}"]
        for row, (pictures, label) in enumerate(zip(rows, labels, strict=True)):
            for axis, picture in zip(axes[3 * i + row], pictures, strict=True):
                axis.imshow(rgb(array_of(picture)), interpolation="nearest")
            axes[3 * i + row, 0].set_ylabel(label, fontsize=7)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0, 0].set_title("observed", fontsize=8)
    axes[0, 1 + len(shown) // 2].set_title(heading_of(len(shown), len(shown), "restoration"), fontsize=8)
    save_picture(path, figure, 160, tight=True)
