"""One progress bar for all of training."""

import math
import sys

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

__all__ = ["TrainingProgress"]


class TrainingProgress(ProgressBar):
    """Counts the steps of all epochs on one line, with the metrics logged for the progress bar.

    Lightning's own bar restarts every epoch: hundreds of bars if an epoch takes a tenth of a second.
    """

    def __init__(self):
        super().__init__()
        self._enabled = True
        self._bar: tqdm | None = None

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def print(self, *args, sep: str = " ") -> None:
        tqdm.write(sep.join(map(str, args)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        self._bar = tqdm(
            desc="training",
            unit="step",
            total=int(total) if math.isfinite(total) else None,
            initial=trainer.global_step,
            disable=not self._enabled,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        if self._bar is not None:
            # steps of the optimiser, which accumulation makes fewer than batches; with several optimisers, batches
            steps = trainer.global_step if pl_module.automatic_optimization else trainer.fit_loop.total_batch_idx + 1
            self._bar.update(steps - self._bar.n)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_metrics(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_metrics(trainer)
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _show_metrics(self, trainer: Trainer) -> None:
        """Show the metrics of the epochs so far.

        A module logs the means of the last one after the callbacks' ``on_train_epoch_end``.
        """
        if self._bar is not None and trainer.current_epoch > 0:
            metrics = {name: value for name, value in trainer.progress_bar_metrics.items() if name != "v_num"}
            self._bar.set_postfix({"epoch": trainer.current_epoch, **metrics}, refresh=False)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
