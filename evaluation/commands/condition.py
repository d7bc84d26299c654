"""The ``condition`` command: complete images with a generator, and report how well the chains mixed."""

import re
import time
import warnings
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import dgm_infer as dgm
import generators
from dgm_infer import HMC, ConstrainedHMC, Draws, GenerativeModel
from dgm_infer.errors import ArgumentError, CheckpointError, ConfigError, cause
from dgm_infer.files import complete_run
from generators import BernoulliVAE, LatentPosterior
from generators.pictures import read_picture

from ..figures import conditioning as plots

__all__ = ["condition_images"]

# R-hat up to which a latent counts as mixed.
R_HAT = 1.05

MASKS = tuple(f"{side}_{share}" for share in ("half", "quarter") for side in ("top", "bottom", "left", "right"))


@runtime_checkable
class HeldOutImages(Protocol):
    """A data set that keeps images no generator was trained on."""

    def held_out(self, n: int | None = None) -> Tensor:
        """The first ``n`` held-out images, ``[n, *shape]``."""
        ...


def condition_images(
    name: str,
    generator: GenerativeModel | str,
    images: HeldOutImages | str,
    observe: str = "top_half",
    n_images: int = 8,
    noise: float | None = None,
    binarise: float | None = None,
    kernel: ConstrainedHMC = ConstrainedHMC(),  # noqa: B008 (immutable)
    latent_kernel: HMC = HMC(),  # noqa: B008
    chains: int = 16,
    warmup: int = 300,
    draws: int = 500,
    thin: int = 1,
    seed: int | None = None,
    target_acceptance: float = 0.8,
    device: str | None = None,
    output: str = "runs",
    resolved: str = "",
) -> Path:
    """Complete images of which a part is observed; write draws, tables and pictures to a run folder.

    A generator of continuous pixels is conditioned exactly; where it has no noise of its own, on no more pixels than it
    has latents, or with ``noise`` on any number. Of one whose pixels are binary, the latents are sampled given the
    observed pixels.

    Args:
        name: of the run; results go to ``<output>/<name>/<time>/``.
        generator: a shipped generator, a path to its weights, or a model by class path.
        images: a data set with held-out images by class path, or a file: a picture, or ``.npy`` of ``[n, *shape]``
            (8-bit values are divided by 255, others taken as they are).
        observe: the observed part: top_half, bottom_half, left_half, right_half, likewise top_quarter and so on, grid_K
            for every K-th pixel of every K-th row, or a ``.npy`` file with a boolean mask of the image's shape.
        n_images: the first so many images.
        noise: standard deviation of Gaussian output noise that the generator is given; null for none.
        binarise: threshold above which a pixel is 1, below it 0; null leaves the values as they are. Generators of
            binary images need it where the images are grey.
        kernel: of the chains; a step size of null is adapted.
        latent_kernel: of the chains where the pixels are binary.
        chains: of every image.
        warmup: iterations that adapt the step sizes.
        draws: kept draws of every chain.
        thin: iterations a kept draw.
        seed: of all randomness; null draws one.
        target_acceptance: that step sizes adapt to.
        device: to compute on; null for the generator's.
        output: folder of all runs.
        resolved: the configuration as it was read, kept with the results.

    Returns:
        the run folder.
    """
    model = read_generator(generator)
    shape = tuple(model.output_shape)
    originals = read_images(images, n_images, shape)
    originals = binarised(originals, binarise)
    mask = read_mask(observe, shape)
    if isinstance(model, BernoulliVAE) and len(shape) == 3 and shape[0] == 1:
        # in latent space a channel of length 1 would be a batch of one
        originals, mask = originals.squeeze(1), mask.squeeze(0)
    problem = _problem(model, originals, mask, noise, device)
    # made before hours of sampling, and gone again if these fail
    with complete_run(name, output) as folder, warnings.catch_warnings():
        # the report says it
        warnings.filterwarnings("ignore", message="interrupted", category=UserWarning)
        started = time.perf_counter()
        result = dgm.sample(
            problem,
            kernel if isinstance(problem, dgm.Fibre) else latent_kernel,
            chains=chains,
            warmup=warmup,
            draws=draws,
            thin=thin,
            seed=seed,
            target_acceptance=target_acceptance,
        )
        seconds = time.perf_counter() - started
        summary = result.summary()
        report = describe(result, summary, seconds)
        (folder / "config.yaml").write_text(resolved)
        (folder / "log.txt").write_text(report)
        result.save(folder / "posterior.nc")
        summary.to_csv(folder / "summary.csv", index_label="latent")
        plots.completions(folder / "completions.png", originals, mask, result.generate())
        plots.traces(folder / "traces.png", result, _worst_and_typical(summary))
    print(report, end="")
    print(f"results in {folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())))
    return folder


def _problem(model: GenerativeModel, images: Tensor, mask: Tensor, noise: float | None, device: str | None):
    """The posterior of what the observed pixels leave open, as a fibre or, of binary pixels, in latent space."""
    if isinstance(model, BernoulliVAE):
        if noise is not None:
            raise ConfigError(f"noise: a {type(model).__name__} has binary pixels, which take no Gaussian noise")
        moved(model, device)
        return LatentPosterior(model.decoder, images, model.input_density, mask)
    model = model if noise is None else dgm.WithNoise(model, noise)
    return dgm.condition(model, images, observe=dgm.pixels(mask), device=device)


def moved(model: GenerativeModel, device: str | None) -> GenerativeModel:
    """The model, moved to a device; None leaves it where it is.

    Raises:
        ArgumentError: there is no such device.
    """
    if device is None:
        return model
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device={device}: {cause(error)}") from error


def binarised(x: Tensor, threshold: float | None) -> Tensor:
    """1 above the threshold, 0 below; None leaves the values."""
    return x if threshold is None else (x > threshold).to(torch.get_default_dtype())


def read_generator(generator: GenerativeModel | str) -> GenerativeModel:
    """A shipped generator by name, one by the path to its weights, or the model itself; in evaluation mode.

    Raises:
        CheckpointError: there is no such generator.
    """
    if not isinstance(generator, str):
        return generator.eval()
    try:
        return generators.load(generator)
    except CheckpointError as error:
        raise CheckpointError(f"generator: {error}, or the class path of a GenerativeModel") from error


def read_images(source: HeldOutImages | str, n: int, shape: tuple[int, ...]) -> Tensor:
    """The first ``n`` images, ``[n, *shape]``; 8-bit values, of a picture or an array, are divided by 255.

    Raises:
        ConfigError: the file is missing or unreadable, or holds fewer images.
    """
    if n < 1:
        raise ConfigError(f"n_images = {n}: must be 1 or more")
    if not isinstance(source, str):
        return source.held_out(n)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"images: {source} is no file and no class path: name a .npy file, a picture, or a class with held_out(n)"
        )
    if path.suffix == ".npy":
        images = torch.from_numpy(_load_array(path))
        images = images / 255 if images.dtype == torch.uint8 else images
        if tuple(images.shape) == shape:
            images = images.unsqueeze(0)
        if tuple(images.shape[1:]) != shape:
            raise ConfigError(f"images: {source} has shape {tuple(images.shape)}, expected [n, *{list(shape)}]")
        if len(images) < n:
            raise ConfigError(f"images: {source} holds {len(images)} images, n_images = {n}")
        return images[:n]
    try:
        pixels = read_picture(path, colour=len(shape) == 3 and shape[0] == 3)
    except ConfigError as error:
        raise ConfigError(f"images: {error}") from error
    height, width = pixels.shape[-2:]
    if (height, width) != tuple(shape[-2:]) or pixels.numel() != torch.Size(shape).numel():
        raise ConfigError(
            f"images: {source} has {height} x {width} pixels, the generator's images the shape {tuple(shape)}: resize "
            "it"
        )
    return pixels.reshape(1, *shape) / 255


def read_mask(observe: str, shape: tuple[int, ...]) -> Tensor:
    """A boolean mask of ``shape``, True = observed; named halves and grids are of the last two dimensions (H, W).

    Raises:
        ConfigError: neither a known name nor a readable ``.npy`` file.
    """
    if observe.endswith(".npy"):
        if not Path(observe).is_file():
            raise ConfigError(f"observe: {observe} does not exist")
        return torch.from_numpy(_load_array(Path(observe)))
    spacing = re.fullmatch(r"grid_([1-9]\d*)", observe)
    if observe not in MASKS and spacing is None:
        raise ConfigError(f"observe: {observe!r} is not one of {', '.join(MASKS)}, grid_K, nor a .npy file")
    if len(shape) < 2:
        raise ConfigError(f"observe: {observe} needs an image of two dimensions, the generator's output is {shape}")
    height, width = shape[-2:]
    mask = torch.zeros(shape, dtype=torch.bool)
    if spacing is not None:
        k = int(spacing[1])
        if k > min(height, width):
            raise ConfigError(f"observe: {observe} observes nothing of images of {height} x {width} pixels")
        # about the middle of blocks of k x k
        mask[..., k // 2 :: k, k // 2 :: k] = True
        return mask
    side, share = observe.split("_")
    n = 2 if share == "half" else 4
    part = {
        "top": (slice(0, height // n), slice(None)),
        "bottom": (slice((n - 1) * height // n, None), slice(None)),
        "left": (slice(None), slice(0, width // n)),
        "right": (slice(None), slice((n - 1) * width // n, None)),
    }[side]
    mask[(..., *part)] = True
    return mask


def describe(draws: Draws, summary: pd.DataFrame, seconds: float) -> str:
    """A table of one row an image, and a line that names the latents not yet mixed."""
    chains, n_draws = draws.shape[:2]
    stats = {name: value.double().flatten(2).cpu() for name, value in draws.stats.items()}
    # of a target in place of a fibre there is no constraint, and what fails diverges
    exact = "constraint_error" in stats
    failed = stats["projection_failed"] + stats["reversal_failed"] if exact else stats["diverging"]
    labels = [str(label) for label in summary.index]
    r_hat, ess = summary["r_hat"].to_numpy(float), summary["ess_bulk"].to_numpy(float)
    image = np.array([index[0] if index else 0 for _, index in map(parse_label, labels)])
    lines = [
        f"{chains} chains x {n_draws} draws an image in {seconds:.1f} s, seed {draws.seed}"
        + (" (interrupted)" if draws.interrupted else ""),
        "image  acceptance  step size  failed %  max |c|  max R-hat  min bulk ESS",
    ]
    for i in range(failed.shape[-1]):
        own = image == i
        lines.append(
            f"{i:5d}  {stats['acceptance_rate'][..., i].mean():10.2f}  {stats['step_size'][..., i].mean():9.2f}  "
            f"{100 * failed[..., i].mean():8.2f}  {_largest(stats['constraint_error'][..., i]) if exact else '-':>7}  "
            f"{r_hat[own].max():9.3f}  {ess[own].min():12.0f}"
        )
    unmixed = [f"{label} ({value:.3f})" for label, value in zip(labels, r_hat, strict=True) if not value <= R_HAT]
    verdict = f"{len(labels) - len(unmixed)} of {len(labels)} (image, latent) pairs have R-hat at most {R_HAT}"
    lines.append(verdict + (f"; not yet mixed: {', '.join(unmixed)}" if unmixed else ""))
    return "\n".join(lines) + "\n"


def _largest(values: Tensor) -> str:
    return f"{values.max():.1e}"


def parse_label(label: str) -> tuple[str, tuple[int, ...]]:
    """``"z[3, 0]" -> ("z", (3, 0))``, the row names of :meth:`Draws.summary`."""
    match = re.fullmatch(r"(.*?)(?:\[([\d, ]+)\])?", label)
    assert match is not None
    return match[1], tuple(int(i) for i in match[2].split(",")) if match[2] else ()


def _worst_and_typical(summary: pd.DataFrame) -> list[tuple[str, tuple[int, ...]]]:
    """The two scalar latents with the largest R-hat and the two in the middle."""
    order = np.argsort(-summary["r_hat"].fillna(np.inf).to_numpy(float))
    middle = len(order) // 2
    chosen = dict.fromkeys([*order[:2], *order[middle : middle + 2]])
    return [parse_label(str(summary.index[i])) for i in chosen]


def _load_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"its values are {array.dtype}, not numbers")
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    except (ValueError, OSError, EOFError, AttributeError) as error:
        raise ConfigError(f"{path} is not a readable .npy array: {error}") from error
