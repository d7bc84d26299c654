"""``dgm-infer bench scaling``: time per chain and step, and memory, as the number of observations grows.

Every size runs in a separate process, so that each has its own peak memory. On the structured path the work is
the same at every size: ``chains = total / N``, so that small sizes fill the machine as large ones do and pay no fixed
costs that would make growth look slower than it is. Chains start at inputs that generated the data, which is an exact
posterior draw, and take steps of one size without geodesic sub-steps, so that the solver has the same work to do. The
dense path runs few chains for few steps: its memory, ``N (N + 4)`` numbers per chain and Jacobian, allows no more.
"""

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import ConfigError

from ..reports.records import write_record
from ..reports.tables import markdown
from .machine import checked_cores
from .publishing import new_record, publish, versions
from .settings import check_counts, writable_folder
from .workers import Clock, Report, run_workers, threads

__all__ = ["Task", "bench", "growth", "measure", "table"]

_STEP_SIZE = 0.2


def bench(
    sizes: str = "2500,25000,250000",
    dense_sizes: str = "250,2500",
    chains: int = 16,
    dense_chains: int = 2,
    repeats: int = 3,
    compile: bool = False,
    cores: int | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Time a chain's step, and measure peak memory, on generalised lambda data of growing size.

    Args:
        sizes: numbers of observations on the structured path, separated by commas.
        dense_sizes: the same on the dense path; empty for none.
        chains: at the largest size; smaller sizes run as many more as they are smaller.
        dense_chains: on the dense path.
        repeats: timed transitions of five steps on the structured path, of which the median counts; the dense path
            takes one transition of one step.
        compile: compile the structured path's kernel.
        cores: processor cores; null for all of them.
        seed: seed of all randomness.
        output: folder for ``scaling.json`` and ``scaling.md``.

    Returns:
        path of the JSON file.
    """
    structured, dense = _sizes("sizes", sizes), _sizes("dense_sizes", dense_sizes)
    if not structured:
        raise ConfigError("sizes: name one or more numbers of observations, such as 2500,25000,250000")
    check_counts(chains=chains, dense_chains=dense_chains, repeats=repeats)
    cores = checked_cores(cores)
    folder = writable_folder(output)
    settings = {
        "sizes": ",".join(map(str, structured)),
        "dense_sizes": ",".join(map(str, dense)),
        "chains": chains,
        "dense_chains": dense_chains,
        "repeats": repeats,
        "compile": compile,
        "cores": cores,
        "seed": seed,
    }
    total = chains * max(structured)
    tasks = [Task("structured", n, total // n, 5, repeats, compile, cores, seed) for n in structured]
    tasks += [Task("dense", n, dense_chains, 1, 1, False, cores, seed) for n in dense]
    record = new_record("scaling", settings, ["dgm-infer", "torch"], threads=f"1 process, {cores} threads")
    record["rows"] = []
    for task in tasks:
        print(f"{task.path}, N = {task.n}: {task.chains} chains", flush=True)
        (worker,) = run_workers(
            "evaluation.benchmarks.scaling:measure", [task], environment=threads(cores), patience=3600
        )
        row = {"path": task.path, "n": task.n, "chains": task.chains, **(worker.value or {"error": worker.error})}
        print(f"  failed: {worker.error}" if worker.value is None else f"  {_described(row)}", flush=True)
        record["rows"].append(row)
    record["growth"] = growth(record["rows"])
    record["cpu_growth"] = growth(record["rows"], "cpu_seconds_per_chain_step")
    path = folder / "scaling.json"
    write_record(path, record)
    publish(path, "scaling", table(record))
    return path


@dataclass(frozen=True)
class Task:
    """One size on one path.

    Args:
        path: how the Jacobian is factorised.
        n: observations.
        chains: at once.
        steps: integrator steps per draw.
        repeats: timed transitions.
        compile: the kernel.
        cores: threads.
        seed: seed of the data and the chains.
    """

    path: Literal["structured", "dense"]
    n: int
    chains: int
    steps: int
    repeats: int
    compile: bool
    cores: int
    seed: int


class _Dense(generators.GeneralisedLambda):
    """The same model, its structure kept from the sampler."""

    structure = "dense"


def measure(task: Task, report: Report = lambda line: None) -> dict[str, float]:
    """Seconds per chain and integrator step, and peak memory of this process in bytes.

    Processor seconds are those of all threads together; they tell a busy machine from a slow program.
    """
    torch.set_num_threads(task.cores)
    rng = torch.Generator().manual_seed(task.seed)
    model = (_Dense if task.path == "dense" else generators.GeneralisedLambda)(task.n)
    z = type(model).published_observations()[1]
    u1 = torch.stack([z[0], z[2], z[3], z[1].expm1().log() * math.sqrt(3) / math.pi])
    u = torch.cat([u1, model.local_density.sample((), generator=rng, dtype=torch.float64)])
    fibre = dgm.condition(model, model.observed(u))
    kernel = dgm.ConstrainedHMC(step_size=_STEP_SIZE, n_steps=task.steps, n_geodesic=1, compile=task.compile)
    position, base = u.repeat(task.chains, 1), peak_bytes()
    # as a user runs it, for the memory; it also compiles
    dgm.sample(
        fibre,
        kernel,
        chains=task.chains,
        warmup=0,
        draws=1,
        seed=task.seed,
        initial=position,
        keep="latents",
        progress=False,
    )
    state = kernel.init(fibre, position)
    clocks, infos = [], []
    for _ in range(task.repeats):
        clock = Clock(math.inf)
        infos.append(kernel.step(fibre, state, rng)[1])
        clocks.append((clock.elapsed, clock.cpu))
    seconds, cpu_seconds = (sorted(times)[len(times) // 2] for times in zip(*clocks, strict=True))
    work = task.chains * task.steps
    return {
        "seconds_per_chain_step": seconds / work,
        "cpu_seconds_per_chain_step": cpu_seconds / work,
        "peak_bytes": peak_bytes(),
        "base_bytes": base,
        "step_size": _STEP_SIZE,
        "acceptance": torch.stack([info.acceptance_rate for info in infos]).mean().item(),
        "failed": torch.stack([info.status != 0 for info in infos]).double().mean().item(),
    }


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def growth(rows: Sequence[Mapping[str, Any]], unit: str = "seconds_per_chain_step") -> float | None:
    """How much faster than N the time of the structured path grows from its smallest to its largest size."""
    done = sorted((row for row in rows if row["path"] == "structured" and "error" not in row), key=lambda row: row["n"])
    if len(done) < 2:
        return None
    per_unit = [row[unit] / row["n"] for row in (done[0], done[-1])]
    return per_unit[1] / per_unit[0]


def table(record: Mapping[str, Any]) -> str:
    """Markdown of one run's record."""
    header = [
        *("path", "N", "chains", "ms per chain and step", "us of CPU per chain, step and observation", "peak GB"),
        *("acceptance", "failed, %"),
    ]
    rows = [[row["path"], str(row["n"]), str(row["chains"]), *_cells(row)] for row in record["rows"]]
    parts = [
        "# Cost of a step as the data grow\n\n"
        f"`{record['command']}`, {record['date']}, on {record['settings']['cores']} cores of {record['processor']}; "
        f"{versions(record)}.\n",
        markdown(header, rows),
    ]
    if record["growth"] is not None:
        sizes = [row["n"] for row in record["rows"] if row["path"] == "structured"]
        parts.append(
            f"From N = {min(sizes)} to {max(sizes)} the time grows {record['growth']:.2f} times as fast as N.\n"
        )
    return "\n".join(parts)


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [row["error"], "", "", "", ""]
    return [
        f"{1e3 * row['seconds_per_chain_step']:.3g}",
        f"{1e6 * row['cpu_seconds_per_chain_step'] / row['n']:.3g}",
        f"{row['peak_bytes'] / 1e9:.2f}",
        f"{row['acceptance']:.2f}",
        f"{100 * row['failed']:.1f}",
    ]


def _described(row: Mapping[str, Any]) -> str:
    return f"{1e3 * row['seconds_per_chain_step']:.3g} ms per chain and step, peak {row['peak_bytes'] / 1e9:.2f} GB"


def _sizes(name: str, text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ConfigError(f"{name}: {text!r} must be integers separated by commas, such as 2500,25000")
    return sizes
