"""Jacobian maps of batched constraint functions: products, Gram solves and log-determinants.

A map is built in two stages. ``entries(function, u)`` evaluates the constraint and the raw entries of J with
``torch.func``, differentiably; ``factorise`` turns the entries into the map. The gradient of ``log|J J^T| / 2``
then needs no derivative of a factorisation: it is the gradient of ``sum(log_det_cotangent * entries)`` (math 3.7,
``grad_k = sum_ij (G^-1 J)_ij dJ_ij/du_k``).
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.utils import _pytree as pytree

__all__ = ["DenseJacobian", "JacobianMap", "LowRankPlusBlocks", "LowRankPlusDiagonal", "push_forward"]


class Evaluation(NamedTuple):
    """Constraint values ``[..., N]`` and the raw entries of the Jacobian there."""

    value: Tensor
    entries: tuple[Tensor, ...]


class JacobianMap:
    """``J`` at a batch of points, ``[..., N, D]``, with its Gram matrix ``G = J J^T`` factorised.

    Rows with a singular or non-finite Gram matrix are data, not an error: their ``log_det`` is not finite.
    """

    log_det: Tensor
    """``log|J J^T|``, ``[...]``."""

    def forward(self, v: Tensor) -> Tensor:
        """``J v``: ``[..., D] -> [..., N]``."""
        raise NotImplementedError

    def transpose(self, c: Tensor) -> Tensor:
        """``J^T c``: ``[..., N] -> [..., D]``."""
        raise NotImplementedError

    def solve(self, c: Tensor) -> Tensor:
        """``G^-1 c``: ``[..., N] -> [..., N]``."""
        raise NotImplementedError

    def pseudo_inverse(self, c: Tensor) -> Tensor:
        """``J^T G^-1 c``, the shortest v with ``J v = c``: ``[..., N] -> [..., D]``."""
        return self.transpose(self.solve(c))

    def oblique_inverse(self, entries: tuple[Tensor, ...], c: Tensor) -> Tensor:
        """``J^T (J' J^T)^-1 c``, a full Newton step along the rows of J; J' is given by its entries."""
        raise NotImplementedError

    def damped_step(self, c: Tensor, damping: Tensor) -> Tensor:
        """``J^T (G + damping I)^-1 c``, a Levenberg-Marquardt step; ``damping [...]``."""
        raise NotImplementedError

    def is_deficient(self) -> Tensor:
        """Whether the rows of J are linearly dependent to rounding, ``[...]``."""
        return ~self.log_det.isfinite()

    def log_det_cotangent(self) -> tuple[Tensor, ...]:
        """Derivative of ``log|G| / 2`` with respect to each of the entries."""
        raise NotImplementedError

    def tangent(self, p: Tensor) -> Tensor:
        """``P p = p - J^T G^-1 J p``, the projection onto the tangent space: ``[..., D] -> [..., D]``."""
        return p - self.pseudo_inverse(self.forward(p))

    def map(self, function: Callable[..., Tensor], *others: Self) -> Self:
        """The map whose tensors are ``function`` of this one's (and the others')."""
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        return type(self)(**{n: function(getattr(self, n), *(getattr(o, n) for o in others)) for n in names})

    def where(self, mask: Tensor, other: Self) -> Self:
        """Rows of this map where ``mask [...]`` is True, of ``other`` elsewhere."""

        def choose(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(mask.reshape(mask.shape + (1,) * (mine.ndim - mask.ndim)), mine, theirs)

        return self.map(choose, other)

    def __getitem__(self, rows: Tensor) -> Self:
        return self.map(lambda tensor: tensor[rows])


def push_forward(function: Callable[[Tensor], Tensor], u: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Value and forward-mode products of a batched function.

    Args:
        function: ``[..., D] -> [..., N]``, row by row.
        u: ``[..., D]``.
        tangents: ``[K, D]``, the same for every row.

    Returns:
        value ``[..., N]`` and products ``J t``, ``[K, ..., N]``, from one pass.
    """
    _load_forward_mode()

    def along(t: Tensor) -> tuple[Tensor, Tensor]:
        value, product = jvp(function, (u,), (t,))[:2]
        return value, product

    # laid out as u is: torch copies others by an operation that torch.compile refuses for any number of rows
    full = tangents.reshape(-1, *[1] * (u.ndim - 1), u.shape[-1]).expand(-1, *u.shape).contiguous()
    return vmap(along, out_dims=cast(Any, (None, 0)))(full)


@functools.cache
def _load_forward_mode() -> None:
    # torch's forward-mode rules are scripted on first use, with a deprecation warning that is not the user's
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script", category=FutureWarning)
        warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def _mv(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _vm(vector: Tensor, matrix: Tensor) -> Tensor:
    return (vector.unsqueeze(-2) @ matrix).squeeze(-2)


def _log_det_cholesky(factor: Tensor, info: Tensor) -> Tensor:
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(info == 0, log_det, torch.nan)


@dataclass(frozen=True)
class DenseJacobian(JacobianMap):
    """``J`` as a matrix, ``[..., N, D]``; O(D N^2 + N^3) a factorisation."""

    matrix: Tensor
    cholesky: Tensor
    log_det: Tensor

    @staticmethod
    def entries(function: Callable[[Tensor], Tensor], u: Tensor) -> Evaluation:
        """Evaluate ``function [..., D] -> [..., N]``: N reverse-mode products, or D forward-mode ones if fewer."""
        n_inputs = u.shape[-1]
        value, pullback = vjp(function, u)[:2]
        n_outputs = value.shape[-1]
        if n_outputs < n_inputs:
            basis = torch.eye(n_outputs, dtype=u.dtype, device=u.device)
            rows = vmap(lambda e: pullback(e.expand_as(value))[0])(basis)
            return Evaluation(value, (rows.movedim(0, -2),))
        basis = torch.eye(n_inputs, dtype=u.dtype, device=u.device)
        columns = push_forward(function, u, basis)[1]
        return Evaluation(value, (columns.movedim(0, -1),))

    @classmethod
    def factorise(cls, matrix: Tensor) -> "DenseJacobian":
        factor, info = torch.linalg.cholesky_ex(matrix @ matrix.mT)
        return cls(matrix, factor, _log_det_cholesky(factor, info))

    def is_deficient(self):
        # the part of every row of J that earlier rows do not explain, of which rounding alone leaves some
        unexplained = self.cholesky.diagonal(dim1=-2, dim2=-1).square() / self.matrix.square().sum(-1)
        small = (unexplained < 4 * torch.finfo(self.matrix.dtype).eps).any(-1)
        return small | super().is_deficient()

    def forward(self, v):
        return _mv(self.matrix, v)

    def transpose(self, c):
        return _mv(self.matrix.mT, c)

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
class LowRankPlusDiagonal(JacobianMap):
    """``J = [A | diag(d)]`` with ``A [..., N, L]``, ``d [..., N]``; O(N L^2) a factorisation (math 4.2, J 8.2).

    With ``S = diag(d^2)``, ``C = I + A^T S^-1 A = K K^T``, ``B = S^-1 A K^-T``:
    ``G^-1 = S^-1 - B B^T``, ``log|G| = sum log d^2 + log|C|``, ``A^T G^-1 = K^-T B^T``.
    N x L matrices are kept transposed: sums over the N outputs then run along memory.
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

    @staticmethod
    def entries(function: Callable[[Tensor], Tensor], u: Tensor, n_columns: int) -> Evaluation:
        """Evaluate ``function [..., L + N] -> [..., N]``: L forward-mode products for A and one for d."""
        n_local = u.shape[-1] - n_columns
        tangents = torch.zeros(n_columns + 1, u.shape[-1], dtype=u.dtype, device=u.device)
        tangents.fill_diagonal_(1)
        tangents[n_columns, n_columns:] = 1
        value, products = push_forward(function, u, tangents)
        if n_local != value.shape[-1]:
            raise ValueError(f"{n_local} local inputs for {value.shape[-1]} outputs")
        return Evaluation(value, (products[:n_columns].movedim(0, -2).contiguous(), products[n_columns]))

    @classmethod
    def factorise(cls, columns: Tensor, diagonal: Tensor) -> "LowRankPlusDiagonal":
        scaled = columns / diagonal.square().unsqueeze(-2)
        inverse, log_det = _factorise_capacity(columns @ scaled.mT)
        log_det = log_det + diagonal.square().log().sum(-1)
        return cls(columns, diagonal, inverse.mT @ scaled, inverse, log_det)

    def forward(self, v):
        v1, v2 = self._split(v)
        return _vm(v1, self.columns) + self.diagonal * v2

    def transpose(self, c):
        return torch.cat([_mv(self.columns, c), self.diagonal * c], -1)

    def solve(self, c):
        return c / self.diagonal.square() - _vm(_mv(self.half, c), self.half)

    def pseudo_inverse(self, c):
        # A^T G^-1 c by its own identity: A^T (S^-1 c - B B^T c) would cancel where d is small
        weights = _mv(self.half, c)
        local = c / self.diagonal - self.diagonal * _vm(weights, self.half)
        return torch.cat([_mv(self.inverse_factor, weights), local], -1)

    def oblique_inverse(self, entries, c):
        # J' J^T = diag(d' d) + A' A^T; with w = c / (d' d) and (I + A^T diag(d' d)^-1 A') x = A^T w the step is
        # [x, d (w - diag(d' d)^-1 A' x)]
        columns, diagonal = entries
        s = diagonal * self.diagonal
        w = c / s
        x = _solve_capacity(self.columns @ (columns / s.unsqueeze(-2)).mT, _mv(self.columns, w))
        return torch.cat([x, (c - _vm(x, columns)) / diagonal], -1)

    def damped_step(self, c, damping):
        s = self.diagonal.square() + damping.unsqueeze(-1)
        w = c / s
        x = _solve_capacity(self.columns @ (self.columns / s.unsqueeze(-2)).mT, _mv(self.columns, w))
        return torch.cat([x, self.diagonal * (w - _vm(x, self.columns) / s)], -1)

    def log_det_cotangent(self):
        # G^-1 A = S^-1 A C^-1 = B K^-1; diag(G^-1) = 1/d^2 - rowsum B^2
        inverse_diagonal = self.diagonal.square().reciprocal() - self.half.square().sum(-2)
        return self.inverse_factor @ self.half, self.diagonal * inverse_diagonal

    def _split(self, v):
        n_columns = self.columns.shape[-2]
        return v[..., :n_columns], v[..., n_columns:]


@dataclass(frozen=True)
class LowRankPlusBlocks(JacobianMap):
    """``J = [A | blockdiag(D_1, ..., D_U)]``: U units of m outputs and k local inputs each; O(N L^2 + N m^2).

    As :class:`LowRankPlusDiagonal` with ``S = blockdiag(D_i D_i^T)``, of which ``R_i`` are the Cholesky factors.
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

    @staticmethod
    def entries(function: Callable[[Tensor], Tensor], u: Tensor, n_columns: int, n_inputs: int) -> Evaluation:
        """Evaluate ``function [..., L + U k] -> [..., U m]``: L forward-mode products for A and k for D."""
        n_units = (u.shape[-1] - n_columns) // n_inputs
        one = torch.eye(n_columns + n_inputs, dtype=u.dtype, device=u.device)
        # the j-th local input of every unit at once; and no writing into views, which torch.compile refuses
        tangents = torch.cat([one[:, :n_columns], one[:, n_columns:].repeat(1, n_units)], -1)
        value, products = push_forward(function, u, tangents)
        blocks = products[n_columns:].unflatten(-1, (n_units, -1)).movedim(0, -1)
        return Evaluation(value, (products[:n_columns].movedim(0, -2).contiguous(), blocks))

    @classmethod
    def factorise(cls, columns: Tensor, blocks: Tensor) -> "LowRankPlusBlocks":
        factor, info = torch.linalg.cholesky_ex(blocks @ blocks.mT)
        scaled = _solve_blocks(factor, columns)
        inverse, log_det = _factorise_capacity(columns @ scaled.mT)
        log_det = log_det + _log_det_cholesky(factor, info).sum(-1)
        return cls(columns, blocks, factor, inverse.mT @ scaled, inverse, log_det)

    def forward(self, v):
        v1, v2 = self._split(v)
        local = _mv(self.blocks, v2.unflatten(-1, (-1, self.blocks.shape[-1])))
        return _vm(v1, self.columns) + local.flatten(-2)

    def transpose(self, c):
        return torch.cat([_mv(self.columns, c), self._local_transpose(c)], -1)

    def solve(self, c):
        return _solve_blocks(self.block_factor, c.unsqueeze(-2)).squeeze(-2) - _vm(_mv(self.half, c), self.half)

    def pseudo_inverse(self, c):
        # as for a diagonal: A^T G^-1 c by its own identity
        return torch.cat([_mv(self.inverse_factor, _mv(self.half, c)), self._local_transpose(self.solve(c))], -1)

    def oblique_inverse(self, entries, c):
        columns, blocks = entries
        cross = blocks @ self.blocks.mT
        # one solve for c and the columns of A'
        right = torch.cat([c.unsqueeze(-2), columns], -2)
        w, scaled = _apply_blocks(lambda x: torch.linalg.solve_ex(cross, x)[0], right, cross.shape[-1]).split(
            [1, columns.shape[-2]], -2
        )
        w = w.squeeze(-2)
        x = _solve_capacity(self.columns @ scaled.mT, _mv(self.columns, w))
        return torch.cat([x, self._local_transpose(w - _vm(x, scaled))], -1)

    def damped_step(self, c, damping):
        gram = self.blocks @ self.blocks.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(damping[..., None, None])
        factor = torch.linalg.cholesky_ex(gram)[0]
        w = _solve_blocks(factor, c.unsqueeze(-2)).squeeze(-2)
        scaled = _solve_blocks(factor, self.columns)
        x = _solve_capacity(self.columns @ scaled.mT, _mv(self.columns, w))
        return torch.cat([x, self._local_transpose(w - _vm(x, scaled))], -1)

    def log_det_cotangent(self):
        # block i of G^-1 J: S_i^-1 D_i - B_i B_i^T D_i
        half = self.half.unflatten(-1, (-1, self.blocks.shape[-2])).movedim(-3, -1)
        local = torch.cholesky_solve(self.blocks, self.block_factor) - half @ (half.mT @ self.blocks)
        return self.inverse_factor @ self.half, local

    def _local_transpose(self, c):
        return _mv(self.blocks.mT, c.unflatten(-1, (-1, self.blocks.shape[-2]))).flatten(-2)

    def _split(self, v):
        n_columns = self.columns.shape[-2]
        return v[..., :n_columns], v[..., n_columns:]


def _apply_blocks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """``function`` of ``[..., U, m, K]``, for K rows ``[..., K, U m]``."""
    return function(rows.unflatten(-1, (-1, size)).movedim(-3, -1)).movedim(-1, -3).flatten(-2)


def _solve_blocks(factor: Tensor, rows: Tensor) -> Tensor:
    """``(R_i R_i^T)^-1`` on the units of every row, ``[..., K, U m]``."""
    return _apply_blocks(lambda x: torch.cholesky_solve(x, factor), rows, factor.shape[-1])


def _plus_identity(matrix: Tensor) -> Tensor:
    return matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _factorise_capacity(product: Tensor) -> tuple[Tensor, Tensor]:
    """``K^-T`` and ``log|C|`` of ``C = I + product = K K^T``."""
    factor, info = torch.linalg.cholesky_ex(_plus_identity(product))
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False).mT
    return inverse, _log_det_cholesky(factor, info)


def _solve_capacity(product: Tensor, right: Tensor) -> Tensor:
    """``(I + product)^-1 right``."""
    return torch.linalg.solve_ex(_plus_identity(product), right)[0]


for _map in (DenseJacobian, LowRankPlusDiagonal, LowRankPlusBlocks):
    # so that compiled functions take and return them
    pytree.register_dataclass(_map)
