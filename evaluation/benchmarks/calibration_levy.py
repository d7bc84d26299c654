"""Signals with independent increments: ``sample()`` of their simulator beside a Gibbs sampler of the same posterior."""

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.sampling.inference_data import r_hat

from ..problems.levy import LevySignal
from .calibration_scores import highest

__all__ = ["levy_row", "levy_table"]

# Signals whose densities are computed at a time.
_TOGETHER = 100


def levy_row(increments: str, operator: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Coverage of 90 % regions and squared errors of posterior means, of ``sample()`` and of the Gibbs sampler.

    ``gap``: mean squared error of the mean over that of the Gibbs sampler's, the estimate of least error, in decibels;
    its standard error is a jackknife over signals.
    ``distance``: root mean square difference of the two means, in posterior standard deviations.
    """
    signal, n, seed = LevySignal(increments, operator), settings["problems"], settings["seed"]
    truth, y = signal.simulated(n, seed)
    began = time.perf_counter()
    with warnings.catch_warnings():
        # what runs find wrong with themselves: here it is measured
        warnings.simplefilter("ignore")
        fibre = dgm.condition(signal.model(), y, device=settings["device"])
        sizes = {"chains": settings["chains"], "draws": settings["draws"], "seed": seed}
        result = dgm.sample(fibre, progress=False, **sizes)
    seconds = time.perf_counter() - began
    ours = result.latents["increments"].cumsum(-1).flatten(0, 1).cpu()
    began = time.perf_counter()
    gibbs = signal.gibbs(y, settings["gibbs"] // 4, settings["gibbs"], seed)
    gibbs_seconds = time.perf_counter() - began
    errors = {name: (x.mean(0) - truth).square().mean(-1) for name, x in (("ours", ours), ("gibbs", gibbs))}
    difference = (ours.mean(0) - gibbs.mean(0)) / gibbs.std(0)
    # not by summary(), whose other columns take minutes for 64 000 increments
    r_hats = r_hat(result.latents["increments"])
    gap, gap_error = _gap(errors["ours"], errors["gibbs"])
    return {
        "coverage": _coverage(signal, ours, truth, y),
        "gibbs_coverage": _coverage(signal, gibbs, truth, y),
        "coverage_error": (0.9 * 0.1 / n) ** 0.5,
        "gap": gap,
        "gap_error": gap_error,
        "distance": difference.square().mean().sqrt().item(),
        "r_hat": r_hats.max().item(),
        "mixed": (r_hats <= 1.05).double().mean().item(),
        "seconds": seconds / n,
        "gibbs_seconds": gibbs_seconds / n,
    }


def _gap(ours: Tensor, least: Tensor) -> tuple[float, float]:
    """``10 log10(sum ours/sum least)`` of squared errors ``[signals]``, and its standard error."""
    whole = (ours.sum() / least.sum()).log10()
    without = ((ours.sum() - ours) / (least.sum() - least)).log10()
    n = len(ours)
    return 10 * whole.item(), 10 * ((without - without.mean()).square().sum() * (n - 1) / n).sqrt().item()


def _coverage(signal: LevySignal, draws: Tensor, truth: Tensor, y: Tensor) -> float:
    # of a thousand signals at once the intermediate results take gigabytes
    parts = zip(draws.split(_TOGETHER, 1), truth.split(_TOGETHER), y.split(_TOGETHER), strict=True)
    inside = [highest(signal.log_posterior(x, seen), signal.log_posterior(t[None], seen)[0]) for x, t, seen in parts]
    return torch.cat(inside).double().mean().item()


def levy_table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table."""
    header = [
        "increments, operator", "coverage of 90 %", "of Gibbs", "gap to MMSE, dB", "means apart, sd", "largest R-hat",
        "R-hat at most 1.05", "seconds a signal", "of Gibbs",
    ]  # fmt: skip
    lines = [
        [
            name,
            f"{row['coverage']:.3f} ± {row['coverage_error']:.3f}",
            f"{row['gibbs_coverage']:.3f}",
            f"{row['gap']:+.3f} ± {row['gap_error']:.3f}",
            f"{row['distance']:.2f}",
            f"{row['r_hat']:.2f}",
            f"{row['mixed']:.1%}",
            f"{row['seconds']:.1f}",
            f"{row['gibbs_seconds']:.2f}",
        ]
        for name, row in rows.items()
    ]
    return header, lines
