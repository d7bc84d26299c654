"""Resuming of interrupted runs as if they had not been interrupted."""

import io
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
    """Stores the states of all random number generators in checkpoints: a resumed run equals the uninterrupted one.

    Shuffling, augmentation and sampling continue from the checkpoint, which must be written between two epochs. Runs
    with several processes draw from their own streams, which are not restored.
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
    """Checkpoints written atomically: to a temporary file in the same folder, then renamed.

    Lightning writes to the system's temporary folder and moves the file, which between file systems is a copy that
    ``kill -9`` can truncate.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        writable_folder(target.parent)
        # in memory first: of a full disk torch says no more than that a write failed
        content = io.BytesIO()
        torch.save(checkpoint, content)
        with complete_file(target) as part, part.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
