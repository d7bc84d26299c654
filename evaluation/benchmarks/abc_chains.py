"""Many chains in one call against one chain at a time: elliptical slices of an ABC posterior (J 10.2)."""

import time
from statistics import median
from typing import Any

from torch import Tensor

import dgm_infer as dgm

from .problems import Problem

__all__ = ["TOLERANCE", "measure"]

# That of the Gaussian kernel in J fig. 10.
TOLERANCE = 10.0
# Transitions that spread the chains before anything is timed.
_SPREAD = 10


def measure(*, chains: int, transitions: int, repetitions: int, seed: int) -> dict[str, Any]:
    """Processor seconds of all chains in one call, and of single ones for as many transitions, in turn.

    All start where a few transitions from the inputs that generated the data have brought them, the single chains where
    some of the many do.

    Args:
        chains: of the one call.
        transitions: of every timed call.
        repetitions: timed calls of either kind.
        seed: seed of all randomness.
    """
    problem = Problem("lotka_volterra")
    target = dgm.condition(problem.model(), problem.observations(), tolerance=TOLERANCE)
    starts, _, _ = _run(target, problem.generating_inputs().expand(chains, -1).clone(), _SPREAD, seed)
    together, alone, evaluations = [], [], {"together": [], "alone": []}
    for i in range(repetitions):
        _, seconds, counts = _run(target, starts, transitions, seed + i)
        together.append(seconds)
        evaluations["together"].append(counts.double().mean().item())
        evaluations["most"] = [*evaluations.get("most", []), counts.amax(0).double().mean().item()]
        # single chains vary more: three for each call of all
        for j in range(3 * i, 3 * i + 3):
            one = j * chains // (3 * repetitions)
            _, seconds, counts = _run(target, starts[one : one + 1], transitions, seed + j)
            alone.append(seconds)
            evaluations["alone"].append(counts.double().mean().item())
    return {
        "tolerance": TOLERANCE,
        "chains": chains,
        "transitions": transitions,
        "seconds_together": together,
        "seconds_alone": alone,
        "evaluations": {name: sum(values) / len(values) for name, values in evaluations.items()},
        "ratio": chains * median(alone) / median(together),
    }


def _run(target: dgm.Target, starts: Tensor, transitions: int, seed: int) -> tuple[Tensor, float, Tensor]:
    """Last positions, processor seconds, and slice evaluations ``[chains, transitions]``."""
    began = time.process_time()
    draws = dgm.sample(
        target,
        dgm.kernels.EllipticalSlice(),
        chains=len(starts),
        warmup=0,
        draws=transitions,
        seed=seed,
        initial=starts,
        progress=False,
    )
    seconds = time.process_time() - began
    assert isinstance(draws.inputs, Tensor)
    return draws.inputs[:, -1], seconds, draws.stats["slice_evaluations"]
