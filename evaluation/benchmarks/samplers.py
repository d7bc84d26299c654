"""``dgm-infer bench samplers``: which sampler when a simulator is observed within a tolerance.

One simulator, ``y = sum_i a_i u_i^2`` of normal inputs, whose posterior is a ridge as narrow as the tolerance. Every
sampler starts from prior draws and adapts itself; one row at a time, the tolerance, the number of inputs and the kernel
vary. Effective draws are given per second, where the simulator costs nothing beside the sampler, and per thousand
simulations, where it costs everything.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dgm_infer as dgm

from ..experiments.pseudo_marginal import quietly_sampled
from ..problems.bowl import Bowl
from ..reports.mixing import R_HAT
from ..reports.records import write_record
from ..reports.tables import markdown
from .comparison import diagnose
from .publishing import new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder

__all__ = ["bench", "page", "tables"]

_TOLERANCES = (1.0, 0.3, 0.1, 0.03, 0.01)
_INPUTS = (2, 8, 32, 128)
_RATES = {"ess_per_thousand": "thousand simulations", "ess_per_second": "second"}


@dataclass(frozen=True)
class _Sampler:
    """A kernel for what a tolerance gives, or for the fibre of the same simulator with noise.

    Args:
        kernel: makes it.
        fibre: whether it is for the fibre.
        gradient: whether it needs one; its transitions take longer, and there are a tenth as many.
    """

    kernel: Callable[[], Any]
    fibre: bool = False
    gradient: bool = True


_SAMPLERS = {
    "RandomWalk": _Sampler(dgm.kernels.RandomWalk, gradient=False),
    "EllipticalSlice": _Sampler(dgm.kernels.EllipticalSlice, gradient=False),
    "LinearSlice": _Sampler(dgm.kernels.LinearSlice, gradient=False),
    "HMC": _Sampler(dgm.HMC),
    "NUTS": _Sampler(dgm.NUTS),
    "RiemannianHMC": _Sampler(dgm.kernels.RiemannianHMC),
    "the default, exact, with noise": _Sampler(lambda: None, fibre=True),
}


def bench(
    chains: int = 20, warmup: int = 100, draws: int = 100, seed: int = 0, output: str = "evaluation/results"
) -> Path:
    """Compare samplers of simulators by tolerance, number of inputs and smoothness.

    Args:
        chains: of every run.
        warmup: transitions that adapt a sampler with gradients; ten times as many without.
        draws: draws kept per chain, likewise.
        seed: of all runs.
        output: folder for ``samplers.json`` and ``samplers.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(2, chains=chains)
    check_counts(warmup=warmup)
    check_counts(20, draws=draws)
    check_seed(seed)
    folder = writable_folder(output)
    settings = {"chains": chains, "warmup": warmup, "draws": draws, "seed": seed}
    record = new_record("samplers", settings, ["dgm-infer", "torch", "arviz"], threads=torch.get_num_threads())
    record["rows"] = []
    path = folder / "samplers.json"
    for n_inputs, tolerance, kernel in _problems():
        for name, sampler in _SAMPLERS.items():
            if kernel != "gaussian" and sampler.gradient:
                continue
            row: dict[str, Any] = {"sampler": name, "inputs": n_inputs, "tolerance": tolerance, "kernel": kernel}
            record["rows"].append(row | _run(sampler, n_inputs, tolerance, kernel, settings))
            write_record(path, record)
            print({key: value for key, value in record["rows"][-1].items() if value is not None}, flush=True)
    publish(path, "samplers", page(record))
    return path


def _problems() -> Iterator[tuple[int, float, str]]:
    for tolerance in _TOLERANCES:
        yield 2, tolerance, "gaussian"
    for n_inputs in _INPUTS[1:]:
        yield n_inputs, 0.1, "gaussian"
    for tolerance in _TOLERANCES[1:3]:
        yield 2, tolerance, "uniform"


def _run(
    sampler: _Sampler, n_inputs: int, tolerance: float, kernel: str, settings: dict[str, int]
) -> dict[str, float | str | None]:
    """Effective draws of the worst input per second and per thousand points, warm-up included in both."""
    model, y = Bowl(n_inputs), torch.tensor([float(n_inputs)])
    if sampler.fibre:
        problem: Any = dgm.condition(dgm.WithNoise(model, tolerance), y)
    else:
        problem = dgm.condition(model, y, tolerance=tolerance, kernel=kernel)
    longer = 1 if sampler.gradient else 10
    warmup, kept = (longer * settings[name] for name in ("warmup", "draws"))
    before, started = Bowl.points, time.perf_counter()
    draws = quietly_sampled(
        problem,
        sampler.kernel(),
        chains=settings["chains"],
        warmup=warmup,
        draws=kept,
        seed=settings["seed"],
        progress=False,
    )
    seconds, points = time.perf_counter() - started, Bowl.points - before
    assert draws.inputs is not None
    found = [diagnose(draws.inputs[..., i].numpy(), 1.0) for i in range(n_inputs)]
    ess, r_hat = (np.array([row[name] for row in found], dtype=float) for name in ("ess_bulk", "r_hat"))
    return {
        "kernel_used": type(draws.kernel).__name__,
        "seconds": seconds,
        "points": points,
        "ess": float(ess.min()),
        "ess_per_second": float(ess.min()) / seconds,
        "ess_per_thousand": 1000 * float(ess.min()) / points,
        "max_r_hat": float(r_hat.max()),
    }


def page(record: dict[str, Any]) -> str:
    """Markdown: effective draws per second and per thousand simulations."""
    return "\n".join(
        [
            "# Samplers of simulators within a tolerance\n",
            f"`{record['command']}`: `y = sum a_i u_i^2`, a = 1, 4, 1, 4, ..., observed as the number of inputs.\n",
            tables(record),
            f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n",
        ]
    )


def tables(record: Mapping[str, Any]) -> str:
    """Markdown: one table per quantity that varies and per unit of effort, the best of a column in bold."""
    smooth = [row for row in record["rows"] if row["kernel"] == "gaussian"]
    two = [row for row in smooth if row["inputs"] == 2]
    wide = [row for row in smooth if row["tolerance"] == 0.1]
    jumps = [row for row in record["rows"] if row["kernel"] != "gaussian"]
    parts = []
    for rate, unit in _RATES.items():
        parts += [f"Effective draws per {unit}, by tolerance, two inputs:\n", _table(two, "tolerance", rate)]
    for rate, unit in _RATES.items():
        parts += [f"Per {unit}, by number of inputs, tolerance 0.1:\n", _table(wide, "inputs", rate)]
    parts += ["A uniform kernel, without a gradient, per thousand simulations, by tolerance:\n"]
    parts += [_table(jumps, "tolerance", "ess_per_thousand")]
    return "\n".join([*parts, f"In brackets where R-hat is above {R_HAT}.\n"])


def _table(rows: list[dict[str, Any]], column: str, rate: str) -> str:
    columns = list(dict.fromkeys(row[column] for row in rows))
    names = list(dict.fromkeys(row["sampler"] for row in rows))
    by = {(row["sampler"], row[column]): row for row in rows}
    best = {c: max((by[n, c][rate] for n in names if _mixed(by[n, c])), default=None) for c in columns}
    return markdown(
        ["sampler", *map(str, columns)], [[n, *(_cell(by[n, c], rate, best[c]) for c in columns)] for n in names]
    )


def _mixed(row: Mapping[str, Any]) -> bool:
    # not a number where a chain never moved
    return row["max_r_hat"] is not None and row["max_r_hat"] <= R_HAT


def _cell(row: Mapping[str, Any], rate: str, best: float | None) -> str:
    if row[rate] is None:
        return "-"
    # two digits, without an exponent
    value = f"{float(f'{row[rate]:.2g}'):g}"
    if not _mixed(row):
        return f"({value})"
    return f"**{value}**" if row[rate] == best else value
