"""The table of ``dgm-infer bench programs``: simulators as written beside the same by hand."""

from typing import Any

from .tables import markdown

__all__ = ["programs_table"]


def programs_table(record: dict[str, Any]) -> str:
    """Milliseconds: one row per simulator and measure, one column per way of writing, and ratios to that by hand."""
    rows = []
    for problem, entry in record["problems"].items():
        for measure, by_label in entry["seconds"].items():
            cells = [_milliseconds(by_label, label) for label in ("traced", "by hand", "vectorised", "declared")]
            ratio = f"{by_label['traced']['median'] / by_label['by hand']['median']:.2f}"
            overhead = f"{100 * entry['overhead']:.0f} %" if measure == "forward" else ""
            rows.append([problem, measure, *cells, ratio, overhead])
    header = ["simulator", "measure", "traced", "by hand", "vectorised", "declared", "traced / by hand"]
    return markdown([*header, "overhead of tracing"], rows)


def _milliseconds(by_label: dict[str, Any], label: str) -> str:
    return f"{1000 * by_label[label]['median']:.3g}" if label in by_label else ""
