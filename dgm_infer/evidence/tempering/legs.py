"""The references of parallel tempering, side by side: paths from them to the target, and fits to its draws."""

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...references import Gaussian
from ...references.density import GaussianDensity, Whitened
from ...references.modes import Modes, cover
from ...references.scales import Diagonal, Full, LowRank, Scale, factorised, remade
from ..path import AnnealedPath, Point

__all__ = ["HalfMoments", "Legs", "broad_reference", "improved"]


# Shares of the draws' moments in a new base, of which the best by the other half of the chains is taken.
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


class HalfMoments:
    """Sums over states at the target, of the first and of the second half of the chains.

    Args:
        like: a state, ``[chains, legs, *batch, D]``, of two chains or more.
    """

    def __init__(self, like: Tensor):
        shape = like.shape[2:]
        self._middle = (len(like) + 1) // 2
        self._first = torch.zeros(2, *shape, dtype=torch.float64, device=like.device)
        self._second = torch.zeros(2, *shape, shape[-1], dtype=torch.float64, device=like.device)
        self._count = torch.zeros(2, dtype=torch.float64, device=like.device)

    def add(self, x: Tensor) -> None:
        """Add states ``[chains, legs, *batch, D]``."""
        for half, part in enumerate((x[: self._middle], x[self._middle :])):
            rows = part.flatten(0, 1).double()
            self._first[half] += rows.sum(0)
            self._second[half] += torch.einsum("n...i,n...j->...ij", rows, rows)
            self._count[half] += len(rows)

    def halves(self) -> tuple[Tensor, Tensor]:
        """Means ``[2, *batch, D]`` and covariances ``[2, *batch, D, D]``."""
        return _moments(self._first, self._second, self._count)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Mean ``[*batch, D]`` and covariance ``[*batch, D, D]`` of all."""
        sums = (part.sum(0, keepdim=True) for part in (self._first, self._second, self._count))
        mean, covariance = _moments(*sums)
        return mean[0], covariance[0]


def improved(mean: Tensor, covariance: Tensor, draws: HalfMoments) -> tuple[Tensor, Tensor, Tensor]:
    """A base of smaller cross-entropy to the target than the present one, by draws that it is not fitted to.

    Candidates have the moments of mixtures of the present base and of the draws, in several shares. Each is fitted to
    one half of the chains and judged by the other, ``E[psi]``, and the best share is then fitted to all.

    Args:
        mean, covariance: of the present base, ``[*batch, D]`` and ``[*batch, D, D]``, float64.
        draws: states at the target.

    Returns:
        mean and covariance of the new base, and whether it is another one than before, ``[*batch]``.
    """
    means, covariances = draws.halves()
    scores = []
    for share in _SHARES:
        fitted = _mixed(torch.full_like(mean[..., 0], share), mean, covariance, means, covariances)
        scores.append(_cross_entropy(*fitted, means.flip(0), covariances.flip(0)).mean(0))
    best = torch.stack(scores).nan_to_num(torch.inf).argmin(0)
    share = torch.tensor(_SHARES, dtype=mean.dtype, device=mean.device)[best]
    return *_mixed(share, mean, covariance, *draws.whole()), best > 0


def _moments(first: Tensor, second: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    n = count.reshape(-1, *[1] * (first.ndim - 1))
    mean = first / n
    return mean, second / n.unsqueeze(-1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)


def _mixed(
    share: Tensor, mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor
) -> tuple[Tensor, Tensor]:
    """Moments of a mixture of two densities; ``share [*batch]`` is that of the other."""
    row, matrix = share.unsqueeze(-1), share[..., None, None]
    apart = other_mean - mean
    spread = matrix * (1 - matrix) * apart.unsqueeze(-1) * apart.unsqueeze(-2)
    return mean + row * apart, torch.lerp(covariance, other_covariance, matrix) + spread


def _cross_entropy(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> Tensor:
    """``-E[log q]`` without its constant, for a normal q and a density of the other moments; infinite for no normal."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    unit = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    factor = torch.where((failed == 0)[..., None, None], factor, unit)
    apart = other_mean - mean
    second = other_covariance + apart.unsqueeze(-1) * apart.unsqueeze(-2)
    trace = torch.cholesky_solve(second, factor).diagonal(dim1=-2, dim2=-1).sum(-1)
    entropy = 0.5 * trace + factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(failed == 0, entropy, torch.inf)


# Standard deviations of the broad reference in those of the base, where there is no mode to cover.
_WIDER = 2.0
# Replicas that are evaluated at once on a CPU.
_ROWS = 1024


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
        super().__init__(path.target, _side_by_side(path.base, broad))
        self.count = 1 if broad is None else 2

    def rebase(self, mean: Tensor, covariance: Tensor, which: Tensor) -> None:
        """Give the first leg of the problems ``which [*batch]`` a reference of these moments.

        Args:
            mean, covariance: ``[*batch, D]`` and ``[*batch, D, D]``.
        """
        means, factors = self.base.mean.clone(), _triangular(self.base.scale).clone()
        factor, failed = torch.linalg.cholesky_ex(covariance)
        which = which & (failed == 0)
        means[0] = torch.where(which.unsqueeze(-1), mean.to(means), means[0])
        factors[0] = torch.where(which[..., None, None], factor.to(factors), factors[0])
        self._start_from(Gaussian(means, cholesky=factors))

    def at(self, v: Tensor) -> Point:
        """Evaluate at ``[..., chains, legs, *batch, D]``."""
        point = super().at(v)
        replicas = v.shape[: v.ndim - self.base.mean.ndim - 1].numel() * self.count
        self.evaluations += replicas - 1
        return point

    def _evaluated(self, x):
        # blocks of whole temperatures, whose activations stay in a CPU's caches
        blocks = min(len(x), -(-x.shape[:-1].numel() // _ROWS)) if x.device.type == "cpu" else 1
        if blocks <= 1:
            return super()._evaluated(x)
        parts = [super(Legs, self)._evaluated(part) for part in x.tensor_split(blocks)]
        energies, gradients = zip(*parts, strict=True)
        return torch.cat(energies), torch.cat(gradients)

    def coordinates(self, x: Tensor) -> Tensor:
        """Whitened coordinates on every leg of points ``[..., *batch, D]``: ``[..., legs, *batch, D]``."""
        x = x.unsqueeze(x.ndim - self.base.mean.ndim + 1)
        return self.base.whiten(x.expand(*x.shape[: x.ndim - self.base.mean.ndim], *self.base.mean.shape))

    def crossed(self, v: Tensor) -> Tensor:
        """The coordinates on the other leg of points ``[..., legs, *batch, D]``."""
        dim = v.ndim - self.base.mean.ndim
        return self.base.whiten(self.base.unwhiten(v).flip(dim))

    def at_last(self, targets: Point) -> Tensor:
        """``phi - psi`` of every leg at the last leg's targets ``[chains, legs, *batch]``, in float64."""
        x = self.base.unwhiten(targets.v)[:, -1]
        energy = targets.energy[:, -1:].expand_as(targets.energy)
        v = self.coordinates(x)
        return self._difference(energy, self._of_base(v, self.base.unwhiten(v))[0])


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
    if all(isinstance(scale, Diagonal) for scale in scales):
        return Gaussian(means, torch.stack([scale.sd for scale in scales if isinstance(scale, Diagonal)]))
    if any(isinstance(scale, Full) for scale in scales):
        return Gaussian(means, cholesky=torch.stack([_triangular(scale) for scale in scales]))
    rank = max(scale.factor.shape[-1] for scale in scales if isinstance(scale, LowRank))
    sds, factors = zip(*(_low_rank(scale, rank) for scale in scales), strict=True)
    return Gaussian(means, torch.stack(sds), factor=torch.stack(factors))


def _fitting(broad: Gaussian, base: Whitened) -> Gaussian:
    broad = broad.to(base.mean)
    if broad.dim != base.dim or broad.batch_shape not in (base.batch_shape, torch.Size()):
        raise ArgumentError(
            f"ParallelTempering(broad of shape {tuple(broad.mean.shape)}): expected {tuple(base.mean.shape)}, or "
            f"{(base.dim,)} for all problems"
        )
    parts = [part.expand(*base.batch_shape, *part.shape[len(broad.batch_shape) :]) for part in broad.scale.tensors]
    return Gaussian._of(broad.mean.expand_as(base.mean), remade(broad.scale, parts))


def _triangular(scale: Scale) -> Tensor:
    if isinstance(scale, Full):
        return scale.cholesky
    covariance = scale.covariance()
    return torch.linalg.cholesky(covariance.double()).to(covariance)


def _low_rank(scale: Scale, rank: int) -> tuple[Tensor, Tensor]:
    """Standard deviations, and a factor of this rank, padded with zeros."""
    sd = scale.tensors[0]
    factor = scale.factor if isinstance(scale, LowRank) else sd.new_zeros(*sd.shape, 0)
    return sd, torch.cat([factor, factor.new_zeros(*sd.shape, rank - factor.shape[-1])], -1)
