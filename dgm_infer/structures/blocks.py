"""Units of several outputs and local inputs: a low-rank matrix plus a block-diagonal one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autodiff.jacobian_products import push_forward
from .jacobian import Evaluation, JacobianMap, factorise_capacity, log_det_cholesky, mv, solve_capacity, vm
from .units import UnitStructure


@dataclass(frozen=True)
class LowRankPlusBlocks(JacobianMap):
    """``J = [A | blockdiag(D_1, ..., D_U)]``: U units of m outputs and k local inputs each; O(N L^2 + N m^2).

    ``S = blockdiag(D_i D_i^T)`` has the Cholesky factors ``R_i``.
    """

    columns: Tensor
    """A^T, ``[..., L, N]``, N = U m."""
    blocks: Tensor
    """D, ``[..., U, m, k]``."""
    block_factor: Tensor
    """R, ``[..., U, m, m]``."""
    half: Tensor
    """B^T, ``[..., L, N]``."""
    inverse_factor: Tensor
    """K^-T, ``[..., L, L]``."""
    log_det: Tensor

    @classmethod
    def factorise(cls, *entries):
        columns, blocks = entries
        factor, info = torch.linalg.cholesky_ex(blocks @ blocks.mT)
        scaled = _solve_blocks(factor, columns)
        inverse, log_det = factorise_capacity(columns @ scaled.mT)
        log_det = log_det + log_det_cholesky(factor, info).sum(-1)
        return cls(columns, blocks, factor, inverse.mT @ scaled, inverse, log_det)

    def forward(self, v):
        v1, v2 = self._split(v)
        local = mv(self.blocks, v2.unflatten(-1, (-1, self.blocks.shape[-1])))
        return vm(v1, self.columns) + local.flatten(-2)

    def transpose(self, c):
        return torch.cat([mv(self.columns, c), self._local_transpose(c)], -1)

    def solve(self, c):
        return _solve_blocks(self.block_factor, c.unsqueeze(-2)).squeeze(-2) - vm(mv(self.half, c), self.half)

    def pseudo_inverse(self, c):
        # as in the diagonal case, A^T G^-1 c has its own identity
        return torch.cat([mv(self.inverse_factor, mv(self.half, c)), self._local_transpose(self.solve(c))], -1)

    def oblique_inverse(self, entries, c):
        columns, blocks = entries
        cross = blocks @ self.blocks.mT
        # one solve for c and the columns of A'
        right = torch.cat([c.unsqueeze(-2), columns], -2)
        w, scaled = _apply_blocks(lambda x: torch.linalg.solve_ex(cross, x)[0], right, cross.shape[-1]).split(
            [1, columns.shape[-2]], -2
        )
        w = w.squeeze(-2)
        x = solve_capacity(self.columns @ scaled.mT, mv(self.columns, w))
        return torch.cat([x, self._local_transpose(w - vm(x, scaled))], -1)

    def damped_step(self, c, damping):
        gram = self.blocks @ self.blocks.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(damping[..., None, None])
        factor = torch.linalg.cholesky_ex(gram)[0]
        w = _solve_blocks(factor, c.unsqueeze(-2)).squeeze(-2)
        scaled = _solve_blocks(factor, self.columns)
        x = solve_capacity(self.columns @ scaled.mT, mv(self.columns, w))
        return torch.cat([x, self._local_transpose(w - vm(x, scaled))], -1)

    def log_det_cotangent(self):
        # block i of G^-1 J: S_i^-1 D_i - B_i B_i^T D_i
        half = self.half.unflatten(-1, (-1, self.blocks.shape[-2])).movedim(-3, -1)
        local = torch.cholesky_solve(self.blocks, self.block_factor) - half @ (half.mT @ self.blocks)
        return self.inverse_factor @ self.half, local

    def _local_transpose(self, c):
        return mv(self.blocks.mT, c.unflatten(-1, (-1, self.blocks.shape[-2]))).flatten(-2)

    def _split(self, v):
        n_columns = self.columns.shape[-2]
        return v[..., :n_columns], v[..., n_columns:]


@dataclass(frozen=True)
class Blocks(UnitStructure):
    """``J = [A | blockdiag(D_1, ..., D_U)]``: the outputs of a unit share its own local inputs."""

    jacobian = LowRankPlusBlocks

    def entries(self, function: Callable[[Tensor], Tensor], u: Tensor) -> Evaluation:
        """By L products ``J t`` for A and k for the blocks."""
        n_columns, n_inputs = self.sizes.n_global, self.sizes.inputs
        n_units = (u.shape[-1] - n_columns) // n_inputs
        one = torch.eye(n_columns + n_inputs, dtype=u.dtype, device=u.device)
        # the j-th local input of every unit at once, without writing into views, which torch.compile rejects
        tangents = torch.cat([one[:, :n_columns], one[:, n_columns:].repeat(1, n_units)], -1)
        value, products = push_forward(function, u, tangents)
        blocks = products[n_columns:].unflatten(-1, (n_units, -1)).movedim(0, -1)
        return Evaluation(value, (products[:n_columns].movedim(0, -2).contiguous(), blocks))

    def row_size(self, n_outputs, n_inputs):
        return n_outputs * (self.sizes.n_global + self.sizes.inputs)

    def pays(self, n_outputs):
        # with fewer inputs than outputs D_i D_i^T is singular, though J J^T need not be
        return self.sizes.inputs >= self.sizes.outputs and super().pays(n_outputs)

    def has_full_rank(self, function, u, tolerance):
        """Whether all blocks have full row rank: every unit by its own inputs."""
        if self.sizes.inputs < self.sizes.outputs:
            return False
        values = torch.linalg.svdvals(self.entries(function, u).entries[1])
        return bool((values > tolerance * values.amax((-1, -2), keepdim=True)).flatten(1).all(-1).any())


def _apply_blocks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """``function`` of ``[..., U, m, K]``, for K rows ``[..., K, U m]``."""
    return function(rows.unflatten(-1, (-1, size)).movedim(-3, -1)).movedim(-1, -3).flatten(-2)


def _solve_blocks(factor: Tensor, rows: Tensor) -> Tensor:
    """``(R_i R_i^T)^-1`` on the units of every row, ``[..., K, U m]``."""
    return _apply_blocks(lambda x: torch.cholesky_solve(x, factor), rows, factor.shape[-1])
