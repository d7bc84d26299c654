"""Measurements beside peers, for ``dgm-infer bench NAME``: one module a benchmark, each with a function ``bench``."""

import importlib
from collections.abc import Callable

__all__ = ["BENCHMARKS", "load"]

# Imported when asked for: a benchmark may need packages that nothing else does.
BENCHMARKS = {
    "fibre": "evaluation.benchmarks.fibre",
    "scaling": "evaluation.benchmarks.scaling",
    "evidence": "evaluation.benchmarks.evidence",
    "training": "evaluation.benchmarks.training",
    "iwae_training": "evaluation.benchmarks.iwae_training",
}


def load(name: str) -> Callable[..., object]:
    """The function ``bench`` of a benchmark in :data:`BENCHMARKS`."""
    return importlib.import_module(BENCHMARKS[name]).bench
