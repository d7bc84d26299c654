"""``dgm-infer bench series``: a predator-prey series observed with noise, this project beside BlackJAX and NumPyro.

A model of 50 steps of arithmetic, in which a sampler's own work is what costs: the logarithms of four parameters and
the noise of every step, given the series with normal noise of sd 0.1; and the equations without noise of the process,
solved by 379 Runge-Kutta steps in a loop of Python. What is timed is what ``bench images`` times:
wall-clock seconds from the first statement after the imports to the last draw. All methods begin at the same points,
near the inputs that generated the data, or each by its own means.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dgm_infer.errors import ConfigError

from ..reports.records import plain, write_record
from .earlier_peer import LATE
from .image_summary import agreement, summarise
from .image_tables import details
from .machine import checked_cores
from .publishing import cores_of, measured_before, new_record, publish, versions
from .series_problems import SERIES, SeriesTask
from .settings import check_counts, check_positive, check_seed, names_of, writable_folder
from .workers import one_thread, run_workers, threads

__all__ = ["METHODS", "bench", "page"]

# Seconds that importing and answering may take beside the sampling.
_IMPORTS = 40
_STARTS = ("shared", "own")
_DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class _Method:
    """How a series is sampled, as :class:`.image_methods.Method`."""

    label: str
    kernel: str
    module: str | None = None
    packages: tuple[str, ...] = ()
    exact: bool = True


def _blackjax(label: str, kernel: str, exact: bool = True) -> _Method:
    return _Method(label, kernel, "blackjax_peer", ("jax", "blackjax", "optax"), exact)


METHODS = {
    "default": _Method("default", "default"),
    "nuts": _Method("NUTS on all inputs", "nuts"),
    "blackjax": _blackjax("BlackJAX NUTS", "nuts"),
    "mclmc": _blackjax("BlackJAX MCLMC", "mclmc", exact=False),
    "chees": _blackjax("BlackJAX ChEES-HMC", "chees"),
    "numpyro": _Method("NumPyro NUTS", "nuts", "numpyro_peer", ("jax", "numpyro")),
}
"""By the names that ``methods=`` has."""


def bench(
    seconds: float = 60,
    problems: str = "mild,published,equations",
    methods: str = ",".join(METHODS),
    chains: int = 4,
    warmup: int | None = None,
    peer_warmup: int = 500,
    starts: str = "shared",
    dtypes: str = "float64",
    again: bool = False,
    cores: int | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Sample the parameters of a noisy series by every method, side by side.

    What an earlier run with the same settings and seconds has measured is kept.

    Args:
        seconds: wall-clock seconds per method, including compilation and warm-up.
        problems: names, separated by commas: mild, published, equations.
        methods: names, separated by commas: default, nuts, blackjax, mclmc, chees, numpyro.
        chains: chains of every method.
        warmup: iterations of this project that adapt a kernel; null for as many as it takes.
        peer_warmup: iterations that BlackJAX and NumPyro adapt in.
        starts: where chains start, separated by commas: shared, near the inputs that generated the data; own, where the
            default starts by itself and peers at prior draws.
        dtypes: what peers compute in, separated by commas: float64, as this project, float32.
        again: measure again what was measured with these settings.
        cores: processor cores; null for all of them. With 1 the peers have one thread, else all that JAX finds.
        seed: seed of all randomness.
        output: folder for ``series.json`` and ``series.md``.

    Returns:
        path of the JSON file.
    """
    check_positive(seconds=seconds)
    check_counts(peer_warmup=peer_warmup)
    check_counts(2, chains=chains)
    if warmup is not None:
        check_counts(warmup=warmup)
    check_seed(seed)
    chosen = {
        option: names_of(option, given, known)
        for option, given, known in (
            ("problems", problems, SERIES),
            ("methods", methods, METHODS),
            ("starts", starts, _STARTS),
            ("dtypes", dtypes, _DTYPES),
        )
    }
    needed = dict.fromkeys(package for name in chosen["methods"] for package in METHODS[name].packages)
    if missing := [package for package in needed if find_spec(package) is None]:
        raise ConfigError(
            f"{' and '.join(missing)} not installed: pip install 'dgm-infer[bench]', or give --methods default,nuts"
        )
    cores = checked_cores(cores)
    folder = writable_folder(output)
    path = folder / "series.json"
    settings = {"chains": chains, "warmup": warmup, "peer_warmup": peer_warmup, "cores": cores, "seed": seed}
    measured = measured_before(path, settings, "problems")
    ran = {"seconds": seconds, "problems": problems, "methods": methods, "starts": starts, "dtypes": dtypes}
    packages = ["dgm-infer", "torch", "numpy", "arviz", "jax", "blackjax", "numpyro"]
    record = new_record("series", {**ran, **settings}, packages) | measured
    task = SeriesTask("", "", seconds, chains, warmup, cores, seed)
    for name in chosen["problems"]:
        print(SERIES[name].title, flush=True)
        entry = record["problems"].setdefault(name, {"title": SERIES[name].title, "methods": {}})
        for method in map(METHODS.__getitem__, chosen["methods"]):
            for label, own in _tasks(method, replace(task, problem=name), peer_warmup, chosen):
                if again or entry["methods"].get(label, {}).get("budget") != seconds:
                    entry["methods"][label] = _measured(method, label, own)
                others = tuple(m.label for m in METHODS.values() if not m.exact)
                exact = {label: row for label, row in entry["methods"].items() if not label.startswith(others)}
                entry["agreement"] = agreement(exact)
                # after every method: what was measured survives whatever happens to the next
                write_record(path, record)
    publish(path, "series", page(plain(record)))
    return path


def _tasks(
    method: _Method, task: SeriesTask, peer_warmup: int, chosen: Mapping[str, list[str]]
) -> list[tuple[str, SeriesTask]]:
    """What is measured of a method, with its labels: from every start, and of peers in every dtype."""
    tasks = []
    for start in chosen["starts"]:
        for dtype in chosen["dtypes"] if method.packages else ["float64"]:
            label = method.label + (", own starts" if start == "own" else "")
            label += ", float32" if dtype == "float32" else ""
            own = replace(task, kernel=method.kernel, start=start, dtype=dtype)
            tasks.append((label, replace(own, warmup=peer_warmup) if method.packages else own))
    return tasks


def _measured(method: _Method, label: str, task: SeriesTask) -> dict[str, Any]:
    print(f"  {label}, {task.seconds:g} s", flush=True)
    alone = bool(method.packages) and task.cores == 1
    module, name = (method.module, "run_series") if method.module else ("series_problems", "run")
    outcomes = run_workers(
        f"evaluation.benchmarks.{module}:{name}",
        [task],
        environment=one_thread() if alone else threads(task.cores),
        patience=LATE * task.seconds + _IMPORTS,
        report=lambda line: print(f"    {line}", flush=True),
    )
    row = {"budget": task.seconds, **summarise(outcomes, task.seconds)}
    if "mean" in row:
        last = torch.from_numpy(np.asarray(outcomes[0].value["last"], np.float64))
        with torch.no_grad():
            row["energy"] = [float(SERIES[task.problem].target().energy(last).mean())]
        print(
            f"    {row['chains']} chains x {row['draws']} draws: bulk ESS per second {row['min_ess_per_second']:.3g} "
            f"(smallest), max R-hat {row['max_r_hat']:.3f}, energy {row['energy'][0]:.1f}",
            flush=True,
        )
    for error in row["errors"]:
        print(f"    failed: {error}", flush=True)
    return row


def page(record: Mapping[str, Any]) -> str:
    """Markdown: a table per problem."""
    settings = record["settings"]
    parts = [
        "# A noisy series, sampler beside sampler\n\nFour parameters of a predator-prey series, and the noise of every "
        "step where there is any, given the series with noise of 0.1; bulk ESS of the logarithms of parameters per "
        f"second of the whole budget, compilation and warm-up included; {settings['chains']} chains.\n"
    ]
    for entry in record["problems"].values():
        parts += [f"## {entry['title'][0].upper()}{entry['title'][1:]}\n", details(entry)]
    where = f"on {cores_of(settings['cores'])} of {record['processor']}"
    load = f"load at the start {record['load_average_at_start']}"
    parts.append(f"`{record['command']}`, {record['date']}, {where}, {load}; {versions(record)}.\n")
    return "\n".join(parts)
