"""Units of one output and one local input: a low-rank matrix plus a diagonal one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import factorise_capacity, mv, solve_capacity, vm
from .jacobian import Evaluation, JacobianMap, push_forward
from .scalar import solve_local_inputs
from .units import UnitStructure

__all__ = ["Diagonal", "LowRankPlusDiagonal"]


@dataclass(frozen=True)
class LowRankPlusDiagonal(JacobianMap):
    """``J = [A | diag(d)]`` with ``A [..., N, L]``, ``d [..., N]``; O(N L^2) per factorisation (math 4.2, J 8.2).

    With ``S = diag(d^2)``, ``C = I + A^T S^-1 A = K K^T``, ``B = S^-1 A K^-T``:
    ``G^-1 = S^-1 - B B^T``, ``log|G| = sum log d^2 + log|C|``, ``A^T G^-1 = K^-T B^T``.
    N x L matrices are stored transposed, so that sums over the N outputs run along contiguous memory.
    """

    columns: Tensor
    """A^T, ``[..., L, N]``."""
    diagonal: Tensor
    """d."""
    half: Tensor
    """B^T, ``[..., L, N]``."""
    inverse_factor: Tensor
    """K^-T, ``[..., L, L]``."""
    log_det: Tensor

    @classmethod
    def factorise(cls, *entries):
        columns, diagonal = entries
        scaled = columns / diagonal.square().unsqueeze(-2)
        inverse, log_det = factorise_capacity(columns @ scaled.mT)
        log_det = log_det + diagonal.square().log().sum(-1)
        return cls(columns, diagonal, inverse.mT @ scaled, inverse, log_det)

    def forward(self, v):
        v1, v2 = self._split(v)
        return vm(v1, self.columns) + self.diagonal * v2

    def transpose(self, c):
        return torch.cat([mv(self.columns, c), self.diagonal * c], -1)

    def solve(self, c):
        return c / self.diagonal.square() - vm(mv(self.half, c), self.half)

    def pseudo_inverse(self, c):
        # A^T G^-1 c has its own identity: A^T (S^-1 c - B B^T c) would cancel where d is small
        weights = mv(self.half, c)
        local = c / self.diagonal - self.diagonal * vm(weights, self.half)
        return torch.cat([mv(self.inverse_factor, weights), local], -1)

    def oblique_inverse(self, entries, c):
        # J' J^T = diag(d' d) + A' A^T; with w = c / (d' d) and (I + A^T diag(d' d)^-1 A') x = A^T w the step is
        # [x, d (w - diag(d' d)^-1 A' x)]
        columns, diagonal = entries
        s = diagonal * self.diagonal
        w = c / s
        x = solve_capacity(self.columns @ (columns / s.unsqueeze(-2)).mT, mv(self.columns, w))
        return torch.cat([x, (c - vm(x, columns)) / diagonal], -1)

    def damped_step(self, c, damping):
        s = self.diagonal.square() + damping.unsqueeze(-1)
        w = c / s
        x = solve_capacity(self.columns @ (self.columns / s.unsqueeze(-2)).mT, mv(self.columns, w))
        return torch.cat([x, self.diagonal * (w - vm(x, self.columns) / s)], -1)

    def log_det_cotangent(self):
        # G^-1 A = S^-1 A C^-1 = B K^-1; diag(G^-1) = 1/d^2 - rowsum B^2
        inverse_diagonal = self.diagonal.square().reciprocal() - self.half.square().sum(-2)
        return self.inverse_factor @ self.half, self.diagonal * inverse_diagonal

    def _split(self, v):
        n_columns = self.columns.shape[-2]
        return v[..., :n_columns], v[..., n_columns:]


@dataclass(frozen=True)
class Diagonal(UnitStructure):
    """``J = [A | diag(d)]``: every output has its own local input."""

    jacobian = LowRankPlusDiagonal

    def entries(self, function: Callable[[Tensor], Tensor], u: Tensor) -> Evaluation:
        """By L products ``J t`` for A and one for d."""
        n_columns = self.sizes.n_global
        n_local = u.shape[-1] - n_columns
        tangents = torch.zeros(n_columns + 1, u.shape[-1], dtype=u.dtype, device=u.device)
        tangents.fill_diagonal_(1)
        tangents[n_columns, n_columns:] = 1
        value, products = push_forward(function, u, tangents)
        if n_local != value.shape[-1]:
            raise ValueError(f"{n_local} local inputs for {value.shape[-1]} outputs")
        return Evaluation(value, (products[:n_columns].movedim(0, -2).contiguous(), products[n_columns]))

    def row_size(self, n_outputs, n_inputs):
        return n_outputs * (self.sizes.n_global + 1)

    def solve_local(self, constraint, u, tolerance):
        return solve_local_inputs(constraint, u, self.sizes.n_global, tolerance)

    def has_full_rank(self, function, u, tolerance):
        """Whether no d is zero: every output then varies with its own input."""
        size = self.entries(function, u).entries[1].abs()
        return bool((size > tolerance * size.amax(-1, keepdim=True)).all(-1).any())
