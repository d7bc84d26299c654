"""Draws as a person looks at them: in a notebook, in ArviZ's plots, and as a sheet of pictures, one row per problem."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ..arguments import choice, names_of, numbers, whole_number
from ..conditioning.fibre import Fibre
from ..conditioning.observed import NoisyMeasurement
from ..conditioning.operators import Selection
from ..conditioning.pictures import PixelScale
from ..errors import ArgumentError, DgmInferError
from ..html import block, figure, table, text
from .inference_data import inference_data, plotted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["trace", "rank", "posterior", "pair", "pictures"]
"""Plots of ArviZ, and the sheet of pictures."""


class NamedTensors(dict[str, Tensor]):
    """Tensors by name; a name that is not there is answered with those that are."""

    def __missing__(self, name: object) -> Tensor:
        raise ArgumentError(
            f"no latent {name!r}: there {'is' if len(self) == 1 else 'are'} {', '.join(self) or 'none'}"
        )


def worst(draws: Any, n: int, names: Any = None) -> dict[str, Tensor]:
    """The ``n`` single latents of the largest R-hat, by their names in the summary: each ``[chains, draws]``."""
    chosen = list(draws.latents) if names is None else names_of("plot", "names", names, draws.latents)
    summary = draws.summary(chosen)
    values = torch.cat([draws.latents[name].reshape(*draws.shape[:2], -1) for name in chosen], -1)
    order = np.argsort(-summary["r_hat"].fillna(-1).to_numpy(), kind="stable")[:n]
    return {str(summary.index[i]): values[..., i] for i in sorted(order)}


def plot(draws: Any, kind: Kind = "trace", names: Any = None, *, n: int = 6, originals: Any = None) -> "Figure":
    """ArviZ's plots of the worst latents, or the sheet of pictures: see :meth:`Draws.plot`."""
    choice("plot", "kind", kind, get_args(Kind))
    whole_number("plot", "n", n)
    if kind == "pictures":
        return picture_sheet(draws, originals, n)
    if not draws.latents:
        raise ArgumentError("plot(): there are no latents to plot: the model's latents(u) names none")
    if draws.shape[1] < 2:
        raise ArgumentError(f"plot(): needs at least 2 draws per chain, there are {draws.shape[1]}")
    import matplotlib.pyplot as plt

    shown = worst(draws, n, names)
    stats = {"diverging": torch.zeros(draws.shape[:2], dtype=torch.bool)}
    # a name with brackets is one of many entries, here a variable of its own
    data = inference_data(shown, stats, 0)
    made = plotted(kind, data)
    # a notebook shows it as what the call returns, and not once more
    plt.close(made)
    return made


def html(draws: Any) -> str:
    """What a notebook shows: how good the draws are, their worst latents, and completions."""
    parts = [f'<p class="said">{text(draws)}</p>']
    try:
        parts.append(f"<pre>{text(draws.diagnose())}</pre>")
        if draws.latents and draws.shape[1] > 3:
            summary = draws.summary().sort_values("r_hat", ascending=False)[["mean", "sd", "ess_bulk", "r_hat"]]
            rows = [
                (label, *map(float, row)) for label, row in zip(summary.index, summary.head(8).to_numpy(), strict=False)
            ]
            parts.append(table(["worst latents", *summary.columns], rows))
        parts += thumbnails(draws)
    except DgmInferError as error:
        # a model that generates nothing, or draws without their problem
        parts.append(f"<p>{text(error)}</p>")
    return block(*parts)


def thumbnails(draws: Any, n: int = 8) -> list[str]:
    """The last completions of the first problem, one a chain; none if outputs are not images."""
    problem = draws.problem
    if problem is None or draws.inputs is None or not problem.can_complete:
        return []
    rng = torch.Generator(draws.inputs.device).manual_seed(draws.seed)
    outputs = problem.complete(draws.inputs[:n, -1:], rng)
    n_batch = len(draws.shape) - 2
    outputs = outputs.reshape(outputs.shape[0], -1, *outputs.shape[2 + n_batch :])[:, 0]
    if outputs.ndim == 4 and outputs.shape[1] in (1, 3):
        outputs = outputs[:, 0] if outputs.shape[1] == 1 else outputs.movedim(1, -1)
    if outputs.ndim not in (3, 4) or min(outputs.shape[1:3]) < 4:
        return []
    unit = pixel_scale(problem).to_unit(outputs).nan_to_num().clamp(0, 1)
    pixels = (255 * unit).round().to(torch.uint8).cpu().numpy()
    return [f"<p>{heading_of(n, n, noun(problem))}</p>", *(figure(p, "", width=max(64, p.shape[1])) for p in pixels)]


# The colour of hidden pixels, which no grey picture has.
_HIDDEN = (0.82, 0.87, 0.95)


class Seen(NamedTuple):
    """What was observed of outputs, as far as it is a picture."""

    pictures: Tensor | None
    """``[images, *shape]``; None if it is none."""
    mask: Tensor | None
    """``[images, *shape]``, True = observed; None for all."""

    @classmethod
    def of(cls, problem: Any, shape: tuple[int, ...]) -> "Seen":
        """That of a problem; nothing of one that is not a fibre."""
        if not isinstance(problem, Fibre):
            return cls(None, None)
        values, operator = problem.values, problem.observed.operator
        values = values.reshape(-1, values.shape[-1])
        size = torch.Size(shape).numel()
        if isinstance(operator, Selection):
            flat = values.new_zeros(*problem.batch_shape, size)
            own = problem.values
            pictures, mask = operator.complete(own, flat), operator.complete(torch.ones_like(own), flat) > 0
            return cls(pictures.reshape(-1, *shape), mask.reshape(-1, *shape))
        return cls(values.reshape(-1, *shape) if values.shape[-1] == size else None, None)


def picture_sheet(draws: Any, originals: Any, n: int) -> "Figure":
    """The sheet of draws whose outputs are pictures: see :meth:`Draws.plot`."""
    outputs = draws.generate()
    n_batch = len(draws.shape) - 2
    shape = tuple(outputs.shape[2 + n_batch :])
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, 3)):
        raise ArgumentError(f"plot('pictures'): outputs of shape {shape} are not [H, W], [1, H, W] or [3, H, W]")
    outputs = outputs.reshape(*outputs.shape[:2], -1, *shape)
    scale = pixel_scale(draws.problem)
    seen = Seen.of(draws.problem, shape)
    if originals is not None:
        originals = numbers("plot", "originals", originals)
        if originals.numel() != outputs[0, 0].numel():
            raise ArgumentError(
                f"plot(originals of shape {tuple(originals.shape)}): expected {(*draws.shape[2:], *shape)}, one for "
                "every problem"
            )
        originals = scale.to_unit(originals.reshape(outputs.shape[2:]))
    pictures = None if seen.pictures is None else scale.to_unit(seen.pictures)
    return sheet(originals, seen.mask, scale.to_unit(outputs), observed=pictures, n_shown=n)


def sheet(
    originals: Tensor | None,
    mask: Tensor | None,
    outputs: Tensor,
    *,
    observed: Tensor | None = None,
    n_shown: int = 12,
) -> "Figure":
    """One row per image: original, what was observed, completions, posterior mean and standard deviation.

    Args:
        originals: ``[images, *shape]``, shape ``(H, W)``, ``(1, H, W)`` or ``(3, H, W)``, values in [0, 1]; None if
            they are unknown.
        mask: ``[H, W]``, ``[*shape]`` or ``[images, *shape]``, True = observed; None for all pixels.
        outputs: ``[chains, draws, images, *shape]``; the completions shown are the last draws of different chains,
            then earlier ones.
        observed: what was observed, ``[images, *shape]``; None for the originals under the mask, and without one for
            what is not a picture.
        n_shown: completions per row.
    """
    from matplotlib.figure import Figure

    n_images = outputs.shape[2]
    # last draw of every chain first: neighbours in the row are independent
    shown = outputs.flip(1).transpose(0, 1).flatten(0, 1)[:n_shown]
    mean, sd = outputs.mean((0, 1)), outputs.std((0, 1))
    # a mask shows which part of the originals was observed
    seen = originals if observed is None and mask is not None else observed
    first = [*([] if originals is None else ["original"]), *([] if seen is None else ["observed"])]
    headings = [*first, *[""] * len(shown), "mean", "sd"]
    cell, gap, top = 0.7, 0.045, 0.22
    width, height = (cell + gap) * len(headings) + gap, (cell + gap) * n_images + gap + top
    figure = Figure(figsize=(width, height), dpi=160)
    # one axis in inches for all: one for every picture takes ten times as long
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()

    def show(picture: np.ndarray, row: int, column: int, **colours: Any) -> None:
        half = np.array(picture.shape[:2]) / max(picture.shape[:2]) * cell / 2
        y, x = top + (cell + gap) * row + cell / 2, gap + (cell + gap) * column + cell / 2
        extent = (x - half[1], x + half[1], y + half[0], y - half[0])
        axis.imshow(picture, extent=extent, interpolation="nearest", aspect="auto", **colours)

    sd_scale = max(float(sd.max()), 1e-6)
    for i in range(n_images):
        pictures = [] if originals is None else [rgb(array_of(originals[i]))]
        pictures += [] if seen is None else [visible(seen[i], mask_of(mask, i, outputs.shape[3:]))]
        pictures += [*(rgb(array_of(s[i])) for s in shown), rgb(array_of(mean[i]))]
        for column, picture in enumerate(pictures):
            show(picture, i, column)
        spread = array_of(sd[i])
        show(spread.mean(-1) if spread.ndim == 3 else spread, i, len(pictures), cmap="magma", vmin=0, vmax=sd_scale)
    # after imshow(), which sets its own
    axis.set(xlim=(0, width), ylim=(height, 0))
    headings[len(first) + len(shown) // 2] = heading_of(len(shown), outputs.shape[0], noun_of(mask))
    for column, heading in enumerate(headings):
        x = gap + (cell + gap) * column + cell / 2
        axis.text(x, top - gap, heading, fontsize=8, ha="center", va="bottom")
    return figure


def pixel_scale(problem: Any) -> PixelScale:
    """What black and white are in the outputs of a problem's draws."""
    model = getattr(problem, "model", problem)
    return PixelScale.of(model.model.model if isinstance(model, NoisyMeasurement) else model)


def noun_of(mask: Tensor | None) -> str:
    """What outputs are called: completions where a mask hides a part, else restorations, as of a blur."""
    return "restoration" if mask is None or bool(mask.all()) else "completion"


def noun(problem: Any) -> str:
    """The same of the outputs of a problem."""
    operator = problem.observed.operator if isinstance(problem, Fibre) else None
    return "completion" if operator is None or isinstance(operator, Selection) else "restoration"


def heading_of(n_shown: int, n_chains: int, noun: str = "completion") -> str:
    """The heading of the completions, which says how many chains they come from."""
    if n_shown < 4:
        # more does not fit above them
        return noun if n_shown == 1 else f"{noun}s"
    if n_shown <= n_chains:
        return f"{noun}s, each from another chain"
    return f"{noun}s from {n_chains} chains" if n_chains > 1 else f"{noun}s from one chain"


def mask_of(mask: Tensor | None, i: int, shape: tuple[int, ...]) -> Tensor | None:
    """The mask of image ``i``, ``[*shape]``, of one for all or one each; None for none."""
    if mask is None:
        return None
    return (mask[i] if mask.ndim > len(shape) else mask).expand(shape)


def visible(picture: Tensor, mask: Tensor | None) -> np.ndarray:
    """Colours ``[H, W, 3]`` of a picture, those of the hidden pixels marked."""
    colours = rgb(array_of(picture))
    if mask is not None:
        hidden = ~array_of(mask).astype(bool)
        colours[hidden.any(-1) if hidden.ndim == 3 else hidden] = _HIDDEN
    return colours


def array_of(x: Tensor) -> np.ndarray:
    """``(H, W)``, ``(1, H, W)`` or ``(C, H, W)`` as an array ``[H, W]`` or ``[H, W, C]``."""
    x = x.detach().cpu()
    if x.ndim == 3:
        x = x[0] if x.shape[0] == 1 else x.permute(1, 2, 0)
    return x.numpy()


def rgb(picture: np.ndarray) -> np.ndarray:
    """An array ``[H, W]`` or ``[H, W, 3]`` as colours ``[H, W, 3]`` in [0, 1]."""
    picture = np.clip(np.nan_to_num(picture, nan=0.0), 0, 1)
    return np.repeat(picture[..., None], 3, -1) if picture.ndim == 2 else picture.copy()
