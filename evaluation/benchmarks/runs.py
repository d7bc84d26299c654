"""``dgm-infer bench runs``: the same draws by 1, 2 and 4 processes and how fast, what checkpoints cost, and a soak.

Rates are transitions per second of the main run, from the times that shards began and ended by their own records:
starting processes and the common warm-up, which one of them makes, are not in them.
"""

import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import ConfigError, uninterrupted
from dgm_infer.runs.chains import Keeper
from dgm_infer.runs.folder import RunFolder
from dgm_infer.runs.kinds import Page

from ..reports.records import write_record
from ..reports.tables import markdown
from .image_problems import PROBLEMS as IMAGES
from .image_problems import top_half
from .problems import Problem
from .publishing import new_record, publish, versions
from .settings import check_counts, check_seed, names_of, writable_folder

__all__ = ["bench", "page"]

_SHARDS, _EVERY = 4, 5.0
_KERNEL = dgm.ConstrainedHMC(n_steps=5)


def _digits(n: int) -> Any:
    """The upper halves of held-out digits, with the noise that the shipped generator has."""
    images = IMAGES["digits"].conditioned(n).images
    model = dgm.WithNoise(generators.load("digits_vae"), 0.1)
    return dgm.condition(model, images, observe=dgm.pixels(top_half((8, 8))))


PROBLEMS: dict[str, Callable[[], Any]] = {
    "digits": lambda: _digits(4),
    "lotka_volterra": lambda: Problem("lotka_volterra").fibre(),
}
"""Four halves of digits; a series of prey and predator."""


def bench(
    problems: str = "digits,lotka_volterra",
    processes: str = "1,2,4",
    draws: int = 400,
    chains: int = 16,
    soak: float = 300.0,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Measure runs in folders.

    Args:
        problems: names, separated by commas: digits, lotka_volterra.
        processes: how many make a run, separated by commas.
        draws: draws per chain of a run.
        chains: chains per problem.
        soak: seconds of the soak, half an hour for the whole one; 0 for none.
        seed: seed of all randomness.
        output: folder of the results.
    """
    check_counts(draws=draws, chains=chains)
    check_seed(seed)
    if not soak >= 0:
        raise ConfigError(f"soak: {soak} must be 0 or more")
    names, counts = names_of("problems", problems, PROBLEMS), names_of("processes", processes, ("1", "2", "4"))
    settings = {
        "problems": problems,
        "processes": processes,
        "draws": draws,
        "chains": chains,
        "soak": soak,
        "seed": seed,
    }
    path = writable_folder(output) / "runs.json"
    record = new_record("runs", settings, ["dgm-infer", "torch"], workers={}, checkpoints={}, soak={})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            record["workers"][name] = _workers(PROBLEMS[name](), [int(n) for n in counts], chains, draws, seed)
            record["checkpoints"][name] = _checkpoints(PROBLEMS[name](), chains, draws, seed)
            write_record(path, record)
            print(f"{name}: {record['workers'][name]}, {record['checkpoints'][name]}", flush=True)
        if soak:
            record["soak"] = _soak(soak, chains, seed)
            write_record(path, record)
    publish(path, "runs", page(record))
    return path


def _workers(fibre: Any, counts: list[int], chains: int, draws: int, seed: int) -> dict[str, Any]:
    """Draws by one process, two and four: whether they are the same, and transitions per second."""
    found: dict[str, Any] = {"same": True}
    first = None
    for n in counts:
        with tempfile.TemporaryDirectory() as folder:
            made = dgm.sample(
                fibre,
                _KERNEL,
                chains=chains,
                warmup=100,
                draws=draws,
                seed=seed,
                run=Path(folder) / "run",
                devices=["cpu"] * n,
                shards=_SHARDS,
                progress=False,
            )
            opened = RunFolder.open("bench", Path(folder) / "run")
            shards = [progress for name in opened.names if (progress := opened.progress(name)) is not None]
        uninterrupted(made)
        assert made.inputs is not None
        first = made.inputs if first is None else first
        found["same"] &= torch.equal(first, made.inputs)
        seconds = max(each["at"] for each in shards) - min(each["began"][0] for each in shards)
        found[str(n)] = chains * draws / seconds
    return found


def _checkpoints(fibre: Any, chains: int, draws: int, seed: int) -> dict[str, float]:
    """The share of a run that checkpoints and their page take, one every five seconds."""
    spent = [0.0]

    def timed(function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Keeper, "write", timed(Keeper.write)),
        mock.patch.object(Page, "update", timed(Page.update)),
    ):
        began = time.perf_counter()
        options = {"chains": chains, "warmup": 100, "draws": draws, "seed": seed, "progress": False}
        uninterrupted(dgm.sample(fibre, _KERNEL, run=Path(folder) / "run", checkpoint_every=_EVERY, **options))
        seconds = time.perf_counter() - began
    return {"share": spent[0] / seconds, "seconds": seconds}


def _soak(seconds: float, chains: int, seed: int) -> dict[str, Any]:
    """Resident memory and files while a run of digits goes on: after a tenth of the time, and at its end."""
    fibre = PROBLEMS["digits"]()
    sizes: list[float] = []
    files: set[str] = set()
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"

        def look() -> None:
            while not over.wait(1.0):
                sizes.append(_resident())
                files.update(path.name for path in run.glob("*"))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        made = dgm.sample(
            fibre,
            _KERNEL,
            chains=chains,
            warmup=100,
            draws=10**5,
            seed=seed,
            run=run,
            checkpoint_every=_EVERY,
            until={"seconds": seconds},
            progress=False,
        )
        over.set()
        watcher.join()
        left = sorted(path.name for path in run.iterdir())
    tenth = max(1, len(sizes) // 10)
    early, late = (sum(part) / len(part) for part in (sizes[tenth : 2 * tenth], sizes[-2 * tenth : -tenth]))
    return {"draws": made.shape[1], "early": early, "late": late, "seen": sorted(files), "left": left}


def _resident() -> float:
    """MiB of anonymous memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def page(record: Mapping[str, Any]) -> str:
    """Markdown: a line per problem, and the soak."""
    header = [
        "problem",
        "the same draws",
        "1 process",
        "2",
        "4 (transitions/s)",
        "2 beside 1",
        "checkpoints, % of the time",
    ]
    lines = [
        [
            name,
            "yes" if rates["same"] else "no",
            *(f"{rates[n]:.0f}" if n in rates else "" for n in ("1", "2", "4")),
            f"{rates['2'] / rates['1']:.2f}" if {"1", "2"} <= set(rates) else "",
            f"{100 * record['checkpoints'][name]['share']:.2f}",
        ]
        for name, rates in record["workers"].items()
    ]
    parts = [
        "# Runs in folders\n",
        f"{record['settings']['chains']} chains in {_SHARDS} shards; checkpoints every {_EVERY:g} s.\n",
        markdown(header, lines),
    ]
    if soak := record["soak"]:
        parts.append(
            f"A soak of {record['settings']['soak']:.0f} s: {soak['draws']} draws per chain, {soak['early']:.0f} MiB "
            f"of anonymous memory after a tenth, {soak['late']:.0f} MiB at the end; files {', '.join(soak['left'])}.\n"
        )
    parts.append(f"`{record['command']}`, {record['date']}, {record['processor']}; {versions(record)}.\n")
    return "\n".join(parts)
