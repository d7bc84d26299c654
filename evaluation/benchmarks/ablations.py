"""``dgm-infer bench ablations``: what every heuristic brings, by switching it off.

Every problem is sampled as a user would, by ``dgm.sample(problem)``, with everything on and then with one switch off
(:mod:`.switches`), the same seeds for all. What brings less than a fifth in speed and prevents no failure goes.
"""

import math
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dgm_infer.errors import ConfigError, DgmInferError

from ..reports.records import write_record
from ..reports.tables import markdown
from .ablation_problems import PROBLEMS, Problem
from .publishing import new_record, publish, versions
from .settings import check_counts, check_positive, names_of, writable_folder
from .switches import SWITCHES

__all__ = ["PROBLEMS", "Problem", "bench", "page"]

_ON = "everything on"


def bench(
    switches: str | None = None,
    problems: str | None = None,
    seeds: str = "1,2,3",
    chains: int = 16,
    draws: int = 500,
    seconds: float = 120.0,
    output: str = "evaluation/results",
) -> Path:
    """Run problems with everything on, and with one switch off at a time.

    Args:
        switches: names, separated by commas; null for all.
        problems: names, separated by commas; null for all.
        seeds: of the runs, separated by commas.
        chains: chains per problem.
        draws: draws per chain.
        seconds: of processor time per run, after which it is stopped and judged by what it has.
        output: folder for ``ablations.json`` and ``ablations.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(2, chains=chains)
    check_counts(20, draws=draws)
    check_positive(seconds=seconds)
    chosen = list(SWITCHES) if switches is None else names_of("switches", switches, SWITCHES)
    on = list(PROBLEMS) if problems is None else names_of("problems", problems, PROBLEMS)
    numbers = _numbers(seeds)
    folder = writable_folder(output)
    settings = {"switches": switches, "problems": problems, "seeds": seeds, "chains": chains, "draws": draws}
    settings["seconds"] = seconds
    record = new_record("ablations", settings, ["dgm-infer", "torch"], threads=torch.get_num_threads())
    record["rows"] = []
    path = folder / "ablations.json"
    for name in on:
        problem = PROBLEMS[name]
        mine = [each for each in chosen if SWITCHES[each].room == problem.room]
        if not mine:
            continue
        # what is compiled and cached by the first run of a process is in no row
        _run(problem, nullcontext(), 0, chains, 20, seconds)
        for seed in numbers:
            for each in (_ON, *mine):
                off = nullcontext() if each == _ON else SWITCHES[each].off()
                row = {"problem": name, "switch": each, "seed": seed}
                row |= _run(problem, off, seed, chains, draws, seconds)
                record["rows"].append(row)
                write_record(path, record)
                print({key: value for key, value in row.items() if value is not None}, flush=True)
    publish(path, "ablations", page(record))
    return path


def page(record: dict[str, Any]) -> str:
    """Markdown: means over seeds by problem and switch."""
    used = {row["switch"]: SWITCHES[row["switch"]].words for row in record["rows"] if row["switch"] in SWITCHES}
    return "\n".join(
        [
            "# What every heuristic brings\n",
            f"`{record['command']}`: means over the seeds; seconds of processor time, start and warm-up included; "
            "*rate*: smallest bulk effective sample size per second; *of all on*: the same over that with everything "
            "on; *error*: of what is known of the problem (below); *failed*: runs without a draw.\n",
            _table(record["rows"]),
            "".join(f"- *{name}*: {words}\n" for name, words in used.items()),
            "".join(f"- {name}: {PROBLEMS[name].words}\n" for name in _in_order(record["rows"], "problem")),
            f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n",
        ]
    )


def _table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for problem in _in_order(rows, "problem"):
        every: float | None = None
        for switch in _in_order(rows, "switch"):
            mine = [row for row in rows if (row["problem"], row["switch"]) == (problem, switch)]
            if not mine:
                continue
            rate = _mean(mine, "rate")
            every = rate if switch == _ON else every
            share = rate / every if rate is not None and every else None
            found = sorted({text for row in mine for text in row["findings"]})
            lines.append(
                [
                    problem,
                    switch if switch == _ON else f"without {switch}",
                    *(_shown(value) for value in (rate, share)),
                    *(_shown(_mean(mine, name)) for name in ("seconds", "r_hat", "error")),
                    str(sum(row["failed"] for row in mine)),
                    "; ".join(found) or "-",
                ]
            )
    return markdown(["problem", "", "rate", "of all on", "seconds", "R-hat", "error", "failed", "findings"], lines)


def _in_order(rows: list[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None and math.isfinite(row[name])]
    return fmean(values) if values else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"seeds: {seeds!r} is not integers separated by commas") from None


def _run(problem: Problem, off: Any, seed: int, chains: int, draws: int, seconds: float) -> dict[str, Any]:
    started = time.process_time()
    try:
        with off, _limited(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {**problem.measure(seed, chains, draws), "failed": False}
    except (DgmInferError, KeyboardInterrupt) as error:
        text = f"no result in {seconds:g} s" if isinstance(error, KeyboardInterrupt) else str(error).split(":")[0]
        return {"failed": True, "findings": [text], "seconds": time.process_time() - started}


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer, as Ctrl-C does: ``sample`` then returns the draws it has."""

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
