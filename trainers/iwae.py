"""Training by the importance-weighted bound (Burda, Grosse and Salakhutdinov 2016)."""

from typing import get_args

from torch import Tensor, nn

from dgm_infer.arguments import choice, whole_number

from .bounds import Gradient, importance_weighted, log_weights
from .module import EncoderTraining

__all__ = ["IWAETraining"]


class IWAETraining(EncoderTraining):
    """Maximises ``E log 1/k sum_i p(x, z_i) / q(z_i | x)`` over k draws ``z_i ~ q(z | x)``.

    The bound increases with k towards log p(x); with one draw it is the evidence lower bound. The encoder's gradient is
    doubly reparameterised (Tucker et al. 2019), or plain, with a signal-to-noise ratio that falls as k grows.

    Adam on a one-cycle schedule. Batches are images ``[n, *output_shape]``, or tuples that begin with them; 0 or 1
    for a generator of binary pixels. Logs ``train/iwae``, ``val/iwae`` and ``val/elbo``, nats per image. Checkpoints
    can be given to ``generators.load``.

    Args:
        generator: the model to train: an IWAE, a BernoulliVAE, a GaussianVAE, or any module with prior, decoder and
            encoder whose class ``generators.register`` decorates.
        samples: k in training.
        gradient: gradient of the encoder.
        learning_rate: largest learning rate of the schedule.
        warm_up: fraction of all steps in which the learning rate rises, in (0, 1).
        validation_samples: k of ``val/iwae``; null for that of training.

    Raises:
        ArgumentError: a value outside its range.
        CheckpointError: the generator's class cannot be rebuilt from a checkpoint.
        ModelError: the generator has no prior, decoder or encoder.
    """

    def __init__(
        self,
        generator: nn.Module,
        samples: int = 50,
        gradient: Gradient = "doubly_reparameterised",
        learning_rate: float = 1e-3,
        warm_up: float = 0.3,
        validation_samples: int | None = None,
    ):
        super().__init__(generator, learning_rate, warm_up)
        whole_number("IWAETraining", "samples", samples)
        if validation_samples is not None:
            whole_number("IWAETraining", "validation_samples", validation_samples)
        choice("IWAETraining", "gradient", gradient, get_args(Gradient))
        self.samples = samples
        self.gradient: Gradient = gradient
        self.validation_samples = samples if validation_samples is None else validation_samples

    @property
    def metrics(self):
        return ("train/iwae", "val/iwae", "val/elbo")

    def training_step(self, batch, batch_idx: int) -> Tensor:
        images = self.images(batch)
        bound = importance_weighted(log_weights(self.generator, images, self.samples, self.gradient)).mean()
        self.log_mean("train/iwae", bound, len(images))
        return -bound

    def validation_step(self, batch, batch_idx: int) -> None:
        images = self.images(batch)
        weights = log_weights(self.generator, images, self.validation_samples)
        self.log("val/iwae", importance_weighted(weights).mean(), True, batch_size=len(images), sync_dist=True)
        self.log("val/elbo", weights.mean(), batch_size=len(images), sync_dist=True)
