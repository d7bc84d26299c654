"""Draws as a person looks at them: in a notebook, and in ArviZ's plots."""

from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..arguments import choice, names_of, whole_number
from ..errors import ArgumentError, DgmInferError
from ..html import block, figure, table, text
from .inference_data import inference_data, plotted
from .sheet import heading_of, noun, picture_sheet, pixel_scale

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
    values = torch.cat([draws.latents[name].flatten(2).reshape(*draws.shape[:2], -1) for name in chosen], -1)
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
