"""The ``condition`` command: complete images with a generator, and report how well the chains mixed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

import dgm_infer as dgm
from dgm_infer import HMC, ConstrainedHMC
from dgm_infer.errors import ConfigError, ObservationError
from dgm_infer.files import complete_run, write_file
from dgm_infer.models import as_generative_model, is_discrete
from generators.pictures import PixelScale

from ..figures.completions import completions
from ..figures.thumbnails import thumbnails
from ..figures.traces import traces
from ..reports.mixing import describe, modes, worst_and_typical
from ..reports.records import announce
from .inputs import HeldOutImages, binarised, image_shape, read_factor, read_generator, read_images, read_mask
from .keeping import go_on, keep, kept_run
from .options import run_configured

__all__ = ["condition_images", "run"]


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer condition --config FILE``: the options are the arguments of :func:`condition_images`."""
    description = "Complete images of which a part is observed."
    run_configured("condition", "train", description, condition_images, arguments)


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
    observe: str = "top_half",
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
    resolved: str = "",
    resume: Path | None = None,
) -> Path:
    """Complete partly observed images; write draws, tables and pictures to a run folder.

    A generator of continuous pixels is conditioned exactly; without output noise, on at most as many pixels as it has
    latents, or with ``noise`` on any number. If pixels are binary, the latents are sampled given the observed pixels.

    Args:
        name: name of the run; results go to ``<output>/<name>/<time>/``.
        generator: a shipped generator, a path to its weights, or a model by class path.
        images: a data set with held-out images by class path, a picture, a folder of pictures, or ``.npy`` of
            ``[n, *shape]``. Pictures, 8-bit values and a data set's images in [0, 1] are mapped to the generator's
            ``output_range``; other values are taken as they are.
        observe: the observed part: top_half, bottom_half, left_half, right_half, likewise top_quarter and so on, grid_K
            for every K-th pixel of every K-th row, downsample_K for the means over blocks of K x K pixels, or a
            ``.npy`` file with a boolean mask of the image's shape.
        n_images: the first so many images.
        noise: standard deviation of Gaussian output noise that the generator is given, on the scale of its images; null
            for none.
        binarise: threshold above which a pixel is 1, below it 0; null leaves the values as they are. Generators of
            binary images need it if the images are grey.
        kernel: kernel of the chains: fields of ConstrainedHMC, or any kernel by class path; a step size of null is
            adapted. Without any, a pilot picks LiftedHMC or ConstrainedHMC.
        latent_kernel: kernel of the chains if the pixels are binary: fields of HMC, or any kernel by class path.
        chains: chains per image.
        warmup: iterations that adapt the step sizes; null for as many as that takes, at most 300.
        draws: draws kept per chain.
        thin: iterations per kept draw.
        seed: seed of all randomness; null draws one.
        target_acceptance: acceptance probability that step sizes are adapted to; null for the kernel's usual one.
        device: to compute on; null for the generator's.
        output: folder of all runs.
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
    originals = binarised(read_images(images, n_images, shape, scale), binarise)
    factor = read_factor(observe)
    mask = None if factor is not None else read_mask(observe, shape)
    if noise is not None:
        if is_discrete(model):
            raise ConfigError(f"noise: a {type(model).__name__} has binary pixels, which take no Gaussian noise")
        model = dgm.WithNoise(as_generative_model(model), noise)
    operator = dgm.pixels(mask) if factor is None else dgm.downsample(factor)
    observed = originals if factor is None else operator(originals)
    try:
        problem = dgm.condition(model, observed, observe=operator, device=device)
    except ObservationError as error:
        if "WithNoise" in str(error):
            error.add_note("as an option: --noise SD")
        raise
    chosen = kernel.chosen() if isinstance(kernel, PilotOrConstrainedHMC) else kernel
    if not isinstance(problem, dgm.Fibre):
        if not isinstance(kernel, ConstrainedHMC):
            raise ConfigError(
                f"kernel: {type(kernel).__name__} would not be used: a {type(model).__name__} has binary pixels; give "
                "it as latent_kernel"
            )
        chosen = latent_kernel
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
        started = time.perf_counter()
        result = go_on(run, sample, problem)
        seconds = time.perf_counter() - started
        keep(result.save, folder / "posterior.nc")
        # a folder that vanished, or a disk that was full, has cost no draw
        run.is_saved = result.shape[:2] == (chains, draws)
        summary = result.summary()
        write_file(folder / "summary.csv", summary.to_csv(index_label="latent"))
        described = describe(result, summary, seconds)
        diagnosis = f"{result.diagnose()}\n"
        # again below: modes take minutes to find, and neither they nor the pictures may take the log along
        write_file(folder / "log.txt", described + diagnosis)
        shown, outputs = scale.to_unit(originals), scale.to_unit(result.generate())
        if mask is None:
            assert factor is not None
            thumbnails(folder / "completions.png", shown, factor, outputs)
        else:
            completions(folder / "completions.png", shown, mask, outputs)
        traces(folder / "traces.png", result, worst_and_typical(summary))
        report = described + modes(result, summary) + diagnosis
        write_file(folder / "log.txt", report)
        announce(report, folder)
        if not run.is_saved:
            raise KeyboardInterrupt
    return folder
