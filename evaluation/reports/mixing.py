"""How well the chains of a run mixed, image by image."""

import re
import sys
from collections.abc import Iterator

import numpy as np
import pandas as pd

from dgm_infer import Draws, Fibre
from dgm_infer.sampling.chain_groups import side_by_side

from .mixed_draws import r_hats
from .tables import aligned

__all__ = ["R_HAT", "describe", "modes", "parse_label", "worst_and_typical"]

# R-hat up to which a latent counts as mixed.
R_HAT = 1.05
# Share of latents that have mixed from which modes are not asked for.
_MIXED = 0.9
# Latents that are named if they have not mixed.
_WORST = 5


def describe(draws: Draws, summary: pd.DataFrame, seconds: float) -> str:
    """A table of one row per image, a line that names the latents not yet mixed, and groups of chains, if there are."""
    chains, n_draws = draws.shape[:2]
    stats = {name: value.double().flatten(2).cpu() for name, value in draws.stats.items()}
    # a target, unlike a fibre, has no constraint, and what fails diverges
    exact = "constraint_error" in stats
    failed = stats["projection_failed"] + stats["reversal_failed"] if exact else stats["diverging"]
    labels = [str(label) for label in summary.index]
    r_hat, ess = summary["r_hat"].to_numpy(float), summary["ess_bulk"].to_numpy(float)
    image = np.array([index[0] if index else 0 for _, index in map(parse_label, labels)])
    columns = {
        "image": "5d",
        "acceptance": "10.2f",
        "step size": "9.2f",
        "failed %": "8.2f",
        "max |c|": "7",
        "max R-hat": "9.3f",
        "min bulk ESS": "12.0f",
    }
    rows = [
        (
            i,
            stats["acceptance_rate"][..., i].mean().item(),
            stats["step_size"][..., i].mean().item() if "step_size" in stats else "-",
            100 * failed[..., i].mean().item(),
            f"{stats['constraint_error'][..., i].max():.1e}" if exact else "-",
            r_hat[image == i].max(),
            ess[image == i].min(),
        )
        for i in range(failed.shape[-1])
    ]
    by = type(draws.kernel).__name__
    heading = f"{chains} chains x {n_draws} draws per image by {by} in {seconds:.1f} s, seed {draws.seed}"
    heading += " (interrupted)" if draws.interrupted else ""
    # NaN, of what does not vary, counts as not mixed
    order = np.argsort(-np.nan_to_num(r_hat, nan=np.inf))
    unmixed = [f"{labels[i]} ({r_hat[i]:.3f})" for i in order if not r_hat[i] <= R_HAT]
    verdict = f"{len(labels) - len(unmixed)} of {len(labels)} (image, latent) pairs have R-hat at most {R_HAT}"
    if unmixed:
        more = len(unmixed) - _WORST
        verdict += f"; not yet mixed: {', '.join(unmixed[:_WORST])}"
        verdict += f" and {more} more (summary.csv)" if more > 0 else ""
    return "\n".join([f"{heading}\n{aligned(columns, rows)}{verdict}", *_groups(draws)]) + "\n"


def _groups(draws: Draws) -> Iterator[str]:
    """For every image whose chains are not one group: the groups, and how the largest mixed within itself."""
    latents = side_by_side(draws.latents, 1)
    for i, groups in enumerate(draws.chain_groups.flatten(1).T):
        sizes = [int((groups == group).sum()) for group in range(int(groups.max()) + 1)]
        if not sizes or sizes[0] == len(groups):
            continue
        told = f"groups of {', '.join(map(str, sizes))} chains never overlap"
        told = f"{sizes[0]} chains overlap" if len(sizes) == 1 else told
        slow = len(groups) - sum(sizes)
        told += f", {slow} mix too slowly to tell" if slow else ""
        found = r_hats(latents[groups == 0, :, i])
        mixed = f"{(found <= R_HAT).sum()} of {len(found)} latents have R-hat at most {R_HAT}"
        yield f"image {i}: {told}; within the largest group {mixed}, all at most {found.max():.2f}"


def modes(draws: Draws, summary: pd.DataFrame) -> str:
    """A line per image that says in which modes its chains are, by their low points; empty where that is not known,
    nine tenths of all latents have mixed, or someone waits for the run to end."""
    problem = draws.problem
    if not (isinstance(problem, Fibre) and problem.has_low_points) or draws.interrupted:
        return ""
    if (summary["r_hat"].to_numpy(float) <= R_HAT).mean() >= _MIXED:
        return ""
    print("not mixed: looking for the modes that chains are in", file=sys.stderr, flush=True)
    found = draws.basins()
    lines = []
    for i, (mode, energy) in enumerate(zip(found.mode.flatten(1).T, found.energy.amin(0).flatten(1).T, strict=True)):
        sizes = [
            f"{int((mode == number).sum())} (lowest energy {energy[mode == number].min().item():.1f})"
            for number in range(int(mode.max()) + 1)
        ]
        lines.append(f"image {i}: chains by the mode below their middle and last draws: {', '.join(sizes)}\n")
    return "".join(lines)


def parse_label(label: str) -> tuple[str, tuple[int, ...]]:
    """``"z[3, 0]" -> ("z", (3, 0))``, the row names of :meth:`Draws.summary`."""
    match = re.fullmatch(r"(.*?)(?:\[([\d, ]+)\])?", label)
    assert match is not None
    return match[1], tuple(int(i) for i in match[2].split(",")) if match[2] else ()


def worst_and_typical(summary: pd.DataFrame) -> list[tuple[str, tuple[int, ...]]]:
    """The two scalar latents with the largest R-hat and the two in the middle."""
    order = np.argsort(-summary["r_hat"].fillna(np.inf).to_numpy(float))
    middle = len(order) // 2
    chosen = dict.fromkeys([*order[:2], *order[middle : middle + 2]])
    return [parse_label(str(summary.index[i])) for i in chosen]
