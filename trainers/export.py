"""The trained generator as a separate file."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

import generators
from dgm_infer.errors import ArgumentError, CheckpointError, ConfigError
from dgm_infer.files import writable_folder
from generators.checkpoints import describe

__all__ = ["SaveGenerator", "run_folder"]


class SaveGenerator(Callback):
    """Writes the module's ``generator`` as safetensors and JSON when training ends, for ``generators.load``.

    The files are written atomically. If the module's generator cannot be rebuilt from a file, nothing is written: its
    weights are in the checkpoint.

    Args:
        path: path of the file, with or without its ending; null for ``generator`` in the run folder.
        notes: JSON values stored with the weights, besides epochs, steps and the last value of every metric.
    """

    def __init__(self, path: str | os.PathLike | None = None, notes: dict[str, Any] | None = None):
        self.path = path
        self.notes = notes or {}
        # path of the written weights; None before
        self.written: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.path is not None:
            # before hours of training, not after
            try:
                writable_folder(Path(self.path).parent)
            except ArgumentError as error:
                raise ConfigError(f"export.path={self.path}: {error}") from error
        try:
            _generator(pl_module)
        except CheckpointError as error:
            rank_zero_warn(f"{error}; its weights will be in the checkpoint alone")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # both may wait for all processes, so all of them ask
        folder, reached = run_folder(trainer), trainer.callback_metrics
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        try:
            generator = _generator(pl_module)
        except CheckpointError:
            return
        if generator is None:
            return
        metrics = {name: round(float(value), 3) for name, value in reached.items()}
        training = {"epochs": trainer.current_epoch, "steps": trainer.global_step, **metrics}
        path = folder / "generator" if self.path is None else self.path
        self.written = generators.save(generator, path, self.notes | training)


def run_folder(trainer: Trainer) -> Path:
    """The folder of a run, that of its first process: every process must ask for it, as all wait for that one."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def _generator(module: LightningModule) -> nn.Module | None:
    generator = getattr(module, "generator", None)
    if not isinstance(generator, nn.Module):
        return None
    describe(generator)
    return generator
