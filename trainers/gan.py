"""Training of a generator against a critic (Goodfellow et al. 2014; Gulrajani et al. 2017)."""

import copy
from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dgm_infer.arguments import choice, positive, whole_number, within
from dgm_infer.errors import ArgumentError, CheckpointError
from generators import GAN, Critic

from .adversarial import Objective, average_towards, critic_loss, generator_loss, gradient_penalty
from .module import ComparedTraining

__all__ = ["GANTraining"]

# Key of the rest of its state in a Lightning checkpoint.
_CHECKPOINT_KEY = "dgm_infer_gan"


class GANTraining(ComparedTraining):
    """A generator and a critic in turns, by the non-saturating or Wasserstein's objective with a gradient penalty.

    ``generator`` is an exponential moving average of the trained one, and the one that ``generators.load`` takes from
    checkpoints. Without a likelihood, epochs are selected by ``val/energy_distance``, the energy distance in pixels
    between its images and the validation images. Also logs the losses ``train/critic`` and ``train/generator``.

    Batches are images ``[n, *output_shape]``, or tuples that begin with them. Every batch is a step of the critic, and
    every ``critic_steps``-th batch also one of the generator.

    Args:
        generator: the model to train.
        critic: critic of images of the same shape.
        objective: non_saturating or wasserstein.
        gradient_penalty: weight of the penalty of the critic's slope: null for 10 with Wasserstein's objective, for
            none otherwise.
        critic_steps: steps of the critic per step of the generator.
        learning_rate: learning rate of Adam, for both.
        betas: betas of Adam, for both.
        decay: decay of the moving average.

    Raises:
        ArgumentError: a value outside its range, or a critic that does not suit the objective.
        CheckpointError: the generator's class cannot be rebuilt from a checkpoint.
    """

    def __init__(
        self,
        generator: GAN,
        critic: Critic,
        objective: Objective = "non_saturating",
        gradient_penalty: float | None = None,
        critic_steps: int = 1,
        learning_rate: float = 2e-4,
        betas: tuple[float, float] = (0.5, 0.999),
        decay: float = 0.999,
    ):
        super().__init__(copy.deepcopy(generator).requires_grad_(False))
        self.automatic_optimization = False
        penalty = (10.0 if objective == "wasserstein" else 0.0) if gradient_penalty is None else gradient_penalty
        _check(generator, critic, objective, penalty, critic_steps, learning_rate, betas, decay)
        self.trained = generator
        self.critic = critic
        self.objective: Objective = objective
        self.gradient_penalty = penalty
        self.critic_steps = critic_steps
        self.learning_rate = learning_rate
        self.betas = (float(betas[0]), float(betas[1]))
        self.decay = decay
        # steps of the critic so far
        self.steps = 0

    @property
    def metrics(self):
        return ("train/critic", "train/generator", "val/energy_distance")

    def sample(self, n: int, model: GAN, rng: torch.Generator | None = None) -> Tensor:
        """Images ``[n, *output_shape]`` of a generator at prior draws."""
        z = model.input_density.sample((n,), generator=rng, device=rng.device if rng else self.device)
        return model(z.to(self.device)).unflatten(-1, model.output_shape)

    def training_step(self, batch, batch_idx: int) -> None:
        images = self.images(batch)
        critic_optimizer, generator_optimizer = self.optimizers()  # type: ignore[misc]
        self._update(critic_optimizer, self.critic, self.trained, "critic", self._critic_loss(images), len(images))
        self.steps += 1
        if self.steps % self.critic_steps == 0:
            updates = self.steps // self.critic_steps - 1
            # the critic's gradients would be discarded
            self.critic.requires_grad_(self.trainer.world_size > 1)
            loss = generator_loss(self.objective, self.critic(self.sample(len(images), self.trained)))
            self._update(generator_optimizer, self.trained, self.critic, "generator", loss, len(images))
            self.critic.requires_grad_(True)
            assert isinstance(self.generator, GAN)
            average_towards(self.generator, self.trained, self.decay, updates)

    def _critic_loss(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            fake = self.sample(len(images), self.trained)
        loss = critic_loss(self.objective, self.critic(images), self.critic(fake))
        if self.gradient_penalty > 0:
            penalty = gradient_penalty(self.objective, self.critic, images, fake)
            loss = loss + self.gradient_penalty * penalty
        return loss

    def _update(self, optimizer: Any, own: nn.Module, other: nn.Module, name: str, loss: Tensor, n: int) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss if self.trainer.world_size == 1 else loss + _nothing(other.parameters()))
        optimizer.step()
        self.log_mean(f"train/{name}", loss, n)

    def fake(self, n, rng):
        assert isinstance(self.generator, GAN)
        return self.sample(n, self.generator, rng).flatten(1)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(network.parameters(), lr=self.learning_rate, betas=self.betas)
            for network in (self.critic, self.trained)
        ]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_CHECKPOINT_KEY] = {"steps": self.steps, "critic": self.critic.config}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        stored = checkpoint.get(_CHECKPOINT_KEY, {})
        if stored.get("critic") != self.critic.config:
            raise CheckpointError(
                f"the checkpoint holds a critic {stored.get('critic')}, this run {self.critic.config}"
            )
        self.steps = stored["steps"]


def _nothing(parameters: Iterable[Tensor]) -> Tensor:
    """Zero, with zero gradients: processes that train together wait for a gradient of every parameter."""
    return 0 * torch.stack([parameter.sum() for parameter in parameters]).sum()


def _check(
    generator: GAN,
    critic: Critic,
    objective: str,
    penalty: float,
    critic_steps: int,
    learning_rate: float,
    betas: tuple[float, float],
    decay: float,
) -> None:
    if tuple(critic.output_shape) != tuple(generator.output_shape):
        raise ArgumentError(
            f"GANTraining: a critic of images {tuple(critic.output_shape)} for a generator of images "
            f"{tuple(generator.output_shape)}"
        )
    choice("GANTraining", "objective", objective, get_args(Objective))
    within("GANTraining", "gradient_penalty", penalty, 0)
    if penalty > 0 and critic.normalisation == "batch":
        raise ArgumentError(
            "GANTraining: a penalty of the critic's slope at each image excludes batch statistics: choose "
            "normalisation none, group or spectral"
        )
    whole_number("GANTraining", "critic_steps", critic_steps)
    positive("GANTraining", "learning_rate", learning_rate)
    try:
        _, _ = (within("GANTraining", "betas", beta, 0, 1, open_end=True) for beta in betas)
    except (TypeError, ValueError):
        raise ArgumentError(f"GANTraining(betas={betas!r}): must be two numbers in [0, 1)") from None
    within("GANTraining", "decay", decay, 0, 1, open_end=True)
