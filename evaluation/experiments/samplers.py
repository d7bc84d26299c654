"""Several samplers on one inference problem, side by side."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Fibre
from dgm_infer.errors import uninterrupted
from dgm_infer.kernels import Kernel

from ..figures.posteriors import efficiency, posteriors
from ..reports.kept import NOT_KEPT, Parts
from ..reports.mixing import R_HAT
from ..reports.samplers import SamplerRun, as_results, describe

__all__ = ["Sampler", "report", "run_samplers", "typical_inputs"]


@dataclass(frozen=True)
class Sampler:
    """A problem and how to sample it.

    Args:
        label: label in tables and pictures.
        problem: what :func:`dgm_infer.condition` returned.
        kernel: kernel of the chains.
        warmup: iterations that adapt the kernel.
        draws: draws kept per chain.
        initial: starting points ``[chains, D]``; None lets :func:`dgm_infer.sample` find them.
    """

    label: str
    problem: Any
    kernel: Kernel
    warmup: int
    draws: int
    initial: Tensor | None = None


def run_samplers(samplers: Sequence[Sampler], *, chains: int, seed: int, parts: Parts = NOT_KEPT) -> list[SamplerRun]:
    """Run every sampler with the same number of chains and the same seed, one after the other.

    Raises:
        KeyboardInterrupt: on the first interrupt, also where :func:`dgm_infer.sample` would keep what it has: a
            comparison with one half-run sampler is none.
    """
    runs = []
    for sampler in samplers:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="interrupted", category=UserWarning)
            draws, seconds = parts.run(
                dgm.sample,
                sampler.problem,
                sampler.kernel,
                chains=chains,
                warmup=sampler.warmup,
                draws=sampler.draws,
                seed=seed,
                initial=sampler.initial,
            )
        uninterrupted(draws)
        summary = draws.summary()
        summary["ess_per_second"] = summary["ess_bulk"] / seconds
        table = {str(name): row.to_dict() for name, row in summary.iterrows()}
        runs.append(SamplerRun(sampler.label, sampler.warmup, draws, seconds, table))
    return runs


def typical_inputs(fibre: Fibre, *, chains: int, warmup: int, seed: int, parts: Parts = NOT_KEPT) -> Tensor:
    """Inputs in the bulk of an exact posterior, where constrained chains are after warm-up: ``[chains, D]``.

    Starting points for methods that find none of their own, or that do not get away from them. The tolerance is far
    below the default: where the fibre's constraint is that of one step of a simulator, the error of a whole series may
    be many times as large, and must stay within the tolerance of the problem that is started.
    """
    kernel = dgm.ConstrainedHMC(tolerance=1e-11)
    draws, _ = parts.run(dgm.sample, fibre, kernel, chains=chains, warmup=warmup, draws=1, seed=seed)
    assert uninterrupted(draws).inputs is not None
    return draws.inputs[:, -1]


def report(folder: Path, runs: Sequence[SamplerRun], truth: Mapping[str, float]) -> dict:
    """Write ``posteriors.png`` and ``efficiency.png`` into ``folder``; returns the numbers and their ``"summary"``.

    Args:
        folder: folder of the pictures.
        runs: one row of the pictures and tables each.
        truth: the parameters compared, with the values that generated the data.
    """
    marginals = {run.label: {name: run.values(name) for name in truth} for run in runs}
    r_hats = {run.label: {name: run.table[name]["r_hat"] for name in truth} for run in runs}
    rates = {run.label: {name: run.table[name]["ess_per_second"] for name in truth} for run in runs}
    notes = {label: {name: f"R-hat {value:.2f}" for name, value in row.items()} for label, row in r_hats.items()}
    unmixed = [run.label for run in runs if not run.max_r_hat <= R_HAT]
    posteriors(folder / "posteriors.png", marginals, truth, notes)
    efficiency(folder / "efficiency.png", rates, unmixed)
    return {"summary": describe(runs, truth), "methods": as_results(runs, truth)}
