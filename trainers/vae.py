"""Training of variational auto-encoders by the evidence lower bound (Kingma and Welling 2014)."""

from torch import Tensor, nn

from dgm_infer.arguments import positive, whole_number

from .bounds import elbo_terms
from .module import EncoderTraining

__all__ = ["VAETraining"]


class VAETraining(EncoderTraining):
    """Maximises ``ELBO(x) = E_q(z|x)[log p(x|z)] - KL(q(z|x) || p(z))``.

    The divergence has a closed form for a normal encoder and a standard normal prior, and is otherwise estimated from
    the same draws.

    A ``kl_weight`` above 1 multiplies the divergence in training (Higgins et al. 2017), so that the latents of images
    spread like the prior: outputs at prior draws then look like images, even if a small fixed sd would spend the
    latents on details. For a Gaussian decoder it equals training with an sd ``sqrt(kl_weight)`` times larger.

    Adam on a one-cycle schedule. Batches are images ``[n, *output_shape]``, or tuples that begin with them; 0 or 1
    for a generator of binary pixels. Logs ``train/elbo`` and ``val/elbo``, nats per image, and ``train/objective``
    where the divergence has a weight. Checkpoints can be given to ``generators.load``.

    Args:
        generator: the model to train: a GaussianVAE, a BernoulliVAE, an IWAE, or any module with prior, decoder and
            encoder whose class ``generators.register`` decorates.
        learning_rate: largest learning rate of the schedule.
        kl_weight: weight of the divergence in training; logged bounds are the ELBO itself.
        warm_up: fraction of all steps in which the learning rate rises, in (0, 1).
        validation_samples: draws of z that ``val/elbo`` averages over for each image.

    Raises:
        ArgumentError: a value outside its range.
        CheckpointError: the generator's class cannot be rebuilt from a checkpoint.
        ModelError: the generator has no prior, decoder or encoder.
    """

    def __init__(
        self,
        generator: nn.Module,
        learning_rate: float = 4e-3,
        kl_weight: float = 1.0,
        warm_up: float = 0.3,
        validation_samples: int = 16,
    ):
        super().__init__(generator, learning_rate, warm_up)
        positive("VAETraining", "kl_weight", kl_weight)
        whole_number("VAETraining", "validation_samples", validation_samples)
        self.kl_weight = kl_weight
        self.validation_samples = validation_samples

    @property
    def metrics(self):
        return ("train/elbo", "val/elbo", *(["train/objective"] if self.kl_weight != 1 else []))

    def elbo(self, images: Tensor, samples: int = 1, kl_weight: float = 1.0) -> Tensor:
        """The bound per image, its expectation estimated from ``samples`` draws: ``[n, *output_shape] -> [n]``.

        Raises:
            ArgumentError: images of another shape.
        """
        terms = elbo_terms(self.generator, self.images(images), samples)
        return terms.log_likelihood - kl_weight * terms.divergence

    def training_step(self, batch, batch_idx: int) -> Tensor:
        images = self.images(batch)
        likelihood, divergence = (term.mean() for term in elbo_terms(self.generator, images))
        elbo = likelihood - divergence
        self.log_mean("train/elbo", elbo, len(images))
        if self.kl_weight == 1:
            return -elbo
        objective = likelihood - self.kl_weight * divergence
        self.log_mean("train/objective", objective, len(images))
        return -objective

    def validation_step(self, batch, batch_idx: int) -> None:
        images = self.images(batch)
        elbo = self.elbo(images, self.validation_samples).mean()
        self.log("val/elbo", elbo, prog_bar=True, batch_size=len(images), sync_dist=True)
