"""Tables of samplers against tolerance, inputs and smoothness."""

from collections.abc import Mapping
from typing import Any

from .mixing import R_HAT
from .tables import markdown

__all__ = ["tables"]

_RATES = {"ess_per_thousand": "thousand simulations", "ess_per_second": "second"}


def tables(record: Mapping[str, Any]) -> str:
    """Markdown: one table per quantity that varies and per unit of effort, the best of a column in bold."""
    smooth = [row for row in record["rows"] if row["kernel"] == "gaussian"]
    two = [row for row in smooth if row["inputs"] == 2]
    wide = [row for row in smooth if row["tolerance"] == 0.1]
    jumps = [row for row in record["rows"] if row["kernel"] != "gaussian"]
    parts = []
    for rate, unit in _RATES.items():
        parts += [f"Effective draws per {unit}, by tolerance, two inputs:\n", _table(two, "tolerance", rate)]
    for rate, unit in _RATES.items():
        parts += [f"Per {unit}, by number of inputs, tolerance 0.1:\n", _table(wide, "inputs", rate)]
    parts += ["A uniform kernel, without a gradient, per thousand simulations, by tolerance:\n"]
    parts += [_table(jumps, "tolerance", "ess_per_thousand")]
    return "\n".join([*parts, f"In brackets where R-hat is above {R_HAT}.\n"])


def _table(rows: list[dict[str, Any]], column: str, rate: str) -> str:
    columns = list(dict.fromkeys(row[column] for row in rows))
    names = list(dict.fromkeys(row["sampler"] for row in rows))
    by = {(row["sampler"], row[column]): row for row in rows}
    best = {c: max((by[n, c][rate] for n in names if _mixed(by[n, c])), default=None) for c in columns}
    return markdown(
        ["sampler", *map(str, columns)], [[n, *(_cell(by[n, c], rate, best[c]) for c in columns)] for n in names]
    )


def _mixed(row: Mapping[str, Any]) -> bool:
    # not a number where a chain never moved
    return row["max_r_hat"] is not None and row["max_r_hat"] <= R_HAT


def _cell(row: Mapping[str, Any], rate: str, best: float | None) -> str:
    if row[rate] is None:
        return "-"
    # two digits, without an exponent
    value = f"{float(f'{row[rate]:.2g}'):g}"
    if not _mixed(row):
        return f"({value})"
    return f"**{value}**" if row[rate] == best else value
