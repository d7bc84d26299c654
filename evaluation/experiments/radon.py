"""Evidence of a hierarchical regression, a Pyro program with 92 latent variables (T 5.6.3, T fig. 5.6).

A diagonal Gaussian fitted by the evidence lower bound is where everything starts. Continuous tempering of x and the
temperature together goes from it in independent runs; a first, short run then gives a base with the posterior's
covariance and a better guess of log Z, from which the same tempering goes again. Long annealing, sequential Monte Carlo
and Gibbs tempering stand beside it. The published run moved by NUTS on the extended space; here it stands beside the
fixed number of leapfrog steps that all other methods use.
"""

from pathlib import Path

import torch

import dgm_infer as dgm
from dgm_infer import Evidence, Gaussian, Target
from dgm_infer.errors import uninterrupted
from dgm_infer.evidence import Method
from dgm_infer.references.density import Whitened

from ..figures import log_evidence
from ..problems.radon import radon_target, read_radon
from ..problems.repeated import repeated
from ..reports.estimates import Estimates, caveats, table
from ..reports.kept import NOT_KEPT, Parts
from ..reports.tables import aligned
from .reference import required_data

__all__ = ["run"]


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``evidence.png``.

    Args:
        folder: folder of the picture.
        fast: fewer chains and draws.
        data: the reference folder, with ``radon`` in it.
        seed: seed of all randomness.
        parts: what a run that was stopped takes up again.

    Raises:
        ConfigError: the data are missing.
    """
    data = required_data(
        data, "radon", "its authors published the file on GitHub, matt-graham/continuously-tempered-hmc"
    )
    runs, chains, lengths = (2, 4, (5, 10)) if fast else (8, 8, (50, 200, 800))
    steps, pooled, temperatures = (200, 8, 20) if fast else (2000, 64, 1000)
    warmup, pilot = (20, 20) if fast else (50, 100)
    target = radon_target(read_radon(data))
    start = Gaussian.standard(target, torch.float64)
    fitted, seconds_fit = parts.value(lambda: Gaussian.fit(target, steps=steps, seed=seed, start=start))
    assert fitted.elbo is not None
    assert fitted.elbo_trace is not None
    print(f"evidence lower bound of a diagonal Gaussian: {fitted.elbo:.2f} after {seconds_fit:.1f} s", flush=True)
    notes: list[str] = []

    def estimate(label: str, base: Whitened, method: Method, chains: int) -> Estimates:
        print(label, flush=True)
        options = {"chains": chains, "seed": seed, "keep_draws": False}
        evidence = uninterrupted(parts.run(dgm.log_evidence, target, base, method, **options)[0])
        notes.extend(caveats(label, evidence))
        return Estimates.of(label, evidence)

    def curve(label: str, base: Whitened, offset: float, **moves) -> list[dict]:
        """The mean of independent runs and its error, at seconds counted from the start of the fit."""
        entries = []
        for k in lengths:
            print(f"{label}: {runs} runs of {chains} chains, {k} draws", flush=True)
            evidence = _runs(
                target,
                base,
                dgm.ContinuousTempering(draws=k, warmup=warmup, pilot_temperatures=pilot, **moves),
                runs,
                chains,
                seed,
                parts,
            )
            entries.append(
                {
                    "draws": k,
                    "seconds": offset + evidence.diagnostics["seconds"],
                    "mean": float(evidence.log_z.mean()),
                    "error": float(evidence.log_z.std() / runs**0.5),
                    "spread": float(evidence.log_z.std()),
                    "gradient_evaluations": evidence.diagnostics["gradient_evaluations"] * chains,
                }
            )
        return entries

    curves = {
        "tempering": curve("tempering", fitted, seconds_fit),
        "tempering by NUTS": curve("tempering by NUTS", fitted, seconds_fit, nuts=31),
    }
    print("refinement of the base by a pilot", flush=True)
    short = dgm.GibbsTempering(draws=lengths[-1] // 4, warmup=warmup, pilot_temperatures=pilot)
    options = {"rounds": 2, "kind": "full", "chains": chains, "seed": seed}
    refined, seconds = parts.value(lambda: dgm.evidence.refine_base(target, fitted, short, **options).base)
    assert refined.log_zeta is not None
    seconds_refined = seconds_fit + seconds
    curves["tempering, refined base"] = curve("tempering, refined base", refined, seconds_refined)
    rows = [
        estimate("ELBO, diagonal", fitted, dgm.Elbo(), pooled),
        estimate(
            "AIS, diagonal",
            fitted,
            dgm.AIS(temperatures=2 * temperatures, schedule="sigmoid", pilot_temperatures=pilot),
            pooled,
        ),
        estimate(
            "AIS", refined, dgm.AIS(temperatures=temperatures, schedule="sigmoid", pilot_temperatures=pilot), pooled
        ),
        # resampling needs many particles per run, so there are few runs
        estimate(
            "SMC",
            refined,
            dgm.SMC(
                particles=pooled,
                schedule="barrier",
                temperatures=temperatures // 10,
                pilot_temperatures=pilot,
            ),
            pooled // 4,
        ),
        *(
            estimate(
                label,
                refined,
                method(draws=temperatures // 2, warmup=warmup, pilot_temperatures=pilot),
                pooled,
            )
            for label, method in (
                ("simulated tempering", dgm.SimulatedTempering),
                ("Gibbs tempering", dgm.GibbsTempering),
                ("joint tempering", dgm.ContinuousTempering),
            )
        ),
    ]
    log_evidence.over_training(
        folder / "evidence.png",
        (seconds_fit, fitted.elbo_trace.tolist()),
        float(fitted.elbo),
        curves,
        rows[1],
        title=f"radon: log evidence, {runs} runs of {chains} chains",
    )
    return {
        "summary": f"base of the last five: full covariance and log zeta {float(refined.log_zeta):.2f} "
        f"from two pilots\n{table(rows)}{_curve_table(curves)}" + "".join(f"{note}\n" for note in notes),
        "elbo": float(fitted.elbo),
        "seconds_fit": seconds_fit,
        "seconds_refined": seconds_refined,
        "runs": runs,
        "chains": chains,
        "curves": curves,
        "methods": {row.label: row.record() for row in rows},
        "largest_disagreement": _disagreement([row for row in rows if row.status in ("unbiased", "consistent")]),
    }


def _runs(target: Target, base: Whitened, method: Method, runs: int, chains: int, seed: int, parts: Parts) -> Evidence:
    options = {"chains": chains, "seed": seed, "keep_draws": False}
    return uninterrupted(parts.run(dgm.log_evidence, *repeated(target, base, runs), method, **options)[0])


def _disagreement(rows: list[Estimates]) -> float:
    """Largest difference of two estimates in standard errors of the difference."""
    return max(
        abs(a.mean - b.mean) / (a.mean_error**2 + b.mean_error**2) ** 0.5 for a in rows for b in rows if a is not b
    )


def _curve_table(curves: dict[str, list[dict]]) -> str:
    columns = {
        "independent runs": f"<{max(len(label) for label in curves)}",
        "draws": "5d",
        "seconds": "7.1f",
        "mean log Z": "11.2f",
        "error": "5.2f",
        "sd of one run": "13.2f",
    }
    keys = ("draws", "seconds", "mean", "error", "spread")
    return aligned(columns, [(label, *(e[key] for key in keys)) for label, entries in curves.items() for e in entries])
