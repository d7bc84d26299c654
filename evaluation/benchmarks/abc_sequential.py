"""SMC-ABC on one simulator: this project's, pyABC's and sbi's, each in a process of its own with one thread."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

import dgm_infer as dgm

from .abc_problem import ABCTask, effective_draws, repeated
from .workers import Report, WorkerResult, one_thread, run_workers

__all__ = ["MANY", "PEERS", "compare", "left_out", "ours"]

PEERS = {"pyABC": "pyabc", "sbi": "sbi"}
"""Peers and the packages on PyPI that they are."""

MANY = 50
"""Factor of the second row of ours: particles that are simulated together cost little more than few."""


def ours(task: ABCTask, report: Report) -> list[dict[str, Any]]:
    """Independent runs, as :func:`repeated` has them."""
    return repeated(_run, task, report)


def _run(task: ABCTask, particles: int, seed: int) -> dict[str, Any]:
    began = time.process_time()
    simulation = dgm.likelihood_free.Simulation(task.problem.simulate, dgm.StandardNormal(2), task.problem.observed)
    draws = dgm.likelihood_free.sample_abc(
        simulation, dgm.likelihood_free.ABCSMC(task.tolerance), draws=particles, seed=seed
    )
    return {
        "mean": draws.mean.tolist(),
        "ess": draws.ess,
        "tolerance": draws.tolerance,
        "simulations": draws.simulations,
        "seconds": time.process_time() - began,
    }


def left_out(peers: Sequence[str] = tuple(PEERS)) -> list[str]:
    """A line for every peer that is not installed."""
    missing = [name for name in peers if find_spec(PEERS[name]) is None]
    return [f"{name} is left out: it is not installed (pip install {PEERS[name]})" for name in missing]


def compare(task: ABCTask, *, patience: float, peers: Sequence[str] = tuple(PEERS)) -> dict[str, Any]:
    """Every method that is installed, one after the other: label -> row.

    Args:
        task: what all run; a second row of ours has :data:`MANY` times its particles.
        patience: seconds after which a method that still runs is ended.
        peers: keys of :data:`PEERS`.
    """
    own = "evaluation.benchmarks.abc_sequential:ours"
    runs = {
        "dgm-infer": (own, task),
        f"dgm-infer, {MANY} times the particles": (own, replace(task, particles=MANY * task.particles)),
    }
    for name in peers:
        if find_spec(PEERS[name]) is not None:
            runs[name] = (f"evaluation.benchmarks.{PEERS[name]}_peer:run", task)
    rows = {}
    for label, (function, given) in runs.items():
        print(f"{label}: {given.repetitions} runs of {given.particles} particles", flush=True)
        (result,) = run_workers(
            function,
            [given],
            environment=one_thread(),
            patience=patience,
            report=lambda line: print(f"  {line}", flush=True),
        )
        rows[label] = _row(given, result)
    return rows


def _row(task: ABCTask, result: WorkerResult) -> dict[str, Any]:
    if result.value is None:
        return {"error": result.error}
    return {"particles": task.particles, **_summary(task, result.value), "runs": result.value}


def _summary(task: ABCTask, runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the runs took, and how far their means are from that of the exact posterior at the same tolerance."""
    mean, sd = task.problem.posterior(task.tolerance)
    means = torch.tensor([run["mean"] for run in runs], dtype=mean.dtype)
    effective = effective_draws(means, mean, sd)
    numbers = {name: sum(run[name] for run in runs) / len(runs) for name in ("ess", "simulations", "seconds")}
    return {
        **numbers,
        "tolerance": max(run["tolerance"] for run in runs),
        # of the mean over all runs, in standard errors of it
        "bias": ((means.mean(0) - mean) * len(runs) ** 0.5 / means.std(0)).abs().max().item(),
        "rms_error": effective**-0.5,
        "effective": effective,
        "seconds_per_1000": 1000 * numbers["seconds"] / effective,
    }
