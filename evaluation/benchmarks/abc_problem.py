"""The problem of the ABC benchmark: normal data by two summaries, with its exact ABC posterior by quadrature."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .workers import Report

__all__ = ["ABCTask", "NormalData", "effective_draws", "repeated"]

# Nodes of the quadratures: of the summary within the tolerance, and of each parameter.
_WITHIN, _GRID = 32, 161
_FLOAT = torch.float64


@dataclass(frozen=True)
class NormalData:
    """``x_1, ..., x_n ~ N(m, e^(2 l))`` with ``z = (m, l) ~ N(0, I)``, seen by their mean and log standard deviation.

    Args:
        n: number of data.
        mean: observed mean of the data.
        log_sd: observed logarithm of their standard deviation (denominator ``n - 1``).
    """

    n: int = 50
    mean: float = 1.0
    log_sd: float = 0.5

    @property
    def observed(self) -> list[float]:
        return [self.mean, self.log_sd]

    def simulate(self, z: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Summaries of fresh data for every row, ``[k, 2] -> [k, 2]``; without ``rng`` by torch's own generator."""
        noise = torch.randn(len(z), self.n, generator=rng, dtype=z.dtype)
        x = z[:, :1] + z[:, 1:].exp() * noise
        return torch.stack([x.mean(-1), x.std(-1).log()], -1)

    def simulate_one(self, m: float, l: float, rng: np.random.Generator) -> np.ndarray:  # noqa: E741
        """The same for one pair of parameters, in NumPy: ``[2]``."""
        x = m + math.exp(l) * rng.standard_normal(self.n)
        return np.array([x.mean(), np.log(x.std(ddof=1))])

    def posterior(self, tolerance: float) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of z given summaries within a Euclidean ball: ``[2]``, ``[2]``.

        The mean of the data is ``N(m, e^(2 l)/n)`` and, independent of it, ``(n - 1) e^(2 (s - l))`` of their log
        standard deviation s is chi-squared with ``n - 1`` degrees of freedom: the probability of the ball is one
        integral, over s, of a closed form.
        """
        nodes, weights = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(_WITHIN))
        s, half = self.log_sd + tolerance * nodes, tolerance * (1 - nodes.square()).sqrt()
        # the parameters that ten posterior standard deviations reach
        reach = 10 * (math.exp(self.log_sd) / self.n**0.5 + tolerance)
        m = self.mean + torch.linspace(-reach, reach, _GRID, dtype=_FLOAT)
        reach = 10 * ((2 * self.n) ** -0.5 + tolerance)
        log_scale = self.log_sd + torch.linspace(-reach, reach, _GRID, dtype=_FLOAT)
        sd = log_scale.exp().unsqueeze(-1) / self.n**0.5
        chi = 2 * (s - log_scale.unsqueeze(-1))
        log_density = 0.5 * (self.n - 1) * (chi - chi.exp())
        mass = torch.zeros(_GRID, _GRID, dtype=_FLOAT)
        for i, weight in enumerate(weights):
            upper, lower = (torch.special.ndtr((self.mean + sign * half[i] - m) / sd) for sign in (1, -1))
            mass += weight * log_density[:, i : i + 1].exp() * (upper - lower)
        mass *= (-0.5 * (m.square() + log_scale.square().unsqueeze(-1))).exp()
        mass /= mass.sum()
        moments = []
        for values, weight in ((m, mass.sum(0)), (log_scale, mass.sum(1))):
            mean = weight @ values
            moments.append((mean, (weight @ (values - mean).square()).sqrt()))
        means, sds = (torch.stack(column) for column in zip(*moments, strict=True))
        return means, sds


@dataclass(frozen=True)
class ABCTask:
    """What a method runs.

    Args:
        problem: the simulator and its data.
        tolerance: radius of the ball of summaries.
        particles: particles of every run.
        repetitions: independent runs.
        seed: of the first; the others have the next ones.
    """

    problem: NormalData
    tolerance: float
    particles: int
    repetitions: int
    seed: int


def repeated(run: Callable[[ABCTask, int, int], dict[str, Any]], task: ABCTask, report: Report) -> list[dict[str, Any]]:
    """Independent runs: means ``[2]``, ESS of the weights, tolerance reached, simulations and processor seconds.

    Args:
        run: of a task, its particles and seed.
        task: what is run.
        report: called with a line after every run.
    """
    # what the first run alone takes is not measured
    run(task, 20, task.seed)
    rows = []
    for i in range(task.repetitions):
        rows.append(run(task, task.particles, task.seed + i))
        report(f"run {i + 1} of {task.repetitions}: {rows[-1]['seconds']:.1f} s")
    return rows


def effective_draws(means: Any, mean: Tensor, sd: Tensor) -> float:
    """Independent exact draws whose mean has the errors of these: ``1 / mean of ((found - mean)/sd)^2``, ``[r, 2]``."""
    errors = (torch.as_tensor(means, dtype=mean.dtype) - mean) / sd
    return 1 / errors.square().mean().item()
