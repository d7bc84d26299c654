"""Pseudo-marginal samplers of a posterior that is known: efficiency against the scale of their moves (T 3.6.1).

Ten data of ten coordinates with Gaussian latent variables, whose likelihood is estimated with N = 1, 8 and 32 samples
from the prior of the latents (T fig. 3.3 to T fig. 3.9). Ten chains per step size or width start at prior draws, as
published; a fifth of the iterations is discarded.

What is counted: an estimate takes N evaluations of the density. A Metropolis-Hastings update takes one estimate, for
its proposal; a slice update one for every point that it tries; the estimate at the present point is kept. Effective
draws are those of the worst of the ten coordinates, of all chains together, over the evaluations of the kept draws of
all chains. The published figures have means over single chains instead, which do not see that chains disagree. The
estimate of effective draws is hardly ever less than one per chain: that of chains that stick throughout is too large.
All samplers get about the same number of evaluations for one N. Slices are run for every N, where the published ones
have N = 1.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..figures.pseudo_marginal import against_scale, chain_rows
from ..problems.gaussian_latent import GaussianLatent, published_observations
from ..reports.kept import NOT_KEPT, Parts
from ..reports.mixed_draws import mixing
from ..reports.tables import aligned
from .pseudo_marginal import SAMPLERS, estimates_per_draw, pseudo_marginal_kernel, quietly_sampled

__all__ = ["run"]

# Estimates per draw, roughly, which share out the evaluations of a run.
_ESTIMATES = {"PM-MH": 1, "MI+MH": 2, "SS+MH": 5, "MI+SS": 3, "SS+SS": 6}
# The widths between which the efficiency of slices should hardly vary.
_WIDE = (2.0, 10.0)


class Sizes(NamedTuple):
    chains: int
    steps: tuple[float, ...]
    widths: tuple[float, ...]
    estimates: dict[int, int]
    """Samples N of an estimate -> estimates of a chain, without those of the warm-up."""


_FULL = Sizes(
    chains=10,
    steps=(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0),
    widths=(0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0),
    estimates={1: 20000, 8: 5000, 32: 2000},
)
_FAST = Sizes(chains=4, steps=(0.2, 0.4), widths=(2.0, 10.0), estimates={1: 400, 4: 200})


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``efficiency.png``, ``traces.png`` (T fig. 3.4, T fig. 3.6) and ``noise.png`` (T fig. 3.8).

    Args:
        folder: folder of the pictures.
        fast: fewer chains, scales and draws.
        data: not used.
        seed: seed of the chains; the data are always the same.
        parts: what a run that was stopped takes up again.
    """
    sizes = _FAST if fast else _FULL
    y = published_observations()
    rows: list[dict[str, Any]] = []
    chains: dict[tuple[str, int, float], dict[str, Tensor]] = {}
    for samples in sizes.estimates:
        for sampler in SAMPLERS:
            print(f"{sampler}, N = {samples}", flush=True)
            for row, latents in _sampled(y, sampler, samples, sizes, seed, parts):
                rows.append(row)
                chains[sampler, samples, row["scale"]] = latents
    best = _best(rows)
    statements = _statements(rows)

    def drawn(names: tuple[str, ...], counts: tuple[int, ...], latent: str, index: tuple[int, ...]) -> dict:
        found = {}
        for sampler in names:
            for samples in counts:
                scale = best[sampler, samples]["scale"]
                values = chains[sampler, samples, scale][latent][(slice(None), slice(None), *index)]
                found[f"{sampler}, N = {samples}, scale {scale:g}"] = values.numpy()
        return found

    problem = GaussianLatent(y)
    mean, variance = problem.posterior()
    against_scale(folder / "efficiency.png", rows)
    traced = drawn(("PM-MH", "MI+MH"), tuple(sizes.estimates), "x", (0,))
    chain_rows(folder / "traces.png", traced, quantity="$x_1$", exact=(float(mean[0]), variance**0.5))
    noise = drawn(("MI+MH", "SS+MH"), (1,), "u", ())
    chain_rows(folder / "noise.png", noise, quantity="$u_1$", exact=problem.noise_posterior())
    return {
        "summary": _summary(rows, best, statements),
        "chains": sizes.chains,
        "posterior": {"mean": mean.tolist(), "variance": variance},
        "rows": rows,
        "best": {f"{sampler}, N = {samples}": row["scale"] for (sampler, samples), row in best.items()},
        "statements": statements,
    }


def _sampled(y: Tensor, sampler: str, samples: int, sizes: Sizes, seed: int, parts: Parts = NOT_KEPT):
    """A row and the latents for every scale, the scales being one batch."""
    scales = sizes.widths if sampler.endswith("+SS") else sizes.steps
    problem = GaussianLatent(y, samples, batch_shape=(len(scales),))
    n = sizes.estimates[samples] // _ESTIMATES[sampler]
    kernel = pseudo_marginal_kernel(sampler, torch.tensor(scales))
    options = {"chains": sizes.chains, "warmup": n // 4, "draws": n, "seed": seed, "keep": "latents"}
    draws = quietly_sampled(problem, kernel, parts, **options)
    estimates = estimates_per_draw(draws).expand(len(scales))
    mean, _ = problem.posterior()
    acceptance = {
        name: draws.stats[key].double().mean((0, 1)).tolist()
        for name, key in (
            ("target_acceptance", "acceptance_rate" if sampler == "PM-MH" else "target_acceptance_rate"),
            ("noise_acceptance", "noise_acceptance_rate"),
        )
        if key in draws.stats
    }
    for i, scale in enumerate(scales):
        found = mixing(draws.latents["x"][:, :, i], mean)
        evaluations = float(estimates[i]) * samples
        row = {
            "sampler": sampler,
            "samples": samples,
            "scale": scale,
            "draws": n,
            **{name: values[i] for name, values in acceptance.items()},
            "evaluations_per_draw": evaluations,
            "ess": found.worst_ess,
            "ess_per_1000_evaluations": 1000 * found.worst_ess / (sizes.chains * n * evaluations),
            "r_hat": found.r_hat,
            "longest_stay": found.longest_stay,
            "error": found.error,
        }
        yield row, {name: value[:, :, i].clone() for name, value in draws.latents.items()}


def _best(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """The most efficient scale of every sampler and N."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        key = (row["sampler"], row["samples"])
        if key not in best or row["ess_per_1000_evaluations"] > best[key]["ess_per_1000_evaluations"]:
            best[key] = row
    return best


def _statements(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios of efficiencies for N = 1."""
    one = [row for row in rows if row["samples"] == 1]
    best = {sampler: row["ess_per_1000_evaluations"] for (sampler, _), row in _best(one).items()}
    found = {"MI+MH over PM-MH": best["MI+MH"] / best["PM-MH"] if best["PM-MH"] else float("inf")}
    for sampler in ("MI+SS", "SS+SS"):
        rates = [
            row["ess_per_1000_evaluations"]
            for row in one
            if row["sampler"] == sampler and _WIDE[0] <= row["scale"] <= _WIDE[1]
        ]
        found[f"{sampler}, largest over smallest"] = max(rates) / min(rates) if min(rates) else float("inf")
    return found


def _summary(
    rows: list[dict[str, Any]], best: dict[tuple[str, int], dict[str, Any]], statements: dict[str, float]
) -> str:
    columns = {
        "sampler": "<7",
        "N": "3d",
        "best scale": "10g",
        "accepted": "8.3f",
        "evaluations": "11.1f",
        "ESS per 1000": "12.3f",
        "R-hat": "6.3f",
        "longest stay": "12d",
        "of draws": "8d",
        "error": "5.1f",
    }
    keys = ("scale", "target_acceptance", "evaluations_per_draw", "ess_per_1000_evaluations", "r_hat", "longest_stay")
    cells = [(s, n, *(row[key] for key in (*keys, "draws", "error"))) for (s, n), row in best.items()]
    unmixed = sum(row["r_hat"] > 1.05 for row in rows)
    lines = [
        "effective draws of the worst coordinate per 1000 evaluations of the density, at the best scale; evaluations",
        "per draw; the error of the mean is that of the worst coordinate in Monte Carlo standard errors",
        aligned(columns, cells).rstrip("\n"),
        f"{unmixed} of {len(rows)} runs have an R-hat above 1.05",
        f"N = 1, best MI+MH over best PM-MH: {statements['MI+MH over PM-MH']:.1f} (at least 3 expected)",
    ]
    for sampler in ("MI+SS", "SS+SS"):
        ratio = statements[f"{sampler}, largest over smallest"]
        lines.append(
            f"N = 1, {sampler} over widths {_WIDE[0]:g} to {_WIDE[1]:g}, best over worst: {ratio:.2f} "
            "(less than 2 expected)"
        )
    return "\n".join(lines)
