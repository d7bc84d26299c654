"""Training of variational auto-encoders by the evidence lower bound (Kingma and Welling 2014)."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence
from torch.optim.lr_scheduler import LambdaLR

from dgm_infer.errors import ArgumentError, CheckpointError
from generators import GaussianVAE
from generators.checkpoints import CHECKPOINT_KEY, describe

__all__ = ["VAETraining", "one_cycle"]


class VAETraining(LightningModule):
    """Maximises ``ELBO(x) = E_q(z|x)[log p(x|z)] - KL(q(z|x) || N(0, I))``, the divergence in closed form.

    A ``kl_weight`` above 1 counts the divergence that many times in training (Higgins et al. 2017), so that the latents
    of images spread like the prior: outputs at prior draws then look like images, also where a small fixed sd would
    spend the latents on details. It equals training with an sd ``sqrt(kl_weight)`` times as large.

    Adam on a one-cycle schedule. Batches are images ``[n, *output_shape]``, or tuples that begin with them. Logs
    ``train/elbo`` and ``val/elbo``, nats an image. Checkpoints can be given to ``generators.load``.

    Args:
        generator: the model to train.
        learning_rate: largest of the schedule.
        kl_weight: of the divergence in training; validation reports the ELBO itself.
        warm_up: fraction of all steps in which the learning rate rises, in (0, 1).
        validation_samples: draws of z that ``val/elbo`` averages over for each image.

    Raises:
        ArgumentError: a value outside its range.
        CheckpointError: the generator's class cannot be rebuilt from a checkpoint.
    """

    def __init__(
        self,
        generator: GaussianVAE,
        learning_rate: float = 4e-3,
        kl_weight: float = 1.0,
        warm_up: float = 0.3,
        validation_samples: int = 16,
    ):
        super().__init__()
        if not learning_rate > 0:
            raise ArgumentError(f"VAETraining(learning_rate={learning_rate:g}): must be positive")
        if not kl_weight > 0:
            raise ArgumentError(f"VAETraining(kl_weight={kl_weight:g}): must be positive")
        if not 0 < warm_up < 1:
            raise ArgumentError(f"VAETraining(warm_up={warm_up:g}): must be between 0 and 1")
        if validation_samples < 1:
            raise ArgumentError(f"VAETraining(validation_samples={validation_samples}): must be 1 or more")
        # before hours of training, not at the first checkpoint
        describe(generator)
        self.generator = generator
        self.learning_rate = learning_rate
        self.kl_weight = kl_weight
        self.warm_up = warm_up
        self.validation_samples = validation_samples

    def elbo(self, images: Tensor, samples: int = 1, kl_weight: float = 1.0) -> Tensor:
        """The bound of each image, its expectation estimated by ``samples`` draws: ``[n, *output_shape] -> [n]``.

        Raises:
            ArgumentError: images of another shape.
        """
        shape = self.generator.output_shape
        if tuple(images.shape[-len(shape) :]) != shape:
            raise ArgumentError(f"images of shape {tuple(images.shape[1:])} for a generator of output_shape {shape}")
        x = images.flatten(-len(shape))
        posterior = self.generator.encoder(x)
        z = posterior.rsample(torch.Size([samples]))
        prior = Independent(Normal(torch.zeros_like(z[0]), torch.ones_like(z[0]), validate_args=False), 1)
        return self.generator.decoder(z).log_prob(x).mean(0) - kl_weight * kl_divergence(posterior, prior)

    def training_step(self, batch, batch_idx: int) -> Tensor:
        images = _images(batch)
        elbo = self.elbo(images, kl_weight=self.kl_weight).mean()
        self.log("train/elbo", elbo, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(images))
        return -elbo

    def validation_step(self, batch, batch_idx: int) -> None:
        images = _images(batch)
        elbo = self.elbo(images, self.validation_samples).mean()
        self.log("val/elbo", elbo, prog_bar=True, batch_size=len(images), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.generator.parameters(), lr=self.learning_rate)
        n_steps = self.trainer.estimated_stepping_batches
        # not torch's OneCycleLR: that one keeps its length in the checkpoint, so that a longer resumed run fails
        schedule = LambdaLR(optimizer, lambda step: one_cycle(step, n_steps, self.warm_up))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = describe(self.generator)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine, found = describe(self.generator), checkpoint.get(CHECKPOINT_KEY)
        if found != mine:
            raise CheckpointError(f"the checkpoint holds {_words(found)}, this run trains {_words(mine)}")


def one_cycle(step: int, n_steps: float, warm_up: float, start: float = 0.04) -> float:
    """Learning rate relative to its largest: a cosine from ``start`` up to 1, then down to 0 (Smith and Topin 2019).

    Args:
        step: steps taken.
        n_steps: of the whole run; infinite for one that keeps the largest rate.
        warm_up: fraction of the steps in which the rate rises.
        start: rate at the first step.
    """
    if math.isinf(n_steps):
        return 1.0
    progress = min(step / n_steps, 1.0)
    if progress < warm_up:
        return start + (1 - start) * (1 - math.cos(math.pi * progress / warm_up)) / 2
    return (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))) / 2


def _images(batch: Any) -> Tensor:
    return batch[0] if isinstance(batch, tuple | list) else batch


def _words(description: Any) -> str:
    if not isinstance(description, dict):
        return "no generator"
    arguments = ", ".join(f"{name}={value!r}" for name, value in description["config"].items())
    return f"{description['class']}({arguments})"
