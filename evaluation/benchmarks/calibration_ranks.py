"""Simulation-based calibration of a shipped generator: ranks of the inputs that made images among posterior draws.

Inputs of the prior make images, of which the top half is observed. If draws are those of the posterior, the rank of the
true value of any quantity among independent draws is uniform (Talts et al. 2018).
"""

import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import dgm_infer as dgm
import generators
from dgm_infer.errors import uninterrupted
from dgm_infer.models import LatentVariableModel
from generators import LatentPosterior

from ..reports.mixing import R_HAT
from .completions import top_half

__all__ = ["rank_rows", "rank_table", "uniformity"]

# Draws that a truth is ranked among, far apart in their chains, and cells of as many ranks each.
_AMONG, _CELLS = 20, 7
# The planted error: draws this much nearer to their mean.
_NARROWER = 0.8


def rank_rows(name: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of a generator: of posterior draws, and of the same draws with a planted error.

    Quantities ranked are the inputs, and the energy, which has both the data's misfit and the prior.

    Args:
        name: of a shipped generator with a prior and a decoder.
        settings: ``problems`` images, ``chains``, ``draws``, ``seed``, ``device``.
    """
    model = generators.load(name).to(settings["device"])
    parts = LatentVariableModel.of(model)
    made = parts.generate(settings["problems"], settings["seed"])
    mask = top_half(tuple(made.images.shape[1:]))
    problem = LatentPosterior(parts.decoder, made.images, parts.prior, mask)
    began = time.perf_counter()
    with warnings.catch_warnings():
        # what runs find wrong with themselves: here it is measured
        warnings.simplefilter("ignore")
        sizes = {"chains": settings["chains"], "draws": settings["draws"]}
        # images of a flow each by itself: together all make the steps of the one whose steps are the shortest
        together = 1 if isinstance(model, generators.LatentFlow) else len(made.images)
        runs = [
            uninterrupted(dgm.sample(problem.take(own), seed=settings["seed"] + k, progress=False, **sizes))
            for k, own in enumerate(torch.arange(len(made.images), device=made.images.device).split(together))
        ]
    seconds = (time.perf_counter() - began) / len(made.images)
    r_hats = [run.summary()["r_hat"].to_numpy(float).reshape(run.shape[2], -1).max(-1) for run in runs]
    r_hat = np.concatenate(r_hats)
    draws = torch.cat([run.inputs.flatten(0, 1) for run in runs if run.inputs is not None], 1)
    draws = draws[torch.linspace(0, len(draws) - 1, _AMONG).long()]
    truth = made.latents.to(draws)
    narrow = draws.mean(0) + _NARROWER * (draws - draws.mean(0))
    facts = {"mixed": float((r_hat <= R_HAT).mean()), "seconds": seconds}
    return {
        name: _row(problem, truth, draws) | facts,
        f"{name}, draws nearer to their mean by {1 - _NARROWER:.0%} (planted)": _row(problem, truth, narrow),
    }


def _row(problem: LatentPosterior, truth: Tensor, draws: Tensor) -> dict[str, float]:
    with torch.no_grad():
        energies = problem.energy(torch.cat([truth.unsqueeze(0), draws])).unsqueeze(-1)
    truth, draws = torch.cat([truth, energies[0]], -1), torch.cat([draws, energies[1:]], -1)
    ranks = (draws < truth).sum(0).cpu()
    p = torch.tensor([uniformity(rank, len(draws)) for rank in ranks.T])
    outside = ((ranks[:, :-1] == 0) | (ranks[:, :-1] == len(draws))).double()
    return {
        "p": min(1.0, len(p) * p.min().item()),
        "p_energy": p[-1].item(),
        "outside": outside.mean().item(),
        "outside_error": outside.mean(-1).std().item() / len(outside) ** 0.5,
        "outside_expected": 2 / (len(draws) + 1),
    }


def uniformity(ranks: Tensor, n: int) -> float:
    """p-value of chi-squared of ranks ``[S]`` in 0, ..., n being uniform, in cells of as many ranks each."""
    return float(stats.chisquare(torch.bincount(ranks * _CELLS // (n + 1), minlength=_CELLS).numpy()).pvalue)


def rank_table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table."""
    header = [
        "generator", "p of uniform ranks", "of the energy's", "truths beyond all draws", "expected", "R-hat <= 1.05",
        "seconds per image",
    ]  # fmt: skip
    lines = [
        [
            name,
            f"{row['p']:.2g}",
            f"{row['p_energy']:.2g}",
            f"{row['outside']:.3f} ± {row['outside_error']:.3f}",
            f"{row['outside_expected']:.3f}",
            f"{row['mixed']:.0%}" if "mixed" in row else "",
            f"{row['seconds']:.1f}" if "seconds" in row else "",
        ]
        for name, row in rows.items()
    ]
    return header, lines
