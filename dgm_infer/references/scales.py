"""Scales of normal densities: the maps that a user describes, and those of covariances."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..arguments import finite, numbers, positive_numbers
from ..errors import ArgumentError, EvidenceError
from ..linear_maps import DiagonalMap, LowRankMap, Scale, TriangularMap

Kind = Literal["diagonal", "full", "low_rank"]
KINDS: tuple[Kind, ...] = get_args(Kind)


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
        if cholesky.triu(1).any():
            raise ArgumentError(
                "Gaussian(cholesky): has numbers above the diagonal: must be the lower triangular factor, "
                "torch.linalg.cholesky(covariance)"
            )
        positive_numbers("Gaussian", "diagonal of cholesky", cholesky.diagonal(dim1=-2, dim2=-1))
        return TriangularMap(finite("Gaussian", "cholesky", cholesky).clone())
    sd = positive_numbers("Gaussian", "sd", sd).to(mean)
    if sd.ndim and sd.shape != mean.shape:
        raise ArgumentError(f"Gaussian(sd of shape {tuple(sd.shape)}): expected {shape}, or a number")
    sd = sd.clone().expand(shape)
    if factor is None:
        return DiagonalMap(sd)
    factor = finite("Gaussian", "factor", factor).to(mean).clone()
    if factor.shape[:-1] != mean.shape:
        raise ArgumentError(f"Gaussian(factor of shape {tuple(factor.shape)}): expected {(*shape, 'R')}")
    return LowRankMap.of(sd, factor)


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
