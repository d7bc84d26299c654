"""``dgm-infer bench modes``: log evidence of targets with many modes, from generic tools alone.

Random frustrated Boltzmann machines, relaxed (math 12.6), whose log Z is known by enumeration. Bases are fitted to the
target without any knowledge of the problem, and every method has its default settings; chains are chosen such that the
methods take about the same time.
"""

import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import dgm_infer as dgm
from dgm_infer import Gaussian
from dgm_infer.errors import uninterrupted
from dgm_infer.evidence import Method

from ..problems.boltzmann import BoltzmannRelaxation, Moments, published_machines, random_machines
from ..reports.records import write_record
from ..reports.tables import markdown
from .publishing import new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder

__all__ = ["bench", "modes_table", "page"]

# Methods with the chains that make their times alike.
_METHODS: dict[str, tuple[Method, int]] = {
    "simulated tempering": (dgm.SimulatedTempering(), 64),
    "Gibbs tempering": (dgm.GibbsTempering(), 64),
    "joint tempering": (dgm.ContinuousTempering(), 64),
    "parallel tempering": (dgm.ParallelTempering(), 12),
}


def bench(
    systems: int = 10,
    units: int = 16,
    runs: int = 10,
    seed: int = 0,
    data: str | None = None,
    output: str = "evaluation/results",
) -> Path:
    """Estimate the evidence of random Boltzmann machines by tempering from generic bases.

    Args:
        systems: random machines.
        units: units of each, at most 20.
        runs: of every method on each.
        seed: of the first machine, and of the first run.
        data: the reference folder, for the five published machines too.
        output: folder for ``modes.json`` and ``modes.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(least=2, systems=systems, units=units)
    check_counts(least=1, runs=runs)
    check_seed(seed)
    folder = writable_folder(output)
    settings = {"systems": systems, "units": units, "runs": runs, "seed": seed}
    record = new_record("modes", settings, ["dgm-infer", "torch"], threads=torch.get_num_threads())
    record["rows"] = _rows(enumerate(random_machines(systems, units, seed), seed), runs, seed)
    if data is not None:
        record["published_rows"] = _rows(enumerate(published_machines(Path(data))), runs, seed)
    path = folder / "modes.json"
    write_record(path, record)
    publish(path, "modes", page(record))
    return path


def _rows(machines: Iterable[tuple[int, tuple[BoltzmannRelaxation, Moments]]], runs: int, seed: int) -> dict[str, Any]:
    """Errors of every method from every base, over machines and runs."""
    results: dict[str, list[dict[str, Any]]] = {}
    for i, (machine, moments) in machines:
        truth = float(moments.log_z)
        print(f"system {i}", flush=True)
        for base_name, base in _bases(machine).items():
            for name, (method, chains) in _METHODS.items():
                rows = results.setdefault(f"{name}; {base_name}", [])
                rows += [{"system": i, **_run(machine, base, method, chains, seed + j, truth)} for j in range(runs)]
    return {
        name: {"chains": _METHODS[name.split(";")[0]][1], **_summary(rows), "runs": rows}
        for name, rows in results.items()
    }


def _bases(machine: BoltzmannRelaxation) -> dict[str, Gaussian]:
    return {"local fits": Gaussian.from_local_fits(machine, start=Gaussian.standard(machine, torch.float64))}


def _run(
    machine: BoltzmannRelaxation, base: Gaussian, method: Method, chains: int, seed: int, truth: float
) -> dict[str, Any]:
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evidence = uninterrupted(
            dgm.log_evidence(machine, base, method, chains=chains, seed=seed, keep_draws=False, progress=False)
        )
    low, high = evidence.interval()
    return {
        "error": float(evidence.log_z) - truth,
        "std_error": float(evidence.std_error),
        "covered": bool(low <= truth <= high),
        "warned": bool(caught),
        "seconds": time.process_time() - started,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = torch.tensor([row["error"] for row in rows], dtype=torch.float64)
    return {
        "rmse": float(errors.square().mean().sqrt()),
        "largest": float(errors.abs().max()),
        "std_error": sum(row["std_error"] for row in rows) / len(rows),
        "covered": sum(row["covered"] for row in rows) / len(rows),
        "warned": sum(row["warned"] for row in rows) / len(rows),
        "covered_or_warned": sum(row["covered"] or row["warned"] for row in rows) / len(rows),
        "largest_unwarned": max((abs(row["error"]) for row in rows if not row["warned"]), default=0.0),
        "seconds": sum(row["seconds"] for row in rows) / len(rows),
    }


def page(record: dict[str, Any]) -> str:
    """Markdown: errors of every method."""
    published = []
    if "published_rows" in record:
        published = ["The five published ones:\n", modes_table(record["published_rows"])]
    settings = record["settings"]
    return "\n".join(
        [
            "# Log evidence of targets with many modes\n",
            f"`{record['command']}`: {settings['systems']} random frustrated Boltzmann machines of {settings['units']} "
            f"units, {settings['runs']} runs of each, against the truth by enumeration. Default settings; seconds of "
            "processor time per run, the base's fit not counted.\n",
            modes_table(record["rows"]),
            *published,
            f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n",
        ]
    )


def modes_table(methods: dict[str, Any]) -> str:
    """Errors of every method from every base, over the systems of the benchmark."""
    rows = []
    for name, row in methods.items():
        method, base = name.split("; ")
        errors = (f"{row[key]:.2f}" for key in ("rmse", "largest", "largest_unwarned", "std_error"))
        shares = (f"{100 * row[key]:.0f} %" for key in ("covered", "warned", "covered_or_warned"))
        rows.append([method, base, str(row["chains"]), f"{row['seconds']:.1f}", *errors, *shares])
    errors = ["rms error", "largest error", "without a warning", "claimed error"]
    shares = ["in 95 % interval", "warned", "either"]
    return markdown(["method", "base", "chains", "seconds", *errors, *shares], rows)
