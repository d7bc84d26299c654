"""Linear maps L with ``L L^T`` the covariance of a Gaussian: diagonal, triangular, low rank plus diagonal."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from ..arguments import finite, numbers, positive_numbers
from ..errors import ArgumentError, EvidenceError

__all__ = ["KINDS", "Diagonal", "Full", "Kind", "LowRank", "Scale", "factorised", "given_scale", "remade", "scale_of"]

Kind = Literal["diagonal", "full", "low_rank"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Scale(Protocol):
    """A map of ``[..., *batch, D]``, one per problem of the batch."""

    @property
    def kind(self) -> Kind: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The defining tensors, each ``[*batch, ...]``."""
        ...

    def apply(self, v: Tensor) -> Tensor:
        """``L v``."""
        ...

    def transpose(self, gradient: Tensor) -> Tensor:
        """``L^T g``."""
        ...

    def solve(self, x: Tensor) -> Tensor:
        """``L^-1 x``."""
        ...

    def solve_transpose(self, gradient: Tensor) -> Tensor:
        """``L^-T g``."""
        ...

    def log_det(self) -> Tensor:
        """``log|det L|``, ``[*batch]``."""
        ...

    def covariance_diagonal(self) -> Tensor:
        """Diagonal of ``L L^T``, ``[*batch, D]``."""
        ...

    def covariance(self) -> Tensor:
        """``L L^T``, ``[*batch, D, D]``."""
        ...


class Diagonal(NamedTuple):
    """``L = diag(sd)``."""

    sd: Tensor
    """``[*batch, D]``, positive."""

    @property
    def kind(self) -> Kind:
        return "diagonal"

    @property
    def tensors(self):
        return (self.sd,)

    def apply(self, v):
        return self.sd * v

    def transpose(self, gradient):
        return self.sd * gradient

    def solve(self, x):
        return x / self.sd

    def solve_transpose(self, gradient):
        return gradient / self.sd

    def log_det(self):
        return self.sd.log().sum(-1)

    def covariance_diagonal(self):
        return self.sd.square()

    def covariance(self):
        return torch.diag_embed(self.sd.square())


class Full(NamedTuple):
    """L lower triangular."""

    cholesky: Tensor
    """``[*batch, D, D]``, with positive diagonal."""

    @property
    def kind(self) -> Kind:
        return "full"

    @property
    def tensors(self):
        return (self.cholesky,)

    def apply(self, v):
        return _times(self.cholesky, v)

    def transpose(self, gradient):
        return _times(self.cholesky.mT, gradient)

    def solve(self, x):
        def substitute(rows: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(self.cholesky.mT, rows, upper=True, left=False)

        return _across(substitute, self.cholesky.ndim - 2, x)

    def solve_transpose(self, gradient):
        def substitute(rows: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(self.cholesky, rows, upper=False, left=False)

        return _across(substitute, self.cholesky.ndim - 2, gradient)

    def log_det(self):
        return self.cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def covariance_diagonal(self):
        return self.cholesky.square().sum(-1)

    def covariance(self):
        return self.cholesky @ self.cholesky.mT


class LowRank(NamedTuple):
    """Covariance ``diag(sd^2) + F F^T``, with the root ``L = diag(sd) (I + U A U^T)``.

    ``U = diag(1/sd) F`` and A of R x R make the bracket the symmetric root of ``I + U U^T``: with
    ``U^T U = P diag(s) P^T``, ``A = P diag((sqrt(1 + s) - 1)/s) P^T``, and for its inverse
    ``P diag((1/sqrt(1 + s) - 1)/s) P^T``. Every product costs O(D R).
    """

    sd: Tensor
    """``[*batch, D]``, positive."""
    factor: Tensor
    """F, ``[*batch, D, R]``."""
    directions: Tensor
    """U, ``[*batch, D, R]``."""
    root: Tensor
    """A, ``[*batch, R, R]``."""
    inverse_root: Tensor
    """``[*batch, R, R]``."""
    eigenvalues: Tensor
    """s, ``[*batch, R]``."""

    @classmethod
    def of(cls, sd: Tensor, factor: Tensor) -> "LowRank":
        """The scale of these two defining tensors."""
        directions = factor / sd.unsqueeze(-1)
        s, p = torch.linalg.eigh(directions.mT @ directions)
        s = s.clamp_min(0)
        # (sqrt(1 + s) - 1)/s = 1/(1 + sqrt(1 + s)), without 0/0
        grown = (1 + s).sqrt()
        root = 1 / (1 + grown)
        matrix = (p * root.unsqueeze(-2)) @ p.mT
        inverse = (p * (-root / grown).unsqueeze(-2)) @ p.mT
        return cls(sd, factor, directions, matrix, inverse, s)

    @property
    def kind(self) -> Kind:
        return "low_rank"

    @property
    def tensors(self):
        return self.sd, self.factor

    def _bracket(self, v: Tensor, inner: Tensor) -> Tensor:
        return v + _times(self.directions, _times(inner, _times(self.directions.mT, v)))

    def apply(self, v):
        return self.sd * self._bracket(v, self.root)

    def transpose(self, gradient):
        return self._bracket(self.sd * gradient, self.root)

    def solve(self, x):
        return self._bracket(x / self.sd, self.inverse_root)

    def solve_transpose(self, gradient):
        # (diag(sd) B)^-T = diag(1/sd) B^-1, since the bracket B is symmetric
        return self._bracket(gradient, self.inverse_root) / self.sd

    def log_det(self):
        return self.sd.log().sum(-1) + 0.5 * self.eigenvalues.log1p().sum(-1)

    def covariance_diagonal(self):
        return self.sd.square() + self.factor.square().sum(-1)

    def covariance(self):
        return torch.diag_embed(self.sd.square()) + self.factor @ self.factor.mT


def remade(scale: Scale, tensors: Iterable[Tensor]) -> Scale:
    """A map of the same kind from other defining tensors."""
    if isinstance(scale, LowRank):
        return LowRank.of(*tensors)
    return (Full if isinstance(scale, Full) else Diagonal)(*tensors)


def given_scale(mean: Tensor, sd: Any, cholesky: Any, factor: Any) -> Scale:
    """The map that a user describes, with copies of the tensors; see :class:`Gaussian`.

    Raises:
        ArgumentError: none of the three forms, a wrong shape, or a number that is not finite or not positive.
    """
    if (sd is None) == (cholesky is None) or (factor is not None and sd is None):
        raise ArgumentError("Gaussian(): give the scale as sd, as sd and factor, or as cholesky")
    shape = tuple(mean.shape)
    if cholesky is not None:
        cholesky = numbers("Gaussian", "cholesky", cholesky).to(mean)
        if cholesky.shape != (*shape, shape[-1]):
            raise ArgumentError(f"Gaussian(cholesky of shape {tuple(cholesky.shape)}): expected {(*shape, shape[-1])}")
        positive_numbers("Gaussian", "diagonal of cholesky", cholesky.diagonal(dim1=-2, dim2=-1))
        # tril copies
        return Full(finite("Gaussian", "cholesky", cholesky.tril()))
    sd = positive_numbers("Gaussian", "sd", sd).to(mean)
    if sd.ndim and sd.shape != mean.shape:
        raise ArgumentError(f"Gaussian(sd of shape {tuple(sd.shape)}): expected {shape}, or a number")
    sd = sd.clone().expand(shape)
    if factor is None:
        return Diagonal(sd)
    factor = finite("Gaussian", "factor", factor).to(mean).clone()
    if factor.shape[:-1] != mean.shape:
        raise ArgumentError(f"Gaussian(factor of shape {tuple(factor.shape)}): expected {(*shape, 'R')}")
    return LowRank.of(sd, factor)


def scale_of(covariance: Tensor, kind: Kind, rank: int) -> Scale:
    """The map of the given kind for a covariance ``[*batch, D, D]``.

    Raises:
        EvidenceError: the covariance is not positive definite.
    """
    if kind == "diagonal":
        return Diagonal(covariance.diagonal(dim1=-2, dim2=-1).sqrt())
    if kind == "full":
        return Full(factorised(covariance))
    # the principal components of the correlations, and the remainder
    sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    values, vectors = torch.linalg.eigh(covariance / (sd.unsqueeze(-1) * sd.unsqueeze(-2)))
    rest = values[..., :-rank].mean(-1, keepdim=True) if rank < values.shape[-1] else 0.1 * values[..., :1]
    factor = vectors[..., -rank:] * (values[..., -rank:] - rest).clamp_min(0).sqrt().unsqueeze(-2)
    diagonal = (1 - factor.square().sum(-1)).clamp_min(1e-3)
    return LowRank.of(sd * diagonal.sqrt(), sd.unsqueeze(-1) * factor)


def factorised(covariance: Tensor) -> Tensor:
    """Lower triangular factor of a covariance ``[*batch, D, D]``.

    Raises:
        EvidenceError: it is not positive definite.
    """
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():
        raise EvidenceError(
            f"a covariance is not positive definite for {int((failed != 0).sum())} of {failed.numel()} problems: use a "
            "diagonal base, or float64"
        )
    return factor


def _times(matrix: Tensor, v: Tensor) -> Tensor:
    """``[*batch, M, N], [..., *batch, N] -> [..., *batch, M]``."""
    return _across(lambda rows: rows @ matrix.mT, matrix.ndim - 2, v)


def _across(function: Callable[[Tensor], Tensor], n_batch: int, v: Tensor) -> Tensor:
    """Applies a map of rows ``[*batch, K, N]`` to vectors ``[..., *batch, N]``.

    The leading dimensions become rows, so that no matrix is repeated for them.
    """
    lead = v.shape[: v.ndim - 1 - n_batch]
    rows = v.reshape(-1, *v.shape[len(lead) :]).movedim(0, -2)
    result = function(rows).movedim(-2, 0)
    return result.reshape(*lead, *result.shape[1:])
