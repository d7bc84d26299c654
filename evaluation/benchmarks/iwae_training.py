"""``dgm-infer bench iwae_training``: one auto-encoder of binarised MNIST trained by the ELBO and by the IWAE bound.

Both runs see the same images for the same number of epochs, in networks of the same size from the same initial
weights; each keeps the epoch that is best by its own bound of the validation images. Two questions are answered:

- how much higher the importance-weighted bound of held-out images is, at far more draws than were trained with;
- how much of a gradient g of the encoder, for some images and draws of z, is signal. Its signal-to-noise ratio is
  ``|E g| / sqrt(E |g - E g|^2)``, both expectations over the draws.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dgm_infer.errors import ConfigError
from generators import BernoulliVAE
from trainers import MNISTData
from trainers.bounds import Gradient, importance_weighted, log_weights
from trainers.quiet import quiet

from ..reports.records import write_record
from ..reports.tables import markdown
from .autoencoders import held_out_bounds, trained
from .machine import checked_cores
from .publishing import cores_of, new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder
from .workers import torch_threads

__all__ = ["bench", "gradient_ratio", "held_out_bounds", "table", "trained"]

_GRADIENTS: Sequence[Gradient] = ("plain", "doubly_reparameterised")
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
        epochs: epochs of either run.
        samples: k of the importance-weighted bound in training, and of the gradients compared.
        batch_size: images per step.
        learning_rate: largest of either run's schedule.
        bound_samples: k of the bound of the held-out images.
        held_out: the first so many held-out images; null for all.
        gradients: drawn for either estimator's signal-to-noise ratio.
        gradient_images: held-out images that each of these is of.
        cores: threads of PyTorch; null for all.
        data: folder with MNIST/raw in it; null for mnist_10k of the reference data (DGM_INFER_REFERENCE_DATA).
        seed: seed of all randomness.
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
        raise ConfigError(f"gradients: {gradients} must be >= {2 * _GROUPS}, for a standard error")
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
    record = new_record(
        "iwae_training",
        settings,
        ["dgm-infer", "torch", "lightning"],
        training_images=len(images.training.images),
    )
    record |= {"models": {}, "gradients": {}}
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
    write_record(path, record)
    publish(path, "iwae_training", table(folder))
    return path


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
    gain = record["gain"]
    header = [
        *("objective", "training, s", "processor, s", "best epoch", "validation bound", "held-out ELBO"),
        f"held-out IWAE-{samples}",
    ]
    models = [
        [
            label,
            f"{row['seconds']:.0f}",
            f"{row['cpu_seconds']:.0f}",
            str(row["best_epoch"]),
            f"{row['validation_bound']:.2f}",
            f"{row['elbo']['mean']:.2f}",
            f"{row[f'iwae_{samples}']['mean']:.2f}",
        ]
        for label, row in record["models"].items()
    ]
    ratios = [
        [label, *(f"{row[g]['ratio']:.3g} ± {row[g]['error']:.1g}" for g in _GRADIENTS)]
        for label, row in record["gradients"].items()
    ]
    parts = [
        "# One auto-encoder of binarised MNIST, trained by the ELBO and by the importance-weighted bound\n",
        f"`{record['command']}`, {record['date']}, on {record['processor']}, {cores_of(settings['cores'])}; "
        f"{versions(record)}. {record['training_images']} training images, with new binary pixels in every epoch, "
        f"{settings['epochs']} epochs, 50 latents, two hidden layers of 200; nats per image, over "
        f"{settings['held_out']} held-out images with fixed binary pixels.\n",
        markdown(header, models),
        f"IWAE-{k} is {gain['mean']:.2f} ± {gain['error']:.2f} nats above the VAE (standard error over images).\n",
        f"Signal-to-noise ratio of the encoder's gradient of the IWAE-{k} bound of {settings['gradient_images']} "
        f"images, from {settings['gradients']} gradients each:\n",
        markdown(["weights after training by", "plain", "doubly reparameterised"], ratios),
    ]
    return "\n".join(parts)
