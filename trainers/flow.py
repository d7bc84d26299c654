"""Training of flows by flow matching (Lipman et al. 2023) and of one-step flows by MeanFlow (Geng et al. 2025)."""

import copy
from typing import Any, Literal, get_args

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dgm_infer.arguments import choice, fraction, within
from dgm_infer.arguments.values import shown
from dgm_infer.autodiff.jacobian_products import load_forward_mode
from dgm_infer.errors import ArgumentError
from generators import FlowGenerator, LatentFlow

from .adversarial import average_towards
from .module import ComparedTraining
from .schedule import adam, check_schedule

__all__ = ["Coupling", "FlowMatching", "MeanFlow"]

Coupling = Literal["independent", "optimal"]


class _FlowTraining(ComparedTraining):
    """A flow in pixels, or of the latents of a VAE that stays as it is, and its exponential moving average.

    ``generator`` has the average, which checkpoints and ``generators.load`` take; ``trained`` is the flow itself.
    """

    def __init__(self, generator: FlowGenerator | LatentFlow, learning_rate: float, warm_up: float, decay: float):
        name = type(self).__name__
        if not isinstance(generator, FlowGenerator | LatentFlow):
            raise ArgumentError(f"{name}(generator={shown(generator)}): must be a FlowGenerator or a LatentFlow")
        super().__init__(generator.requires_grad_(False))
        check_schedule(self, learning_rate, warm_up)
        self.learning_rate, self.warm_up = learning_rate, warm_up
        self.decay = within(name, "decay", decay, 0, 1, open_end=True)
        self.trained = copy.deepcopy(self.flow).requires_grad_(True)

    @property
    def flow(self) -> FlowGenerator:
        """The flow of the generator."""
        generator = self.generator
        return generator.flow if isinstance(generator, LatentFlow) else generator  # type: ignore[return-value]

    def points(self, images: Tensor) -> Tensor:
        """Images ``[n, *output_shape]`` as the flow ends in them: pixels of its scale, or latents drawn for them."""
        if isinstance(self.generator, LatentFlow):
            with torch.no_grad():
                rows = self.generator.encoded(images.flatten(1))
        else:
            rows = images.flatten(1)
        return (rows - self.flow.loc) / self.flow.scale

    def real(self, images):
        return self.points(images)

    def fake(self, n, rng):
        u = self.flow.input_density.sample((n,), generator=rng).to(self.device)
        return (self.flow(u) - self.flow.loc) / self.flow.scale

    def loss(self, noise: Tensor, points: Tensor) -> Tensor:
        """The objective of pairs of noise and data, each ``[n, D]``."""
        raise NotImplementedError

    def training_step(self, batch, batch_idx: int) -> Tensor:
        points = self.points(self.images(batch))
        loss = self.loss(torch.randn_like(points), points)
        self.log_mean("train/loss", loss, len(points))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        average_towards(self.flow, self.trained, self.decay, self.global_step - 1)

    def configure_optimizers(self) -> Any:
        return adam(self.trained.parameters(), self.trainer, self.learning_rate, self.warm_up)


class FlowMatching(_FlowTraining):
    """Minimises ``E|v(x_t, t) - (x_1 - x_0)|^2 / D``, ``x_t = (1 - t) x_0 + t x_1``, noise x_0, data x_1, t uniform.

    With the optimal coupling, noise and data of a batch are paired so that the sum of squared distances is smallest
    (Pooladian et al. 2023; Tong et al. 2024): paths are straighter, and fewer steps follow them.

    Adam on a one-cycle schedule. Batches are images ``[n, *output_shape]``, or tuples that begin with them. Logs
    ``train/loss``, and ``val/energy_distance`` of the generator's outputs, of latents for a LatentFlow, from validation
    data.

    Args:
        generator: the flow, or the latent flow whose VAE stays as it is.
        coupling: independent or optimal.
        learning_rate: largest learning rate of the schedule.
        warm_up: fraction of all steps in which the learning rate rises, in (0, 1).
        decay: decay of the moving average.

    Raises:
        ArgumentError: a value outside its range, or a flow of average velocities.
        CheckpointError: the generator's class, or its network's, cannot be rebuilt from a checkpoint.
    """

    def __init__(
        self,
        generator: FlowGenerator | LatentFlow,
        coupling: Coupling = "independent",
        learning_rate: float = 2e-3,
        warm_up: float = 0.1,
        decay: float = 0.999,
    ):
        super().__init__(generator, learning_rate, warm_up, decay)
        self.coupling: Coupling = choice("FlowMatching", "coupling", coupling, get_args(Coupling))
        if self.flow.solver == "average":
            raise ArgumentError("FlowMatching: a flow of average velocities is trained by MeanFlow")

    def loss(self, noise, points):
        if self.coupling == "optimal":
            cost = torch.cdist(noise, points).square()
            _, chosen = linear_sum_assignment(cost.cpu().numpy())
            points = points[torch.from_numpy(chosen).to(points.device)]
        t = torch.rand(len(points), 1, dtype=points.dtype, device=points.device)
        velocity = self.trained.at(torch.lerp(noise, points, t), t.squeeze(-1))
        return (velocity - (points - noise)).square().mean()


class MeanFlow(_FlowTraining):
    """Trains a network of two times, ``w(x, t, s)``, as the average velocity from t to s of the flow of the data.

    Differentiating ``(s - t) w(x_t, t, s) = int_t^s v`` in t along the flow gives ``w = v + (s - t) dw/dt``, ``dw/dt =
    w_x v + w_t``. The loss is the mean squared difference of w from the right side, with the velocity ``x_1 - x_0`` of
    the pair for v and no gradient through the derivative (Geng et al. 2025, algorithm 1; there time runs from data to
    noise, and pairs are weighted by their loss, which in few dimensions biases the mean). One step of
    ``FlowGenerator(w, shape, steps=1, solver="average")`` then makes images.

    Otherwise as :class:`FlowMatching`.

    Args:
        generator: a flow with the solver ``average``, or a latent flow of one.
        share: share of pairs with ``s > t``; the others, ``s = t``, teach the velocity itself.
        learning_rate: largest learning rate of the schedule.
        warm_up: fraction of all steps in which the learning rate rises, in (0, 1).
        decay: decay of the moving average.

    Raises:
        ArgumentError: a value outside its range, or a flow with another solver.
        CheckpointError: the generator's class, or its network's, cannot be rebuilt from a checkpoint.
    """

    def __init__(
        self,
        generator: FlowGenerator | LatentFlow,
        share: float = 0.5,
        learning_rate: float = 2e-3,
        warm_up: float = 0.1,
        decay: float = 0.999,
    ):
        super().__init__(generator, learning_rate, warm_up, decay)
        self.share = fraction("MeanFlow", "share", share)
        if self.flow.solver != "average":
            raise ArgumentError(
                f"MeanFlow: a flow with solver={self.flow.solver!r}: must be 'average', of a network of two times"
            )

    def loss(self, noise, points):
        n = len(points)
        times = torch.rand(n, 2, dtype=points.dtype, device=points.device).sort(-1).values
        t, s = times.unbind(-1)
        s = torch.where(torch.rand_like(s) < self.share, s, t)
        x, velocity = torch.lerp(noise, points, t.unsqueeze(-1)), points - noise
        tangents = (velocity, torch.ones_like(t), torch.zeros_like(s))
        load_forward_mode()
        average, slope = torch.func.jvp(self.trained.at, (x, t, s), tangents)  # type: ignore[misc]
        target = velocity + (s - t).unsqueeze(-1) * slope.detach()
        return (average - target).square().mean()
