"""Several samplers of one posterior side by side: what became of each, and their tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dgm_infer import Draws

from .tables import aligned

__all__ = ["SamplerRun", "as_results", "describe"]


@dataclass(frozen=True)
class SamplerRun:
    """What a sampler did on its problem."""

    label: str
    """For the tables and pictures."""
    warmup: int
    """Iterations that adapted the kernel."""
    draws: Draws
    seconds: float
    """Wall-clock time of starts, warm-up and main run together."""
    table: dict[str, dict[str, float]]
    """Latent -> column of ``draws.summary()``, and ``ess_per_second``: bulk ESS of all chains over ``seconds``."""

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
    def step_size(self) -> float | None:
        """Mean over the chains; None where no step is sized."""
        sizes = self.draws.stats.get("step_size")
        return None if sizes is None else float(sizes.mean())

    @property
    def slice_evaluations(self) -> float | None:
        """Mean evaluations of the model per transition, of all its slices; None where there are none."""
        counts = [v for name, v in self.draws.stats.items() if name.endswith("slice_evaluations")]
        return sum(float(v.double().mean()) for v in counts) if counts else None

    @property
    def max_r_hat(self) -> float:
        """NaN where a latent has none: its chains never moved."""
        return float(np.max([row["r_hat"] for row in self.table.values()]))

    def values(self, name: str) -> np.ndarray:
        """All draws of one scalar latent, ``[chains * draws]``."""
        return self.draws.latents[name].flatten().cpu().numpy()


def describe(runs: Sequence[SamplerRun], truth: Mapping[str, float]) -> str:
    """Two tables, one row per sampler: how the chains did with the ESS per second, and the posterior moments."""
    label = f"<{max(len(run.label) for run in runs)}"
    chains = runs[0].draws.shape[0]
    heading = f"{chains} chains each; right: bulk ESS per second of wall clock, starts and warm-up included"
    columns = {
        "": label,
        "seconds": "7.1f",
        "accept": "6.2f",
        "failed %": "8.2f",
        "stuck": "5d",
        "max R-hat": "9.3f",
        **dict.fromkeys(truth, "7.3g"),
    }
    rows = [
        (
            run.label,
            run.seconds,
            run.acceptance,
            100 * run.failed,
            run.stuck,
            run.max_r_hat,
            *(run.table[name]["ess_per_second"] for name in truth),
        )
        for run in runs
    ]
    moments = [
        (run.label, *(f"{run.table[name]['mean']:.4g} ({run.table[name]['sd']:.2g})" for name in truth)) for run in runs
    ]
    second = {"posterior mean (sd)": label, **dict.fromkeys(truth, "17.5g")}
    return f"{heading}\n{aligned(columns, rows)}\n{aligned(second, [('true', *truth.values()), *moments])}".rstrip("\n")


def as_results(runs: Sequence[SamplerRun], truth: Mapping[str, float]) -> dict:
    """The same, and more, for JSON."""
    columns = ["mean", "sd", "mcse_mean", "ess_bulk", "ess_tail", "r_hat", "ess_per_second"]
    return {
        run.label: {
            "chains": run.draws.shape[0],
            "warmup": run.warmup,
            "draws": run.draws.shape[1],
            "seconds": run.seconds,
            "acceptance_rate": run.acceptance,
            "step_size": run.step_size,
            "slice_evaluations": run.slice_evaluations,
            "failed": run.failed,
            "stuck_chains": run.stuck,
            "max_r_hat": run.max_r_hat,
            "latents": {
                name: {"true": value, **{c: run.table[name][c] for c in columns}} for name, value in truth.items()
            },
        }
        for run in runs
    }
