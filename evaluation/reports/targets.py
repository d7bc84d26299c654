"""Tables of ``dgm-infer bench targets``: every method on the known targets of the field."""

import math
from collections.abc import Mapping, Sequence
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


def _cell(runs: Sequence[Mapping[str, Any]] | None) -> str:
    """``rms error (claimed)``, bold where most 95 % intervals miss the truth, with a star where a run warned."""
    done = [run for run in runs or () if "failed" not in run]
    if not done:
        return "failed" if runs else ""
    star = "*" if any(run["warnings"] for run in done) else ""
    claimed = _number(_mean(done, "std_error"))
    if done[0]["error"] is None:
        return f"{_mean(done, 'log_z'):.2f} ({claimed}){star}"
    text = f"{_rms(done):.2f} ({claimed})"
    missed = sum(run["covered"] is False for run in done)
    return (f"**{text}**" if 2 * missed > len(done) else text) + star


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [run[name] for run in runs if run[name] is not None]
    return sum(values) / len(values) if values else math.nan


def _rms(runs: Sequence[Mapping[str, Any]]) -> float:
    return math.sqrt(sum(run["error"] ** 2 for run in runs) / len(runs))


def _number(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:.2f}"


def page(record: Mapping[str, Any], versions: str) -> str:
    """Markdown: the table, then every method on every target."""
    settings = record["settings"]
    parts = [
        "# Log evidence of the field's known targets\n",
        f"`{record['command']}`, default settings of every method, {settings['chains']} chains and {settings['runs']} "
        "runs, fewer where a target says so.\n",
        "Root mean square errors against the known log Z, in parentheses the mean claimed standard error; where log Z "
        "is unknown, mean estimates. Bold: most 95 % intervals miss the truth. Star: a run warned. Seconds are of the "
        f"processor; the machine's load average before was {record['load_average']:.1f}.\n",
        targets_table(record),
    ]
    for name, entry in record["targets"].items():
        truth = "unknown" if entry["log_z"] is None else f"{entry['log_z']:.4f}"
        parts += [
            f"## {name}\n",
            f"{entry['words']}; D = {entry['dim']}, log Z {truth}; base: {entry['base']} "
            f"({entry['base_seconds']:.1f} s); {entry['chains']} chains, {entry['runs']} runs.\n",
            *_bounds(entry),
            *_methods(entry["methods"]),
        ]
    parts.append(f"On {record['processor']}, {record['threads']} threads; {versions}.\n")
    return "\n".join(parts)


def _bounds(entry: Mapping[str, Any]) -> list[str]:
    if "bounds" not in entry:
        return []
    sides = (
        f"{name} {entry['bounds'][name]['log_z']:.3f} ± {entry['bounds'][name]['std_error'] or math.nan:.2f}"
        for name in ("lower", "upper", "combined")
    )
    return [f"Annealing from both sides: {', '.join(sides)} ({entry['bounds']['seconds']:.1f} s).\n"]


def _methods(methods: Mapping[str, Any]) -> list[str]:
    """All runs of every method, and what they warned of."""
    costs = ["gradients", "seconds", "warned"]
    header = ["method", "status", "mean log Z", "claimed error", "rms error", "in 95 % interval", *costs]
    rows, notes = [], []
    for label, runs in methods.items():
        done = [run for run in runs if "failed" not in run]
        notes += [f"- {label}: {note}\n" for note in dict.fromkeys(_notes(runs))]
        if not done:
            rows.append([label, "failed", *[""] * 7])
            continue
        name = f"{label}: {', '.join(sorted({run['method'] for run in done}))}" if label == "default" else label
        known = done[0]["error"] is not None
        covered = [run["covered"] for run in done if run["covered"] is not None]
        rows.append(
            [
                name,
                done[0]["status"],
                f"{_mean(done, 'log_z'):.3f}",
                _number(_mean(done, "std_error")),
                f"{_rms(done):.3f}" if known else "",
                f"{sum(covered)} of {len(covered)}" if covered else "",
                f"{_mean(done, 'gradient_evaluations') / 1000:.0f}e3",
                f"{_mean(done, 'seconds'):.1f}",
                f"{sum(bool(run['warnings']) for run in done)} of {len(runs)}",
            ]
        )
    return [markdown(header, rows), *(["".join(notes)] if notes else [])]


def _notes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Failures and warnings of the runs."""
    return [note for run in runs for note in ([run["failed"]] if "failed" in run else run["warnings"])]
