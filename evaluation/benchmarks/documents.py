"""The measured tables of docs, written from evaluation/results: ``python -m evaluation.benchmarks.documents``.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``. Where a command has measured again, run this.
"""

import json
import re
from pathlib import Path
from typing import Any

from ..reports.published import boltzmann_table, gp_probit_table, quantile_table, radon_table
from ..reports.rates import rates_table
from . import image_tables, samplers
from .abc import chains_table, sequential_table
from .completions import scorecard
from .coverage import coverage_table
from .methods import methods_table
from .modes import modes_table
from .multimodal import multimodal_table
from .programs import programs_table
from .targets import targets_table

__all__ = ["PAGES", "read_record", "renewed"]

ROOT = Path(__file__).parents[2]
PAGES = ("docs/evidence.md", "docs/completions.md", "docs/images.md", "docs/samplers.md", "docs/programs.md")

_TABLE = re.compile(r"(?<=<!-- table )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def read_record(name: str) -> dict[str, Any]:
    """What a command measured, ``evaluation/results/NAME.json``."""
    return json.loads((ROOT / "evaluation" / "results" / f"{name}.json").read_text())


def renewed(page: str) -> str:
    """The text of a page with its tables as the records have them.

    Raises:
        KeyError: a table of an unknown name.
    """
    return _TABLE.sub(lambda match: f"{match[1]}{match[2]}\n{_table(match[1])}\n", page)


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
    "samplers": samplers.tables,
    "quantile": quantile_table,
    "gp_probit": gp_probit_table,
    "completions": scorecard,
    "images_cpu": image_tables.tables,
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
