"""``dgm-infer bench completions``: how good half-observed images are completed, generator by generator.

A sampler can be exact and its generator poor. Two rows per generator tell which: for images that the generator made
itself, intervals of exact draws cover 90 % whatever the generator; for held-out images they do only if the generator
describes them. Beside them, the same scores of the nearest training images as completions.

Coverage and the continuous ranked probability score are those of hidden pixels. The class of completed images is that
of a convolutional classifier trained on real images, its probabilities averaged over completions.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import dgm_infer as dgm
import generators
from dgm_infer.arguments import positive
from dgm_infer.errors import ConfigError, reported_as, uninterrupted
from dgm_infer.models import CensoredNormal, as_generative_model, base_distribution, reference_tensor
from generators import LatentPosterior
from trainers import DigitsData, FashionMNISTData, MNISTData
from trainers.data import ImageData

from ..reports.mixing import R_HAT
from ..reports.records import write_record
from ..reports.tables import markdown
from .classifier import Classifier, train_classifier
from .machine import checked_cores
from .noisy_decoder import NoisyDecoder
from .publishing import measured_before, new_record, publish
from .scores import class_scores, covered, crps
from .settings import check_counts, check_seed, writable_folder
from .workers import torch_threads

__all__ = ["bench", "nearest_completions", "page", "posterior", "scorecard", "scored"]

# The data of shipped generators, by the beginning of their names.
DATA: dict[str, type[ImageData]] = {"digits": DigitsData, "mnist": MNISTData, "fashion": FashionMNISTData}
# Nearest training images that serve as completions.
_NEIGHBOURS = 19


class Pictures(NamedTuple):
    """Images to complete; labels None where they are unknown."""

    images: Tensor
    labels: Tensor | None


def bench(
    generators: str = "digits_vae,digits_gan,mnist_vae,mnist_gan",
    images: int = 100,
    chains: int = 4,
    warmup: int = 150,
    draws: int = 100,
    noise: float = 0.1,
    own: bool = True,
    cores: int | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Complete held-out images from their top half, and score the completions.

    What an earlier run with the same settings has measured is kept: give the generators that are new.

    Args:
        generators: names or paths of generators, separated by commas; a path is ``digits=PATH``, ``mnist=PATH`` or
            ``fashion=PATH``, which says the data.
        images: the first so many held-out images.
        chains: chains per image.
        warmup: iterations that adapt the kernel, HMC on the latents.
        draws: completions per chain.
        noise: standard deviation of the output noise that generators without noise of their own are given.
        own: also complete as many images that the generator made, which tells its faults from the sampler's.
        cores: processor cores; null for all of them.
        seed: seed of all randomness.
        output: folder for ``completions.json`` and ``completions.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(images=images, warmup=warmup)
    check_counts(2, chains=chains, draws=draws)
    check_seed(seed)
    with reported_as(ConfigError):
        positive("bench", "noise", noise)
    cores = checked_cores(cores)
    chosen = {entry.strip(): _named(entry.strip()) for entry in generators.split(",")}
    for _, model in chosen.values():
        # before anything is measured
        _parts(model, noise)
    folder = writable_folder(output)
    path = folder / "completions.json"
    settings = {
        "images": images,
        "chains": chains,
        "warmup": warmup,
        "draws": draws,
        "noise": noise,
        "own": own,
        "cores": cores,
        "seed": seed,
    }
    measured = measured_before(path, settings, "data", "generators")
    named = ",".join(dict.fromkeys([*measured["generators"], *chosen]))
    record = new_record("completions", {"generators": named, **settings}, ["dgm-infer", "torch", "numpy"]) | measured
    with torch_threads(cores):
        for kind in dict.fromkeys(kind for kind, _ in chosen.values()):
            data = DATA[kind]()
            held_out = Pictures(data.held_out(images), data.held_out_labels(images))
            classifier = train_classifier(data.training, seed)
            record["data"][kind] = _without_generator(data, held_out, classifier, seed)
            for name, model in ((name, model) for name, (of, model) in chosen.items() if of == kind):
                print(f"{name}: {images} images x {chains} chains", flush=True)
                row = {"data": kind, "held_out": _completed(model, held_out, classifier, settings)}
                if own:
                    row["own"] = _completed(model, Pictures(_made(model, images, noise, seed), None), None, settings)
                record["generators"][name] = row
                # after every generator: what was measured survives whatever happens to the next
                write_record(path, record)
    publish(path, "completions", page(record))
    return path


def _named(entry: str) -> tuple[str, nn.Module]:
    """Kind of data and model of one of ``bench(generators=...)``."""
    kind, _, path = entry.partition("=") if "=" in entry else (entry.split("_")[0], "", entry)
    if kind not in DATA:
        raise ConfigError(f"generators: {entry!r} names no data: give one of {', '.join(DATA)}, as in mnist=PATH")
    model = generators.load(path)
    if tuple(model.output_shape) != DATA[kind].output_shape:
        raise ConfigError(f"generators: {path} makes images {tuple(model.output_shape)}, not those of {kind}")
    return kind, model


def _parts(model: nn.Module, noise: float) -> tuple[nn.Module, dgm.models.InputDensity]:
    """A decoder of normal pixels, and the density of its latents.

    Raises:
        ConfigError: the pixels are discrete.
    """
    found = dgm.models.LatentVariableModel.find(model)
    if found is None:
        generator = as_generative_model(model)
        return NoisyDecoder(generator, noise), generator.input_density
    if not isinstance(base_distribution(found.outputs), Normal | CensoredNormal):
        raise ConfigError(f"generators: a {type(model).__name__} has discrete pixels, which intervals do not describe")
    return found.decoder, found.prior


def _made(model: nn.Module, n: int, noise: float, seed: int) -> Tensor:
    """Images of the generator, with its noise: ``[n, *output_shape]``."""
    decoder, prior = _parts(model, noise)
    like = reference_tensor(decoder)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        z = prior.sample((n,), generator=rng, dtype=like.dtype)
        # not the seed itself, which would make the noise of the same numbers as z
        torch.manual_seed(int(torch.randint(2**62, (), generator=rng)))
        return decoder(z).sample().reshape(n, *model.output_shape)  # type: ignore[arg-type]


def top_half(shape: tuple[int, ...]) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[..., : shape[-2] // 2, :] = True
    return mask


def posterior(model: nn.Module, images: Tensor, mask: Tensor, noise: float) -> LatentPosterior:
    """The posterior of the latents given the observed pixels of every image.

    Args:
        model: a generator with normal outputs, or one without noise.
        images: ``[n, *output_shape]``.
        mask: ``[*output_shape]``, True = observed.
        noise: standard deviation of the noise that a generator without noise is given.
    """
    decoder, prior = _parts(model, noise)
    return LatentPosterior(decoder, images, prior, mask)


def _completed(
    model: nn.Module, pictures: Pictures, classifier: Classifier | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Sample the completions of some images; their scores, and how well the chains mixed."""
    mask, seed = top_half(tuple(pictures.images.shape[1:])), settings["seed"]
    problem = posterior(model, pictures.images, mask, settings["noise"])
    started = time.perf_counter()
    sizes = {name: settings[name] for name in ("chains", "warmup", "draws")}
    result = uninterrupted(dgm.sample(problem, **sizes, seed=seed))
    seconds = time.perf_counter() - started
    summary = result.summary()
    completions = result.generate(seed=seed).flatten(0, 1)
    return scored(completions, pictures.images, mask, pictures.labels, classifier, seed, settings["chains"]) | {
        "seconds": seconds,
        "mixed": float((summary["r_hat"].to_numpy(float) <= R_HAT).mean()),
        "min_ess": float(summary["ess_bulk"].to_numpy(float).min()),
    }


def scored(
    completions: Tensor,
    images: Tensor,
    mask: Tensor,
    labels: Tensor | None,
    classifier: Classifier | None,
    seed: int,
    chains: int = 1,
) -> dict[str, Any]:
    """Means over images of the scores of completions, with standard errors.

    Args:
        completions: ``[S, n, *shape]``, S at least 2.
        images: the true ones, ``[n, *shape]``.
        mask: ``[*shape]``, True = observed.
        labels: ``[n]``; None without a class.
        classifier: judge of the class; None without a class.
        seed: seed of the randomised ends of intervals.
        chains: chains that the completions are draws of, one after the other; 1 if they are independent.
    """
    hidden, truth = completions[..., ~mask], images[..., ~mask]
    rng = torch.Generator().manual_seed(seed)
    scores = {
        "coverage": _estimate(covered(hidden, truth, rng).double().mean(-1)),
        "crps": _estimate(crps(hidden, truth, chains).double().mean(-1)),
    }
    if labels is None or classifier is None:
        return scores
    probabilities = classifier.probabilities(completions).double().mean(0)
    judged = class_scores(probabilities, labels)
    return scores | {
        "class_log_score": _estimate(judged.log_score),
        "accuracy": judged.accuracy,
        "calibration_error": judged.calibration_error,
    }


def _estimate(values: Tensor) -> dict[str, float]:
    """Mean over images and its standard error."""
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return {"mean": values.mean().item(), "std_error": error}


def nearest_completions(images: Tensor, mask: Tensor, training: Tensor, n: int = _NEIGHBOURS) -> Tensor:
    """The training images whose observed pixels are nearest, the observed ones replaced: ``[n, images, *shape]``."""
    nearest = torch.cdist(images[..., mask], training[..., mask]).topk(n, largest=False).indices
    return torch.where(mask, images, training[nearest.T])


def _without_generator(data: ImageData, held_out: Pictures, classifier: Classifier, seed: int) -> dict[str, Any]:
    """Scores of the nearest training images, and of the classifier on the whole images."""
    images, labels = held_out
    assert labels is not None
    mask = top_half(tuple(images.shape[1:]))
    nearest = nearest_completions(images, mask, data.training.images)
    judged = class_scores(classifier.probabilities(images).double(), labels)
    return {
        "neighbours": scored(nearest, images, mask, labels, classifier, seed),
        "complete": {
            "class_log_score": _estimate(judged.log_score),
            "accuracy": judged.accuracy,
            "calibration_error": judged.calibration_error,
        },
    }


_HEADER = [
    "generator",
    "images",
    "coverage of 90 %",
    "CRPS",
    "class log score",
    "accuracy",
    "calibration error",
    "mixed",
    "seconds",
]


def scorecard(record: Mapping[str, Any]) -> str:
    """One row per generator and kind of images, under those of the nearest training images."""
    rows = []
    for kind, others in record["data"].items():
        rows.append([f"{kind}: nearest training images", "held out", *_cells(others["neighbours"])])
        for name, row in record["generators"].items():
            if row["data"] == kind:
                rows.append([name, "held out", *_cells(row["held_out"])])
                if "own" in row:
                    rows.append(["", "its own", *_cells(row["own"])])
        rows.append([f"{kind}: the whole images", "held out", *_cells(others["complete"])])
    return markdown(_HEADER, rows)


def _cells(row: Mapping[str, Any]) -> list[str]:
    def number(name: str, form: str) -> str:
        value = row.get(name)
        if value is None:
            return ""
        if isinstance(value, Mapping):
            # one image has no standard error
            error = value["std_error"]
            return format(value["mean"], form) + ("" if error is None else f" ± {error:{form}}")
        return format(value, form)

    forms = {
        "coverage": ".3f",
        "crps": ".4f",
        "class_log_score": ".2f",
        "accuracy": ".2f",
        "calibration_error": ".2f",
        "mixed": ".0%",
        "seconds": ".0f",
    }
    return [number(name, form) for name, form in forms.items()]


def page(record: Mapping[str, Any]) -> str:
    """The page of ``dgm-infer bench completions``."""
    settings, versions = record["settings"], record["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    machine = f"on {record['processor']}, load at the start {record['load_average_at_start']}; {named}"
    return f"""# Completions of half-observed images

The top half of {settings["images"]} images is observed, the rest completed by {settings["chains"]} chains of
{settings["draws"]} draws per image. A calibrated prediction has coverage 0.9; CRPS and the calibration error are the
better the lower, the class log score (nats) the higher. Mixed: share of (image, latent) pairs with R-hat at most 1.05.

{scorecard(record)}
`{record["command"]}`, {record["date"]}, {machine}.
"""
