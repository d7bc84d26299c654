"""A generator without noise as a decoder of normal pixels."""

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import dgm_infer as dgm

__all__ = ["NoisyDecoder"]


class NoisyDecoder(nn.Module):
    """``N(g(z), sd^2)`` about the outputs of a generator without noise."""

    def __init__(self, model: dgm.GenerativeModel, sd: float):
        super().__init__()
        self.model = model
        self.sd = sd

    def forward(self, z: Tensor) -> Independent:
        mean = self.model.observed(z)
        return Independent(Normal(mean, torch.full_like(mean, self.sd), validate_args=False), 1, validate_args=False)
