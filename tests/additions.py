"""A Jacobian structure and an operator as a user adds them: nothing else of the project knows of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dgm_infer.conditioning import Operator, Reduction, Selection
from dgm_infer.structures import Evaluation, JacobianMap, Units, UnitStructure, of_units, push_forward
from dgm_infer.structures.jacobian import factorise_capacity, mv, solve_capacity, vm


@dataclass(frozen=True)
class LowRankPlusIdentity(JacobianMap):
    """``J = [A | I]``; with ``C = I + A^T A = K K^T`` and ``B = A K^-T``: ``G^-1 = I - B B^T``, ``|G| = |C|``."""

    columns: Tensor
    half: Tensor
    inverse_factor: Tensor
    log_det: Tensor

    @classmethod
    def factorise(cls, *entries):
        (columns,) = entries
        inverse, log_det = factorise_capacity(columns @ columns.mT)
        return cls(columns, inverse.mT @ columns, inverse, log_det)

    def forward(self, v):
        n_columns = self.columns.shape[-2]
        return vm(v[..., :n_columns], self.columns) + v[..., n_columns:]

    def transpose(self, c):
        return torch.cat([mv(self.columns, c), c], -1)

    def solve(self, c):
        return c - vm(mv(self.half, c), self.half)

    def oblique_inverse(self, entries, c):
        x = solve_capacity(self.columns @ entries[0].mT, mv(self.columns, c))
        return torch.cat([x, c - vm(x, entries[0])], -1)

    def damped_step(self, c, damping):
        s = 1 + damping.unsqueeze(-1)
        x = solve_capacity(self.columns @ self.columns.mT / s.unsqueeze(-1), mv(self.columns, c / s))
        return torch.cat([x, (c - vm(x, self.columns)) / s], -1)

    def log_det_cotangent(self):
        return (self.inverse_factor @ self.half,)


@dataclass(frozen=True)
class Additive(UnitStructure):
    """Every output is a function of the global inputs plus its own local input."""

    jacobian = LowRankPlusIdentity
    mismatch = "its outputs do not add their local inputs as they are"
    can_be_scaled = False

    def entries(self, function, u):
        tangents = torch.eye(self.sizes.n_global, u.shape[-1], dtype=u.dtype, device=u.device)
        value, products = push_forward(function, u, tangents)
        return Evaluation(value, (products.movedim(0, -2).contiguous(),))

    def row_size(self, n_outputs, n_inputs):
        return n_outputs * self.sizes.n_global

    def local_product(self, local, u2, direction):
        return direction.expand_as(u2)


def additive(model) -> Additive:
    return Additive(Units(model.global_density.dim))


@dataclass(frozen=True)
class Differences(Operator):
    """``y_j = x_{first_j} - x_{second_j}``, of which no entry of x occurs twice."""

    first_index: Tensor
    second_index: Tensor
    size: int

    def __call__(self, x):
        return x.index_select(-1, self.first_index) - x.index_select(-1, self.second_index)

    def reduce(self, structure):
        units = structure.units
        if units is None or not (structure.is_separable and units.is_scalar):
            return None
        index = torch.stack([self.first_index, self.second_index], -1)
        return Reduction(of_units(Units(units.n_global, 2, 1)), Selection(index.flatten(), self.size))
