"""An importance sample far around a run's draws: mass that no chain came near, in few dimensions (math 6.14)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..autodiff.capture import calls_and_numbers
from .estimators import exceeded, welch
from .method import Outcome
from .path import AnnealedPath


@dataclass(frozen=True)
class WideSampleSettings:
    """Sizes of the sample, and when it counts."""

    scales: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0)
    """Factors on the standard deviations of the base, of the draws and of a standard normal: of a normal 1.7 times as
    wide as another one, between two of them, a quarter of the draws are effective in five dimensions."""
    dim: int = 10
    """Dimensions above which none of its points would be where the mass is."""
    share: float = 0.25
    """Points for every gradient of the run, whose cost they raise by a twelfth."""
    most: int = 2**17
    """Points for every problem, at most."""
    enough: int = 2**16
    """The same of short runs whose energies cost little: a tenth of a second."""
    numbers: int = 2**26
    """What energies of so many points make, in all problems, where they cost little."""
    held: int = 2**23
    """Numbers in the points of all problems: 64 MiB."""
    rows: int = 2**13
    """Points of all problems that are evaluated at once."""
    effective: float = 20.0
    """Effective points below which their error is not known."""
    false: float = 1e-3
    """Probability of a shift where there is none, over all problems."""


SETTINGS = WideSampleSettings()
# Standard errors of a difference above which it widens the error.
BEYOND = 1.5


class CrossCheck(NamedTuple):
    """What another method says, each ``[*batch]``."""

    shift: Tensor
    """By how much log Z is larger, 0 where that can be chance."""
    spread: Tensor
    """What the standard error of the run lacks, by the difference: an error that adds to it in squares."""

    @classmethod
    def none(cls, like: Tensor) -> "CrossCheck":
        return cls(torch.zeros_like(like), torch.zeros_like(like))

    @classmethod
    def of(cls, difference: Tensor, excess: Tensor, variance: Tensor, quantile: Tensor, like: Tensor) -> "CrossCheck":
        """By how much log Z is larger, at least 0, where ``excess``, of this variance, is beyond a quantile of it."""
        spread = (difference.square() - BEYOND**2 * variance).clamp_min(0.0).nan_to_num(0.0).sqrt()
        shift = torch.where(excess > quantile * variance.sqrt(), difference, 0.0)
        return cls(shift.to(like), spread.to(like))


@torch.no_grad()
def wide_sample(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> CrossCheck:
    """By how much log Z is larger by importance sampling from normals up to a hundred times as wide.

    They have the moments of the base, of the run's draws and of a standard normal, a third each. ``Z =
    E[exp(-phi(x))/q(x)]``, with q their mixture in equal parts, whatever chains have seen, so that a larger Z is
    evidence against the run; a smaller one is not, as a sample may miss mass too. An energy that fails far out leaves
    the question open.
    """
    estimate, base = outcome.estimate, path.base
    nothing = CrossCheck.none(estimate.log_z)
    dim, problems = base.dim, max(1, base.batch_shape.numel())
    if dim > SETTINGS.dim or not estimate.log_z.isfinite().any() or outcome.interrupted:
        return nothing
    try:
        n = _points(path, outcome) // (3 * len(SETTINGS.scales))
        if n < SETTINGS.effective:
            return nothing
        log_w = _log_weights(path, _components(path, outcome), n, max(1, SETTINGS.rows // problems), rng)
    except (RuntimeError, ValueError, ArithmeticError):
        return nothing
    return beside_run(log_w, outcome, least=SETTINGS.effective, false=SETTINGS.false)


def beside_run(log_w: Tensor, outcome: Outcome, *, least: float, false: float) -> CrossCheck:
    """What an importance sample of log weights ``[n, *batch]`` says of a run.

    Args:
        least: effective points below which their error is not known.
        false: probability of a shift where there is none, over all problems.
    """
    estimate = outcome.estimate
    log_z = log_w.logsumexp(0) - math.log(len(log_w))
    relative = (log_w - log_z).exp().std(0) / math.sqrt(len(log_w))
    effective = (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp()
    claimed, error = estimate.log_z.double(), estimate.std_error.double()
    variance, dof = welch(torch.stack([relative, error]), (len(log_w) - 1, len(outcome.draws) - 1))
    difference = torch.where(effective >= least, log_z - claimed, 0.0).clamp_min(0.0).nan_to_num(0.0)
    # the error of few chains is itself uncertain
    quantile = exceeded(false / max(1, log_z.numel()), dof.clamp_min(1.0)).to(variance)
    # of Z itself, whose weights have the error
    return CrossCheck.of(difference, -torch.expm1(-difference), variance, quantile, estimate.log_z)


def _points(path: AnnealedPath, outcome: Outcome) -> int:
    """Points of every problem."""
    _, numbers = calls_and_numbers(path.target.energy, path.base.mean.unsqueeze(0))
    cheap = min(SETTINGS.enough, SETTINGS.numbers // max(1, numbers))
    most = min(SETTINGS.most, SETTINGS.held // max(1, path.base.mean.numel()))
    return min(most, max(cheap, int(SETTINGS.share * path.evaluations * len(outcome.draws))))


class _Normals(NamedTuple):
    """In whitened coordinates."""

    means: Tensor
    """``[K, *batch, D]``."""
    factors: Tensor
    """Lower triangular, ``[K, *batch, D, D]``."""


def _components(path: AnnealedPath, outcome: Outcome) -> _Normals:
    """The moments of the base, of the draws and, whatever they are, of a standard normal."""
    dim, batch = path.base.dim, path.base.batch_shape
    unit = torch.eye(dim, dtype=torch.float64, device=path.base.mean.device).expand(*batch, dim, dim)
    mean, factor = torch.zeros_like(unit[..., 0]), unit
    if outcome.draws.shape[1]:
        v = path.base.whiten(outcome.draws.flatten(0, 1).to(path.base.mean)).double()
        weight = outcome.log_weights.flatten(0, 1).double().softmax(0).unsqueeze(-1)
        own = (weight * v).sum(0)
        apart = v - own
        covariance = torch.einsum("n...i,n...j->...ij", weight * apart, apart)
        root, failed = torch.linalg.cholesky_ex(covariance)
        there = (failed == 0) & root.isfinite().all(-1).all(-1)
        mean = torch.where(there.unsqueeze(-1), own, mean)
        factor = torch.where(there[..., None, None], root, factor)
    # where that normal is in whitened coordinates
    axes = unit.movedim(-1, 0).to(path.base.mean)
    origin = path.base.whiten(torch.zeros_like(axes[:1]))
    apart = (path.base.whiten(axes) - origin).double()
    outside = torch.linalg.cholesky(torch.einsum("n...i,n...j->...ij", apart, apart))
    means = torch.stack([torch.zeros_like(mean), mean, origin[0].double()])
    return _Normals(means, torch.stack([unit, factor, outside]))


def _log_weights(path: AnnealedPath, normals: _Normals, n: int, rows: int, rng: torch.Generator) -> Tensor:
    """``-phi - log q`` at n points of every normal and scale, ``[K len(scales) n, *batch]``."""
    means, factors = normals
    scales = torch.tensor(SETTINGS.scales, dtype=means.dtype, device=means.device)
    noise = torch.randn(n, len(scales), *means.shape, generator=rng, dtype=means.dtype, device=means.device)
    noise *= scales.reshape(-1, *[1] * means.ndim)
    v = (means + (factors @ noise.unsqueeze(-1)).squeeze(-1)).flatten(0, 2)
    densities = torch.full_like(v[..., 0], -math.inf)
    for mean, factor in zip(means, factors, strict=True):
        columns = (v - mean).movedim(0, -1)
        square = torch.linalg.solve_triangular(factor, columns, upper=False).square().sum(-2).movedim(-1, 0)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        for scale in SETTINGS.scales:
            log_density = -0.5 * square / scale**2 - log_det - v.shape[-1] * math.log(scale)
            densities = torch.logaddexp(densities, log_density)
    log_q = densities - math.log(len(means) * len(scales)) - 0.5 * v.shape[-1] * math.log(2 * math.pi)
    x = path.base.unwhiten(v.to(path.base.mean))
    energy = torch.cat([path.target.energy(part) for part in x.split(rows)]).double()
    return torch.where(energy.isfinite(), -energy, -math.inf) + path.base.log_det.double() - log_q
