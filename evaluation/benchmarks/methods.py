"""``dgm-infer bench methods``: every method of estimating log evidence on every experiment, by gradient evaluations.

All methods have their default settings and equally many chains. A standard error falls with the square root of the
chains, so a standard error of 0.05 would take the gradient evaluations of a run times its mean squared error over
0.05^2. If the truth is known the error is measured against it, which reveals what a method misses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgm_infer as dgm
import generators
from dgm_infer import Gaussian, Target
from dgm_infer.errors import ConfigError, EvidenceError, uninterrupted
from dgm_infer.evidence import Method
from dgm_infer.models import LatentVariableModel
from dgm_infer.references.density import Whitened
from trainers import DigitsData

from ..experiments.reference import reference_folder
from ..problems.boltzmann import BoltzmannRelaxation, published_system, random_system
from ..problems.radon import radon_target, read_radon
from ..problems.repeated import repeated
from ..reports.estimates import Estimates, caveats
from ..reports.records import write_record
from ..reports.tables import markdown
from .publishing import new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder

__all__ = ["METHODS", "bench", "evaluations_to_error", "methods_table", "table"]

METHODS: dict[str, Method] = {
    "ELBO": dgm.Elbo(),
    "Hamiltonian ELBO": dgm.evidence.HamiltonianElbo(),
    "importance sampling": dgm.evidence.ImportanceSampling(),
    "AIS": dgm.AIS(),
    "Hamiltonian AIS": dgm.evidence.HamiltonianAIS(),
    "SMC, adaptive": dgm.SMC(),
    "SMC, frozen": dgm.SMC(schedule="barrier"),
    "SMC, waste-free": dgm.SMC(waste_free=4),
    "parallel tempering": dgm.ParallelTempering(),
    "simulated tempering": dgm.SimulatedTempering(),
    "importance tempering": dgm.evidence.ImportanceTempering(),
    "Gibbs tempering": dgm.GibbsTempering(),
    "joint tempering": dgm.ContinuousTempering(),
    "path sampling": dgm.evidence.PathSampling(),
    "joint tempering, NUTS": dgm.ContinuousTempering(nuts=31),
}
_ERROR = 0.05


@dataclass(frozen=True)
class Experiment:
    """Problems of one kind, and where every method starts on them."""

    name: str
    words: str
    target: Target
    base: Whitened
    truth: Tensor | None = None
    """Log Z, ``[*batch]``."""


def bench(
    chains: int = 16,
    images: int = 20,
    runs: int = 4,
    data: str | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Estimate the evidence of every experiment by every method.

    Args:
        chains: chains per problem.
        images: images of the auto-encoders.
        runs: independent ones, of the experiments that are a single problem.
        data: the reference folder; null for the environment variable DGM_INFER_REFERENCE_DATA. Without it the
            experiments are the shipped digits and random Boltzmann machines.
        seed: seed of all randomness.
        output: folder for ``methods.json`` and ``methods.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(least=2, chains=chains, runs=runs)
    check_counts(images=images)
    check_seed(seed)
    reference = reference_folder(data)
    if reference is not None and not reference.is_dir():
        raise ConfigError(f"data: {reference} is not a folder; name the reference data's")
    folder = writable_folder(output)
    settings = {"chains": chains, "images": images, "runs": runs, "seed": seed}
    record = new_record(
        "methods", settings, ["dgm-infer", "torch", "pyro-ppl", "numpy"], threads=torch.get_num_threads()
    )
    record["experiments"] = {}
    for experiment in _experiments(reference, images, runs, chains, seed):
        rows = {}
        for label, method in METHODS.items():
            print(f"{experiment.name}: {label}", flush=True)
            rows[label] = _row(experiment, label, method, chains, seed)
        record["experiments"][experiment.name] = {"words": experiment.words, "methods": rows}
    path = folder / "methods.json"
    write_record(path, record)
    publish(path, "methods", table(record))
    return path


def evaluations_to_error(evaluations: float, rms_error: float, error: float = _ERROR) -> float:
    """Gradient evaluations of a run with so many chains that its standard error is ``error``."""
    return evaluations * (rms_error / error) ** 2


def _experiments(data: Path | None, images: int, runs: int, chains: int, seed: int) -> Iterator[Experiment]:
    digits = LatentVariableModel.of(generators.load("digits_vae"))
    target = generators.LatentPosterior(digits.decoder, DigitsData().held_out(images), digits.prior)
    words = f"{images} held-out digits under the shipped Gaussian VAE, 12 latents, from its encoder"
    yield Experiment("digits", words, target, Gaussian.from_encoder(digits.encode, target.images))
    if data is not None and (data / "iwae_mnist").is_dir():
        model = generators.IWAE.from_npz(data)
        published = generators.IWAE.published_images(data).images[:images]
        target = generators.LatentPosterior(model.decoder, published, model.prior)
        words = f"{images} published images under the published IWAE, 50 latents, from its encoder"
        yield Experiment("iwae", words, target, Gaussian.from_encoder(model.encoder, target.images))
    for i in (0, 3):
        if data is not None and (data / "boltzmann").is_dir():
            relaxation, truth = published_system(data, i)
        else:
            relaxation = BoltzmannRelaxation(*random_system(16, i))
            truth = relaxation.exact()
        words = (
            f"relaxation of {relaxation.units} units, {relaxation.dim} dimensions, from moment-matched mean fields; "
            f"{runs} runs"
        )
        target, base = repeated(relaxation, relaxation.mean_field(seed=seed), runs)
        yield Experiment(f"boltzmann {i}", words, target, base, truth.log_z.expand(runs))
    if data is not None and (data / "radon").is_dir():
        radon = radon_target(read_radon(data))
        fitted = Gaussian.fit(radon, steps=2000, seed=seed, start=Gaussian.standard(radon, torch.float64))
        words = f"hierarchical regression, 92 dimensions, from a diagonal fit of the bound; {runs} runs"
        yield Experiment("radon, diagonal base", words, *repeated(radon, fitted, runs))
        refined = dgm.evidence.refine_base(radon, fitted, kind="full", chains=chains, seed=seed, progress=False).base
        words = f"the same from a base of full covariance that two tempered pilots left; {runs} runs"
        yield Experiment("radon, refined base", words, *repeated(radon, refined, runs))


def _row(experiment: Experiment, label: str, method: Method, chains: int, seed: int) -> dict[str, Any]:
    try:
        target, base = experiment.target, experiment.base
        evidence = uninterrupted(dgm.log_evidence(target, base, method, chains=chains, seed=seed, coverage=False))
    except EvidenceError as error:
        return {"error": str(error)}
    own = Estimates.of(label, evidence)
    std_error = _rms(own.std_error)
    deviation = None if experiment.truth is None else _rms(own.log_z - experiment.truth)
    reaches = own.status in ("unbiased", "consistent")
    return {
        "status": own.status,
        "log_z": own.mean,
        "std_error": std_error,
        "deviation": deviation,
        "gradient_evaluations": own.gradient_evaluations,
        "seconds": own.seconds,
        "to_error": evaluations_to_error(own.gradient_evaluations, deviation or std_error) if reaches else None,
        "caveats": caveats(label, evidence),
    }


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def table(record: dict[str, Any]) -> str:
    """Markdown: gradient evaluations to a standard error of 0.05, and the runs that they come from."""
    parts = [
        "# Log evidence: every method on every experiment\n",
        f"`{record['command']}`, default settings of every method, {record['settings']['chains']} chains.\n",
        "Thousands of gradient evaluations, of all chains of a problem together, to a standard error of 0.05 nats; a "
        "bound does not get there. On the Boltzmann machines the error is that against the truth.\n",
        methods_table(record),
    ]
    for name, experiment in record["experiments"].items():
        parts += [f"## {name}\n", f"{experiment['words']}.\n", *_runs(experiment["methods"])]
    parts.append(f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n")
    return "\n".join(parts)


def _runs(methods: dict[str, dict[str, Any]]) -> list[str]:
    header = ["method", "status", "mean log Z", "standard error", "error against the truth", "gradients", "seconds"]
    rows, notes = [], []
    for label, row in methods.items():
        if "error" in row:
            rows.append([label, f"failed: {row['error']}", *[""] * 5])
            continue
        rows.append(
            [
                label,
                row["status"],
                f"{row['log_z']:.3f}",
                f"{row['std_error']:.3f}",
                "" if row["deviation"] is None else f"{row['deviation']:.3f}",
                str(row["gradient_evaluations"]),
                f"{row['seconds']:.1f}",
            ]
        )
        notes += row["caveats"]
    return [markdown(header, rows), *(["".join(f"- {note}\n" for note in notes)] if notes else [])]


def methods_table(record: dict[str, Any]) -> str:
    """Thousands of gradient evaluations to the error aimed at: one row per method, one column per experiment."""
    experiments = record["experiments"]
    labels = next(iter(experiments.values()))["methods"]
    rows = [[label, *(_effort(entry["methods"][label]) for entry in experiments.values())] for label in labels]
    return markdown(["method", *experiments], rows)


def _effort(row: dict[str, Any]) -> str:
    if "error" in row:
        return "failed"
    if row["to_error"] is None:
        return "a bound"
    return f"{row['to_error'] / 1000:.3g}" + ("*" if row["caveats"] else "")
