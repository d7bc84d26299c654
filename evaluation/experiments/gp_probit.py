"""Pseudo-marginal samplers of the covariance of a Gaussian process classifier (T 3.6.2).

Breast cancer Wisconsin: 683 complete cases (682 in print) at 449 different points. Ten chains from prior draws infer a
scale and nine length scales; the likelihood is estimated with N = 50 samples of a Laplace approximation. As published,
walks are isotropic and slices have width 4 without stepping out. Two things differ: step sizes are adapted to one
acceptance (0.15 for PM-MH, 0.234 for the others) instead of a range from 0.15 to 0.3, and chains are shorter, 800
draws after 200 of warm-up instead of 10 000 after 2000; SS+SS, whose draws cost more, has a quarter of them, where the
published one has as many draws and half the warm-up.

The whole run takes 21 minutes of one core.

What is counted: cubic operations, which are Cholesky factorisations and, once per Laplace approximation, a matrix
product. Updates of the noise reuse the approximation at their x and take none. Rejected proposals are counted too.
Effective draws are those of the kept draws over the cubic operations of the kept draws; curves against time begin with
the warm-up.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..figures.posteriors import efficiency
from ..figures.pseudo_marginal import chain_rows, r_hat_against_time
from ..problems.gp_probit import Cases, ProbitEstimate, gp_probit, read_cases
from ..reports.kept import NOT_KEPT, Parts
from ..reports.mixed_draws import largest_r_hat, mixing
from ..reports.mixing import R_HAT
from ..reports.tables import aligned
from .pseudo_marginal import estimates_per_draw, pseudo_marginal_kernel, quietly_sampled
from .reference import required_data

__all__ = ["run"]

# The published comparison, with the width of brackets where slices update the target.
_SAMPLERS = {"PM-MH": None, "MI+MH": None, "SS+MH": None, "SS+SS": 4.0}
# Parts of the chains at which R-hat is computed.
_PARTS = 20


class Sizes(NamedTuple):
    cases: int | None
    """The first cases of the file; None for all."""
    samples: int
    """N."""
    chains: int
    warmup: int
    draws: int


_FULL = Sizes(cases=None, samples=50, chains=10, warmup=200, draws=800)
_FAST = Sizes(cases=60, samples=20, chains=4, warmup=16, draws=40)


class Chains(NamedTuple):
    """What one sampler did."""

    x: Tensor
    """``[chains, draws, D]``."""
    stats: dict[str, Tensor]
    estimates: float
    """Estimates per draw."""
    cubic: int
    """Cubic operations of all chains during the kept draws."""
    cubic_warmup: int
    seconds: float
    seconds_warmup: float


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``efficiency.png``, ``r_hat.png`` (T fig. 3.11) and ``traces.png`` (T fig. 3.12).

    Args:
        folder: folder of the pictures.
        fast: 60 cases, few chains and draws.
        data: the reference folder, with ``breast_cancer`` in it.
        seed: seed of all randomness.
        parts: what a run that was stopped takes up again.

    Raises:
        ConfigError: the data are missing.
    """
    data = required_data(
        data, "breast_cancer", "UCI has the file, Breast Cancer Wisconsin (Original), here as wisconsin_original.csv"
    )
    sizes = _FAST if fast else _FULL
    cases = read_cases(data, sizes.cases)
    found: dict[str, Chains] = {}
    for sampler, width in _SAMPLERS.items():
        print(sampler, flush=True)
        found[sampler], _ = parts.value(partial(_sampled, cases, sampler, width, sizes, seed))
    names = [f"x{i + 1}" for i in range(cases.features.shape[1] + 1)]
    rows = {sampler: _row(sampler, chains, names) for sampler, chains in found.items()}
    curves = {sampler: _curve(chains) for sampler, chains in found.items()}
    efficiency(
        folder / "efficiency.png",
        {sampler: row["ess_per_1000_cubic_operations"] for sampler, row in rows.items()},
        [sampler for sampler, row in rows.items() if not row["r_hat"] <= R_HAT],
        unit="ESS per 1000 cubic operations",
    )
    r_hat_against_time(folder / "r_hat.png", curves)
    chain_rows(
        folder / "traces.png", {s: chains.x[..., 0].numpy() for s, chains in found.items()}, quantity="$x_1 = \\log s$"
    )
    n = int((cases.positive + cases.negative).sum())
    return {
        "summary": _summary(rows, n, len(cases.features), sizes),
        "cases": n,
        "points": len(cases.features),
        "samples": sizes.samples,
        "chains": sizes.chains,
        "methods": rows,
        "curves": curves,
    }


def _sampled(cases: Cases, sampler: str, width: float | None, sizes: Sizes, seed: int) -> Chains:
    """Warm-up, then the kept draws by the adapted kernel, so that each has its own time and operations."""
    estimate = ProbitEstimate(cases, sizes.samples, kept=6 * sizes.chains)
    problem = gp_probit(estimate)
    warmup, n = (sizes.warmup // 4, sizes.draws // 4) if width is not None else (sizes.warmup, sizes.draws)
    rng = torch.Generator().manual_seed(seed)
    start = problem.initial_draws(sizes.chains, rng)
    before, started = estimate.cubic_operations, time.perf_counter()
    kernel = pseudo_marginal_kernel(sampler, width)
    warm = quietly_sampled(problem, kernel, chains=sizes.chains, warmup=warmup, draws=1, seed=seed, initial=start)
    assert warm.inputs is not None
    middle, halfway = estimate.cubic_operations, time.perf_counter()
    draws = quietly_sampled(
        problem,
        warm.kernel,
        chains=sizes.chains,
        warmup=0,
        draws=n,
        seed=seed + 1,
        initial=warm.inputs[:, -1],
        keep="latents",
    )
    ended = time.perf_counter()
    return Chains(
        draws.latents["x"],
        draws.stats,
        float(estimates_per_draw(draws)),
        estimate.cubic_operations - middle,
        middle - before,
        ended - halfway,
        halfway - started,
    )


def _row(sampler: str, chains: Chains, names: list[str]) -> dict[str, Any]:
    n_chains, n = chains.x.shape[:2]
    found = mixing(chains.x)
    stats = chains.stats
    target = "acceptance_rate" if sampler == "PM-MH" else "target_acceptance_rate"
    row = {
        "draws": n,
        "seconds": chains.seconds,
        "seconds_warmup": chains.seconds_warmup,
        "cubic_operations": chains.cubic,
        "cubic_operations_per_draw": chains.cubic / (n_chains * n),
        "estimates_per_draw": chains.estimates,
        "target_acceptance": float(stats[target].mean()),
        "r_hat": found.r_hat,
        "longest_stay": found.longest_stay,
        "ess": dict(zip(names, found.ess, strict=True)),
        "ess_per_1000_cubic_operations": {
            name: 1000 * ess / chains.cubic for name, ess in zip(names, found.ess, strict=True)
        },
        "mean": dict(zip(names, chains.x.mean((0, 1)).tolist(), strict=True)),
        "sd": dict(zip(names, chains.x.flatten(0, 1).std(0).tolist(), strict=True)),
    }
    if "noise_acceptance_rate" in stats:
        row["noise_acceptance"] = float(stats["noise_acceptance_rate"].mean())
    if "step_size" in stats:
        row["step_size"] = float(stats["step_size"].mean())
    return row


def _curve(chains: Chains) -> dict[str, list[float]]:
    """R-hat of the first draws, against what all iterations up to there took."""
    n_chains, n = chains.x.shape[:2]
    ends = np.unique(np.linspace(0, n, _PARTS + 1)[1:].astype(int))
    ends = ends[ends >= 4]
    share = ends / n
    return {
        "seconds": (chains.seconds_warmup + share * chains.seconds).tolist(),
        "cubic_operations": ((chains.cubic_warmup + share * chains.cubic) / n_chains).tolist(),
        "r_hat": [largest_r_hat(chains.x[:, :end]) for end in ends],
    }


def _summary(rows: dict[str, dict[str, Any]], cases: int, points: int, sizes: Sizes) -> str:
    columns = {
        "sampler": "<7",
        "draws": "5d",
        "seconds": "7.1f",
        "accepted": "8.3f",
        "estimates": "9.1f",
        "cubic": "6.1f",
        "least ESS": "9.2f",
        "median ESS": "10.2f",
        "R-hat": "6.3f",
        "longest stay": "12d",
    }
    cells = []
    for sampler, row in rows.items():
        rates = list(row["ess_per_1000_cubic_operations"].values())
        keys = ("draws", "seconds", "target_acceptance", "estimates_per_draw", "cubic_operations_per_draw")
        cells.append(
            (sampler, *(row[k] for k in keys), min(rates), float(np.median(rates)), row["r_hat"], row["longest_stay"])
        )
    return (
        f"{cases} cases at {points} points, N = {sizes.samples}, {sizes.chains} chains; estimates and cubic operations "
        "per draw, ESS per 1000 cubic\noperations over the ten coordinates; seconds of the kept draws\n"
        + aligned(columns, cells).rstrip("\n")
    )
