"""Comparison of two samplers on the same problems: diagnostics, ratio, and the table of a folder of results."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..reports.mixing import R_HAT
from ..reports.tables import markdown
from .publishing import DEVICES, by_device, versions
from .workers import WorkerResult

__all__ = ["FEWEST", "compare", "diagnose", "summarise", "table"]

# Draws per chain below which an ESS is uninformative: ArviZ then only reports its upper limit.
FEWEST = 20

# Chains from which the spread of their means is known to some ten per cent.
_MANY = 32


def summarise(workers: Sequence[WorkerResult], seconds: float, cores: int) -> dict[str, Any]:
    """One method on one problem: ESS per second of the whole budget, moments and their errors, failures.

    Processes stop at different counts of draws: diagnostics are those of equal lengths, the shortest, and the ESS is
    scaled to all draws made. Chains less than half as long as the longest, or shorter than 20 draws, count as failed.

    Returns:
        a record for JSON; without ``latents`` if nothing was sampled.
    """
    errors = [worker.error for worker in workers if worker.error is not None]
    results = [worker.value for worker in workers if worker.value is not None]
    lengths = [_length(result) for result in results]
    enough = max(FEWEST, 0.5 * max(lengths, default=0))
    errors += [f"a process made only {n} draws per chain in the time" for n in lengths if n < enough]
    results = [result for result, n in zip(results, lengths, strict=True) if n >= enough]
    if not results:
        return {"errors": errors}
    shortest = min(map(_length, results))
    used = max(seconds, *(result["seconds"] for result in results))
    scale = float(np.mean([_length(result) for result in results])) / shortest
    latents = {}
    for name in results[0]["latents"]:
        values = np.concatenate([result["latents"][name][:, :shortest] for result in results])
        latents[name] = diagnose(values, scale)
    min_ess, min_tail_ess = (float(np.min([z[f"ess_{kind}"] for z in latents.values()])) for kind in ("bulk", "tail"))
    max_r_hat = float(np.max([latent["r_hat"] for latent in latents.values()]))
    return {
        "chains": sum(next(iter(result["latents"].values())).shape[0] for result in results),
        "draws": shortest,
        "seconds": used,
        "cpu_share": sum(result["cpu_seconds"] for result in results) / (used * cores),
        "warmup_seconds": float(np.mean([result["warmup_seconds"] for result in results])),
        "warmup_iterations": float(np.mean([result["warmup_iterations"] for result in results])),
        "step_size": float(np.mean([result["step_size"] for result in results])),
        "steps_per_draw": _mean(results, "n_steps"),
        "acceptance": _mean(results, "acceptance"),
        "failed": _mean(results, "failed"),
        "min_ess": min_ess,
        "min_ess_per_second": min_ess / used,
        "min_tail_ess_per_second": min_tail_ess / used,
        "max_r_hat": max_r_hat,
        "converged": bool(max_r_hat <= R_HAT),
        "latents": latents,
        "errors": errors,
    }


def diagnose(values: np.ndarray, scale: float) -> dict[str, float | None]:
    """Moments of ``[chains, draws]`` and their reliability, as ArviZ computes it; NaN where nothing moved."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        import arviz
    # ArviZ warns of a single chain, which is known
    logging.getLogger("arviz").setLevel(logging.ERROR)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return {
            "mean": float(values.mean()),
            "mcse_mean": float(arviz.mcse(values, method="mean")),
            "sd": float(values.std(ddof=1)),
            "mcse_sd": float(arviz.mcse(values, method="sd")),
            # ArviZ counts every draw of a constant as effective
            **{
                f"ess_{kind}": scale * float(arviz.ess(values, method=kind)) if np.ptp(values) > 0 else np.nan
                for kind in ("bulk", "tail")
            },
            "mcse_mean_between_chains": _between_chains(values),
            # one chain is compared by halves
            "r_hat": float(arviz.rhat(values if len(values) > 1 else _halves(values[0]))),
        }


def _between_chains(values: np.ndarray) -> float | None:
    """Standard error of the mean of ``[chains, draws]`` from the spread of independent chains' own means.

    It needs no autocorrelations, of which ArviZ bounds the gain of negative ones: ESS at most ``S log10 S`` of S draws.
    """
    chains = len(values)
    return float(values.mean(1).std(ddof=1) / chains**0.5) if chains >= _MANY else None


def _halves(chain: np.ndarray) -> np.ndarray:
    """One chain as two, so that it can be compared with itself: ``[draws] -> [2, draws // 2]``."""
    n = len(chain) // 2
    return np.stack([chain[:n], chain[-n:]])


def compare(own: Mapping[str, Any], other: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both methods, the ratio of their ESS per second, and the largest difference of means in combined errors."""
    ratio = tail_ratio = difference = None
    if other is not None and "latents" in own and "latents" in other:
        ratio = own["min_ess_per_second"] / other["min_ess_per_second"]
        tail_ratio = own["min_tail_ess_per_second"] / other["min_tail_ess_per_second"]
        pairs = [(own["latents"][name], other["latents"][name]) for name in own["latents"]]
        # NaN where an error is not known
        difference = float(
            np.max([abs(a["mean"] - b["mean"]) / np.hypot(a["mcse_mean"], b["mcse_mean"]) for a, b in pairs])
        )
    return {
        "ratio": ratio,
        "tail_ratio": tail_ratio,
        "largest_mean_difference": difference,
        "dgm-infer": own,
        "mici": other,
    }


def table(folder: Path) -> str:
    """Markdown of the results in a folder: this project on a processor and on a GPU, and Mici."""
    records = by_device(folder, "fibre")
    measured = {device: record for device, record in records.items() if record is not None}
    names = dict.fromkeys(name for record in measured.values() for name in record["problems"])
    rows = []
    for name in names:
        entries = {device: record["problems"].get(name) for device, record in measured.items()}
        peer = next((entry["mici"] for entry in entries.values() if entry), None)
        cells = [name, _rate(peer)]
        for device in DEVICES:
            entry = entries.get(device)
            cells += [_rate(entry["dgm-infer"]), _number(entry["ratio"])] if entry else ["not measured", "not measured"]
        rows.append(cells)
    header = ["problem", "Mici, CPU", "dgm-infer, CPU", "ratio", "dgm-infer, GPU", "ratio"]
    parts = [
        "# Draws on the fibre: dgm-infer beside Mici\n\n"
        "Smallest bulk ESS of z1 to z4 per second of the whole budget, compilation and warm-up included.\n",
        markdown(header, rows),
        *(_details(device, record) for device, record in measured.items()),
    ]
    return "\n".join(parts)


def _details(device: str, record: Mapping[str, Any]) -> str:
    header = [
        *("problem", "method", "chains x draws", "warm-up, s", "steps", "acceptance", "failed, %", "max R-hat"),
        *("min ESS", "ESS/s", "tail ESS/s", "CPU used, %"),
    ]
    rows, notes = [], []
    for name, entry in record["problems"].items():
        for method in ("dgm-infer", "mici"):
            side = entry[method]
            notes += [f"- {name}, {method}: {error}" for error in (side or {}).get("errors", [])]
            if not side or "latents" not in side:
                continue
            if not side["converged"]:
                notes.append(f"- {name}, {method}: R-hat is not at most {R_HAT}, its chains have not converged")
            rows.append(
                [
                    name,
                    method,
                    f"{side['chains']} x {side['draws']}",
                    f"{side['warmup_seconds']:.1f}",
                    f"{side['steps_per_draw']:.1f}",
                    f"{side['acceptance']:.2f}",
                    f"{100 * side['failed']:.2f}",
                    f"{side['max_r_hat'] or float('nan'):.3f}",
                    _number(side["min_ess"]),
                    _number(side["min_ess_per_second"]),
                    _number(side["min_tail_ess_per_second"]),
                    f"{100 * side['cpu_share']:.0f}",
                ]
            )
    moments = []
    for name, entry in record["problems"].items():
        sides = [(entry[method] or {}).get("latents", {}) for method in ("dgm-infer", "mici")]
        for latent in dict.fromkeys([*sides[0], *sides[1]]):
            errors = [_with_error(side.get(latent), moment) for moment in ("mean", "sd") for side in sides]
            moments.append([name, latent, *errors])
        if entry["largest_mean_difference"] is not None:
            notes.append(
                f"- {name}: the means differ by at most {entry['largest_mean_difference']:.2f} combined standard errors"
            )
    where = f"`{record['command']}`, {record['date']}, on {record['settings']['cores']} cores of {record['processor']}"
    where += f" with {record['device_name']}" if record["device_name"] else ""
    parts = [
        f"## {DEVICES[device]}\n\n{where}; {versions(record)}.\n",
        markdown(header, rows),
        markdown(["problem", "latent", "mean, dgm-infer", "mean, Mici", "sd, dgm-infer", "sd, Mici"], moments),
    ]
    return "\n".join([*parts, "".join(f"{note}\n" for note in notes)] if notes else parts)


def _with_error(latent: Mapping[str, float] | None, moment: str) -> str:
    if latent is None:
        return "-"
    return f"{latent[moment]:.6g} ± {latent[f'mcse_{moment}'] or float('nan'):.1g}"


def _rate(side: Mapping[str, Any] | None) -> str:
    if side is None:
        return "not measured"
    return _number(side["min_ess_per_second"]) if "latents" in side else "failed"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _length(result: Mapping[str, Any]) -> int:
    return next(iter(result["latents"].values())).shape[1]


def _mean(results: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.concatenate([np.ravel(result[name]) for result in results]).mean())
