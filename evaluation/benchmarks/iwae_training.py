"""``dgm-infer bench iwae_training``: one auto-encoder of binarised MNIST trained by the ELBO and by the IWAE bound.

Both runs see the same images for the same number of epochs, in networks of the same size from the same initial
weights; each keeps the epoch that is best by its own bound of the validation images. Two questions are answered:

- how much higher the importance-weighted bound of held-out images is, at far more draws than were trained with;
- how much of a gradient g of the encoder, for some images and draws of z, is signal. Its signal-to-noise ratio is
  ``|E g| / sqrt(E |g - E g|^2)``, both expectations over the draws.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import generators
from dgm_infer.errors import ConfigError
from generators import BernoulliVAE
from trainers import IWAETraining, MNISTData, VAETraining
from trainers.bounds import Gradient, importance_weighted, log_weights

from ..commands.train import quiet
from .workers import (
    Clock,
    check_counts,
    check_seed,
    checked_cores,
    machine,
    options,
    plain,
    torch_threads,
    writable_folder,
)

__all__ = ["bench", "gradient_ratio", "held_out_bounds", "table", "trained"]

_GRADIENTS: Sequence[Gradient] = ("plain", "doubly_reparameterised")
# Rows that go through the decoder at once.
_ROWS = 10_000
# Groups of gradients, whose spread gives the error of a ratio.
_GROUPS = 8


def bench(
    epochs: int = 40,
    samples: int = 50,
    batch_size: int = 100,
    learning_rate: float = 3e-3,
    bound_samples: int = 5000,
    held_out: int | None = None,
    gradients: int = 1000,
    gradient_images: int = 20,
    cores: int | None = None,
    data: str | None = None,
    seed: int = 1,
    output: str = "evaluation/results",
) -> Path:
    """Train a VAE and an IWAE of the same size on binarised MNIST, and compare them on held-out images.

    Args:
        epochs: of either run.
        samples: k of the importance-weighted bound in training, and of the gradients compared.
        batch_size: images a step.
        learning_rate: largest of either run's schedule.
        bound_samples: k of the bound of the held-out images.
        held_out: the first so many held-out images; null for all.
        gradients: drawn for either estimator's signal-to-noise ratio.
        gradient_images: held-out images that each of these is of.
        cores: threads of PyTorch; null for all.
        data: folder with MNIST/raw in it; null for mnist_10k of the reference data (DGM_INFER_REFERENCE_DATA).
        seed: of all randomness.
        output: folder for ``iwae_training.json`` and ``iwae_training.md``.

    Returns:
        path of the JSON file.
    """
    counts = {
        "epochs": epochs,
        "samples": samples,
        "batch_size": batch_size,
        "bound_samples": bound_samples,
        "gradient_images": gradient_images,
    }
    check_counts(**counts)
    if gradients < 2 * _GROUPS:
        raise ConfigError(f"gradients: {gradients} must be {2 * _GROUPS} or more, for a standard error")
    if not learning_rate > 0:
        raise ConfigError(f"learning_rate: {learning_rate:g} must be positive")
    check_seed(seed)
    cores = checked_cores(cores)
    images = MNISTData(data, batch_size=batch_size, binarise="dynamic")
    images.prepare_data()
    test = images.held_out(held_out)
    if gradient_images > len(test):
        raise ConfigError(f"gradient_images: {gradient_images} must be at most the {len(test)} held-out images")
    folder = writable_folder(output)
    settings = {
        **counts,
        "learning_rate": learning_rate,
        "held_out": len(test),
        "gradients": gradients,
        "cores": cores,
        "seed": seed,
    }
    record: dict[str, Any] = {
        "command": "dgm-infer bench iwae_training " + options(settings),
        **machine(["dgm-infer", "torch", "lightning"]),
        "training_images": len(images.training.images),
        "settings": settings,
        "models": {},
        "gradients": {},
    }
    bounds = {}
    with torch_threads(cores), torch.random.fork_rng(devices=[]), quiet():
        for label, k in (("VAE", None), (f"IWAE-{samples}", samples)):
            print(f"{label}: {epochs} epochs of {len(images.training.images)} images", flush=True)
            model, figures = trained(k, images, epochs, learning_rate, seed)
            print(f"  {figures['seconds']:.0f} s, best epoch {figures['best_epoch']}", flush=True)
            torch.manual_seed(seed)
            bounds[label] = held_out_bounds(model, test, bound_samples)
            elbo, iwae = bounds[label]
            figures |= {"elbo": _mean(elbo), f"iwae_{bound_samples}": _mean(iwae)}
            record["models"][label] = figures
            torch.manual_seed(seed)
            record["gradients"][label] = {
                gradient: gradient_ratio(model, test[:gradient_images], samples, gradient, gradients)
                for gradient in _GRADIENTS
            }
    ours, theirs = (bounds[label][1] for label in (f"IWAE-{samples}", "VAE"))
    record["gain"] = _mean(ours - theirs)
    path = folder / "iwae_training.json"
    path.write_text(json.dumps(plain(record), indent=2) + "\n")
    (folder / "iwae_training.md").write_text(table(folder))
    print(table(folder), end="")
    print(f"results in {folder}: {path.name}, iwae_training.md")
    return path


def trained(
    samples: int | None,
    data: MNISTData,
    epochs: int,
    learning_rate: float,
    seed: int,
    accelerator: str = "cpu",
    precision: Any = "32-true",
) -> tuple[BernoulliVAE, dict[str, Any]]:
    """The best epoch of a run by the importance-weighted bound, by the ELBO for None; seconds, those of
    the processor, epoch and bound."""
    torch.manual_seed(seed)
    model = BernoulliVAE(50, data.output_shape, (200, 200))
    module = (
        VAETraining(model, learning_rate)
        if samples is None
        else IWAETraining(model, samples, learning_rate=learning_rate)
    )
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val/elbo" if samples is None else "val/iwae", mode="max")
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            precision=precision,
            max_epochs=epochs,
            # so that the last epoch is among those compared
            check_val_every_n_epoch=1 if epochs % 2 else 2,
            num_sanity_val_steps=0,
            callbacks=[best],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        clock = Clock(math.inf)
        trainer.fit(module, datamodule=data)
        seconds = {"seconds": clock.elapsed, "cpu_seconds": clock.cpu}
        chosen = generators.load(best.best_model_path)
        epoch = torch.load(best.best_model_path, weights_only=True)["epoch"] + 1
    assert isinstance(chosen, BernoulliVAE)
    assert best.best_model_score is not None
    return chosen, {**seconds, "best_epoch": epoch, "validation_bound": best.best_model_score.item()}


@torch.no_grad()
def held_out_bounds(model: BernoulliVAE, images: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The ELBO and the importance-weighted bound of every image from the same draws, float64: ``[n]``, ``[n]``."""
    parts = []
    for some in images.split(100):
        at_once = max(1, _ROWS // len(some))
        counts = [min(at_once, samples - done) for done in range(0, samples, at_once)]
        parts.append(torch.cat([log_weights(model, some, n).double() for n in counts]))
    weights = torch.cat(parts, -1)
    return weights.mean(0), importance_weighted(weights)


def gradient_ratio(model: BernoulliVAE, images: Tensor, k: int, gradient: Gradient, n: int) -> dict[str, float]:
    """Signal-to-noise ratio of the encoder's gradient of the mean bound of ``images``, from ``n`` gradients.

    The squared norm of a mean of m gradients exceeds that of their expectation by the variance over m, which is
    subtracted. ``error`` is a standard error, from the spread over groups of gradients.
    """
    parameters = list(model.encoder.parameters())
    m = n // _GROUPS
    signals, noises = [], []
    for _ in range(_GROUPS):
        total = squares = torch.zeros(())
        for _ in range(m):
            bound = importance_weighted(log_weights(model, images, k, gradient)).mean()
            g = torch.cat([part.flatten() for part in torch.autograd.grad(bound, parameters)])
            total, squares = total + g, squares + g.double().square().sum()
        norm = total.div(m).double().square().sum()
        variance = (squares / m - norm) * m / (m - 1)
        signals.append(norm - variance / m)
        noises.append(variance)
    signal, noise = torch.stack(signals), torch.stack(noises).mean()
    ratio = (signal.mean().clamp_min(0) / noise).sqrt()
    error = signal.std() / noise / (_GROUPS**0.5 * 2 * ratio)
    return {"ratio": ratio.item(), "error": error.item(), "signal": signal.mean().item(), "noise": noise.item()}


def _mean(values: Tensor) -> dict[str, float]:
    """Over images, with the standard error for images of the kind."""
    return {"mean": values.mean().item(), "error": values.std().item() / len(values) ** 0.5}


def table(folder: Path) -> str:
    """Markdown of the results in a folder."""
    record = json.loads((folder / "iwae_training.json").read_text())
    settings = record["settings"]
    k, samples = settings["samples"], settings["bound_samples"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    gain = record["gain"]
    lines = [
        "# One auto-encoder of binarised MNIST, trained by the ELBO and by the importance-weighted bound",
        "",
        f"`{record['command']}`, {record['date']}, on {record['processor']}, {settings['cores']} "
        f"{'core' if settings['cores'] == 1 else 'cores'}; {versions}. {record['training_images']} training images, "
        f"with new binary pixels in every epoch, {settings['epochs']} epochs, 50 latents, two hidden layers of 200; "
        f"nats an image, over {settings['held_out']} held-out images with fixed binary pixels.",
        "",
        "| objective | training, s | processor, s | best epoch | validation bound | held-out ELBO "
        f"| held-out IWAE-{samples} |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, row in record["models"].items():
        elbo, iwae = row["elbo"], row[f"iwae_{samples}"]
        lines.append(
            f"| {label} | {row['seconds']:.0f} | {row['cpu_seconds']:.0f} | {row['best_epoch']} "
            f"| {row['validation_bound']:.2f} | {elbo['mean']:.2f} | {iwae['mean']:.2f} |"
        )
    lines += [
        "",
        f"IWAE-{k} is {gain['mean']:.2f} ± {gain['error']:.2f} nats above the VAE (standard error over images).",
        "",
        f"Signal-to-noise ratio of the encoder's gradient of the IWAE-{k} bound of {settings['gradient_images']} "
        f"images, from {settings['gradients']} gradients each:",
        "",
        "| weights after training by | plain | doubly reparameterised |",
        "|---|---|---|",
    ]
    for label, row in record["gradients"].items():
        cells = " | ".join(f"{row[g]['ratio']:.3g} ± {row[g]['error']:.1g}" for g in _GRADIENTS)
        lines.append(f"| {label} | {cells} |")
    return "\n".join(lines) + "\n"
