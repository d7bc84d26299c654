"""Many double wells in a product: 2^(D/2) modes of unequal mass (math 12.8)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dgm_infer import Target
from dgm_infer.arguments import whole_number
from dgm_infer.errors import ArgumentError

__all__ = ["ManyWell"]


class _Grid(NamedTuple):
    """The density of one well on an even grid."""

    x: Tensor
    mass: Tensor
    """Mass of the cell around every node, not normalised."""


class ManyWell(Target):
    """``-log p = sum_j x_j^4 - 6 x_j^2 - x_j/2 + y_j^2/2`` over D/2 pairs (x_j, y_j) (Midgley et al. 2023).

    log Z is ``D/2`` times that of a pair, whose integral over x is a sum on an even grid: of a smooth density that
    vanishes at its ends, such a sum is exact to rounding.

    Args:
        dim: D, even; x_j are the even coordinates.
    """

    def __init__(self, dim: int = 32):
        dim = whole_number("ManyWell", "dim", dim, 2)
        if dim % 2:
            raise ArgumentError(f"ManyWell(dim={dim}): must be even, two coordinates per well")
        super().__init__(None, dim)
        self.log_z = dim // 2 * (math.log(float(_grid().mass.sum())) + 0.5 * math.log(2 * math.pi))

    def energy(self, x: Tensor) -> Tensor:
        return (_well(x[..., 0::2]) + 0.5 * x[..., 1::2].square()).sum(-1)

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        """Draws ``[n, D]``, float64, from the grid's cells: exact but for the density's slope in a cell of 1/1000."""
        grid = _grid()
        pairs = self.dim // 2
        cell = torch.multinomial(grid.mass, n * pairs, replacement=True, generator=rng)
        width = float(grid.x[1] - grid.x[0])
        x = grid.x[cell] + width * (torch.rand(n * pairs, generator=rng, dtype=torch.float64) - 0.5)
        y = torch.randn(n * pairs, generator=rng, dtype=torch.float64)
        return torch.stack([x, y], -1).reshape(n, self.dim)


def _well(x: Tensor) -> Tensor:
    return x.square().square() - 6 * x.square() - 0.5 * x


def _grid() -> _Grid:
    x = torch.linspace(-4, 4, 8001, dtype=torch.float64)
    return _Grid(x, (-_well(x)).exp() * (x[1] - x[0]))
