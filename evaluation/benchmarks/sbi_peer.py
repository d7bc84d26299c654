"""A peer of the ABC benchmark: ``SMCABC`` of sbi, with the simulator in batches."""

import importlib
import logging
import time
from typing import Any

import torch
from torch.distributions import MultivariateNormal

from .abc_problem import ABCTask, repeated
from .workers import Report

__all__ = ["run"]

# in no extra: the benchmark leaves out what is not installed
SMCABC: Any = importlib.import_module("sbi.inference").SMCABC

# Keeps about half of the particles. Its rule takes the quantile of the running sum of the sorted distances: of points
# spread evenly over a disk the nearer half holds 2^(-3/2) of the sum.
_DECAY = 0.35
_MOST_SIMULATIONS = 100_000_000


class _ToTolerance(SMCABC):
    """Ends at a tolerance: its own runs end where a number of simulations is used up."""

    least = 0.0

    def _get_next_epsilon(self, distances, quantile):
        return max(super()._get_next_epsilon(distances, quantile), self.least)

    def _sample_next_population(self, *arguments, epsilon, **options):
        found = super()._sample_next_population(*arguments, epsilon=epsilon, **options)
        if epsilon <= self.least:
            self.num_simulations = self.simulation_counter
        return found


def run(task: ABCTask, report: Report) -> list[dict[str, Any]]:
    """Independent runs, as :func:`repeated` has them."""
    logging.getLogger("sbi").setLevel(logging.ERROR)
    return repeated(_run, task, report)


def _run(task: ABCTask, particles: int, seed: int) -> dict[str, Any]:
    began = time.process_time()
    torch.manual_seed(seed)
    smc = _ToTolerance(
        task.problem.simulate,
        MultivariateNormal(torch.zeros(2), torch.eye(2)),
        simulation_batch_size=100_000,
        show_progress_bars=False,
    )
    smc.least = task.tolerance
    particle, summary = smc(
        torch.tensor([task.problem.observed]),
        num_particles=particles,
        num_initial_pop=2 * particles,
        num_simulations=_MOST_SIMULATIONS,
        epsilon_decay=_DECAY,
        distance_based_decay=True,
        return_summary=True,
    )
    weights = summary["weights"][-1].exp()
    return {
        "mean": (weights @ particle / weights.sum()).tolist(),
        "ess": float(weights.sum() ** 2 / weights.square().sum()),
        "tolerance": float(summary["epsilons"][-1]),
        "simulations": int(smc.simulation_counter),
        "seconds": time.process_time() - began,
    }
