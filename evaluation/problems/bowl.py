"""A simulator in one line whose posteriors are narrow ridges: what samplers are compared on."""

import torch
from torch import Tensor

from dgm_infer import GenerativeModel, StandardNormal

__all__ = ["Bowl"]


class Bowl(GenerativeModel):
    """``y = sum_i a_i u_i^2``, ``u ~ N(0, I)``, with a = 1, 4, 1, 4, ...: the fibre of y is an ellipsoid.

    Args:
        n_inputs: D, even.
    """

    points = 0
    """Positions at which any of these models has been evaluated."""

    def __init__(self, n_inputs: int):
        super().__init__()
        self.input_density = StandardNormal(n_inputs)
        self.register_buffer("scale", torch.tensor([1.0, 4.0]).repeat(n_inputs // 2))
        self.scale: Tensor

    def observed(self, u: Tensor) -> Tensor:
        Bowl.points += u.shape[:-1].numel()
        return u.square() @ self.scale.unsqueeze(-1)
