"""``dgm-infer bench training``: images per second of training by Lightning, beside a loop in plain PyTorch.

Both train the same auto-encoder of 28 x 28 binary images, 50 latents and two hidden layers of 200, with Adam, on the
same images in memory, of which every batch is drawn and made binary again. Lightning's side is what ``dgm-infer train``
runs, its log file included and its progress bar left out: module, data module and trainer. The plain side is the
formulas by hand in a ``for`` loop. They take turns of one epoch; the median of the turns' ratios counts, by the clock
and by the processor's own time, which other programs on the machine disturb less.

On a GPU the two objectives are also trained on MNIST in 32 and in 16 bits, for the bounds that they reach.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from generators import BernoulliVAE
from trainers import IWAETraining, MNISTData, VAETraining
from trainers.data import ImageData, Labelled, Split
from trainers.quiet import quiet

from ..reports.records import write_record
from ..reports.tables import markdown
from .autoencoders import held_out_bounds, trained
from .machine import check_device, checked_cores, device_name
from .plain_loop_peer import one_epoch, synchronise
from .publishing import DEVICES, by_device, cores_of, new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder
from .workers import Clock, torch_threads

__all__ = ["CASES", "Case", "bench", "compared", "table"]

_LEARNING_RATE = 1e-3
_BOUND_SAMPLES = 500


@dataclass(frozen=True)
class Case:
    """What is trained: the importance-weighted bound of k draws, or the ELBO for None."""

    name: str
    samples: int | None
    batch_size: int
    required: float | None
    """Required share of the plain loop's throughput; None if it is only reported."""


CASES = (
    Case("IWAE-50, batches of 100", 50, 100, 0.9),
    Case("VAE, batches of 512", None, 512, 0.9),
    Case("VAE, batches of 100", None, 100, None),
)


def bench(
    rounds: int = 9,
    steps: int = 20,
    epochs: int = 20,
    device: Literal["cpu", "cuda"] = "cpu",
    cores: int | None = None,
    data: str | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Train by Lightning and by a plain loop, in turns.

    Args:
        rounds: turns of either side.
        steps: steps per turn.
        epochs: epochs of the runs in 32 and 16 bits, on cuda only.
        device: device of both sides.
        cores: threads of PyTorch; null for all.
        data: folder with MNIST/raw in it, for the runs on cuda; null for mnist_10k of the reference data.
        seed: seed of all randomness.
        output: folder for ``training_<device>.json`` and ``training.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(rounds=rounds, steps=steps, epochs=epochs)
    check_seed(seed)
    check_device(device)
    cores = checked_cores(cores)
    mnist = MNISTData(data, batch_size=100, binarise="dynamic") if device == "cuda" else None
    if mnist is not None:
        mnist.prepare_data()
    folder = writable_folder(output)
    settings = {"rounds": rounds, "steps": steps, "device": device, "cores": cores, "seed": seed}
    record = new_record("training", settings, ["dgm-infer", "torch", "lightning"], device_name=device_name(device))
    record["cases"] = {}
    with torch_threads(cores), torch.random.fork_rng(), quiet():
        for case in CASES:
            print(f"{case.name}: {rounds} rounds of {steps} steps", flush=True)
            record["cases"][case.name] = compared(case, rounds, steps, device, seed)
        if mnist is not None:
            record["precision"] = _precisions(mnist, epochs, seed)
    path = folder / f"training_{device}.json"
    write_record(path, record)
    publish(path, "training", table(folder))
    return path


def compared(case: Case, rounds: int, steps: int, device: str, seed: int) -> dict[str, Any]:
    """Images per second of either side, medians over the rounds, and Lightning's share of the plain loop's."""
    torch.manual_seed(seed)
    data = _Images(case.batch_size, case.batch_size * steps)
    model = BernoulliVAE(50, data.output_shape, (200, 200)).to(device)
    if case.samples is None:
        module = VAETraining(model, _LEARNING_RATE)
    else:
        module = IWAETraining(model, case.samples, learning_rate=_LEARNING_RATE)
    by_hand = partial(one_epoch, model, data.training.images, case.samples, case.batch_size, _LEARNING_RATE, device)
    sides = {"lightning": partial(_fit, module, data, device), "plain": by_hand}
    for side in sides.values():
        side()
    turns = []
    for i in range(rounds):
        # neither is always the first
        names = list(sides) if i % 2 else list(reversed(sides))
        taken = {name: sides[name]() for name in names}
        turns.append(taken)
    n = len(data.training.images)
    result: dict[str, Any] = {
        name: {
            "images_per_second": median(n / turn[name][0] for turn in turns),
            "step_ms": 1000 * median(turn[name][0] for turn in turns) / steps,
            "turns": [{"seconds": turn[name][0], "cpu_seconds": turn[name][1]} for turn in turns],
        }
        for name in sides
    }
    for i, kind in enumerate(("share", "cpu_share")):
        result[kind] = median(turn["plain"][i] / turn["lightning"][i] for turn in turns)
    return result


class _Images(ImageData):
    """Grey noise of the size of MNIST's images: throughput does not depend on what they show."""

    output_shape = (28, 28)

    def __init__(self, batch_size: int, n: int):
        super().__init__(batch_size, binarise="dynamic")
        self.n = n

    def read(self) -> Split:
        images, labels = torch.rand(self.n, *self.output_shape), torch.zeros(self.n, dtype=torch.int64)
        return Split(*[Labelled(images, labels)] * 3)


class _Epoch(Callback):
    """Seconds of the last epoch, without what comes before and after training."""

    def __init__(self, device: str):
        self.device = device
        self.taken = (math.nan, math.nan)

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        synchronise(self.device)
        self.clock = Clock(math.inf)

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        synchronise(self.device)
        self.taken = (self.clock.elapsed, self.clock.cpu)


def _fit(module: VAETraining | IWAETraining, data: _Images, device: str) -> tuple[float, float]:
    """One epoch by Lightning after one that is not counted: seconds, and those of the processor."""
    epoch = _Epoch(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            max_epochs=2,
            limit_val_batches=0,
            log_every_n_steps=50,
            logger=CSVLogger(folder),
            callbacks=[epoch],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    module.to(device)
    return epoch.taken


def _precisions(data: MNISTData, epochs: int, seed: int) -> dict[str, Any]:
    """Bounds of held-out images after training in 32 and 16 bits, and how fast that was."""
    found: dict[str, Any] = {"epochs": epochs, "bound_samples": _BOUND_SAMPLES}
    for label, samples in (("VAE", None), ("IWAE-50", 50)):
        for precision in ("32-true", "bf16-mixed"):
            print(f"{label}, {precision}: {epochs} epochs of MNIST", flush=True)
            model, figures = trained(samples, data, epochs, 3e-3, seed, "gpu", precision)
            torch.manual_seed(seed)
            _, bound = held_out_bounds(model, data.held_out(), _BOUND_SAMPLES)
            speed = epochs * len(data.training.images) / figures["seconds"]
            found[f"{label}, {precision}"] = {**figures, "images_per_second": speed, "bound": bound.mean().item()}
    return found


def table(folder: Path) -> str:
    """Markdown of the results in a folder, on a processor and on a GPU."""
    records = by_device(folder, "training")
    columns: Sequence[tuple[str, Callable[[dict[str, Any]], str]]] = (
        ("plain loop, images/s", lambda row: f"{row['plain']['images_per_second']:.0f}"),
        ("Lightning, images/s", lambda row: f"{row['lightning']['images_per_second']:.0f}"),
        ("share", lambda row: f"{row['share']:.3f}"),
        ("share by processor time", lambda row: f"{row['cpu_share']:.3f}"),
        ("overhead per step, ms", lambda row: f"{row['lightning']['step_ms'] - row['plain']['step_ms']:.2f}"),
    )
    rows = []
    for case in CASES:
        for device, record in records.items():
            row = None if record is None else record["cases"][case.name]
            cells = ["not measured" if row is None else get(row) for _, get in columns]
            rows.append([case.name, DEVICES[device], *cells])
    parts = [
        "# Training: Lightning beside a plain PyTorch loop\n\n"
        "Auto-encoder of binary 28 x 28 images, 50 latents, two hidden layers of 200, 32 bits. At least 0.9 of the\n"
        "plain loop's throughput is required of IWAE-50 and of batches of 512.\n",
        markdown(["", "", *(name for name, _ in columns)], rows),
    ]
    for device, record in records.items():
        parts += [f"{DEVICES[device]}: not measured.\n"] if record is None else _details(device, record)
    return "\n".join(parts)


def _details(device: str, record: dict[str, Any]) -> list[str]:
    settings = record["settings"]
    where = f"{DEVICES[device]}: `{record['command']}`, {record['date']}, on {record['processor']}"
    where += f" with {record['device_name']}" if record["device_name"] else ""
    parts = [
        f"{where}, {cores_of(settings['cores'])}, load at the start {record['load_average_at_start']}; "
        f"{versions(record)}. Medians over {settings['rounds']} rounds of {settings['steps']} steps.\n"
    ]
    if "precision" in record:
        found = dict(record["precision"])
        epochs, samples = found.pop("epochs"), found.pop("bound_samples")
        header = [f"{epochs} epochs of MNIST", "images/s", f"held-out IWAE-{samples}, nats"]
        rows = [[name, f"{row['images_per_second']:.0f}", f"{row['bound']:.2f}"] for name, row in found.items()]
        parts.append(markdown(header, rows))
    return parts
