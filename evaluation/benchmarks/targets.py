"""``dgm-infer bench targets``: every method of estimating log evidence on the targets that the field compares on.

Bases are made by generic tools and every method has its default settings, as of a user who knows nothing of the target.
Where log Z is known the error is measured against it: the table shows which errors a default claims and does not keep,
and whether it warns. Targets with exact draws are bounded from both sides as well.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dgm_infer as dgm
from dgm_infer import Evidence, Gaussian
from dgm_infer.errors import ArgumentError, ConfigError, EvidenceError, uninterrupted
from dgm_infer.evidence import Method

from ..experiments.reference import reference_folder
from ..problems.known import FOLDER, NAMES, KnownTarget, known_target
from ..reports.records import write_record
from ..reports.tables import markdown
from .methods import METHODS
from .publishing import measured_before, new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder

__all__ = ["bench", "page", "targets_table"]

# None is what log_evidence picks by itself
_METHODS: dict[str, Method | None] = {"default": None, **METHODS}
_FAST: dict[str, Method | None] = {
    "AIS": dgm.AIS(temperatures=20, pilot_temperatures=10),
    "Gibbs tempering": dgm.GibbsTempering(draws=10, warmup=2, pilot_temperatures=10),
}
_FAST_TARGETS = ("funnel-10", "seeds")


def bench(
    targets: str | None = None,
    chains: int = 16,
    runs: int = 3,
    data: str | None = None,
    fast: bool = False,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Estimate the evidence of every target by every method.

    What the record already holds of these settings is kept, run by run: after an interruption, or for more runs.

    Args:
        targets: names, separated by commas; null for all.
        chains: chains per problem, fewer where a gradient is expensive.
        runs: independent ones of every method on each target, fewer where a gradient is expensive.
        data: the reference folder, with ``known_targets`` in it, which ``python -m evaluation.problems.debian_data
            FOLDER/known_targets`` fills; null for the environment variable DGM_INFER_REFERENCE_DATA. What is not there
            is simulated, and named so.
        fast: two targets and two short methods, whose numbers mean little.
        seed: seed of all randomness.
        output: folder for ``targets.json`` and ``targets.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(least=2, chains=chains)
    check_counts(runs=runs)
    check_seed(seed)
    names = (_FAST_TARGETS if fast else NAMES) if targets is None else tuple(targets.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"targets: {unknown[0]!r} is not one of {', '.join(NAMES)}")
    reference = reference_folder(data)
    folder, files = writable_folder(output), None if reference is None else reference / FOLDER
    settings = {"chains": chains, "runs": runs, "fast": fast, "seed": seed}
    path = folder / "targets.json"
    measured = measured_before(path, {"chains": chains, "fast": fast}, "targets")["targets"]
    # of the last five minutes: others may use the machine too
    facts = {"threads": torch.get_num_threads(), "load_average": os.getloadavg()[1]}
    record = new_record("targets", settings, ["dgm-infer", "torch"], **facts)
    for name in names:
        known = known_target(name, files)
        before = measured.get(name, {})
        print(f"{name}: {known.words}", flush=True)
        for entry in _entries(known, before if before.get("words") == known.words else {}, fast, chains, runs, seed):
            measured[name] = entry
            record["targets"] = {each: measured[each] for each in NAMES if each in measured}
            write_record(path, record)
    publish(path, "targets", page(record))
    return path


def _entries(
    known: KnownTarget, before: Mapping[str, Any], fast: bool, chains: int, runs: int, seed: int
) -> Iterator[dict[str, Any]]:
    """All that is recorded of one target, once for every method that has been measured."""
    methods = _FAST if fast else _METHODS
    if known.most_chains is not None:
        chains, runs = min(chains, known.most_chains), 1
    seeds = range(seed, seed + runs)
    earlier = {
        label: {run["seed"]: run for run in before.get("methods", {}).get(label, []) if run["seed"] in seeds}
        for label in methods
    }
    started = time.process_time()
    base = known.base(fast)
    entry: dict[str, Any] = {
        "words": known.words,
        "dim": known.target.dim,
        "log_z": known.log_z,
        "base": known.base_kind,
        "base_seconds": time.process_time() - started,
        "chains": chains,
        "runs": runs,
    }
    if known.can_draw:
        entry["bounds"] = before.get("bounds") or _bounds(known, base, methods["AIS"], chains, seed)
    entry["methods"] = {label: list(done.values()) for label, done in earlier.items() if done}
    for label, method in methods.items():
        print(f"  {label}", flush=True)
        done = earlier[label]
        entry["methods"][label] = [done.get(s) or _run(known, base, method, chains, s) for s in seeds]
        yield entry


def _run(known: KnownTarget, base: Gaussian, method: Method | None, chains: int, seed: int) -> dict[str, Any]:
    def estimate() -> Evidence:
        options = {"chains": chains, "seed": seed, "keep_draws": False, "progress": False}
        return uninterrupted(dgm.log_evidence(known.target, base, method, **options))

    with _watched() as cost:
        try:
            evidence = estimate()
        except (ArgumentError, EvidenceError) as error:
            return {"seed": seed, "failed": str(error)}
    low, high = evidence.interval()
    truth = known.log_z
    bounds = evidence.status not in ("unbiased", "consistent")
    return {
        "seed": seed,
        "method": evidence.method,
        "status": evidence.status,
        "log_z": float(evidence.log_z),
        "std_error": float(evidence.std_error),
        "error": None if truth is None else float(evidence.log_z) - truth,
        "covered": None if truth is None or bounds else bool(low <= truth <= high),
        "gradient_evaluations": evidence.diagnostics["gradient_evaluations"] * chains,
        **cost,
    }


def _bounds(known: KnownTarget, base: Gaussian, method: Any, chains: int, seed: int) -> dict[str, Any]:
    """Two-sided bounds by annealing from the base and back from exact draws."""
    draw: Callable[[int, torch.Generator], torch.Tensor] = known.target.draw  # type: ignore[attr-defined]
    # a generator of its own: the chains of the run must not start from the numbers that made the draws
    exact = draw(chains, torch.Generator().manual_seed(seed + 1)).to(base.mean)
    with _watched() as cost:
        options = {"chains": chains, "seed": seed, "keep_draws": False, "progress": False}
        found = dgm.bidirectional(known.target, base, exact, method, **options)
    sides = {"lower": found.lower, "upper": found.upper, "combined": found.combined}
    values = {name: {"log_z": float(e.log_z), "std_error": float(e.std_error)} for name, e in sides.items()}
    return {**values, **cost}


@contextmanager
def _watched() -> Iterator[dict[str, Any]]:
    """Seconds of the processor, and what was warned of, when the block has ended."""
    cost: dict[str, Any] = {}
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield cost
    cost |= {"seconds": time.process_time() - started, "warnings": [str(each.message) for each in caught]}


# On the page of the docs: the others are in the record's own page.
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


def page(record: Mapping[str, Any]) -> str:
    """Markdown: errors of every method, and all of its runs."""
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
            *_both_sides(entry),
            *_methods(entry["methods"]),
        ]
    parts.append(f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n")
    return "\n".join(parts)


def _both_sides(entry: Mapping[str, Any]) -> list[str]:
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
