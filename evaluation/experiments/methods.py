"""Several samplers on one inference problem, side by side."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Draws, Fibre
from dgm_infer.kernels import Kernel

from ..figures import experiments as figures

__all__ = ["Method", "MethodRun", "report", "run_methods", "typical_inputs"]

# R-hat up to which a parameter counts as mixed; above it an effective sample size means little.
R_HAT = 1.05


@dataclass(frozen=True)
class Method:
    """A problem and how to sample it.

    Args:
        label: of the tables and pictures.
        problem: what :func:`dgm_infer.condition` returned.
        kernel: of the chains.
        warmup: iterations that adapt the kernel.
        draws: kept draws of every chain.
        initial: starting points ``[chains, D]``; None lets :func:`dgm_infer.sample` find them.
    """

    label: str
    problem: Any
    kernel: Kernel
    warmup: int
    draws: int
    initial: Tensor | None = None


@dataclass(frozen=True)
class MethodRun:
    """What became of a :class:`Method`."""

    method: Method
    draws: Draws
    seconds: float
    """Wall-clock time of starts, warm-up and main run together."""
    table: dict[str, dict[str, float]]
    """Latent -> column of ``draws.summary()``, and ``ess_per_second``: bulk ESS of all chains over ``seconds``."""

    @property
    def label(self) -> str:
        return self.method.label

    @property
    def failed(self) -> float:
        """Share of main-run transitions that failed: a projection, a reversal or a divergence."""
        names = ("projection_failed", "reversal_failed", "diverging")
        return sum(float(self.draws.stats[name].double().mean()) for name in names if name in self.draws.stats)

    @property
    def stuck(self) -> int:
        """Chains that never moved in the main run."""
        assert self.draws.inputs is not None
        moved = (self.draws.inputs.diff(dim=1) != 0).any(-1).any(1)
        return int((~moved).sum())

    @property
    def acceptance(self) -> float:
        return float(self.draws.stats["acceptance_rate"].mean())

    @property
    def max_r_hat(self) -> float:
        """NaN where a latent has none: its chains never moved."""
        return float(np.max([row["r_hat"] for row in self.table.values()]))

    def values(self, name: str) -> np.ndarray:
        """All draws of one scalar latent, ``[chains * draws]``."""
        return self.draws.latents[name].flatten().cpu().numpy()


def run_methods(methods: Sequence[Method], *, chains: int, seed: int) -> list[MethodRun]:
    """Sample every method with the same number of chains and the same seed, one after the other.

    Raises:
        KeyboardInterrupt: on the first interrupt, also where :func:`dgm_infer.sample` would keep what it has: a
            comparison with one half-run method is none.
    """
    runs = []
    for method in methods:
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="interrupted", category=UserWarning)
            draws = dgm.sample(
                method.problem,
                method.kernel,
                chains=chains,
                warmup=method.warmup,
                draws=method.draws,
                seed=seed,
                initial=method.initial,
            )
        seconds = time.perf_counter() - started
        if draws.interrupted:
            raise KeyboardInterrupt
        summary = draws.summary()
        summary["ess_per_second"] = summary["ess_bulk"] / seconds
        table = {str(name): row.to_dict() for name, row in summary.iterrows()}
        runs.append(MethodRun(method, draws, seconds, table))
    return runs


def typical_inputs(fibre: Fibre, *, chains: int, warmup: int, seed: int) -> Tensor:
    """Inputs in the bulk of an exact posterior, where constrained chains are after warm-up: ``[chains, D]``.

    Starting points for methods that find none of their own, or that do not get away from them. The tolerance is far
    below the default: where the fibre's constraint is that of one step of a simulator, the error of a whole series may
    be many times as large, and must stay within the tolerance of the problem that is started.
    """
    draws = dgm.sample(fibre, dgm.ConstrainedHMC(tolerance=1e-11), chains=chains, warmup=warmup, draws=1, seed=seed)
    assert draws.inputs is not None
    return draws.inputs[:, -1]


def report(folder: Path, runs: Sequence[MethodRun], truth: Mapping[str, float]) -> dict:
    """Write ``posteriors.png`` and ``efficiency.png`` into ``folder``; returns the numbers and their ``"summary"``.

    Args:
        folder: of the pictures.
        runs: one row of the pictures and tables each.
        truth: the parameters compared, with the values that generated the data.
    """
    marginals = {run.label: {name: run.values(name) for name in truth} for run in runs}
    r_hats = {run.label: {name: run.table[name]["r_hat"] for name in truth} for run in runs}
    rates = {run.label: {name: run.table[name]["ess_per_second"] for name in truth} for run in runs}
    notes = {label: {name: f"R-hat {value:.2f}" for name, value in row.items()} for label, row in r_hats.items()}
    unmixed = [run.label for run in runs if not run.max_r_hat <= R_HAT]
    figures.posteriors(folder / "posteriors.png", marginals, truth, notes)
    figures.efficiency(folder / "efficiency.png", rates, unmixed)
    return {"summary": describe(runs, truth), "methods": as_results(runs, truth)}


def describe(runs: Sequence[MethodRun], truth: Mapping[str, float]) -> str:
    """Two tables, one row a method: how the chains did with the ESS per second, and the posterior moments."""
    width = max(len(run.label) for run in runs)
    chains = runs[0].draws.shape[0]
    head = f"{'':{width}}  seconds  accept  failed %  stuck  max R-hat  " + "  ".join(f"{n:>7}" for n in truth)
    lines = [f"{chains} chains each; right: bulk ESS per second of wall clock, starts and warm-up included", head]
    for run in runs:
        rates = "  ".join(f"{run.table[name]['ess_per_second']:7.3g}" for name in truth)
        lines.append(
            f"{run.label:{width}}  {run.seconds:7.1f}  {run.acceptance:6.2f}  {100 * run.failed:8.2f}  {run.stuck:5d}  "
            f"{run.max_r_hat:9.3f}  {rates}"
        )
    lines += ["", f"{'posterior mean (sd)':{width}}  " + "  ".join(f"{name:>17}" for name in truth)]
    lines.append(f"{'true':{width}}  " + "  ".join(f"{value:17.5g}" for value in truth.values()))
    for run in runs:
        moments = (f"{run.table[n]['mean']:.4g} ({run.table[n]['sd']:.2g})" for n in truth)
        lines.append(f"{run.label:{width}}  " + "  ".join(f"{text:>17}" for text in moments))
    return "\n".join(lines)


def as_results(runs: Sequence[MethodRun], truth: Mapping[str, float]) -> dict:
    """The same, and more, for JSON."""
    columns = ["mean", "sd", "mcse_mean", "ess_bulk", "ess_tail", "r_hat", "ess_per_second"]
    return {
        run.label: {
            "chains": run.draws.shape[0],
            "warmup": run.method.warmup,
            "draws": run.draws.shape[1],
            "seconds": run.seconds,
            "acceptance_rate": run.acceptance,
            "step_size": float(run.draws.stats["step_size"].mean()),
            "failed": run.failed,
            "stuck_chains": run.stuck,
            "max_r_hat": run.max_r_hat,
            "latents": {
                name: {"true": value, **{c: run.table[name][c] for c in columns}} for name, value in truth.items()
            },
        }
        for run in runs
    }
