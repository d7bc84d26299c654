"""The measured tables of docs, written from evaluation/results: ``python -m evaluation.reports.documents`` renews them.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``. Where a command has measured anew, run this; the
sentences around the tables are tested against the same records.
"""

import json
import re
from pathlib import Path
from typing import Any

from . import crossovers, images
from .abc import chains_table, sequential_table
from .programs import programs_table
from .published import gp_probit_table, quantile_table
from .rates import rates_table
from .scorecard import scorecard
from .tables import markdown
from .targets import targets_table

__all__ = [
    "GOAL",
    "boltzmann_table",
    "coverage_table",
    "methods_table",
    "modes_table",
    "multimodal_table",
    "radon_table",
    "read_record",
    "renewed",
    "seconds_to",
]

ROOT = Path(__file__).parents[2]
PAGES = ("docs/evidence.md", "docs/completions.md", "docs/images.md", "docs/samplers.md", "docs/programs.md")
# The error in log Z that times are given to.
GOAL = 0.1

_TABLE = re.compile(r"(?<=<!-- table )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
# as the experiments name them
_NAMES = {
    "SMC": "SMC, frozen schedule",
    "ST": "simulated tempering",
    "Gibbs CT": "Gibbs tempering",
    "CT-HMC": "joint tempering",
    "AIS, diagonal": "AIS, diagonal base",
}


def read_record(name: str) -> dict[str, Any]:
    """What a command measured, ``evaluation/results/NAME.json``."""
    return json.loads((ROOT / "evaluation" / "results" / f"{name}.json").read_text())


def renewed(page: str) -> str:
    """The text of a page with its tables as the records have them.

    Raises:
        KeyError: a table of an unknown name.
    """
    return _TABLE.sub(lambda match: f"{match[1]}{match[2]}\n{_table(match[1])}\n", page)


def methods_table(record: dict[str, Any]) -> str:
    """Thousands of gradient evaluations to the error aimed at: one row per method, one column per experiment."""
    experiments = record["experiments"]
    labels = next(iter(experiments.values()))["methods"]
    rows = [[label, *(_effort(entry["methods"][label]) for entry in experiments.values())] for label in labels]
    return markdown(["method", *experiments], rows)


def _effort(row: dict[str, Any]) -> str:
    if "error" in row:
        return "failed"
    if row["to_error"] is None:
        return "a bound"
    return f"{row['to_error'] / 1000:.3g}" + ("*" if row["caveats"] else "")


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


def coverage_table(methods: dict[str, Any]) -> str:
    """Coverage of 95 % intervals, and errors as they are and as claimed: one row per method, one column per family."""

    def cell(row: dict[str, Any]) -> str:
        covered, either = (f"{100 * row[key]:.0f} %" for key in ("covered", "covered_or_named"))
        shares = covered if covered == either else f"{covered} / {either}"
        return f"{shares} ({row['rmse']:.2g}, {row['std_error']:.2g})"

    families = next(iter(methods.values()))
    rows = [[name, *(cell(row) for row in by_family.values())] for name, by_family in methods.items()]
    return markdown(["method", *families], rows)


def multimodal_table(samplers: dict[str, Any]) -> str:
    """Errors of expectations by every sampler, over the systems of the benchmark."""
    rows = []
    for name, row in samplers.items():
        errors = (f"{row[key]:.3f}" for key in ("mean", "largest", "largest_unwarned", "covariance"))
        r_hat = "-" if row["r_hat"] is None else f"{row['r_hat']:.2f}"
        rows.append([name, f"{row['seconds']:.1f}", *errors, r_hat, f"{100 * row['warned']:.0f} %"])
    errors = ["mean, rms error", "largest", "largest without a warning", "covariance, relative error"]
    return markdown(["sampler", "seconds", *errors, "R-hat, median of worst", "warned"], rows)


def boltzmann_table(record: dict[str, Any]) -> str:
    """Errors of every method at every length of its runs; the smallest of a column in bold."""
    methods, plain = record["results"]["methods"], record["results"]["plain_hmc"]
    errors = {label: [_errors(entry) for entry in entries] for label, entries in methods.items()}
    best = [min(column) for column in zip(*(row for rows in errors.values() for row in rows), strict=True)]
    rows = []
    for label, entries in methods.items():
        for i, (entry, row) in enumerate(zip(entries, errors[label], strict=True)):
            cells = [format(error, form) for error, form in zip(row, (".3f", ".2f", ".2f"), strict=True)]
            cells = [f"**{c}**" if e == b else c for c, e, b in zip(cells, row, best, strict=True)]
            name = "" if i else _NAMES.get(label, label)
            effort = [f"{entry['seconds']:.1f}", f"{entry['gradient_evaluations'] / 1e6:.1f}e6"]
            rows.append([name, *effort, *cells, f"{seconds_to(entry):.0f}"])
    moments = (f"{plain[name]['value']:.2f}" for name in ("mean", "covariance"))
    rows.append(["plain HMC", f"{plain['seconds']:.1f}", "", "", *moments, f"R-hat {plain['max_r_hat']:.1f}"])
    header = ["method", "seconds", "gradients", "log Z", "mean", "covariance", f"seconds to {GOAL:g} in log Z"]
    return markdown(header, rows)


def _errors(entry: dict[str, Any]) -> tuple[float, float, float]:
    return entry["log_z_rmse"], entry["mean"]["value"], entry["covariance"]["value"]


def seconds_to(entry: dict[str, Any]) -> float:
    """Seconds to an error of :data:`GOAL` in log Z, which falls with the square root of time."""
    return entry["seconds"] * (entry["log_z_rmse"] / GOAL) ** 2


def radon_table(record: dict[str, Any]) -> str:
    """Estimates of log Z, without the bound."""
    rows = [
        [_NAMES.get(label, label), f"{row['mean']:.2f}", f"{row['mean_error']:.2f}", f"{row['seconds']:.0f}"]
        for label, row in record["results"]["methods"].items()
        if row["status"] != "lower"
    ]
    return markdown(["method", "log Z", "standard error", "seconds"], rows)


_TABLES = {
    "methods": methods_table,
    "boltzmann": boltzmann_table,
    "radon": radon_table,
    "coverage": lambda record: coverage_table(record["rows"]),
    "modes": lambda record: modes_table(record["rows"]),
    "modes_published": lambda record: modes_table(record["published_rows"]),
    "multimodal": lambda record: multimodal_table(record["rows"]),
    "multimodal_published": lambda record: multimodal_table(record["published_rows"]),
    "targets": targets_table,
    "rate_distortion": lambda record: rates_table(record["results"]),
    "programs": programs_table,
    "samplers": crossovers.tables,
    "quantile": quantile_table,
    "gp_probit": gp_probit_table,
    "completions": scorecard,
    "images_cpu": images.tables,
    "abc_chains": chains_table,
    "abc_sequential": sequential_table,
}
# records that have other names than their tables
_RECORDS = {
    "modes_published": "modes",
    "multimodal_published": "multimodal",
    "abc_chains": "abc",
    "abc_sequential": "abc",
}


def _table(name: str) -> str:
    return _TABLES[name](read_record(_RECORDS.get(name, name)))


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(renewed(path.read_text()))
