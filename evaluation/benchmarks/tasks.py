"""What a process samples in the comparison of samplers on the fibre."""

from dataclasses import dataclass
from typing import Literal

from .problems import Problem

__all__ = ["MiciTask", "Task"]


@dataclass(frozen=True)
class Task:
    """What this project's process samples: the options of :func:`evaluation.benchmarks.fibre.bench`."""

    problem: Problem
    seconds: float
    chains: int
    warmup: int
    compile: bool
    device: str
    cores: int
    seed: int


@dataclass(frozen=True)
class MiciTask:
    """What one process of Mici's samples (:mod:`evaluation.benchmarks.mici_peer`, which needs JAX).

    Args:
        problem: to sample.
        seconds: wall-clock seconds, including compilation, starting point and warm-up.
        warmup: iterations that adapt the step size, at most.
        warmup_share: share of the seconds after which warm-up ends in any case.
        seed: seed of all randomness.
        index: index of the process.
        form: form of the constraint.
    """

    problem: Problem
    seconds: float
    warmup: int
    warmup_share: float
    seed: int
    index: int
    form: Literal["generator", "residual"] = "generator"
