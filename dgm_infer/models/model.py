"""Generative models: deterministic functions of random inputs with a known density (J 4, T 4.2)."""

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..arguments import default_type, random_seed, whole_number
from ..errors import ModelError, cause
from ..structures import Dense, Structure
from .densities import InputDensity


class GeneratedImages(NamedTuple):
    """Images of a model and the latents that generated them, exact draws of their posteriors but for a log factor."""

    images: Tensor
    """``[n, *output_shape]``."""
    latents: Tensor
    """``[n, Dz]``; of a :class:`GenerativeModel` its inputs, ``[n, Du]``."""


class GenerativeModel(nn.Module):
    """A differentiable generative model ``x = g_x(u)``, ``u ~ p_u``.

    A subclass sets ``input_density`` and defines :meth:`observed`; every method accepts any leading dimensions and
    treats them as independent.
    """

    input_density: InputDensity
    output_range: tuple[float, float] | None = None
    """Interval (low, high) of all outputs, edges excluded unless the outputs are discrete; None for all numbers."""
    structure: str | Structure = "dense"
    """Structure of the Jacobian: only a :class:`DirectedModel` has another one."""
    lost_mass: Mapping[str, float] = MappingProxyType({})
    """Shares of priors that the inputs cannot reach, by name: of programs with densities that round."""
    has_local_inputs = False
    """Whether some inputs belong to single outputs, as in a :class:`DirectedModel`."""

    def observed(self, u: Tensor) -> Tensor:
        """Observed outputs ``g_x(u)``, flat: ``[..., Du] -> [..., Dx]``."""
        raise NotImplementedError(f"{type(self).__name__} defines no observed(u)")

    def forward(self, u: Tensor) -> Tensor:
        return self.observed(u)

    def latents(self, u: Tensor) -> dict[str, Tensor]:
        """Named latent variables ``g_z(u)``, each ``[..., *shape]``."""
        return {"u": u}

    def log_factor(self, u: Tensor) -> Tensor:
        """Additional log density ``[..., Du] -> [...]``, for soft observations and non-standard inputs."""
        return u.new_zeros(u.shape[:-1])

    def implausible(self, x: Tensor) -> str | None:
        """What outputs ``[n, Dx]`` at prior draws say against the model, in one line; None if nothing does."""
        return None

    def generate(self, n: int, seed: int) -> GeneratedImages:
        """``n`` outputs of inputs from their density, in the model's dtype and on its device; :meth:`log_factor` weighs
        none of them.

        Raises:
            ArgumentError: ``n`` is not an integer >= 1, or the seed not one >= 0.
        """
        n, seed = whole_number("generate", "n", n), random_seed("generate", seed)
        like = reference_tensor(self)
        rng = torch.Generator(like.device).manual_seed(seed)
        u = self.input_density.sample((n,), generator=rng, dtype=like.dtype, device=like.device)
        with torch.no_grad():
            return GeneratedImages(self.observed(u).reshape(n, *self.output_shape), u)

    @property
    def has_log_factor(self) -> bool:
        return type(self).log_factor is not GenerativeModel.log_factor or "log_factor" in vars(self)

    @property
    def jacobian_structure(self) -> Structure:
        """The structure that :attr:`structure` declares."""
        return Dense()

    def split(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs that all outputs may depend on, and those of single outputs: ``[..., Du] -> [..., L], [..., N]``."""
        return u, u[..., :0]

    @property
    def can_scale_noise(self) -> bool:
        """Whether local inputs are normal noise, whose standard deviation can be scaled."""
        return False

    @property
    def can_omit_local_inputs(self) -> bool:
        """Whether local inputs that no observed output depends on can be omitted while conditioning."""
        return False

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one output, with ``prod(output_shape) = Dx``; flat by default."""
        like = reference_tensor(self)
        try:
            with torch.no_grad():
                output = self.observed(torch.zeros(self.input_density.dim, dtype=like.dtype, device=like.device))
        except Exception as error:
            # nn.Module would report an AttributeError as a missing attribute output_shape
            raise ModelError(f"{type(self).__name__}.observed fails for one row of zeros: {cause(error)}") from error
        if not isinstance(output, Tensor):
            raise ModelError(f"{type(self).__name__}.observed returns a {type(output).__name__}: expected a tensor")
        return tuple(output.shape)


def reference_tensor(module: nn.Module) -> Tensor:
    """A floating-point parameter or buffer, whose dtype and device are the module's; an empty tensor if none."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.empty(0, dtype=default_type())
