"""What every objective shares: a generator that its checkpoints describe, and the images that it is shown."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from dgm_infer import GenerativeModel
from dgm_infer.errors import ArgumentError, CheckpointError
from generators import BernoulliVAE
from generators.checkpoints import CHECKPOINT_KEY, describe
from generators.networks import single

__all__ = ["GeneratorTraining"]


class GeneratorTraining(LightningModule):
    """A module whose ``generator`` can be taken from its checkpoints by ``generators.load``.

    Batches are images ``[n, *output_shape]``, or tuples that begin with them. Every process of a run on several
    devices draws its own random numbers.

    Raises:
        CheckpointError: the generator's class cannot be rebuilt from a checkpoint.
    """

    def __init__(self, generator: GenerativeModel):
        super().__init__()
        # before hours of training, not at the first checkpoint
        describe(generator)
        self.generator = generator
        self._shown = False
        # sums over the images of an epoch, and their number
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def images(self, batch: Any) -> Tensor:
        """The images of a batch, ``[n, *output_shape]``.

        Raises:
            ArgumentError: they have another shape.
        """
        images = batch[0] if isinstance(batch, tuple | list) else batch
        shape = tuple(self.generator.output_shape)
        if tuple(images.shape[1:]) != shape:
            raise ArgumentError(f"images of shape {tuple(images.shape[1:])} for a generator of output_shape {shape}")
        return images

    def log_mean(self, name: str, value: Tensor, n: int) -> None:
        """Log the mean over all images of the epoch, of which these n have ``value`` on average.

        Once an epoch: Lightning's own sums cost every step half a millisecond.
        """
        value = single(value.detach())
        total, count = self._sums.get(name, (torch.zeros_like(value), 0))
        self._sums[name] = (total + n * value, count + n)

    def on_train_epoch_end(self) -> None:
        for name, (total, count) in self._sums.items():
            # one process of several that stops alone leaves the others waiting
            if not total.isfinite() and self.trainer.world_size == 1:
                raise ArgumentError(
                    f"{name} is {total.item():g} in epoch {self.current_epoch + 1}: training has diverged; lower the "
                    "learning rate"
                )
            self.log(name, total / count, prog_bar=True, batch_size=count, sync_dist=True)
        self._sums.clear()

    def on_train_start(self) -> None:
        # of a run that was broken off
        self._sums.clear()
        if self.trainer.world_size > 1:
            torch.manual_seed(torch.initial_seed() + self.global_rank)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._shown:
            return
        # once: every look at the pixels makes a GPU wait
        self._shown = True
        images = self.images(batch)
        if isinstance(self.generator, BernoulliVAE) and not ((images == 0) | (images == 1)).all():
            grey = images[(images != 0) & (images != 1)][0].item()
            raise ArgumentError(
                f"{type(self.generator).__name__} describes pixels of 0 or 1, not {grey:.3g}: set the data's binarise "
                "to dynamic or static"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = describe(self.generator)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine, found = describe(self.generator), checkpoint.get(CHECKPOINT_KEY)
        if found != mine:
            raise CheckpointError(f"the checkpoint holds {_words(found)}, this run trains {_words(mine)}")


def _words(description: Any) -> str:
    if not isinstance(description, dict):
        return "no generator"
    arguments = ", ".join(f"{name}={value!r}" for name, value in description["config"].items())
    return f"{description['class']}({arguments})"
