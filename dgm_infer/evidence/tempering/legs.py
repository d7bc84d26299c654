"""The references of parallel tempering, side by side: paths from them to the target, and fits to its draws."""

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...linear_maps import DiagonalMap, LowRankMap, Scale, TriangularMap, factorised
from ...references import Gaussian
from ...references.density import GaussianDensity, Whitened
from ...references.modes import Modes, cover
from ..path import AnnealedPath, PathPoint

# Standard deviations of the broad reference in those of the base, where there is no mode to cover.
_WIDER = 2.0


class Legs(AnnealedPath):
    """Paths from one or two references to the same target; the first batch dimension is that of the legs.

    ``evaluations`` counts the gradients of all replicas of a chain.

    Args:
        path: path from the base, whose target and problems these are.
        broad: second reference, of the same batch shape or none; None for one leg.

    Raises:
        ArgumentError: the second reference does not fit the problems.
    """

    def __init__(self, path: AnnealedPath, broad: Gaussian | None):
        self._own, self._broad = path.base, broad
        super().__init__(path.target, _side_by_side(self._own, broad))
        self.count = 1 if broad is None else 2

    @property
    def can_refit(self) -> bool:
        """Whether the base is a Gaussian, beside one of full covariance that stays."""
        return self.count == 2 and isinstance(self._own, Gaussian) and self.base.kind == "full"

    def refit(self, draws: Tensor) -> None:
        """Give the base the moments of draws of the target ``[chains, draws, *batch, D]``, shrunk (math 6.15)."""
        self._own = self._own.refined(draws, draws.new_zeros(draws.shape[:-1]), kind="full")
        self._start_from(_side_by_side(self._own, self._broad))

    def gradients(self, v: Tensor) -> int:
        """Those at ``[..., chains, legs, *batch, D]``."""
        return v.shape[: v.ndim - self.base.mean.ndim - 1].numel() * self.count

    def coordinates(self, x: Tensor) -> Tensor:
        """Whitened coordinates on every leg of points ``[..., *batch, D]``: ``[..., legs, *batch, D]``."""
        x = x.unsqueeze(x.ndim - self.base.mean.ndim + 1)
        return self.base.whiten(x.expand(*x.shape[: x.ndim - self.base.mean.ndim], *self.base.mean.shape))

    def crossed(self, v: Tensor) -> Tensor:
        """The coordinates on the other leg of points ``[..., legs, *batch, D]``."""
        dim = v.ndim - self.base.mean.ndim
        return self.base.whiten(self.base.unwhiten(v).flip(dim))

    def at_last(self, targets: PathPoint) -> Tensor:
        """``phi - psi`` of every leg at the last leg's targets ``[chains, legs, *batch]``, in float64."""
        x = self.base.unwhiten(targets.v)[:, -1]
        energy = targets.energy[:, -1:].expand_as(targets.energy)
        v = self.coordinates(x)
        return self._difference(energy, self._of_base(v)[0])


def broad_reference(found: Modes, base: Whitened) -> Gaussian:
    """A Gaussian that covers the modes of every problem; where none was found, the base with 4 times its covariance.

    Args:
        found: modes, ``[M, *batch, D]``; a problem without any has masses ``-inf``.
        base: density whose moments stand in for modes.
    """
    lost = found.log_z.isneginf()
    if not lost.any():
        return Gaussian.covering(found)
    moments = base.moments
    mean, covariance = cover(found)
    wide = lost[..., None, None]
    # the moments of no mode are NaN
    unit = torch.eye(base.dim, dtype=covariance.dtype, device=covariance.device)
    factor = torch.where(wide, _WIDER * _triangular(moments.scale), factorised(torch.where(wide, unit, covariance)))
    return Gaussian(torch.where(lost.unsqueeze(-1), moments.mean, mean), cholesky=factor)


class _SideBySide(Whitened):
    """References of any kind over ``[legs, *batch, D]``, in the whitened coordinates of their moments."""

    def __init__(self, references: list[Whitened]):
        gaussians = _gaussians([reference.moments for reference in references])
        vars(self).update(references=references, mean=gaussians.mean, scale=gaussians.scale)

    references: list[Whitened]

    def energy(self, x):
        return self._joined([leg.energy(part) for leg, part in self._legs(x)], x)

    def energy_and_gradient(self, x):
        energies, gradients = zip(*(leg.energy_and_gradient(part) for leg, part in self._legs(x)), strict=True)
        return self._joined(energies, x), self._joined(gradients, x)

    def sample(self, shape=(), generator=None):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return torch.stack([leg.sample(shape, generator) for leg in self.references], len(shape))

    def _legs(self, x: Tensor) -> list[tuple[Whitened, Tensor]]:
        return list(zip(self.references, x.unbind(x.ndim - self.mean.ndim), strict=True))

    def _joined(self, parts, x: Tensor) -> Tensor:
        return torch.stack(list(parts), x.ndim - self.mean.ndim)


def _side_by_side(base: Whitened, broad: Gaussian | None) -> Whitened:
    """One density over ``[legs, *batch, D]``."""
    references = [base] if broad is None else [base, _fitting(broad, base)]
    gaussians = [reference for reference in references if isinstance(reference, GaussianDensity)]
    return _gaussians(gaussians) if len(gaussians) == len(references) else _SideBySide(references)


def _gaussians(references: list[GaussianDensity]) -> Gaussian:
    """One Gaussian over ``[legs, *batch, D]``, whose kind is the more general of theirs."""
    scales = [reference.scale for reference in references]
    means = torch.stack([reference.mean for reference in references])
    if all(isinstance(scale, DiagonalMap) for scale in scales):
        return Gaussian(means, torch.stack([scale.sd for scale in scales if isinstance(scale, DiagonalMap)]))
    if any(isinstance(scale, TriangularMap) for scale in scales):
        return Gaussian(means, cholesky=torch.stack([_triangular(scale) for scale in scales]))
    rank = max(scale.factor.shape[-1] for scale in scales if isinstance(scale, LowRankMap))
    sds, factors = zip(*(_low_rank(scale, rank) for scale in scales), strict=True)
    return Gaussian(means, torch.stack(sds), factor=torch.stack(factors))


def _fitting(broad: Gaussian, base: Whitened) -> Gaussian:
    broad = broad.to(base.mean)
    if broad.dim != base.dim or broad.batch_shape not in (base.batch_shape, torch.Size()):
        raise ArgumentError(
            f"ParallelTempering(broad of shape {tuple(broad.mean.shape)}): expected {tuple(base.mean.shape)}, or "
            f"{(base.dim,)} for all problems"
        )
    parts = [part.expand(*base.batch_shape, *part.shape[len(broad.batch_shape) :]) for part in broad.scale.parts]
    return Gaussian._of(broad.mean.expand_as(base.mean), broad.scale.remade(parts))


def _triangular(scale: Scale) -> Tensor:
    if isinstance(scale, TriangularMap):
        return scale.factor
    covariance = scale.covariance()
    return torch.linalg.cholesky(covariance.double()).to(covariance)


def _low_rank(scale: Scale, rank: int) -> tuple[Tensor, Tensor]:
    """Standard deviations, and a factor of this rank, padded with zeros."""
    sd = scale.parts[0]
    factor = scale.factor if isinstance(scale, LowRankMap) else sd.new_zeros(*sd.shape, 0)
    return sd, torch.cat([factor, factor.new_zeros(*sd.shape, rank - factor.shape[-1])], -1)
