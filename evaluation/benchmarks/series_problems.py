"""Predator-prey series observed with noise, and how this project samples them in a process of their own."""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Fibre, Target
from generators import LotkaVolterra

from .image_sampling import sample_until
from .workers import Report

__all__ = ["SERIES", "EquationSeries", "NoisySeries", "SeriesTask", "run"]

_N_STEPS = 50
_SEED = 1234


class _Series:
    """What a series of either kind is sampled as; a subclass has its model and the inputs that generate the data."""

    dim: ClassVar[int]
    sd: float

    def model(self) -> dgm.GenerativeModel:
        raise NotImplementedError

    def generating_inputs(self) -> Tensor:
        """Those of the series before its measurement, ``[dim]``."""
        raise NotImplementedError

    def observations(self) -> Tensor:
        """``[Dy]``."""
        series = self.model().observed(self.generating_inputs())
        return series + self.sd * torch.from_numpy(np.random.RandomState(_SEED + 1).normal(size=len(series)))

    def fibre(self) -> Fibre:
        """Given exactly, the noise of the measurement among the inputs."""
        return dgm.condition(self.model(), self.observations(), noise=self.sd)

    def target(self) -> Target:
        """The same posterior of the model's own inputs: a Gaussian kernel about the data."""
        return dgm.condition(self.model(), self.observations(), tolerance=self.sd)  # type: ignore[return-value]

    def starts(self, chains: int, seed: int, spread: float = 0.001) -> Tensor:
        """Inputs near those that generated the data, which all samplers can begin at: ``[chains, dim]``."""
        rng = torch.Generator().manual_seed(seed)
        return self.generating_inputs() + spread * torch.randn(chains, self.dim, generator=rng, dtype=torch.float64)


@dataclass(frozen=True)
class NoisySeries(_Series):
    """50 steps of Lotka-Volterra with noise of the process, all observed with normal noise: 104 unknowns.

    Args:
        title: in words.
        parameters: ``z1, ..., z4`` that generate the data.
        initial: prey and predators at the start.
        process: standard deviation of the noise of a step.
        sd: standard deviation of the noise of the measurement.
    """

    title: str
    parameters: tuple[float, float, float, float]
    initial: tuple[float, float]
    process: float
    sd: float = 0.1
    dim: ClassVar[int] = 4 + 2 * _N_STEPS

    def model(self) -> LotkaVolterra:
        return LotkaVolterra(_N_STEPS, noise=self.process, initial=self.initial)

    def generating_inputs(self) -> Tensor:
        """Those of the series before its measurement, ``[104]``."""
        noise = np.random.RandomState(_SEED).normal(size=2 * _N_STEPS)
        return torch.cat([torch.tensor(self.parameters, dtype=torch.float64).log() + 2, torch.from_numpy(noise)])


class _Equations(dgm.GenerativeModel):
    """379 Runge-Kutta steps in a plain loop of Python, as the author of a simulator would write them."""

    input_density = dgm.StandardNormal(4)

    def __init__(self, series: "EquationSeries"):
        super().__init__()
        self.series = series

    def observed(self, u):
        series = self.series
        a, b, c, d = (torch.tensor(series.log_medians).to(u) + series.spread * u).exp().unbind(-1)
        prey, predators = torch.full_like(a, series.initial[0]), torch.full_like(a, series.initial[1])

        def slope(prey, predators):
            return a * prey - b * prey * predators, d * prey * predators - c * predators

        seen, h = [], series.step
        for k in range(1, series.n_steps + 1):
            first = slope(prey, predators)
            second = slope(prey + h / 2 * first[0], predators + h / 2 * first[1])
            third = slope(prey + h / 2 * second[0], predators + h / 2 * second[1])
            last = slope(prey + h * third[0], predators + h * third[1])
            prey = prey + h / 6 * (first[0] + 2 * second[0] + 2 * third[0] + last[0])
            predators = predators + h / 6 * (first[1] + 2 * second[1] + 2 * third[1] + last[1])
            if k in series.observed_steps:
                seen += [prey, predators]
        return torch.stack(seen, -1).log()


@dataclass(frozen=True)
class EquationSeries(_Series):
    """The predator-prey equations of a published suite of problems for simulators: four unknowns, no process noise.

    ``log z ~ N((-.125, -3, -.125, -3), .5^2)``; ten pairs of populations, 2.1 apart, whose logarithms are observed with
    noise of 0.1 (doi:10.48550/arXiv.2101.04653, appendix T.10).
    """

    title: str = "equations: 379 Runge-Kutta steps, four unknowns, ten noisy pairs of populations"
    log_medians: tuple[float, ...] = (-0.125, -3.0, -0.125, -3.0)
    spread: float = 0.5
    initial: tuple[float, float] = (30.0, 1.0)
    n_steps: int = 379
    between: float = 2.1
    n_observed: int = 10
    sd: float = 0.1
    dim: ClassVar[int] = 4

    @property
    def step(self) -> float:
        """Time of a step."""
        return self.n_observed * self.between / self.n_steps

    @property
    def observed_steps(self) -> tuple[int, ...]:
        """Those nearest to the times of the observations, counted from 1."""
        return tuple(round(k * self.n_steps / self.n_observed) for k in range(1, self.n_observed + 1))

    def model(self) -> _Equations:
        return _Equations(self)

    def generating_inputs(self) -> Tensor:
        """``[4]``."""
        return 0.3 * torch.from_numpy(np.random.RandomState(_SEED).normal(size=4))


SERIES: dict[str, NoisySeries | EquationSeries] = {
    # the medians of the prior, about which populations change by some ten per cent a step
    "mild": NoisySeries("mild: parameters at the prior's medians", (0.135, 0.135, 0.135, 0.135), (1.5, 1.0), 0.05),
    "published": NoisySeries("the published parameters and series", (0.4, 0.005, 0.05, 0.001), (100.0, 100.0), 1.0),
    "equations": EquationSeries(),
}
"""By name."""


@dataclass(frozen=True)
class SeriesTask:
    """What one process samples.

    Args:
        problem: a key of :data:`SERIES`.
        kernel: default or nuts, or one of a peer's.
        seconds: wall-clock seconds, start-up and warm-up included.
        chains: chains, all in this process.
        warmup: iterations that adapt the kernel; None for as many as it takes.
        cores: threads.
        seed: seed of all randomness.
        start: near the inputs that generated the data (shared), or by the sampler's own means, of a peer at prior draws
            (own).
        dtype: float32 or float64, of peers.
    """

    problem: str
    kernel: str
    seconds: float
    chains: int
    warmup: int | None
    cores: int
    seed: int
    start: str = "shared"
    dtype: str = "float64"


def run(task: SeriesTask, report: Report) -> dict[str, Any]:
    """Warm up and draw until the time is used; the result as :func:`.image_sampling.run`, ``z`` of ``log z1..z4``."""
    began = time.perf_counter()
    torch.set_num_threads(task.cores)
    series = SERIES[task.problem]
    on_fibre = task.kernel == "default"
    problem: Any = series.fibre() if on_fibre else series.target()
    initial = series.starts(task.chains, task.seed) if task.start == "shared" else None
    if initial is not None and on_fibre:
        noise = (series.observations() - series.model().observed(initial)) / series.sd
        initial = torch.cat([initial, noise], -1)

    def logarithms(draws: Any) -> Tensor:
        return draws.inputs[..., :4] - 2 if isinstance(series, NoisySeries) else draws.inputs[..., :4]

    made = sample_until(problem, task, began, report, logarithms, initial, keep="inputs")
    return {**made, "last": made["last"][:, : series.dim]}
