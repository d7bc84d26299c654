"""Linear maps L, each the root ``L L^T`` of a covariance: identity, diagonal, triangular, low rank plus diagonal.

Metrics of kernels and scales of normal densities are such maps, one per problem of a batch.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from .autodiff.loops import is_captured
from .errors import EvidenceError
from .settings import Settings

Kind = Literal["diagonal", "full", "low_rank"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Multiplications up to which, in compiled code, a product is a loop of its own and not a call of a library, which takes
# longer to start. Measured with matrices of 2 to 64 rows and 4 to 400 vectors: as fast at about 2000; of a million the
# loop takes five to eight times as long, of 20 million 16 times, as it writes them all to memory.
_SMALL = 2**11


@dataclass(frozen=True, eq=False, repr=False)
class LinearMap(Settings, ABC):
    """A map of vectors ``[..., *batch, D]``, defined by tensors ``[*batch, ...]``."""

    kind: ClassVar[str]

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """``L v``."""

    @abstractmethod
    def transpose(self, gradient: Tensor) -> Tensor:
        """``L^T g``."""

    @abstractmethod
    def solve(self, x: Tensor) -> Tensor:
        """``L^-1 x``, coordinates in which the covariance is the identity."""

    @abstractmethod
    def solve_transpose(self, gradient: Tensor) -> Tensor:
        """``L^-T g``."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The defining tensors, in the order of the arguments."""
        return tuple(getattr(self, each.name) for each in dataclasses.fields(self) if each.init)

    def remade(self, parts: Sequence[Tensor]) -> Self:
        """A map of the same kind from other defining tensors."""
        return type(self)(*parts)

    def __repr__(self) -> str:
        # its numbers would fill pages
        names = [each.name for each in dataclasses.fields(self) if each.init]
        shapes = (f"{name} of shape {tuple(part.shape)}" for name, part in zip(names, self.parts, strict=True))
        return f"{type(self).__name__}({', '.join(shapes)})"


@dataclass(frozen=True, eq=False, repr=False)
class IdentityMap(LinearMap):
    """``L = I``, for vectors of any length."""

    kind = "identity"

    def apply(self, v):
        return v

    def transpose(self, gradient):
        return gradient

    def solve(self, x):
        return x

    def solve_transpose(self, gradient):
        return gradient


IDENTITY = IdentityMap()


class Scale(LinearMap, ABC):
    """A map with a covariance ``[*batch, D, D]`` of its own."""

    kind: ClassVar[Kind]

    @abstractmethod
    def log_det(self) -> Tensor:
        """``log|det L|``, ``[*batch]``."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """``L L^T``, ``[*batch, D, D]``."""

    @abstractmethod
    def covariance_diagonal(self) -> Tensor:
        """Diagonal of ``L L^T``, ``[*batch, D]``."""


@dataclass(frozen=True, eq=False, repr=False)
class DiagonalMap(Scale):
    """``L = diag(sd)``.

    Args:
        sd: positive, ``[*batch, D]``.
    """

    kind = "diagonal"
    sd: Tensor

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

    def covariance(self):
        return torch.diag_embed(self.sd.square())

    def covariance_diagonal(self):
        return self.sd.square()


@dataclass(frozen=True, eq=False, repr=False)
class TriangularMap(Scale):
    """L lower triangular.

    Args:
        factor: with positive diagonal, ``[*batch, D, D]``.

    Attributes:
        rows: ``L^T``, laid out row by row: compiled code adds up whole rows.
        inverse_rows: ``L^-T``, likewise; computed once, as a product takes less time than a substitution.
    """

    kind = "full"
    factor: Tensor
    rows: Tensor = field(init=False)
    inverse_rows: Tensor = field(init=False)

    def __post_init__(self):
        unit = torch.eye(self.factor.shape[-1]).to(self.factor)
        # the class is frozen
        inverse = torch.linalg.solve_triangular(self.factor, unit, upper=False)
        object.__setattr__(self, "rows", self.factor.mT.contiguous())
        object.__setattr__(self, "inverse_rows", inverse.mT.contiguous())

    @classmethod
    def of_precision(cls, precision: Tensor, dtype: torch.dtype) -> Self:
        """The root of the inverse of a positive definite matrix ``[*batch, D, D]`` of float64.

        Raises:
            RuntimeError: it is not positive definite.
        """
        # S = U^-1 U^-T with the factor of the reversed matrix: its inverse is lower triangular
        eye = torch.eye(precision.shape[-1], dtype=torch.float64, device=precision.device)
        # as much of the identity as the rounding of a large matrix may take away
        regular = precision + 1e-14 * precision.diagonal(0, -2, -1).amax(-1)[..., None, None] * eye
        reverse = torch.linalg.cholesky(regular.flip(-1, -2)).flip(-1, -2)
        return cls(torch.linalg.solve_triangular(reverse.mT, eye, upper=False).to(dtype))

    def apply(self, v):
        return _times(self.rows.mT, v)

    def transpose(self, gradient):
        return _times(self.factor.mT, gradient)

    def solve(self, x):
        return _times(self.inverse_rows.mT, x)

    def solve_transpose(self, gradient):
        return _times(self.inverse_rows, gradient)

    def log_det(self):
        return self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def covariance(self):
        return self.factor @ self.factor.mT

    def covariance_diagonal(self):
        return self.factor.square().sum(-1)


@dataclass(frozen=True, eq=False, repr=False)
class LowRankMap(Scale):
    """``L = diag(sd) (I + V diag(stretch - 1) V^T)`` with orthonormal V: a few directions of other widths.

    Every product costs O(D r).

    Args:
        sd: positive, ``[*batch, D]``.
        directions: V, ``[*batch, D, r]``.
        stretch: positive, ``[*batch, r]``.
    """

    kind = "low_rank"
    sd: Tensor
    directions: Tensor
    stretch: Tensor

    @classmethod
    def of(cls, sd: Tensor, factor: Tensor) -> Self:
        """The root of ``diag(sd^2) + F F^T``, F ``[*batch, D, R]``.

        With ``U = diag(1/sd) F`` and ``U^T U = P diag(s) P^T``, ``V = U P diag(s)^(-1/2)`` and the stretch is
        ``sqrt(1 + s)``; of more columns than rows the D largest s are all.
        """
        u = factor / sd.unsqueeze(-1)
        directions, root, _ = torch.linalg.svd(u, full_matrices=False)
        return cls(sd, directions, (1 + root.square()).sqrt())

    @property
    def factor(self) -> Tensor:
        """F, where no direction is narrower than the others."""
        return self.sd.unsqueeze(-1) * self.directions * (self.stretch.square() - 1).clamp_min(0).sqrt().unsqueeze(-2)

    def _stretched(self, x: Tensor, by: Tensor) -> Tensor:
        return x + _times(self.directions, (by - 1) * _times(self.directions.mT, x))

    def apply(self, v):
        return self.sd * self._stretched(v, self.stretch)

    def transpose(self, gradient):
        return self._stretched(self.sd * gradient, self.stretch)

    def solve(self, x):
        return self._stretched(x / self.sd, self.stretch.reciprocal())

    def solve_transpose(self, gradient):
        return self._stretched(gradient, self.stretch.reciprocal()) / self.sd

    def log_det(self):
        return self.sd.log().sum(-1) + self.stretch.log().sum(-1)

    def covariance(self):
        scaled = self.sd.unsqueeze(-1) * self.directions
        widths = (self.stretch.square() - 1).unsqueeze(-2)
        return torch.diag_embed(self.sd.square()) + (scaled * widths) @ scaled.mT

    def covariance_diagonal(self):
        widths = (self.stretch.square() - 1).unsqueeze(-2)
        return self.sd.square() * (1 + (self.directions.square() * widths).sum(-1))


def scale_of(covariance: Tensor, kind: Kind, rank: int) -> Scale:
    """The map of the given kind for a covariance ``[*batch, D, D]``.

    Raises:
        EvidenceError: the covariance is not positive definite.
    """
    if kind == "diagonal":
        return DiagonalMap(covariance.diagonal(dim1=-2, dim2=-1).sqrt())
    if kind == "full":
        return TriangularMap(factorised(covariance))
    # the principal components of the correlations, and the remainder
    sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    values, vectors = torch.linalg.eigh(covariance / (sd.unsqueeze(-1) * sd.unsqueeze(-2)))
    rest = values[..., :-rank].mean(-1, keepdim=True) if rank < values.shape[-1] else 0.1 * values[..., :1]
    factor = vectors[..., -rank:] * (values[..., -rank:] - rest).clamp_min(0).sqrt().unsqueeze(-2)
    diagonal = (1 - factor.square().sum(-1)).clamp_min(1e-3)
    return LowRankMap.of(sd * diagonal.sqrt(), sd.unsqueeze(-1) * factor)


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
    if is_captured() and matrix.shape[-2] * v.numel() <= _SMALL:
        return (matrix * v.unsqueeze(-2)).sum(-1)
    lead = v.shape[: v.ndim + 1 - matrix.ndim]
    # vectors as columns, so that no matrix is repeated
    columns = v if len(lead) == 1 else v.reshape(-1, *v.shape[len(lead) :])
    result = (matrix @ columns.movedim(0, -1)).movedim(-1, 0)
    return result if len(lead) == 1 else result.reshape(*lead, *result.shape[1:])
