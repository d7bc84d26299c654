"""Auto-encoders of binarised MNIST: trained by either bound, and their bounds of held-out images."""

import math
import tempfile
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import generators
from generators import BernoulliVAE
from trainers import IWAETraining, MNISTData, VAETraining
from trainers.bounds import importance_weighted, log_weights

from .workers import Clock

__all__ = ["held_out_bounds", "trained"]

# Rows that go through the decoder at once.
_ROWS = 10_000


def trained(
    samples: int | None,
    data: MNISTData,
    epochs: int,
    learning_rate: float,
    seed: int,
    accelerator: str = "cpu",
    precision: Any = "32-true",
) -> tuple[BernoulliVAE, dict[str, Any]]:
    """The best epoch of a run by the importance-weighted bound, or the ELBO if ``samples`` is None; and its seconds,
    processor seconds, epoch and bound."""
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
