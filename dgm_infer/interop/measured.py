"""Generators of images as a noisy instrument sees them; what is asked for is the image before the noise."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..models import DirectedModel, GenerativeModel, StandardNormal, WithNoise

__all__ = ["Measured", "NoisyPixels", "clean_images", "with_noise"]


class Measured(GenerativeModel):
    """``A(g_x(u))``, whose latent ``image`` is ``g_x(u)``.

    Args:
        model: g, a model of images.
        matrix: A as a matrix ``[Dy, Dx]``; None if it is a function.
        function: A of flat images, ``[..., Dx] -> [..., Dy]``; None, too, for the image itself.
    """

    def __init__(
        self,
        model: GenerativeModel,
        matrix: Tensor | None = None,
        function: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__()
        self.model = model
        self.input_density = model.input_density
        self.matrix: Tensor | None
        self.register_buffer("matrix", matrix, persistent=False)
        self.function = function

    def observed(self, u):
        x = self.model.observed(u)
        if self.function is not None:
            return self.function(x)
        return x if self.matrix is None else x @ self.matrix.to(x).mT

    def latents(self, u):
        return {"image": self.model.observed(u)}

    def log_factor(self, u):
        return self.model.log_factor(u)

    @property
    def has_log_factor(self):
        return self.model.has_log_factor


class NoisyPixels(DirectedModel):
    """``g_x(u) + sd n`` for a generator of independent units, which n joins: still linear in the number of pixels.

    Args:
        model: a generator of independent units with standard normal local inputs.
        sd: standard deviation of the noise.
    """

    structure = "independent"

    def __init__(self, model: DirectedModel, sd: float):
        super().__init__()
        units = model.units
        assert units is not None
        self.model, self.sd = model, sd
        self.output_shape = model.output_shape
        self.unit_inputs, self.unit_outputs = units.inputs + units.outputs, units.outputs
        self._own = units.inputs
        self.global_density = model.global_density
        self.local_density = StandardNormal(model.local_density.dim // units.inputs * (units.inputs + units.outputs))

    @staticmethod
    def suits(model: GenerativeModel) -> bool:
        """Whether a generator is of that kind, and reports nothing that depends on its local inputs."""
        return (
            isinstance(model, DirectedModel)
            and model.units is not None
            and model.jacobian_structure.is_separable
            and model.local_density.is_standard_normal
            and model.can_omit_local_inputs
        )

    def global_latents(self, u1):
        return self.model.global_latents(u1)

    def named_latents(self, u1):
        return self.model.named_latents(u1)

    def simulate(self, z, u2):
        own, noise = self._parts(u2)
        return self.model.simulate(z, own) + self.sd * noise

    def clean(self, u: Tensor) -> Tensor:
        """The images without the noise, ``[..., Du] -> [..., Dx]``."""
        u1, u2 = self.split(u)
        return self.model.observed(torch.cat([u1, self._parts(u2)[0]], -1))

    def _parts(self, u2: Tensor) -> tuple[Tensor, Tensor]:
        """The local inputs of the generator, and the noise."""
        units = u2.unflatten(-1, (-1, self._own + (self.unit_outputs or 1)))
        return units[..., : self._own].flatten(-2), units[..., self._own :].flatten(-2)


def with_noise(
    model: GenerativeModel,
    sd: float,
    matrix: Tensor | None = None,
    function: Callable[[Tensor], Tensor] | None = None,
) -> GenerativeModel:
    """The model of ``A(x) + sd n``; arguments are those of :class:`Measured`."""
    if matrix is None and function is None and NoisyPixels.suits(model):
        assert isinstance(model, DirectedModel)
        return NoisyPixels(model, sd)
    return WithNoise(Measured(model, matrix, function), sd)


def clean_images(problem: Fibre, inputs: Tensor, seed: int) -> Tensor:
    """The images before the noise that :func:`with_noise` added, ``[..., *batch, Du] -> [..., *batch, Dx]``.

    Args:
        problem: a problem of such a model.
        inputs: its positions.
        seed: seed of the noise of hidden pixels, which the positions omit; another one than that of the run.
    """
    noisy: Any = problem.model
    if not isinstance(noisy, NoisyPixels):
        return problem.latents(inputs)["image"]
    observed = copy.copy(problem.observed)
    # the same inputs, of other outputs
    observed.model = SimpleNamespace(split=noisy.split, local_density=noisy.local_density, observed=noisy.clean)  # type: ignore[assignment]
    rng = torch.Generator(inputs.device).manual_seed(seed)
    with torch.no_grad():
        return observed.generate(inputs, rng)
