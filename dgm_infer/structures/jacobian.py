"""Jacobian maps of batched constraint functions: their interface, and the factorisations that they share.

A map is built in two stages. A structure evaluates the constraint and the raw entries of J, differentiably;
``factorise`` turns the entries into the map. The gradient of ``log|J J^T| / 2`` then needs no derivative of a
factorisation: it is the gradient of ``sum(log_det_cotangent * entries)`` (math 3.7,
``grad_k = sum_ij (G^-1 J)_ij dJ_ij/du_k``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Evaluation(NamedTuple):
    """Constraint values ``[..., N]`` and the raw entries of the Jacobian at the same points."""

    value: Tensor
    entries: tuple[Tensor, ...]


class JacobianMap(ABC):
    """``J`` at a batch of points, ``[..., N, D]``, with its Gram matrix ``G = J J^T`` factorised.

    A subclass is a frozen dataclass of tensors, each ``[..., *shape]``. Rows with a singular or non-finite Gram matrix
    do not raise: their ``log_det`` is not finite.
    """

    log_det: Tensor
    """``log|J J^T|``, ``[...]``."""

    @classmethod
    @abstractmethod
    def factorise(cls, *entries: Tensor) -> Self:
        """The map of raw entries."""

    @abstractmethod
    def forward(self, v: Tensor) -> Tensor:
        """``J v``: ``[..., D] -> [..., N]``."""

    @abstractmethod
    def transpose(self, c: Tensor) -> Tensor:
        """``J^T c``: ``[..., N] -> [..., D]``."""

    @abstractmethod
    def solve(self, c: Tensor) -> Tensor:
        """``G^-1 c``: ``[..., N] -> [..., N]``."""

    def pseudo_inverse(self, c: Tensor) -> Tensor:
        """``J^T G^-1 c``, the shortest v with ``J v = c``: ``[..., N] -> [..., D]``."""
        return self.transpose(self.solve(c))

    @abstractmethod
    def oblique_inverse(self, entries: tuple[Tensor, ...], c: Tensor) -> Tensor:
        """``J^T (J' J^T)^-1 c``, a full Newton step along the rows of J; J' is given by its entries."""

    @abstractmethod
    def damped_step(self, c: Tensor, damping: Tensor) -> Tensor:
        """``J^T (G + damping I)^-1 c``, a Levenberg-Marquardt step; ``damping [...]``."""

    @abstractmethod
    def log_det_cotangent(self) -> tuple[Tensor, ...]:
        """Derivative of ``log|G| / 2`` with respect to each entry."""

    def is_deficient(self) -> Tensor:
        """Whether the rows of J are linearly dependent up to rounding, ``[...]``."""
        return ~self.log_det.isfinite()

    def tangent(self, p: Tensor) -> Tensor:
        """``P p = p - J^T G^-1 J p``, the projection onto the tangent space: ``[..., D] -> [..., D]``."""
        return p - self.pseudo_inverse(self.forward(p))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the map, in the order of its constructor."""
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def map(self, function: Callable[..., Tensor], *others: Self) -> Self:
        """The map whose tensors are ``function`` applied to this one's (and the others')."""
        return type(self)(*map(function, self.tensors, *(other.tensors for other in others)))

    def where(self, mask: Tensor, other: Self) -> Self:
        """Rows of this map where ``mask [...]`` is True, rows of ``other`` elsewhere."""

        def choose(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(mask.reshape(mask.shape + (1,) * (mine.ndim - mask.ndim)), mine, theirs)

        return self.map(choose, other)

    def __getitem__(self, rows: Tensor) -> Self:
        return self.map(lambda tensor: tensor[rows])


def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    """``[..., N, D], [..., D] -> [..., N]``."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def vm(vector: Tensor, matrix: Tensor) -> Tensor:
    """``[..., N], [..., N, D] -> [..., D]``."""
    return (vector.unsqueeze(-2) @ matrix).squeeze(-2)


def log_det_cholesky(factor: Tensor, info: Tensor) -> Tensor:
    """Log-determinant ``[...]`` from ``torch.linalg.cholesky_ex``; NaN where it failed."""
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(info == 0, log_det, torch.nan)


def factorise_capacity(product: Tensor) -> tuple[Tensor, Tensor]:
    """``K^-T [..., L, L]`` and ``log|C| [...]`` of the capacity matrix ``C = I + product = K K^T``."""
    factor, info = torch.linalg.cholesky_ex(_plus_identity(product))
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False).mT
    return inverse, log_det_cholesky(factor, info)


def solve_capacity(product: Tensor, right: Tensor) -> Tensor:
    """``(I + product)^-1 right``: ``[..., L, L], [..., L] -> [..., L]``."""
    return torch.linalg.solve_ex(_plus_identity(product), right)[0]


def _plus_identity(matrix: Tensor) -> Tensor:
    return matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
