"""What makes an interrupted run go on as if it had not been interrupted."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

from dgm_infer.files import complete_file, writable_folder

__all__ = ["RandomState", "WholeFiles"]


class RandomState(Callback):
    """Keeps the states of all random numbers in checkpoints, so that a resumed run is the uninterrupted one.

    Shuffling, augmentation and sampling go on where the checkpoint was written, which has to be between two epochs.
    Runs of several processes draw from streams of their own and are left as they are.
    """

    def __init__(self):
        self._several = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._several = trainer.world_size > 1

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        _, key, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (users' data sets use it)
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": (version, list(words), gauss),
            "numpy": (torch.from_numpy(np.asarray(key, dtype=np.int64)), int(position), int(has_gauss), float(cached)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._several:
            return
        torch.set_rng_state(state_dict["torch"].cpu())
        if torch.cuda.is_available() and len(state_dict["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([state.cpu() for state in state_dict["cuda"]])
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words), gauss))
        key, *rest = state_dict["numpy"]
        np.random.set_state(("MT19937", key.numpy().astype(np.uint32), *rest))  # noqa: NPY002


class WholeFiles(TorchCheckpointIO):
    """Checkpoints that appear complete or not at all: written beside, then renamed.

    Lightning's own writes to the folder for temporary files and moves, which between file systems is a copy that
    ``kill -9`` cuts short.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        writable_folder(target.parent)
        with complete_file(target) as part, part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
