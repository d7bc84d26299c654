"""``dgm-infer bench abc``: chains of elliptical slices in one call or one by one, and SMC-ABC beside pyABC and sbi.

Both measure processor seconds of one thread: no method here uses more. SMC-ABC has the same simulator, prior, Euclidean
distance and final tolerance in all packages, and tolerances on the way that each keep about half of the particles.

The simulator draws 50 normal data and returns two summaries; its ABC posterior is known by quadrature at every
tolerance. So the effective size that is compared is not what the weights claim but what the errors of the posterior
means show, over independent runs: ``sd^2 / E (mean found - mean)^2``.
"""

from pathlib import Path
from statistics import median
from typing import Any

from ..reports.records import write_record
from ..reports.tables import markdown
from . import abc_chains, abc_sequential
from .abc_problem import ABCTask, NormalData
from .publishing import new_record, publish, versions
from .settings import check_counts, check_positive, check_seed, writable_folder
from .workers import torch_threads

__all__ = ["bench", "chains_table", "page", "sequential_table"]


def bench(
    chains: int = 1000,
    transitions: int = 20,
    particles: int = 200,
    tolerance: float = 0.1,
    repetitions: int = 8,
    peers: bool = True,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Time elliptical slices of many chains at once, and SMC-ABC beside its peers.

    Args:
        chains: chains of one call of the Lotka-Volterra ABC posterior.
        transitions: of every timed call.
        particles: particles of SMC-ABC.
        tolerance: of SMC-ABC.
        repetitions: timed calls, and independent runs of every method of SMC-ABC.
        peers: run pyABC and sbi, those that are installed: pip install pyabc sbi.
        seed: seed of all randomness.
        output: folder for ``abc.json`` and ``abc.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(least=2, chains=chains, particles=particles, repetitions=repetitions)
    check_counts(transitions=transitions)
    check_positive(tolerance=tolerance)
    check_seed(seed)
    folder = writable_folder(output)
    settings = {
        "chains": chains,
        "transitions": transitions,
        "particles": particles,
        "tolerance": tolerance,
        "repetitions": repetitions,
        "peers": peers,
        "seed": seed,
    }
    asked = tuple(abc_sequential.PEERS) if peers else ()
    record = new_record("abc", settings, ["dgm-infer", "torch", "numpy", *map(str.lower, asked)], threads=1)
    record["left_out"] = abc_sequential.left_out(asked)
    for line in record["left_out"]:
        print(line, flush=True)
    print(f"elliptical slices: {repetitions} calls of {chains} chains", flush=True)
    with torch_threads(1):
        record["chains"] = abc_chains.measure(
            chains=chains, transitions=transitions, repetitions=repetitions, seed=seed
        )
    path = folder / "abc.json"
    write_record(path, record)
    task = ABCTask(NormalData(), tolerance, particles, repetitions, seed)
    record["sequential"] = abc_sequential.compare(task, patience=600, peers=asked)
    mean, sd = task.problem.posterior(tolerance)
    record["exact"] = {"mean": mean.tolist(), "sd": sd.tolist()}
    write_record(path, record)
    publish(path, "abc", page(record))
    return path


def page(record: dict[str, Any]) -> str:
    """Markdown: both comparisons."""
    chains, settings = record["chains"], record["settings"]
    notes = "".join(f"- {line}\n" for line in [*record["left_out"], *_failures(record["sequential"])])
    return "\n".join(
        [
            "# ABC: many chains at once, and sequential Monte Carlo beside peers\n",
            f"`{record['command']}`. Seconds of processor time, one thread.\n",
            "## Elliptical slices of the Lotka-Volterra ABC posterior\n",
            f"Full series, Gaussian kernel of width {chains['tolerance']:g}; medians of "
            f"{len(chains['seconds_together'])} calls of {chains['chains']} chains and of "
            f"{len(chains['seconds_alone'])} of one, {chains['transitions']} transitions each.\n",
            chains_table(record),
            "## SMC-ABC of normal data by two summaries\n",
            f"{settings['repetitions']} independent runs each, to tolerance {settings['tolerance']:g}; errors of "
            "posterior means in posterior standard deviations, against quadrature.\n",
            sequential_table(record),
            *([notes] if notes else []),
            f"On {record['processor']}; {versions(record)}.\n",
        ]
    )


def _failures(rows: dict[str, Any]) -> list[str]:
    return [f"{label} failed: {row['error']}" for label, row in rows.items() if "error" in row]


def chains_table(record: dict[str, Any]) -> str:
    """Seconds of chains in one call, and of as many chains one by one."""
    chains = record["chains"]
    n, evaluations = chains["chains"], chains["evaluations"]
    together, alone = (median(chains[f"seconds_{name}"]) for name in ("together", "alone"))
    rows = [
        [f"{n} chains in one call", f"{together:.3g}", f"{together:.3g}", f"{evaluations['together']:.1f}", ""],
        [
            f"one chain, {n} times",
            f"{alone:.3g}",
            f"{n * alone:.3g}",
            f"{evaluations['alone']:.1f}",
            f"{chains['ratio']:.0f}",
        ],
    ]
    header = [
        "",
        "seconds of a call",
        f"seconds of {n} chains",
        "evaluations per transition",
        "times as long",
    ]
    return markdown(header, rows)


def sequential_table(record: dict[str, Any]) -> str:
    """Every method that ran: simulations, seconds, errors and seconds to equal effective size."""
    rows = [
        [
            label,
            str(row["particles"]),
            f"{row['simulations']:.0f}",
            f"{row['seconds']:.3g}",
            f"{row['ess']:.0f}",
            f"{row['rms_error']:.3f}",
            f"{row['effective']:.0f}",
            f"{row['simulations'] / row['effective']:.0f}",
            f"{row['seconds_per_1000']:.3g}",
        ]
        for label, row in record["sequential"].items()
        if "error" not in row
    ]
    header = [
        *("SMC-ABC", "particles", "simulations", "seconds", "ESS of weights", "rms error of means"),
        *("effective draws by the errors", "simulations per one", "seconds per 1000"),
    ]
    return markdown(header, rows)
