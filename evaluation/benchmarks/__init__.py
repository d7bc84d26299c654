"""Measurements beside peers, for ``dgm-infer bench NAME``: one module per benchmark, each with a function ``bench``."""

import importlib
from collections.abc import Callable

from dgm_infer.errors import extra

__all__ = ["BENCHMARKS", "load"]

# Imported when asked for: a benchmark may need packages that nothing else does.
BENCHMARKS = {
    "fibre": "evaluation.benchmarks.fibre",
    "scaling": "evaluation.benchmarks.scaling",
    "evidence": "evaluation.benchmarks.evidence",
    "methods": "evaluation.benchmarks.methods",
    "coverage": "evaluation.benchmarks.coverage",
    "modes": "evaluation.benchmarks.modes",
    "multimodal": "evaluation.benchmarks.multimodal",
    "replicas": "evaluation.benchmarks.replicas",
    "targets": "evaluation.benchmarks.targets",
    "programs": "evaluation.benchmarks.programs",
    "training": "evaluation.benchmarks.training",
    "iwae_training": "evaluation.benchmarks.iwae_training",
    "completions": "evaluation.benchmarks.completions",
    "calibration": "evaluation.benchmarks.calibration",
    "flows": "evaluation.benchmarks.flows",
    "images": "evaluation.benchmarks.images",
    "series": "evaluation.benchmarks.series",
    "steps": "evaluation.benchmarks.steps",
    "unvisited": "evaluation.benchmarks.unvisited",
    "runs": "evaluation.benchmarks.runs",
    "device": "evaluation.benchmarks.device",
    "samplers": "evaluation.benchmarks.samplers",
    "abc": "evaluation.benchmarks.abc",
    "ablations": "evaluation.benchmarks.ablations",
}


def load(name: str) -> Callable[..., object]:
    """The function ``bench`` of a benchmark in :data:`BENCHMARKS`."""
    with extra("bench"):
        return importlib.import_module(BENCHMARKS[name]).bench
