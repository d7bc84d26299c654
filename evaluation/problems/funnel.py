"""Neal's funnel: one scale for all other coordinates, over many orders of magnitude (math 12.8)."""

import math

import torch
from torch import Tensor

from dgm_infer import Target
from dgm_infer.arguments import whole_number

__all__ = ["Funnel"]

# standard deviation of the coordinate that is the others' log variance
_SD = 3.0


class Funnel(Target):
    """``v ~ N(0, 9)``, ``x_i ~ N(0, exp(v))`` for D - 1 of them, normalised (Neal 2003).

    Args:
        dim: D, 2 or more; v is the first coordinate.
    """

    log_z = 0.0

    def __init__(self, dim: int = 10):
        super().__init__(None, whole_number("Funnel", "dim", dim, 2))

    def energy(self, x: Tensor) -> Tensor:
        v, rest = x[..., 0], x[..., 1:]
        n = self.dim - 1
        own = 0.5 * (v / _SD).square() + math.log(_SD) + 0.5 * self.dim * math.log(2 * math.pi)
        return own + 0.5 * (-v).exp() * rest.square().sum(-1) + 0.5 * n * v

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        """Exact draws ``[n, D]``, float64."""
        z = torch.randn(n, self.dim, generator=rng, dtype=torch.float64)
        v = _SD * z[:, :1]
        return torch.cat([v, (0.5 * v).exp() * z[:, 1:]], -1)
