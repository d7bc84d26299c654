"""Flows of velocity networks as functions of noise (Lipman et al. 2023), in pixels and in the latents of a VAE."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from dgm_infer import StandardNormal
from dgm_infer.arguments import allocatable, choice, finite, function, instance, positive, sizes, whole_number
from dgm_infer.errors import ArgumentError, ModelError, cause
from dgm_infer.models import LatentVariableModel, frozen_copy, reference_tensor

from .bernoulli_vae import GeneratedImages
from .registry import register
from .steps import Step, SteppedGenerator, check_floats

__all__ = ["FlowGenerator", "LatentFlow", "Solver"]

Solver = Literal["euler", "midpoint", "heun", "average"]


@register
class FlowGenerator(SteppedGenerator):
    """``x = loc + scale y(1)``, ``dy/dt = v(y, t)`` from noise ``y(0) = u`` by a fixed number of equal steps h.

    - ``euler``: ``y + h v(y, t)``
    - ``midpoint``: ``y + h v(y + h v(y, t) / 2, t + h / 2)``
    - ``heun``: ``y + h (v(y, t) + v(y + h v(y, t), t + h)) / 2``
    - ``average``: ``y + h v(y, t, t + h)``, of a network of two times that gives the average velocity between them
      (``trainers.MeanFlow``; Geng et al. 2025), which one step serves

    The velocity takes rows ``y [n, *shape]`` and their times ``t [n]`` in [0, 1], 0 for noise and 1 for data, and
    returns ``[n, *shape]``. Latent: ``u``.

    Args:
        velocity: the network, or any function.
        shape: shape of an image; an integer for vectors.
        steps: number of steps.
        solver: as above; midpoint and heun evaluate the network twice a step.
        loc: number added to the flow's outputs.
        scale: number that the flow's outputs are multiplied by: flows are best trained on data of variance 1.

    Raises:
        ArgumentError: a number outside its range, or a network with weights of 16 bits.
        ModelError: the network does not take such rows and times, or returns another shape.
    """

    velocity: Any

    def __init__(
        self,
        velocity: nn.Module | Callable[..., Tensor],
        shape: int | Sequence[int],
        steps: int = 8,
        solver: Solver = "midpoint",
        loc: float = 0.0,
        scale: float = 1.0,
    ):
        shape = sizes("FlowGenerator", "shape", (shape,) if isinstance(shape, int) else shape)
        allocatable("FlowGenerator", "shape", shape, 4 * math.prod(shape), "give the shape of one output")
        scale = positive("FlowGenerator", "scale", scale)
        centre = finite("FlowGenerator", "loc", loc, torch.float64)
        if centre.numel() != 1:
            raise ArgumentError(f"FlowGenerator(loc of shape {tuple(centre.shape)}): must be a number")
        loc = centre.item()
        super().__init__(shape, loc, scale)
        self.velocity = function("FlowGenerator", "velocity", velocity, "a network v(x, t)")
        check_floats("FlowGenerator", "velocity", velocity)
        self.steps = whole_number("FlowGenerator", "steps", steps)
        self.solver: Solver = choice("FlowGenerator", "solver", solver, get_args(Solver))
        self.config: dict[str, Any] = {
            "velocity": velocity,
            "shape": list(shape),
            "steps": steps,
            "solver": solver,
            "loc": loc,
            "scale": scale,
        }
        # only the flag: train() would change the caller's network
        self.training = isinstance(velocity, nn.Module) and any(part.training for part in velocity.modules())
        self._try()

    def at(self, x: Tensor, *times: Tensor | float) -> Tensor:
        """The network's velocity of rows ``[n, D]`` at one time: ``[n, D]``."""
        rows = x.reshape(-1, *self.output_shape)
        n = len(rows)
        # a number that is made a tensor of a device is copied there, for which the host waits
        given = [t.to(x).expand(n) if isinstance(t, Tensor) else x.new_full((n,), t) for t in times]
        return self.velocity(rows, *given).reshape(x.shape)

    def steps_of(self, like):
        h = 1 / self.steps
        return [Step(self._step(k * h, h), 1.0) for k in range(self.steps)]

    def _step(self, t: float, h: float) -> Callable[[Tensor], Tensor]:
        v = self.at
        if self.solver == "euler":
            return lambda x: x + h * v(x, t)
        if self.solver == "midpoint":
            return lambda x: x + h * v(x + h / 2 * v(x, t), t + h / 2)
        if self.solver == "average":
            return lambda x: x + h * v(x, t, t + h)

        def heun(x: Tensor) -> Tensor:
            first = v(x, t)
            return x + h / 2 * (first + v(x + h * first, t + h))

        return heun

    def latents(self, u):
        return {"u": u}

    def _try(self) -> None:
        """Call the network for two rows, and for three: a time of all rows must not be taken for a row's entries."""
        like = reference_tensor(self)
        # on a copy: the modes and statistics of the caller's network stay as they are
        net = (
            frozen_copy(self.velocity, like.dtype, like.device)
            if isinstance(self.velocity, nn.Module)
            else self.velocity
        )
        name, times = type(self.velocity).__name__, 2 if self.solver == "average" else 1
        for n in (2, 3):
            x = torch.linspace(-1, 1, n * self.dim, dtype=like.dtype, device=like.device).reshape(n, *self.output_shape)
            t = torch.full((n,), 0.5, dtype=like.dtype, device=like.device)
            takes = f"x {tuple(x.shape)} and {' and '.join(['t (' + str(n) + ',)'] * times)}, times in [0, 1]"
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    v = net(x, *[t] * times)
            except Exception as error:
                remedy = (
                    "a network of whole timesteps takes lambda x, t: net(x, (1000 * t).long())"
                    if "long" in str(error).lower() or "int" in str(error).lower()
                    else "t has one time a row: t.view(-1, 1) broadcasts over vectors; else give lambda x, t: ..."
                )
                raise ModelError(f"{name} fails for {takes}: {cause(error)} ({remedy})") from error
            if not isinstance(v, Tensor) or v.shape != x.shape:
                what = f"shape {tuple(v.shape)}" if isinstance(v, Tensor) else f"type {type(v).__name__}"
                raise ModelError(f"{name} returns {what} for {takes}: expected a tensor of x's shape")


class _FlowDecoder(nn.Module):
    """The decoder of a VAE after a flow: ``[..., Dz]`` to a distribution over ``[..., Dx]``."""

    def __init__(self, flow: FlowGenerator, decoder: nn.Module):
        super().__init__()
        self.flow, self.decoder = flow, decoder

    def forward(self, u: Tensor) -> Distribution:
        return self.decoder(self.flow.observed(u))


@register
class LatentFlow(nn.Module):
    """A VAE whose latents have a learned prior: ``u -> z = flow(u) -> decoder(z)``, ``u ~ N(0, I)``.

    The prior of a VAE has holes, latents that no image is encoded to and whose decodings are not images; a flow trained
    on the latents of images (``trainers.FlowMatching``) has none, at no cost in dimensions. Outputs have the noise of
    the VAE's decoder.

    Args:
        vae: a VAE with a standard normal prior, such as ``generators.load("mnist_conv_vae")``.
        flow: a flow of vectors of as many entries as the VAE has latents.

    Raises:
        ArgumentError: the flow has another number of entries.
        ModelError: the module has no encoder or no decoder.
    """

    def __init__(self, vae: nn.Module, flow: FlowGenerator):
        super().__init__()
        parts = LatentVariableModel.of(instance("LatentFlow", "vae", vae, nn.Module, "generators.GaussianVAE(...)"))
        instance("LatentFlow", "flow", flow, FlowGenerator, "generators.FlowGenerator(velocity, 16)")
        if parts.encoder is None:
            raise ModelError(f"LatentFlow(vae={type(vae).__name__}): needs an encoder, whose latents the flow is of")
        if flow.output_shape != (parts.prior.dim,):
            raise ArgumentError(
                f"LatentFlow: a flow of shape {flow.output_shape} for a VAE of {parts.prior.dim} latents: must be "
                f"({parts.prior.dim},)"
            )
        self.config: dict[str, Any] = {"vae": vae, "flow": flow}
        self.output_shape = parts.output_shape
        self.discrete = parts.discrete
        self.prior = StandardNormal(parts.prior.dim)
        self.decoder = _FlowDecoder(flow, parts.decoder)
        self.vae_encoder = parts.encoder

    @property
    def flow(self) -> FlowGenerator:
        """The prior of the VAE's latents."""
        return self.decoder.flow  # a part of the decoder alone: weights are stored once

    def encoded(self, x: Tensor) -> Tensor:
        """Latents of flat images, one draw of the VAE's encoder for each: ``[..., Dx] -> [..., Dz]``."""
        return self.vae_encoder(x).sample()

    def generate(self, n: int, seed: int) -> GeneratedImages:
        """``n`` images from the model itself, in its dtype and on its device."""
        return LatentVariableModel.of(self).generate(n, seed)
