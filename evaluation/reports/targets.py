"""Tables of ``dgm-infer bench targets``: every method on the known targets of the field."""

from collections.abc import Mapping
from typing import Any

from .tables import markdown

__all__ = ["page", "targets_table"]

# Of the page of the docs: the others are in the record's own page.
_SHOWN = (
    "default",
    "AIS",
    "Hamiltonian AIS",
    "SMC, frozen",
    "parallel tempering",
    "simulated tempering",
    "Gibbs tempering",
    "joint tempering",
)


def targets_table(record: Mapping[str, Any]) -> str:
    """One row per target, one column per method: error and claimed error, or the estimate where log Z is unknown."""
    targets = record["targets"]
    labels = [label for label in _SHOWN if any(label in entry["methods"] for entry in targets.values())]
    rows = []
    for name, entry in targets.items():
        truth = "" if entry["log_z"] is None else f"{entry['log_z']:.2f}"
        rows.append([name, str(entry["dim"]), truth, *(_cell(entry["methods"].get(label)) for label in labels)])
    return markdown(["target", "D", "log Z", *labels], rows)


def _cell(row: Mapping[str, Any] | None) -> str:
    """``error ± claimed``, bold where the 95 % interval misses the truth, with a star where a warning came with it."""
    if row is None:
        return ""
    if "error" in row and isinstance(row["error"], str):
        return "failed"
    star = "*" if row["warnings"] else ""
    if row["error"] is None:
        return f"{row['log_z']:.2f} ± {_number(row['std_error'])}{star}"
    text = f"{row['error']:+.2f} ± {_number(row['std_error'])}"
    return (f"**{text}**" if row["covered"] is False else text) + star


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def page(record: Mapping[str, Any], versions: str) -> str:
    """Markdown: the table, then every method on every target."""
    settings = record["settings"]
    parts = [
        "# Log evidence of the field's known targets\n",
        f"`{record['command']}`, default settings of every method, {settings['chains']} chains, fewer where a target "
        "says so.\n",
        "Errors against the known log Z with the claimed standard errors; where log Z is unknown, estimates. Bold: the "
        "95 % interval misses the truth. Star: the run warned. Seconds are of the processor, on a machine that others "
        "used too.\n",
        targets_table(record),
    ]
    for name, entry in record["targets"].items():
        truth = "unknown" if entry["log_z"] is None else f"{entry['log_z']:.4f}"
        parts += [
            f"## {name}\n",
            f"{entry['words']}; D = {entry['dim']}, log Z {truth}; base: {entry['base']} "
            f"({entry['base_seconds']:.1f} s); {entry['chains']} chains.\n",
            *_bounds(entry),
            *_methods(entry["methods"]),
        ]
    parts.append(f"On {record['processor']}, {record['threads']} threads; {versions}.\n")
    return "\n".join(parts)


def _bounds(entry: Mapping[str, Any]) -> list[str]:
    if "bounds" not in entry:
        return []
    sides = (
        f"{name} {entry['bounds'][name]['log_z']:.3f} ± {_number(entry['bounds'][name]['std_error'])}"
        for name in ("lower", "upper", "combined")
    )
    return [f"Annealing from both sides: {', '.join(sides)} ({entry['bounds']['seconds']:.1f} s).\n"]


def _methods(methods: Mapping[str, Any]) -> list[str]:
    header = [
        "method",
        "status",
        "log Z",
        "claimed error",
        "error",
        "in 95 % interval",
        "gradients",
        "seconds",
        "warned",
    ]
    rows, notes = [], []
    for label, row in methods.items():
        if isinstance(row.get("error"), str):
            rows.append([label, f"failed: {row['error']}", *[""] * 7])
            continue
        name = f"{label}: {row['method']}" if label == "default" else label
        covered = {None: "", True: "yes", False: "**no**"}[row["covered"]]
        error = "" if row["error"] is None else f"{row['error']:+.3f}"
        cost = [f"{row['gradient_evaluations'] / 1000:.0f}e3", f"{row['seconds']:.1f}"]
        warned = "yes" if row["warnings"] else ""
        claimed = _number(row["std_error"])
        rows.append([name, row["status"], f"{row['log_z']:.3f}", claimed, error, covered, *cost, warned])
        notes += [f"- {label}: {each}\n" for each in row["warnings"]]
    return [markdown(header, rows), *(["".join(notes)] if notes else [])]
