"""``dgm-infer bench multimodal``: posterior expectations under targets with many modes, by several samplers.

The relaxed Boltzmann machines of ``bench modes``, whose means and covariances are known by enumeration (math 12.6). No
sampler is told anything of the problem; lengths are chosen such that all take about the same time.
"""

import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Gaussian
from dgm_infer.errors import uninterrupted
from dgm_infer.kernels import Kernel

from ..problems.boltzmann import BoltzmannRelaxation, Moments, published_machines, random_machines
from ..reports.records import write_record
from ..reports.tables import markdown
from .publishing import new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder

__all__ = ["bench", "multimodal_table", "page"]

_CHAINS = 16


class Found(NamedTuple):
    """What a sampler says of a target."""

    mean: Tensor
    """``[D]``."""
    covariance: Tensor
    """``[D, D]``."""
    r_hat: float | None
    """The worst; None of what has no chains of the target."""


def bench(
    systems: int = 10,
    units: int = 16,
    runs: int = 5,
    seed: int = 0,
    data: str | None = None,
    output: str = "evaluation/results",
) -> Path:
    """Estimate means and covariances of random Boltzmann machines.

    Args:
        systems: random machines.
        units: units of each, at most 20.
        runs: of every sampler on each.
        seed: of the first machine, and of the first run.
        data: the reference folder, for the five published machines too.
        output: folder for ``multimodal.json`` and ``multimodal.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(least=2, systems=systems, units=units)
    check_counts(least=1, runs=runs)
    check_seed(seed)
    folder = writable_folder(output)
    settings = {"systems": systems, "units": units, "runs": runs, "seed": seed}
    record = new_record("multimodal", settings, ["dgm-infer", "torch"], threads=torch.get_num_threads())
    record["rows"] = _rows(random_machines(systems, units, seed), runs, seed)
    if data is not None:
        record["published_rows"] = _rows(published_machines(Path(data)), runs, seed)
    path = folder / "multimodal.json"
    write_record(path, record)
    publish(path, "multimodal", page(record))
    return path


def _by(kernel: Kernel, draws: int) -> Callable[[BoltzmannRelaxation, int], Found]:
    def run(machine: BoltzmannRelaxation, seed: int) -> Found:
        found = dgm.sample(machine, kernel, chains=_CHAINS, draws=draws, seed=seed, progress=False)
        assert found.inputs is not None
        x = found.inputs.double().flatten(0, 1)
        return Found(x.mean(0), torch.cov(x.T), found.summary()["r_hat"].to_numpy(float).max())

    return run


def _tempered(draws: int) -> Callable[[BoltzmannRelaxation, int], Found]:
    def run(machine: BoltzmannRelaxation, seed: int) -> Found:
        base = Gaussian.from_local_fits(machine, start=Gaussian.standard(machine, torch.float64))
        method = dgm.ParallelTempering(draws=draws)
        evidence = uninterrupted(dgm.log_evidence(machine, base, method, chains=12, seed=seed, progress=False))
        mean = evidence.expectation(lambda x: x).value
        second = evidence.expectation(lambda x: x.unsqueeze(-1) * x.unsqueeze(-2)).value
        return Found(mean, second - torch.outer(mean, mean), None)

    return run


_SAMPLERS: dict[str, Callable[[BoltzmannRelaxation, int], Found]] = {
    "HMC": _by(dgm.HMC(), 4000),
    "NUTS": _by(dgm.NUTS(), 1000),
    "ModeJumps": _by(dgm.ModeJumps(), 1000),
    "parallel tempering": _tempered(500),
}


def _rows(machines: Iterable[tuple[BoltzmannRelaxation, Moments]], runs: int, seed: int) -> dict[str, dict[str, Any]]:
    """Errors of every sampler, over machines and runs."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in _SAMPLERS}
    for i, (machine, truth) in enumerate(machines):
        print(f"system {i}", flush=True)
        for name, sampler in _SAMPLERS.items():
            results[name] += [{"system": i, **_run(machine, truth, sampler, seed + j)} for j in range(runs)]
    return {name: {**_summary(rows), "runs": rows} for name, rows in results.items()}


def _run(
    machine: BoltzmannRelaxation,
    truth: Moments,
    sampler: Callable[[BoltzmannRelaxation, int], Found],
    seed: int,
) -> dict[str, Any]:
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = sampler(machine, seed)
    seconds = time.process_time() - started
    off = (found.mean - truth.mean) / truth.covariance.diagonal().sqrt()
    covariance = (found.covariance - truth.covariance).norm() / truth.covariance.norm()
    said = any(issubclass(each.category, UserWarning) for each in caught)
    return {
        "mean": float(off.square().mean().sqrt()),
        "covariance": float(covariance),
        "r_hat": found.r_hat,
        "warned": said or (found.r_hat or 0) > 1.05,
        "seconds": seconds,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    def rms(name: str, of: list[dict[str, Any]]) -> float:
        return (sum(row[name] ** 2 for row in of) / len(of)) ** 0.5 if of else 0.0

    worst = [row["r_hat"] for row in rows if row["r_hat"] is not None]
    return {
        "mean": rms("mean", rows),
        "largest": max(row["mean"] for row in rows),
        "largest_unwarned": max((row["mean"] for row in rows if not row["warned"]), default=0.0),
        "covariance": rms("covariance", rows),
        "r_hat": sorted(worst)[len(worst) // 2] if worst else None,
        "warned": sum(row["warned"] for row in rows) / len(rows),
        "seconds": sum(row["seconds"] for row in rows) / len(rows),
    }


def page(record: dict[str, Any]) -> str:
    """Markdown: errors of every sampler."""
    published = []
    if "published_rows" in record:
        published = ["The five published ones:\n", multimodal_table(record["published_rows"])]
    settings = record["settings"]
    return "\n".join(
        [
            "# Expectations under targets with many modes\n",
            f"`{record['command']}`: {settings['systems']} random frustrated Boltzmann machines of {settings['units']} "
            f"units, {settings['runs']} runs of each, against the truth by enumeration. {_CHAINS} chains; seconds of "
            "processor time per run, warm-up, searches for modes and the base's fit included.\n",
            multimodal_table(record["rows"]),
            *published,
            f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n",
        ]
    )


def multimodal_table(samplers: dict[str, Any]) -> str:
    """Errors of expectations by every sampler, over the systems of the benchmark."""
    rows = []
    for name, row in samplers.items():
        errors = (f"{row[key]:.3f}" for key in ("mean", "largest", "largest_unwarned", "covariance"))
        r_hat = "-" if row["r_hat"] is None else f"{row['r_hat']:.2f}"
        rows.append([name, f"{row['seconds']:.1f}", *errors, r_hat, f"{100 * row['warned']:.0f} %"])
    errors = ["mean, rms error", "largest", "largest without a warning", "covariance, relative error"]
    return markdown(["sampler", "seconds", *errors, "R-hat, median of worst", "warned"], rows)
