"""A reconstructor for deepinv: the exact posterior of a generative model given deepinv's measurements."""

import copy
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..arguments import numbers, random_seed, sizes, whole_number
from ..conditioning.condition import condition
from ..conditioning.fibre import Fibre
from ..errors import ArgumentError, extra
from ..kernels import Kernel
from ..kernels.kernel import check_kernel
from ..models import DirectedModel, GenerativeModel, StandardNormal, as_generative_model, reference_tensor
from ..sampling.draws import Draws
from ..sampling.sample import sample
from .measurements import measurement, noise_sd

with extra("deepinv"):
    from deepinv.models import Reconstructor
    from deepinv.physics import Physics


class DeepinvReconstructor(Reconstructor):
    """``x_hat = E[x | y]``, the posterior mean of a generative model's images given ``y = N(A(x))``.

    ``reconstructor(y, physics)`` conditions the model on measurements of deepinv and samples; :meth:`sample` gives the
    images themselves. Without noise the observation is exact, ``A(x) = y``. What of deepinv's physics is used:

    - ``Inpainting`` (a mask of 0 and 1) and ``Denoising``: a selection of pixels.
    - any other ``LinearPhysics`` of up to 2^22 entries: its matrix. Where rows do not overlap, as in a
      ``Downsampling`` by block means, the model keeps its structure.
    - any other ``Physics``: its function ``A``, which torch differentiates.
    - ``GaussianNoise`` of one sigma: ``y = A(x) + sigma n``, as by ``condition(noise=)``; ``ZeroNoise``.

    Args:
        model: a generative model of images, as for :func:`dgm_infer.condition`.
        image_shape: ``(C, H, W)``; None for the model's output shape, with one channel if that is ``(H, W)``.
        kernel: as for :func:`dgm_infer.sample`.
        chains: chains per measurement.
        warmup: iterations that adapt the kernel.
        draws: draws per chain.
        seed: seed of the sampling; None takes one from torch's global generator.

    Attributes:
        draws: the :class:`Draws` of the last call, to be diagnosed; None before it.

    Raises:
        MissingExtraError: deepinv is not installed.
        ArgumentError: a number is outside its range, or the model's outputs are not images of that shape.
        ModelError: the model cannot be conditioned.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        image_shape: tuple[int, int, int] | None = None,
        kernel: Kernel | None = None,
        chains: int = 16,
        warmup: int = 150,
        draws: int = 50,
        seed: int | None = None,
    ):
        super().__init__()
        self.model = as_generative_model(model)
        self.image_shape = _image_shape(tuple(self.model.output_shape), image_shape)
        self.kernel = None if kernel is None else check_kernel("DeepinvReconstructor", kernel, "dgm.ConstrainedHMC()")
        self.settings: dict[str, Any] = {
            "chains": whole_number("DeepinvReconstructor", "chains", chains),
            "warmup": whole_number("DeepinvReconstructor", "warmup", warmup, 0),
            "draws": whole_number("DeepinvReconstructor", "draws", draws),
        }
        self.seed = None if seed is None else random_seed("DeepinvReconstructor", seed)
        self.draws: Draws | None = None

    def forward(self, y: Tensor, physics: Physics) -> Tensor:  # type: ignore[override]
        """The posterior mean, ``[B, C, H, W]``.

        Args:
            y: measurements ``[B, ...]``, as ``physics(x)`` gives them.
            physics: how they were measured.

        Raises:
            ArgumentError: y is not a tensor of numbers, or is not of the shape that the physics gives.
            ModelError: the noise, the sensor or the operator is not mapped.
            ObservationError: no image of the model gives y.
        """
        return self.sample(y, physics).double().mean(0).to(y.dtype)

    def sample(self, y: Tensor, physics: Physics) -> Tensor:
        """Images from the posterior, ``[chains * draws, B, C, H, W]``, neighbours of different chains.

        Args and errors are those of :meth:`forward`.
        """
        problem = self.condition(y, physics)
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        self.draws = sample(problem, self.kernel, seed=seed, progress=False, **self.settings)
        assert self.draws.inputs is not None
        joined = isinstance(problem.model, NoisyPixels)
        images = clean_images(problem, self.draws.inputs, seed + 1) if joined else self.draws.generate()
        images = images.transpose(0, 1).flatten(0, 1)
        return images.reshape(len(images), len(y), *self.image_shape).to(y)

    def condition(self, y: Tensor, physics: Physics) -> Any:
        """The problem that :meth:`sample` samples: the :class:`Fibre` of the measurements, one problem each.

        With noise its outputs are what was measured, of which :meth:`sample` gives the image before the noise.
        Args and errors are those of :meth:`forward`.
        """
        if not isinstance(physics, Physics):
            raise ArgumentError(f"physics={type(physics).__name__}: must be a deepinv.physics.Physics")
        if not isinstance(y, Tensor):
            raise ArgumentError(f"y is a {type(y).__name__}: must be one tensor [B, ...], without stacked physics")
        sd = noise_sd(physics)
        y = numbers("DeepinvReconstructor", "y", y).to(reference_tensor(self.model).device)
        how = measurement(y, physics, self.image_shape, is_exact=sd is None)
        shape = tuple(self.model.output_shape)
        values = how.values.reshape(len(y), *shape) if how.is_of_pixels else how.values
        if sd is not None and how.is_of_pixels and NoisyPixels.suits(self.model):
            return condition(NoisyPixels(self.model, sd), values, observe=how.observe(shape))
        return condition(self.model, values, observe=how.observe(shape), noise=sd)


def _image_shape(output_shape: tuple[int, ...], given: Any) -> tuple[int, ...]:
    if given is not None:
        given = sizes("DeepinvReconstructor", "image_shape", given)
        if len(given) == 3 and torch.Size(given).numel() == torch.Size(output_shape).numel():
            return given
    elif len(output_shape) in (2, 3):
        return output_shape if len(output_shape) == 3 else (1, *output_shape)
    raise ArgumentError(
        f"DeepinvReconstructor(image_shape={given}): the model's outputs have shape {output_shape}: give (C, H, W) of "
        "as many entries"
    )


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
    def suits(model: GenerativeModel) -> TypeGuard[DirectedModel]:
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


def clean_images(problem: Fibre, inputs: Tensor, seed: int) -> Tensor:
    """The images before the noise of :class:`NoisyPixels`, ``[..., *batch, Du] -> [..., *batch, Dx]``.

    Args:
        problem: a problem of such a model.
        inputs: its positions.
        seed: seed of the noise of hidden pixels, which the positions omit; another one than that of the run.
    """
    noisy: Any = problem.model
    observed = copy.copy(problem.observed)
    # the same inputs, of other outputs
    observed.model = SimpleNamespace(split=noisy.split, local_density=noisy.local_density, observed=noisy.clean)  # type: ignore[assignment]
    rng = torch.Generator(inputs.device).manual_seed(seed)
    with torch.no_grad():
        return observed.generate(inputs, rng)
