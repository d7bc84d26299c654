"""Batched products and factorisations shared by the Jacobian maps."""

import torch
from torch import Tensor

__all__ = ["factorise_capacity", "log_det_cholesky", "mv", "solve_capacity", "vm"]


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
