"""The common part of all objectives: a generator described by its checkpoints, and the images it is trained on."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributions import Bernoulli

from dgm_infer.conditioning.pictures import PixelScale
from dgm_infer.errors import ArgumentError, CheckpointError, ConfigError, ModelError
from dgm_infer.models import LatentVariableModel, base_distribution
from generators.checkpoints import CHECKPOINT_KEY, describe
from generators.networks import single

from .adversarial import energy_distance
from .schedule import adam, check_schedule

__all__ = ["ComparedTraining", "EncoderTraining", "GeneratorTraining"]

# Values that the noise of an augmentation may add to pixels in [0, 1].
_BEYOND = 0.25
# Validation images, and as many generated ones, between which distances are computed.
_COMPARED = 1000
# Seed of the latents of images compared with validation images: the same in every epoch.
_VALIDATION_SEED = 20260


class GeneratorTraining(LightningModule):
    """A module whose ``generator`` can be loaded from its checkpoints by ``generators.load``.

    Batches are images ``[n, *output_shape]``, or tuples that begin with them. In a run on several devices every process
    draws its own random numbers.

    Raises:
        CheckpointError: the generator's class cannot be rebuilt from a checkpoint.
    """

    def __init__(self, generator: nn.Module):
        super().__init__()
        # before hours of training, not at the first checkpoint
        describe(generator)
        self.generator = generator
        self._shown = False
        # sums over the images of an epoch, and their number
        self._sums: dict[str, tuple[Tensor, int]] = {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what it logs, which callbacks can monitor; empty if that is not known."""
        return ()

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return tuple(self.generator.output_shape)  # type: ignore[arg-type]

    def images(self, batch: Any) -> Tensor:
        """The images of a batch, ``[n, *output_shape]``.

        Raises:
            ArgumentError: they have another shape.
        """
        images = batch[0] if isinstance(batch, tuple | list) else batch
        shape = self.output_shape
        if tuple(images.shape[1:]) != shape:
            raise ArgumentError(f"images of shape {tuple(images.shape[1:])} for a generator of output_shape {shape}")
        return images

    def log_mean(self, name: str, value: Tensor, n: int) -> None:
        """Log the mean over all images of the epoch; these n have the mean ``value``.

        Logged once per epoch: Lightning's own sums cost half a millisecond per step.
        """
        value = single(value.detach())
        total, count = self._sums.get(name, (torch.zeros_like(value), 0))
        self._sums[name] = (total + n * value, count + n)

    def on_train_epoch_end(self) -> None:
        for name, (total, count) in self._sums.items():
            finite = bool(total.isfinite())
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                # those of all processes: one that stopped alone would leave the others waiting
                finite = self.trainer.strategy.reduce_boolean_decision(finite)
            if not finite:
                raise ArgumentError(
                    f"{name} is {total.item():g} in epoch {self.current_epoch + 1}: training has diverged; lower the "
                    "learning rate"
                )
            self.log(name, total / count, prog_bar=True, batch_size=count, sync_dist=True)
        self._sums.clear()

    def on_train_start(self) -> None:
        # left by an interrupted run
        self._sums.clear()
        if self.trainer.world_size > 1:
            torch.manual_seed(torch.initial_seed() + self.global_rank)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._shown:
            return
        # once: every check of the pixels makes a GPU wait
        self._shown = True
        self.check_images(self.images(batch))

    def check_images(self, images: Tensor) -> None:
        """Raise :class:`ArgumentError` for images that the generator cannot describe."""
        scale = PixelScale.of(self.generator)
        wide = scale.black < -_BEYOND or scale.white > 1 + _BEYOND
        if wide and images.min() >= -_BEYOND and images.max() <= 1 + _BEYOND:
            raise ArgumentError(
                f"{type(self.generator).__name__} makes pixels from {scale.black:g} to {scale.white:g}, those of the "
                "data are in [0, 1]: set the generator's output_range to [0, 1], or map the data to its range"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = describe(self.generator)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine, found = describe(self.generator), checkpoint.get(CHECKPOINT_KEY)
        if found != mine:
            raise CheckpointError(f"the checkpoint holds {_words(found)}, this run trains {_words(mine)}")


class ComparedTraining(GeneratorTraining):
    """Training without a likelihood: logs ``val/energy_distance``, of generated rows from those of validation images.

    Raises:
        CheckpointError: the generator's class cannot be rebuilt from a checkpoint.
    """

    def __init__(self, generator: nn.Module):
        super().__init__(generator)
        self._compared: list[Tensor] = []

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("train/loss", "val/energy_distance")

    def real(self, images: Tensor) -> Tensor:
        """What of images is compared: ``[n, *output_shape] -> [n, D]``."""
        return images.flatten(1)

    def fake(self, n: int, rng: torch.Generator) -> Tensor:
        """The same of ``n`` outputs of the generator, ``[n, D]``."""
        raise NotImplementedError

    def validation_step(self, batch, batch_idx: int) -> None:
        if sum(map(len, self._compared)) < _COMPARED:
            self._compared.append(self.real(self.images(batch)))

    def on_validation_epoch_end(self) -> None:
        real = torch.cat(self._compared)[:_COMPARED].float()
        self._compared = []
        if len(real) < 2:
            raise ConfigError(f"val/energy_distance needs 2 images for validation, not {len(real)}: keep more for it")
        fake = self.fake(len(real), torch.Generator().manual_seed(_VALIDATION_SEED)).float()
        self.log("val/energy_distance", energy_distance(real, fake), True, sync_dist=True)


class EncoderTraining(GeneratorTraining):
    """Training of a :class:`dgm_infer.models.LatentVariableModel`'s parts, by Adam on a one-cycle schedule.

    Args:
        generator: module with a prior, a decoder and an encoder.
        learning_rate: largest learning rate of the schedule.
        warm_up: fraction of all steps in which the learning rate rises, in (0, 1).

    Raises:
        ArgumentError: a value outside its range.
        CheckpointError: the generator's class cannot be rebuilt from a checkpoint.
        ModelError: the generator lacks one of the parts.
    """

    def __init__(self, generator: nn.Module, learning_rate: float, warm_up: float):
        super().__init__(generator)
        check_schedule(self, learning_rate, warm_up)
        self.learning_rate = learning_rate
        self.warm_up = warm_up
        if self.parts.encoder is None:
            raise ModelError(
                f"{type(self).__name__}: a {type(generator).__name__} has no encoder: give it encoder(x), a "
                "distribution over z"
            )

    @property
    def parts(self) -> LatentVariableModel:
        """The prior, decoder and encoder that are trained."""
        return LatentVariableModel.of(self.generator)

    @property
    def output_shape(self):
        return self.parts.output_shape

    def check_images(self, images):
        super().check_images(images)
        parts = self.parts
        if not parts.discrete:
            return
        pixels = base_distribution(parts.outputs)
        possible = pixels.support.check(images.reshape(len(images), *parts.outputs.event_shape))  # type: ignore[union-attr]
        if not possible.all():
            kind = "pixels of 0 or 1" if isinstance(pixels, Bernoulli) else "discrete pixels"
            grey = images.reshape(possible.shape)[~possible][0].item()
            raise ArgumentError(
                f"{type(self.generator).__name__} describes {kind}, not {grey:.3g}: set the data's binarise to dynamic "
                "or static"
            )

    def configure_optimizers(self) -> Any:
        return adam(self.generator.parameters(), self.trainer, self.learning_rate, self.warm_up)


def _words(description: Any) -> str:
    if not isinstance(description, dict):
        return "no generator"
    arguments = ", ".join(f"{name}={value!r}" for name, value in description["config"].items())
    return f"{description['class']}({arguments})"
