"""Linear Gaussian models, with everything known in closed form."""

import torch
from torch import Tensor

from dgm_infer import DirectedModel, StandardNormal
from dgm_infer.arguments import finite, positive
from dgm_infer.errors import ArgumentError

__all__ = ["LinearGaussian"]


class LinearGaussian(DirectedModel):
    """Probabilistic principal component analysis, ``x = W z + b + sd n`` with ``z, n`` standard normal.

    Posterior ``z | x ~ N(M^-1 W^T (x - b), sd^2 M^-1)``, ``M = W^T W + sd^2 I`` (Tipping and Bishop 1999).

    Args:
        weight: W, ``[Dx, Dz]``.
        bias: b, ``[Dx]``; None for zero.
        sd: noise standard deviation, positive.
    """

    structure = "independent"

    def __init__(self, weight, bias=None, sd: float = 1.0):
        super().__init__()
        weight = finite("LinearGaussian", "weight", weight)
        if weight.ndim != 2:
            raise ArgumentError(f"LinearGaussian(weight of shape {tuple(weight.shape)}): expected [Dx, Dz]")
        sd = positive("LinearGaussian", "sd", sd)
        bias = weight.new_zeros(len(weight)) if bias is None else finite("LinearGaussian", "bias", bias, weight.dtype)
        if bias.shape != weight.shape[:1]:
            raise ArgumentError(f"LinearGaussian(bias of shape {tuple(bias.shape)}): expected ({weight.shape[0]},)")
        self.weight: Tensor
        self.bias: Tensor
        self.sd: Tensor
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("sd", torch.as_tensor(sd, dtype=weight.dtype))
        self.output_shape = (weight.shape[0],)
        self.global_density = StandardNormal(weight.shape[1])
        self.local_density = StandardNormal(weight.shape[0])

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        return z["z"] @ self.weight.mT + self.bias + self.sd * u2
