"""``dgm-infer bench coverage``: how often 95 % intervals of log Z cover it, or the run says that they may not.

Families of problems of known log Z (:mod:`evaluation.problems.families`), from a base near them and from the prior.
"""

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import dgm_infer as dgm
from dgm_infer.errors import ConfigError, uninterrupted
from dgm_infer.evidence import Evidence, Method

from ..problems.families import FAMILIES, HEAVY
from ..reports.records import write_record
from ..reports.tables import markdown
from .publishing import cores_of, measured_before, new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder

__all__ = ["METHODS", "bench", "coverage_table", "page", "row"]

METHODS: dict[str, Method | None] = {
    "default": None,
    "AIS": dgm.AIS(),
    "Hamiltonian AIS": dgm.evidence.HamiltonianAIS(),
    "SMC, adaptive": dgm.SMC(),
    "SMC, frozen": dgm.SMC(schedule="barrier", temperatures=30),
    "Gibbs tempering": dgm.GibbsTempering(),
    "joint tempering": dgm.ContinuousTempering(),
    "simulated tempering": dgm.SimulatedTempering(),
    "importance tempering": dgm.evidence.ImportanceTempering(),
    "path sampling": dgm.evidence.PathSampling(),
    "parallel tempering": dgm.ParallelTempering(),
}


# Those of the table, and those of heavy tails.
_KNOWN = FAMILIES | HEAVY


def bench(
    problems: int = 200,
    chains: int = 16,
    methods: str | None = None,
    families: str | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Compare errors of log Z with what they are claimed to be, method by method.

    Args:
        problems: of every family.
        chains: per problem.
        methods: names, separated by semicolons; None for all. Those measured before with the same settings are kept.
        families: likewise; None for those of the table.
        seed: of every run.
        output: folder for ``coverage.json`` and ``coverage.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(least=2, problems=problems, chains=chains)
    check_seed(seed)
    names = _chosen("methods", methods, METHODS)
    kinds = list(FAMILIES) if families is None else _chosen("families", families, _KNOWN)
    folder = writable_folder(output)
    settings = {"problems": problems, "chains": chains, "seed": seed}
    path = folder / "coverage.json"
    rows = dict(measured_before(path, settings, "rows")["rows"])
    record = new_record("coverage", settings, ["dgm-infer", "torch"], threads=torch.get_num_threads())
    for name in names:
        print(name, flush=True)
        measured = dict(rows.get(name, {}))
        for family in kinds:
            measured[family] = _measured(name, family, problems, chains, seed)
        rows[name] = {family: measured[family] for family in _KNOWN if family in measured}
        record["rows"] = {each: rows[each] for each in METHODS if each in rows}
        write_record(path, record)
    publish(path, "coverage", page(record))
    return path


def _chosen(what: str, names: str | None, known: Mapping[str, Any]) -> list[str]:
    chosen = [*known] if names is None else [name.strip() for name in names.split(";")]
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"{what}: {unknown[0]!r} is not one of {'; '.join(known)}")
    return chosen


def _measured(name: str, family: str, problems: int, chains: int, seed: int) -> dict[str, Any]:
    target, base = _KNOWN[family](problems)
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dgm.diagnosis.DiagnosisWarning)
        evidence = uninterrupted(
            # the families have one mode: the search for others would find none
            dgm.log_evidence(
                target,
                base,
                METHODS[name],
                chains=chains,
                seed=seed,
                coverage=METHODS[name] is None,
                progress=False,
            )
        )
    return {**row(evidence), "seconds": time.process_time() - started}


def row(evidence: Evidence) -> dict[str, float]:
    """Shares of problems of log Z = 0, and root mean squares of the estimates that have a finite error."""
    low, high = evidence.interval()
    covered, named = (low < 0) & (high > 0), torch.zeros_like(evidence.log_z, dtype=torch.bool)
    for finding in evidence.diagnose():
        if finding.severity != "imprecise":
            named[list(finding.problems)] = True

    def share(where: torch.Tensor) -> float:
        return float(where.double().mean())

    known = evidence.std_error.isfinite()
    log_z, std_error = evidence.log_z[known], evidence.std_error[known]
    return {
        "covered": share(covered),
        "named": share(named),
        "covered_or_named": share(covered | named),
        "rmse": float(log_z.square().mean().sqrt()),
        "std_error": float(std_error.square().mean().sqrt()),
        "bias": float(log_z.mean()),
    }


def page(record: dict[str, Any]) -> str:
    """Markdown: coverage by method and family."""
    settings = record["settings"]
    return "\n".join(
        [
            "# Coverage of 95 % intervals of log Z\n",
            f"`{record['command']}`: {settings['problems']} problems of every family, {settings['chains']} chains, "
            "default settings. Share of problems whose interval covers log Z; after a slash, where it differs, the "
            "share that is covered or named by `diagnose()`; in parentheses root mean square and claimed errors, where "
            "these are finite.\n",
            coverage_table(record["rows"]),
            f"On {record['processor']}, {cores_of(record['threads'])}; {versions(record)}.\n",
        ]
    )


def coverage_table(methods: dict[str, Any]) -> str:
    """Coverage of 95 % intervals, and errors as they are and as claimed: one row per method, one column per family."""

    def cell(row: dict[str, Any]) -> str:
        covered, either = (f"{100 * row[key]:.0f} %" for key in ("covered", "covered_or_named"))
        shares = covered if covered == either else f"{covered} / {either}"
        sizes = ("-" if row[key] is None else f"{row[key]:.2g}" for key in ("rmse", "std_error"))
        return f"{shares} ({', '.join(sizes)})"

    families = [name for name in _KNOWN if any(name in by_family for by_family in methods.values())]
    rows = [
        [name, *(cell(by_family[family]) if family in by_family else "-" for family in families)]
        for name, by_family in methods.items()
    ]
    return markdown(["method", *families], rows)
