"""Results of a run: strict JSON, and the line that says where they are."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dgm_infer.files import write_file
from evaluation.reports.folders import held

__all__ = ["announce", "plain", "write_record"]


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_record(path: Path, record: Mapping[str, Any], indent: int = 2) -> None:
    """Write a record as strict JSON."""
    write_file(path, json.dumps(plain(record), indent=indent, allow_nan=False) + "\n")


def announce(report: str, folder: Path) -> None:
    """Print a report, and what is in the folder of its run."""
    print(report, end="")
    print(f"results in {folder}: {held(folder)}")
