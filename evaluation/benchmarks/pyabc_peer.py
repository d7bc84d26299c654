"""A peer of the ABC benchmark: pyABC's ``ABCSMC``, on one core, with the simulator in NumPy."""

import importlib
import logging
import time
from typing import Any

import numpy as np

from .abc_problem import ABCTask, repeated
from .workers import Report

__all__ = ["run"]

# in no extra: the benchmark leaves out what is not installed
pyabc: Any = importlib.import_module("pyabc")

_MOST_POPULATIONS = 50


class _Quantile(pyabc.QuantileEpsilon):
    """Tolerances that keep half of the particles, and end at the one asked for instead of below it."""

    def __init__(self, least: float):
        super().__init__(alpha=0.5)
        self._least = least

    def __call__(self, t: int) -> float:
        return max(super().__call__(t), self._least)


def run(task: ABCTask, report: Report) -> list[dict[str, Any]]:
    """Independent runs, as :func:`repeated` has them."""
    logging.getLogger("ABC").setLevel(logging.ERROR)
    return repeated(_run, task, report)


def _run(task: ABCTask, particles: int, seed: int) -> dict[str, Any]:
    began = time.process_time()
    # the one that pyABC draws its particles by
    np.random.seed(seed)  # noqa: NPY002
    rng = np.random.default_rng(seed)
    problem = task.problem

    def simulate(z):
        return {"s": problem.simulate_one(z["m"], z["l"], rng)}

    smc = pyabc.ABCSMC(
        simulate,
        pyabc.Distribution(m=pyabc.RV("norm", 0, 1), l=pyabc.RV("norm", 0, 1)),
        distance_function=lambda x, y: float(np.linalg.norm(x["s"] - y["s"])),
        population_size=particles,
        eps=_Quantile(task.tolerance),
        sampler=pyabc.SingleCoreSampler(),
    )
    smc.new("sqlite://", {"s": np.array(problem.observed)})
    history = smc.run(minimum_epsilon=task.tolerance, max_nr_populations=_MOST_POPULATIONS)
    z, weights = history.get_distribution(m=0, t=history.max_t)
    return {
        "mean": [float(z[name] @ weights) for name in ("m", "l")],
        "ess": float(1 / np.square(weights).sum()),
        "tolerance": float(history.get_all_populations().epsilon.iloc[-1]),
        "simulations": int(history.total_nr_simulations),
        "seconds": time.process_time() - began,
    }
