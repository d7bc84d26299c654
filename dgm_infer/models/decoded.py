"""Latent variable models as generative models: the function of continuous inputs that a decoder defines."""

import torch
from torch import nn
from torch.distributions import Normal

from ..errors import ModelError
from .decoder import LatentVariableModel, base_distribution
from .densities import StandardNormal
from .directed import DirectedModel
from .model import GenerativeModel
from .validate import validate

__all__ = ["MeanOfDecoder", "NormalOutputs", "as_generative_model"]


class MeanOfDecoder(GenerativeModel):
    """``x = E[x | z]``: the mean of a decoder, which is differentiable even if its outputs are discrete.

    Args:
        model: the latent variable model.
    """

    def __init__(self, model: LatentVariableModel):
        super().__init__()
        self.decoder = model.decoder
        self.output_shape = model.output_shape
        self.input_density = model.prior
        self.training = _is_training(model.decoder)

    def observed(self, u):
        return self.decoder(u).mean.flatten(u.ndim - 1)


class NormalOutputs(DirectedModel):
    """``x = mean(z) + sd(z) n``, ``n ~ N(0, I)``: a decoder of independent normal outputs as a generative model.

    Args:
        model: the latent variable model.
    """

    structure = "independent"

    def __init__(self, model: LatentVariableModel):
        super().__init__()
        self.decoder = model.decoder
        self.output_shape = model.output_shape
        self.training = _is_training(model.decoder)
        self.global_density = model.prior
        self.local_density = StandardNormal(torch.Size(model.output_shape).numel())

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        normal = base_distribution(self.decoder(z["z"]))
        mean, sd = (part.flatten(z["z"].ndim - 1) for part in (normal.mean, normal.stddev))
        return mean + sd * u2


def as_generative_model(module: object) -> GenerativeModel:
    """The module itself or, if it has a prior and a decoder of normal outputs, these as a generative model.

    Raises:
        ModelError: it is neither, or lacks what conditioning needs.
    """
    try:
        model = None if isinstance(module, GenerativeModel) else LatentVariableModel.of(module)
        if model is not None and isinstance(base_distribution(model.outputs), Normal):
            return NormalOutputs(model)
    except ModelError:
        # validate() names the fault
        pass
    validate(module)
    return module  # type: ignore[return-value]


def _is_training(module: nn.Module) -> bool:
    """Whether any part is in training mode; only the flag is copied: ``train()`` would change the caller's module."""
    return any(getattr(part, "training", False) for part in module.modules())
