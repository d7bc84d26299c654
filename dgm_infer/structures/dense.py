"""Jacobians without structure."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autodiff.jacobian_products import pull_back
from .jacobian import Evaluation, JacobianMap, log_det_cholesky, mv
from .structure import Structure


@dataclass(frozen=True)
class DenseJacobian(JacobianMap):
    """``J`` as a matrix, ``[..., N, D]``; O(D N^2 + N^3) per factorisation."""

    matrix: Tensor
    cholesky: Tensor
    log_det: Tensor

    @classmethod
    def factorise(cls, *entries):
        (matrix,) = entries
        factor, info = torch.linalg.cholesky_ex(matrix @ matrix.mT)
        return cls(matrix, factor, log_det_cholesky(factor, info))

    def is_deficient(self):
        # the part of every row of J not explained by earlier rows, which rounding keeps above zero
        unexplained = self.cholesky.diagonal(dim1=-2, dim2=-1).square() / self.matrix.square().sum(-1)
        small = (unexplained < 4 * torch.finfo(self.matrix.dtype).eps).any(-1)
        return small | super().is_deficient()

    def forward(self, v):
        return mv(self.matrix, v)

    def transpose(self, c):
        return mv(self.matrix.mT, c)

    def solve(self, c):
        return torch.cholesky_solve(c.unsqueeze(-1), self.cholesky).squeeze(-1)

    def oblique_inverse(self, entries, c):
        return self.transpose(torch.linalg.solve_ex(entries[0] @ self.matrix.mT, c)[0])

    def damped_step(self, c, damping):
        gram = self.matrix @ self.matrix.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(damping.unsqueeze(-1))
        return self.transpose(torch.linalg.solve_ex(gram, c)[0])

    def log_det_cotangent(self):
        return (torch.cholesky_solve(self.matrix, self.cholesky),)


@dataclass(frozen=True)
class Dense(Structure):
    """No structure: fits every function."""

    jacobian = DenseJacobian

    def entries(self, function: Callable[[Tensor], Tensor], u: Tensor) -> Evaluation:
        """By N reverse-mode products: a constraint has fewer outputs than inputs."""
        value, rows = pull_back(function, u)
        return Evaluation(value, (rows.movedim(0, -2),))

    def row_size(self, n_outputs, n_inputs):
        return n_outputs * n_inputs
