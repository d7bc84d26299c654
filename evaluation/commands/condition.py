"""The ``condition`` command: complete images with a generator, and report how well the chains mixed."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pandas as pd
from torch import nn

import dgm_infer as dgm
from dgm_infer import HMC, ConstrainedHMC
from dgm_infer.conditioning.observations import Downsample, Linear, Pixels
from dgm_infer.conditioning.pictures import PixelScale, image_shape
from dgm_infer.errors import ConfigError
from dgm_infer.files import write_file
from dgm_infer.models import as_generative_model, is_discrete
from dgm_infer.sampling.show import noun
from evaluation.reports.folders import complete_run

from ..figures.completions import completions, single_pictures
from ..figures.thumbnails import thumbnails
from ..figures.traces import traces
from ..reports.kept import go_on, kept_run
from ..reports.mixing import describe, modes, worst_and_typical
from ..reports.page import code, frame, pictures, said, write_report
from ..reports.records import announce
from .inputs import HeldOutImages, Observed, binarised, read_generator, read_images, read_observation
from .keeping import keep
from .options import run_configured
from .outline import in_words_of

__all__ = ["condition_images", "run"]


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer condition --config FILE``: the options are the arguments of :func:`condition_images`."""
    description = "Complete images of which a part is observed."
    run_configured("condition", "train", description, condition_images, arguments)


def _shape_of(operator: Observed, shape: tuple[int, ...], measured: bool) -> tuple[int, ...]:
    """The shape of one of the images that are given: that of what was measured, or the generator's."""
    if measured and isinstance(operator, Downsample):
        return (*shape[:-2], *(side // operator.factor for side in shape[-2:]))
    return (len(operator.matrix),) if measured and isinstance(operator, Linear) else shape


@runtime_checkable
class AnyKernel(Protocol):
    """What a configuration may name as a kernel; :class:`dgm_infer.kernels.Kernel` without its types."""

    def check(self, problem, /) -> Any: ...

    def init(self, problem, position, /) -> Any: ...

    def step(self, problem, state, rng, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class PilotOrConstrainedHMC(ConstrainedHMC):
    """ConstrainedHMC with the given fields, or what :func:`dgm_infer.sample` picks where none is given."""

    def chosen(self) -> ConstrainedHMC | None:
        given = ConstrainedHMC(**{field.name: getattr(self, field.name) for field in fields(self)})
        return None if given == ConstrainedHMC() else given


def condition_images(
    name: str,
    generator: nn.Module | str,
    images: HeldOutImages | str,
    observe: str | None = None,
    n_images: int = 8,
    noise: float | None = None,
    binarise: float | None = None,
    kernel: AnyKernel = PilotOrConstrainedHMC(),
    latent_kernel: AnyKernel = HMC(),  # noqa: B008
    chains: int = 16,
    warmup: int | None = None,
    draws: int = 500,
    thin: int = 1,
    seed: int | None = None,
    target_acceptance: float | None = None,
    device: str | None = None,
    output: str = "runs",
    mask: str | None = None,
    measured: bool = False,
    resize: bool = False,
    output_noise: float | None = None,
    mean: bool = False,
    resolved: str = "",
    resume: Path | None = None,
) -> Path:
    """Complete partly observed images; write draws, tables and pictures to a run folder.

    A generator of continuous pixels is conditioned exactly; without noise, on at most as many pixels as it has
    latents, or with ``noise`` on any number. If pixels are binary, the latents are sampled given the observed pixels.

    Args:
        name: name of the run; results go to ``<output>/<name>/<time>/``.
        generator: a shipped generator, a path to its weights, or a model by class path.
        images: a data set with held-out images by class path, a picture, a folder of pictures, or ``.npy`` of
            ``[n, *shape]``. Pictures, 8-bit values and a data set's images in [0, 1] are mapped to the generator's
            ``output_range``; other values are taken as they are.
        observe: the observed part: top_half, bottom_half, left_half, right_half, likewise top_quarter and so on,
            grid:K for every K-th pixel of every K-th row, or a ``.npy`` file with a boolean mask of the image's shape
            or of ``[H, W]``; or what is observed of the image: downsample:K, the means over blocks of K x K pixels,
            blur:SD, a Gaussian blur of SD pixels, blur:FILE.npy with a kernel, linear:FILE.npy with a matrix
            ``[Dy, Dx]``. null for top_half.
        n_images: the first so many images; of a folder, by name.
        noise: standard deviation of normal noise of the measurement, after the operator and on the scale of the
            generator's images; completions are without it. null for none.
        binarise: threshold above which a pixel is 1, below it 0; null leaves the values as they are. Generators of
            binary images need it if the images are grey.
        kernel: kernel of the chains: fields of ConstrainedHMC, or any kernel by class path; a step size of null is
            adapted. Without any, a pilot picks LiftedHMC or ConstrainedHMC.
        latent_kernel: kernel of the chains if the pixels are binary: fields of HMC, or any kernel by class path; as it
            stands, what :func:`dgm_infer.sample` picks.
        chains: chains per image.
        warmup: iterations that adapt the step sizes; null for as many as that takes, at most 500.
        draws: draws kept per chain.
        thin: iterations per kept draw.
        seed: seed of all randomness; null draws one.
        target_acceptance: acceptance probability that step sizes are adapted to; null for the kernel's usual one.
        device: to compute on; null for the generator's.
        output: folder of all runs.
        mask: a picture that is white where pixels are observed, or a ``.npy`` file; in place of observe.
        measured: whether the images are what was observed, already blurred or thumbnails, and not complete ones.
        resize: whether pictures of another size are cut about the middle and scaled to the generator's.
        output_noise: standard deviation of Gaussian noise of the generator's outputs, before the operator, which
            completions have; null for none.
        mean: whether completions are without the generator's output noise.
        resolved: the configuration as it was read, kept with the results.
        resume: the folder of a run of this configuration that was stopped, which goes on; None for a new one.

    Returns:
        the run folder.

    Raises:
        DgmInferError: an option, a file or the generator does not serve.
        KeyboardInterrupt: interrupted; the run folder keeps the draws made so far, and the results of those.
    """
    model = read_generator(generator)
    shape = image_shape(model)
    scale = PixelScale.of(model)
    operator = read_observation(observe, mask, shape)
    given = binarised(read_images(images, n_images, _shape_of(operator, shape, measured), scale, resize), binarise)
    observed = given if measured or isinstance(operator, Pixels) else operator(given)
    if noise is not None or output_noise is not None:
        if is_discrete(model):
            raise ConfigError(f"noise: a {type(model).__name__} has binary pixels, which take no Gaussian noise")
        model = model if output_noise is None else dgm.WithNoise(as_generative_model(model), output_noise)
    problem = dgm.condition(model, observed, observe=operator, noise=noise, device=device)
    chosen = kernel.chosen() if isinstance(kernel, PilotOrConstrainedHMC) else kernel
    if not isinstance(problem, dgm.Fibre):
        if not isinstance(kernel, ConstrainedHMC):
            raise ConfigError(
                f"kernel: {type(kernel).__name__} would not be used: a {type(model).__name__} has binary pixels; give "
                "it as latent_kernel"
            )
        chosen = None if latent_kernel == HMC() else latent_kernel
    if chosen is not None:
        chosen.check(problem)
    # made before hours of sampling, and gone again if these leave nothing
    sample = partial(
        dgm.sample,
        problem,
        chosen,
        chains=chains,
        warmup=warmup,
        draws=draws,
        thin=thin,
        seed=seed,
        target_acceptance=target_acceptance,
    )
    with complete_run(name, output, resolved, resume) as folder, kept_run(folder, "run", "condition") as run:
        if run.path.exists():
            print("going on where the run was stopped", file=sys.stderr, flush=True)
        started = time.perf_counter()
        result = go_on(run, sample, problem)
        seconds = time.perf_counter() - started
        print("sampled: writing draws, pictures and the report", file=sys.stderr, flush=True)
        keep(result.save, folder / "posterior.nc")
        # a folder that vanished, or a disk that was full, has cost no draw
        run.is_saved = result.shape[:2] == (chains, draws)
        summary = result.summary()
        write_file(folder / "summary.csv", summary.to_csv(index_label="latent"))
        described = describe(result, summary, seconds)
        diagnosis = in_words_of("condition", f"{result.diagnose()}\n")
        # again below: modes take minutes to find, and neither they nor the pictures may take the log along
        write_file(folder / "log.txt", described + diagnosis)
        outputs = scale.to_unit(result.generate(mean=mean))
        originals = None if measured else scale.to_unit(given)
        hidden = operator.mask if isinstance(operator, Pixels) else None
        seen = None if isinstance(operator, Linear) else scale.to_unit(observed)
        if isinstance(operator, Downsample) and originals is not None:
            thumbnails(folder / "completions.png", originals, operator.factor, outputs)
        else:
            completions(folder / "completions.png", originals, hidden, outputs, observed=seen)
        single_pictures(folder / "images", originals, seen, hidden, outputs)
        traces(folder / "traces.png", result, worst_and_typical(summary))
        report = described + modes(result, summary) + diagnosis
        write_file(folder / "log.txt", report)
        _write_report(folder, name, result, summary, described, diagnosis, resolved)
        run.clear()
        announce(report, folder)
        if not run.is_saved:
            raise KeyboardInterrupt
    return folder


def _write_report(
    folder: Path, name: str, draws: dgm.Draws, summary: pd.DataFrame, described: str, diagnosis: str, resolved: str
) -> None:
    again = (
        f"dgm-infer condition --config {folder / 'config.yaml'} --draws {2 * draws.shape[1]}\n\n"
        f'import dgm_infer as dgm\ndraws = dgm.Draws.load("{folder / "posterior.nc"}")\n'
        'print(draws.summary(), draws.diagnose())\ndraws.plot("rank")'
    )
    shown = ["mean", "sd", "ess_bulk", "ess_tail", "r_hat"]
    worst = summary.sort_values("r_hat", ascending=False).loc[:, shown]
    singles = sorted((folder / "images").glob("*.png"))
    made = noun(draws.problem).capitalize()
    sections = [
        (f"{made}s", pictures([folder / "completions.png"], f"{made.lower()}s")),
        ("Diagnosis", said(diagnosis)),
        ("Latents with the largest R-hat", frame(worst, "latent")),
        ("Traces and ranks", pictures([folder / "traces.png"], "the latents with the largest R-hat, and typical ones")),
        ("Numbers", code(described)),
        ("What was asked", code(resolved) if resolved else ""),
        ("How to go on", code(again) + (f"<p>{len(singles)} single pictures are in {folder / 'images'}.</p>")),
    ]
    write_report(folder, f"{made}s: {name}", described.partition("\n")[0], sections)
