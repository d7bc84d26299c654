"""What became of one method on one problem of images, and whether methods agree."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from ..reports.mixing import R_HAT
from .comparison import FEWEST, diagnose
from .workers import WorkerResult

__all__ = ["agreement", "summarise"]


def summarise(workers: Sequence[WorkerResult], seconds: float) -> dict[str, Any]:
    """ESS per second of the whole budget over (image, latent) pairs, R-hat, moments and failures.

    Processes may stop at different counts of draws: diagnostics are those of equal lengths, the shortest, and the ESS
    is scaled to all draws made.

    Args:
        workers: results of :func:`.image_sampling.run`, chains of one method.
        seconds: wall-clock seconds that each was given.

    Returns:
        a record for JSON, of ``errors`` alone if nothing was sampled; ``mean``, ``mcse`` and ``r_hat`` hold one number
        per pair.
    """
    errors = [worker.error for worker in workers if worker.error is not None]
    results = [worker.value for worker in workers if worker.value is not None]
    few = [result for result in results if result["z"].shape[1] < FEWEST]
    errors += [f"only {result['z'].shape[1]} draws per chain in {result['seconds']:.0f} s" for result in few]
    results = [result for result in results if result["z"].shape[1] >= FEWEST]
    if not results:
        return {"errors": errors}
    lengths = [result["z"].shape[1] for result in results]
    shortest, used = min(lengths), max(seconds, *(result["seconds"] for result in results))
    values = np.concatenate([result["z"][:, :shortest] for result in results]).astype(np.float64)
    pairs = [diagnose(np.ascontiguousarray(z), float(np.mean(lengths)) / shortest) for z in np.moveaxis(values, -1, 0)]
    ess, r_hat = (np.array([pair[name] for pair in pairs], dtype=float) for name in ("ess_bulk", "r_hat"))
    return {
        "kernel": results[0]["kernel"],
        "chains": len(values),
        "draws": shortest,
        "seconds": used,
        "warmup_seconds": float(np.mean([result["warmup_seconds"] for result in results])),
        "steps": float(np.mean([result["steps"] for result in results])),
        "constraint_error": float(np.max([result["constraint_error"] for result in results])),
        "min_ess_per_second": float(ess.min()) / used,
        "median_ess_per_second": float(np.median(ess)) / used,
        "max_r_hat": float(r_hat.max()),
        "mixed": float((r_hat <= R_HAT).mean()),
        **{name: [_short(pair[key]) for pair in pairs] for name, key in _KEPT.items()},
        # what a peer's energies and gradients differ by from this project's
        **({"agreed": results[0]["agreed"]} if "agreed" in results[0] else {}),
        "errors": errors,
    }


_KEPT = {"mean": "mean", "mcse": "mcse_mean", "r_hat": "r_hat"}
# Draws of all chains from which standard errors are told.
_TOLD = 200


def _short(value: float | None) -> float:
    return float(f"{float('nan') if value is None else value:.5g}")


def agreement(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The largest difference of posterior means between two methods, in combined standard errors.

    Standard errors mean something where chains have mixed: pairs whose R-hat is at most 1.05 by both methods count, and
    methods with 200 draws or more.

    Returns:
        ``largest``, the methods it is ``between``, and how many comparisons were made of how many (``compared``,
        ``possible``); None for fewer than two methods.
    """
    sampled = [label for label, row in methods.items() if "mean" in row and row["chains"] * row["draws"] >= _TOLD]
    largest, between, compared, possible = 0.0, None, 0, 0
    for a, b in combinations(sampled, 2):
        mean, mcse, r_hat = (np.array([methods[m][key] for m in (a, b)], dtype=float) for key in _KEPT)
        mixed = np.all(r_hat <= R_HAT, axis=0)
        differences = (np.abs(mean[0] - mean[1]) / np.hypot(*mcse))[mixed]
        compared, possible = compared + int(mixed.sum()), possible + mixed.size
        if mixed.any() and (found := float(differences.max())) > largest:
            largest, between = found, [a, b]
    if not possible:
        return None
    largest = largest if compared else None
    return {"largest": largest, "between": between, "compared": compared, "possible": possible}
