"""Output noise for any model (J 7), and outputs without it."""

import torch
from torch import Tensor

from ..arguments import positive_numbers
from ..errors import ArgumentError, ModelError
from .densities import StandardNormal
from .directed import DirectedModel, validate
from .model import GenerativeModel, reference_tensor

# Relative difference from a straight line up to which noise is taken as added: rounding in 32 bits.
_ADDED = 1e-4


class WithNoise(DirectedModel):
    """A model with independent Gaussian output noise, ``g_y(u, n) = g_x(u) + sd n`` (J 7).

    Its Jacobian has full row rank everywhere; conditioning on it equals a Gaussian ABC kernel of width ``sd``.

    Args:
        model: the noiseless model.
        sd: standard deviation of the noise in units of the output, positive, a number, ``[Dx]`` or of the output's
            shape.
    """

    structure = "independent"

    def __init__(self, model: GenerativeModel, sd: float | Tensor):
        super().__init__()
        validate(model)
        # the noise has the model's dtype: a 32-bit sd must not mix precisions in a 64-bit model
        sd = positive_numbers("WithNoise", "sd", sd, reference_tensor(model).dtype)
        self.model = model
        self.output_shape = model.output_shape
        self.global_density = model.input_density
        shape = torch.Size(self.output_shape)
        self.local_density = StandardNormal(shape.numel())
        if sd.ndim and sd.shape not in (shape, (shape.numel(),)):
            image = f" or {tuple(shape)}" if len(shape) > 1 else ""
            raise ArgumentError(
                f"WithNoise(sd of shape {tuple(sd.shape)}): expected a number or shape ({shape.numel()},){image}"
            )
        self.register_buffer("sd", sd.flatten() if sd.ndim else sd)
        self.sd: Tensor

    def global_latents(self, u1):
        return {"u": u1}

    def simulate(self, z, u2):
        return self.model.observed(z["u"]) + self.sd * u2

    @property
    def adds_noise(self):
        return type(self).simulate is WithNoise.simulate

    def named_latents(self, u1):
        return self.model.latents(u1)

    def log_factor(self, u):
        return self.model.log_factor(self.split(u)[0])

    @property
    def has_log_factor(self):
        return self.model.has_log_factor


def noiseless(model: GenerativeModel, u: Tensor) -> Tensor:
    """Outputs at inputs ``u`` without the noise that the model adds, ``[..., Du] -> [..., Dx]``.

    Raises:
        ModelError: the model has noise that is not known to be added.
    """
    if not isinstance(model, DirectedModel):
        # its outputs have no noise
        return model.observed(u)
    u1, u2 = model.split(u)

    def at(local: Tensor) -> Tensor:
        return model.observed(torch.cat([u1, local], -1))

    x, one = at(torch.zeros_like(u2)), at(u2)
    if not torch.allclose(at(-2 * u2) - x, -2 * (one - x), rtol=_ADDED, atol=_ADDED * float(one.abs().max())):
        raise ModelError(
            f"generate(mean=True): a {type(model).__name__} does not add its noise to its outputs: omit it"
        )
    return noiseless(model.model, u1) if isinstance(model, WithNoise) else x
