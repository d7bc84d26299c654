"""The scorecard of generators by their completions, as a page and as the table of the documentation."""

from collections.abc import Mapping
from typing import Any

from .tables import markdown

__all__ = ["page", "scorecard"]

_HEADER = [
    "generator",
    "images",
    "coverage of 90 %",
    "CRPS",
    "class log score",
    "accuracy",
    "calibration error",
    "mixed",
    "seconds",
]


def scorecard(record: Mapping[str, Any]) -> str:
    """One row per generator and kind of images, under those of the nearest training images."""
    rows = []
    for kind, others in record["data"].items():
        rows.append([f"{kind}: nearest training images", "held out", *_cells(others["neighbours"])])
        for name, row in record["generators"].items():
            if row["data"] == kind:
                rows.append([name, "held out", *_cells(row["held_out"])])
                if "own" in row:
                    rows.append(["", "its own", *_cells(row["own"])])
        rows.append([f"{kind}: the whole images", "held out", *_cells(others["complete"])])
    return markdown(_HEADER, rows)


def _cells(row: Mapping[str, Any]) -> list[str]:
    def number(name: str, form: str) -> str:
        value = row.get(name)
        if value is None:
            return ""
        if isinstance(value, Mapping):
            # one image has no standard error
            error = value["std_error"]
            return format(value["mean"], form) + ("" if error is None else f" ± {error:{form}}")
        return format(value, form)

    forms = {
        "coverage": ".3f",
        "crps": ".4f",
        "class_log_score": ".2f",
        "accuracy": ".2f",
        "calibration_error": ".2f",
        "mixed": ".0%",
        "seconds": ".0f",
    }
    return [number(name, form) for name, form in forms.items()]


def page(record: Mapping[str, Any]) -> str:
    """The page of ``dgm-infer bench completions``."""
    settings, versions = record["settings"], record["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    machine = f"on {record['processor']}, load at the start {record['load_average_at_start']}; {named}"
    return f"""# Completions of half-observed images

The top half of {settings["images"]} images is observed, the rest completed by {settings["chains"]} chains of
{settings["draws"]} draws per image. A calibrated prediction has coverage 0.9; CRPS and the calibration error are the
better the lower, the class log score (nats) the higher. Mixed: share of (image, latent) pairs with R-hat at most 1.05.

{scorecard(record)}
`{record["command"]}`, {record["date"]}, {machine}.
"""
