"""The ``evidence`` command: log p(x) of images under a generator, by several methods, between two bounds."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import dgm_infer as dgm
from dgm_infer import AIS, Evidence, Gaussian
from dgm_infer.arguments import random_seed
from dgm_infer.conditioning.pictures import PixelScale
from dgm_infer.errors import ConfigError, EvidenceError, ModelError, cause, uninterrupted
from dgm_infer.evidence import Bounds, Method
from dgm_infer.evidence.start import EvidenceProblem
from dgm_infer.files import write_file
from dgm_infer.models import LatentVariableModel, as_generative_model
from dgm_infer.references.density import Whitened
from dgm_infer.sampling.preflight import fitting_threads
from evaluation.reports.folders import complete_run
from generators import LatentPosterior

from ..figures.log_evidence import by_image
from ..reports.estimates import Estimates, caveats, table
from ..reports.kept import KeptRun, go_on, kept_run
from ..reports.page import code, frame, pictures, said, write_report
from ..reports.records import announce
from .inputs import HeldOutImages, binarised, moved, read_generator, read_images
from .keeping import keep
from .options import run_configured
from .outline import in_words_of

__all__ = ["DEFAULT_METHODS", "estimate_evidence", "fitted_base", "run"]

DEFAULT_METHODS = (
    dgm.Elbo(),
    dgm.evidence.ImportanceSampling(),
    dgm.AIS(),
    dgm.GibbsTempering(),
    dgm.ContinuousTempering(),
)

# What annealing back from draws of a method gives.
_TWO_SIDED = ("reverse AIS", "Bennett")


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer evidence --config FILE``: the options are the arguments of :func:`estimate_evidence`."""
    description = "Estimate log p(x) of images, between two bounds."
    run_configured("evidence", "train", description, estimate_evidence, arguments)


def estimate_evidence(
    name: str,
    generator: nn.Module | str,
    images: HeldOutImages | str,
    n_images: int = 20,
    binarise: float | None = None,
    methods: list[Method] | None = None,
    base: Literal["encoder", "diagonal", "low_rank", "full", "laplace"] | None = None,
    bounds: AIS | None = AIS(),  # noqa: B008 (immutable)
    n_simulated: int = 10,
    chains: int = 16,
    chunk: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    output: str = "runs",
    resolved: str = "",
    resume: Path | None = None,
    output_noise: float | None = None,
) -> Path:
    """Estimate log p(x) of images under a generator; write results, a table and a picture to a run folder.

    Args:
        name: name of the run; results go to ``<output>/<name>/<time>/``.
        generator: a shipped generator, a path to its weights, or a model by class path; it has a decoder, or
            normal noise (output_noise), and an encoder if the base needs one.
        images: a data set with held-out images by class path, a picture, a folder of pictures, or ``.npy`` of
            ``[n, *shape]``. Pictures, 8-bit values and a data set's images in [0, 1] are mapped to the generator's
            ``output_range``; other values are taken as they are.
        n_images: the first so many images; of a folder, by name.
        binarise: threshold above which a pixel is 1, below it 0; null leaves the values as they are. Generators of
            binary images need it if the images are grey.
        methods: evidence methods by class path; null for Elbo, ImportanceSampling, AIS, GibbsTempering and
            ContinuousTempering with their defaults, minutes for small networks; GibbsTempering alone, with bounds null,
            is the quick one.
        base: density that methods start from: encoder, a Gaussian fitted by the evidence lower bound (diagonal,
            low_rank, full), or laplace; null for the encoder's, without one laplace where there is a mode, else a fit.
        bounds: annealing in both directions, for an upper bound: from draws of the last method that has draws of the
            posterior (heuristic, for these are not exact), and on simulated images; null for none.
        n_simulated: images simulated from the generator, of which exact draws are known: there both bounds hold, and
            their gap says what to expect of annealing; 0 for none.
        chains: chains per image.
        chunk: images at a time; null for as many as memory allows.
        seed: seed of all randomness; null draws one.
        device: to compute on; null for the generator's.
        output: folder of all runs.
        resolved: the configuration as it was read, kept with the results.
        resume: the folder of a run of this configuration that was stopped, which goes on; None for a new one.
        output_noise: standard deviation of normal noise of the outputs of a generator that has no decoder, whose
            pictures alone have no density; null for none.

    Returns:
        the run folder.

    Raises:
        DgmInferError: an option, a file or the generator does not serve.
        KeyboardInterrupt: interrupted; the run folder keeps the estimates of all methods until then.
    """
    module = moved(read_generator(generator), device)
    if output_noise is not None:
        module = dgm.WithNoise(as_generative_model(module), output_noise)
    model = _parts(module)
    x = binarised(read_images(images, n_images, model.output_shape, PixelScale.of(module)), binarise)
    methods = list(DEFAULT_METHODS) if methods is None else methods
    if not methods:
        raise ConfigError("methods: the list is empty; name one, or give null for all")
    if n_simulated < 0:
        raise ConfigError(f"n_simulated = {n_simulated}: must be >= 0")
    if chains < 2:
        raise ConfigError(f"chains = {chains}: must be >= 2, errors come from the spread over chains")
    seed = random_seed("evidence", seed)
    print(f"base: {base or 'chosen'}, of {n_images} images", flush=True)
    target, q = _problem(model, x, base, seed)
    options = {"chains": chains, "seed": seed, "chunk": chunk}
    stages = _Stages(len(methods) + (bounds is not None) * (1 + (n_simulated > 0)))
    with complete_run(name, output, resolved, resume) as folder, _said_of_the_finished(folder, results := {}):
        for method, label in zip(methods, _labels(methods), strict=True):
            if _is_there(results, folder, label, target):
                stages.begin(f"{label}: finished before, and taken over")
                continue
            with kept_run(folder, f"run_{_file(label)}", "evidence") as run:
                stages.begin(f"{label}: {n_images} images x {chains} chains", run)
                begin = partial(dgm.log_evidence, target, q, method=method, **options)
                _add(results, folder, {label: go_on(run, begin, target)})
                run.is_saved = True
        simulated = None
        if bounds is not None:
            if all(_is_there(results, folder, label, target) for label in _TWO_SIDED):
                stages.begin("bounds: finished before, and taken over")
            else:
                with kept_run(folder, "run_bounds", "evidence") as run:
                    _add(results, folder, _heuristic_bounds(target, q, bounds, results, options, stages, run))
                    run.is_saved = True
            if n_simulated:
                with kept_run(folder, "run_simulated", "evidence") as run:
                    stages.begin(f"bounds: {n_simulated} simulated images, whose latents are known", run)
                    simulated = _simulated_bounds(model, n_simulated, base, bounds, options, run)
                    run.is_saved = True
        print("writing the report", flush=True)
        rows = [Estimates.of(label, evidence) for label, evidence in results.items()]
        report = _report(rows, results, simulated, chains, seed)
        write_file(folder / "log.txt", report)
        by_image(folder / "evidence.png", rows, _reference(rows))
        _write_report(folder, name, results, report, resolved)
        announce(report, folder)
    return folder


class _Stages:
    """What a run is at, of how much: a line at the beginning of every stage."""

    def __init__(self, n: int):
        self._n, self._at, self._began = n, 0, time.monotonic()

    def begin(self, what: str, run: KeptRun | None = None) -> None:
        """Say that a stage begins, or goes on where it was stopped."""
        self._at += 1
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        goes_on = ", going on where it was stopped" if run is not None and run.path.exists() else ""
        print(f"{self._at} of {self._n}, after {minutes}:{seconds:02d}: {what}{goes_on}", flush=True)


@contextmanager
def _said_of_the_finished(folder: Path, results: dict[str, Evidence]) -> Iterator[None]:
    """Print the table of the methods that are finished, and how to go on, where the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt as error:
        # the part under way may say so itself
        if results and not any("--resume" in note for note in getattr(error, "__notes__", ())):
            error.add_note(f"dgm-infer evidence --resume {folder} goes on")
        if rows := [Estimates.of(label, found) for label, found in results.items() if not found.interrupted]:
            print(f"finished before the interruption:\n{table(rows)}", end="", flush=True)
        raise


def _add(results: dict[str, Evidence], folder: Path, found: dict[str, Evidence]) -> None:
    """Keep the estimates of a method, in the folder too, before the next method begins.

    Those of earlier methods are written again if the folder has vanished.

    Raises:
        KeyboardInterrupt: they are of an interrupted run.
    """
    results |= found
    for label, evidence in results.items():
        path = folder / f"{_file(label)}.npz"
        if label in found or not path.exists():
            keep(evidence.save, path)
    table = _frame(results).to_csv(index=False)
    keep(lambda path: write_file(path, table), folder / "evidence.csv")
    for evidence in found.values():
        uninterrupted(evidence)


def _file(label: str) -> str:
    return label.replace(" ", "_")


def _is_there(results: dict[str, Evidence], folder: Path, label: str, target: LatentPosterior) -> bool:
    """Whether the folder has the whole estimates of a method, which are added to the results."""
    path = folder / f"{_file(label)}.npz"
    if not path.exists() or (found := Evidence.load(path)).interrupted:
        return False
    # later methods begin with its draws
    draws = None if found.draws is None else found.draws.to(target.images.device)
    results[label] = replace(found, draws=draws, log_weights=found.log_weights.to(target.images.device))
    return True


class _Noisy(nn.Module):
    """The decoder of a network with normal noise: ``p(x | z)`` is ``Normal(network(z), sd)``."""

    def __init__(self, model: dgm.WithNoise):
        super().__init__()
        self.model = model

    def forward(self, z: Tensor) -> Independent:
        shape = self.model.output_shape
        mean, sd = self.model.model.observed(z), self.model.sd
        images = Normal(mean.unflatten(-1, shape), sd.reshape(shape) if sd.ndim else sd)
        return Independent(images, len(shape))


def _parts(model: nn.Module) -> LatentVariableModel:
    if isinstance(model, dgm.WithNoise) and not model.model.has_local_inputs and not model.has_log_factor:
        return LatentVariableModel(model, model.global_density, _Noisy(model), None)
    try:
        return LatentVariableModel.of(model)
    except ModelError as error:
        raise ModelError(f"generator: {error}; or give it normal noise, --output_noise SD") from error


def fitted_base(model: LatentVariableModel, target: LatentPosterior, kind: str | None, seed: int) -> Whitened:
    """The density that methods start from, for every image of the target; None as :func:`dgm_infer.log_evidence` does.

    Raises:
        ModelError: an encoder is asked for, and the model has none.
    """
    if kind is None:
        if model.encoder is None:
            return EvidenceProblem("evidence", target).started(None).base
        kind = "encoder"
    if kind == "encoder":
        if model.encoder is None:
            name = type(model.module).__name__
            raise ModelError(f"generator: a {name} has no encoder: choose base diagonal, low_rank, full or laplace")
        return Gaussian.from_encoder(model.encode, target.images.flatten(len(target.batch_shape)))
    if kind == "laplace":
        try:
            return Gaussian.laplace(target)
        except EvidenceError as error:
            # at the kinks of a network there may be no Hessian
            raise EvidenceError(f"{cause(error).split(':')[0]}: choose base full, low_rank or diagonal") from error
    return Gaussian.fit(target, kind, seed=seed)  # type: ignore[arg-type]


def _problem(model: LatentVariableModel, x: Tensor, base: str | None, seed: int) -> tuple[LatentPosterior, Whitened]:
    # a channel of its own would look like a batch of one
    target = LatentPosterior(model.decoder, x.reshape(len(x), *(n for n in x.shape[1:] if n > 1)), model.prior)
    with fitting_threads("evidence", EvidenceProblem("evidence", target).trial):
        return target, fitted_base(model, target, base, seed)


def _labels(methods: Sequence[Method]) -> list[str]:
    """Class names, numbered if they are repeated."""
    names = [type(method).__name__ for method in methods]
    return [name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)]


def _heuristic_bounds(
    target: LatentPosterior,
    q: Whitened,
    method: AIS,
    results: dict[str, Evidence],
    options: dict,
    stages: "_Stages",
    run: KeptRun,
) -> dict[str, Evidence]:
    """An upper bound and the two-sided estimate, from the draws of a method; none if no method has draws."""
    sources = [(label, e) for label, e in results.items() if e.status in ("unbiased", "consistent")]
    if not sources:
        stages.begin("bounds: none, as no method has draws of the posterior")
        return {}
    label, evidence = sources[-1]
    stages.begin(f"bounds: annealing back from draws of {label}", run)
    draws = _resampled(evidence, options["chains"], options["seed"])
    found = go_on(run, partial(dgm.bidirectional, target, q, draws, method=method, exact=False, **options), target)
    return dict(zip(_TWO_SIDED, (found.upper, found.combined), strict=True))


def _resampled(evidence: Evidence, chains: int, seed: int) -> Tensor:
    """Unweighted draws of the posteriors, ``[chains, *batch, D]``, as good as the weights are."""
    assert evidence.draws is not None
    draws, log_weights = evidence.draws.flatten(0, 1), evidence.log_weights.flatten(0, 1)
    batch = draws.shape[1:-1]
    draws, log_weights = draws.reshape(len(draws), -1, draws.shape[-1]), log_weights.reshape(len(draws), -1)
    rng = torch.Generator(draws.device).manual_seed(seed)
    chosen = torch.multinomial((log_weights - log_weights.amax(0)).exp().mT, chains, replacement=True, generator=rng)
    picked = draws.gather(0, chosen.mT.unsqueeze(-1).expand(-1, -1, draws.shape[-1]))
    return picked.reshape(chains, *batch, -1)


def _simulated_bounds(
    model: LatentVariableModel, n: int, base: str | None, method: AIS, options: dict, run: KeptRun
) -> Bounds:
    """Both bounds on images that the generator makes, from the latents that it made them of."""
    images, latents = model.generate(n, options["seed"])
    target, q = _problem(model, images, base, options["seed"])
    bounds = go_on(run, partial(dgm.bidirectional, target, q, latents, method=method, **options), target)
    uninterrupted(bounds.combined)
    return bounds


def _reference(rows: Sequence[Estimates]) -> Estimates:
    """The most precise row that is not a bound, otherwise the last."""
    central = [row for row in rows if row.status in ("unbiased", "consistent")] or list(rows[-1:])
    return min(central, key=lambda row: float(row.std_error.double().nan_to_num(torch.inf).median()))


def _report(
    rows: Sequence[Estimates], results: dict[str, Evidence], simulated: Bounds | None, chains: int, seed: int
) -> str:
    n = len(rows[0].log_z)
    images = f"{n} image" + "s" * (n != 1)
    parts = [
        f"log p(x) of {images}, {chains} chains each, seed {seed}; errors are standard errors, of the mean over "
        "these images and of the typical image\n",
        table(rows),
    ]
    if simulated is not None:
        bounds = {"lower, AIS": simulated.lower, "upper, reverse AIS": simulated.upper, "Bennett": simulated.combined}
        held = [Estimates.of(label, evidence) for label, evidence in bounds.items()]
        parts += [
            f"\non {len(held[0].log_z)} images simulated from the generator, whose exact draws make both bounds hold: "
            f"mean gap {float(simulated.gap.mean()):.3f}\n",
            table(held),
        ]
    lines = [line for label, evidence in results.items() for line in caveats(label, evidence)]
    parts += [f"{in_words_of('evidence', line)}\n" for line in lines]
    if any(row.status == "heuristic" for row in rows):
        parts.append("heuristic: no bound is guaranteed, because the draws it starts from are not exact\n")
    return "".join(parts)


def _write_report(folder: Path, name: str, results: dict[str, Evidence], report: str, resolved: str) -> None:
    label = next(reversed(results))
    again = (
        f'import dgm_infer as dgm\nestimate = dgm.Evidence.load("{folder / label.replace(" ", "_")}.npz")\n'
        "print(estimate.to_dataframe(), estimate.diagnose())\nestimate.plot()\n"
        "dgm.compare(estimate, another)  # of another generator, of the same images: their difference with its error"
    )
    found = "\n".join(f"{label}: {evidence.diagnose()}" for label, evidence in results.items())
    sections = [
        ("By image", pictures([folder / "evidence.png"])),
        ("Estimates", code(report)),
        ("Diagnosis", said(in_words_of("evidence", found))),
        (f"Images, {label}", frame(results[label].to_dataframe(), "image", n=20)),
        ("What was asked", code(resolved)),
        ("How to go on", code(again)),
    ]
    write_report(folder, f"Log evidence: {name}", report.partition("\n")[0], sections)


def _frame(results: dict[str, Evidence]) -> pd.DataFrame:
    frames = [evidence.to_dataframe().reset_index().assign(method=label) for label, evidence in results.items()]
    return pd.concat(frames, ignore_index=True)
