"""The modes to jump between, and proposals by the affine maps between their normal approximations (math 8.15)."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..autodiff.randomness import normal, uniform
from ..errors import ArgumentError
from ..settings import Settings
from .metropolis import Point, metropolis

# Modes that are kept, at most, and numbers in their covariances, which files and checkpoints hold.
_MOST, _NUMBERS = 256, 2**21


class Landed(NamedTuple):
    """Outcome of jumps."""

    moved: Tensor
    """Which chains are elsewhere, ``[chains, *batch]``."""
    probability: Tensor
    """Acceptance probability of the jump of each chain, made or not, ``[chains, *batch]``."""


@dataclass(frozen=True, eq=False, repr=False)
class Jumps(Settings):
    """Modes to jump between: normal densities ``N(m_k, L_k L_k^T)`` with weights, for every problem of a batch.

    From x a mode i is drawn with probability ``r_i(x) ~ w_i N(x | m_i, L_i L_i^T)``, another one j with ``q(j | i) ~
    w_j^(1/2)``, and proposed is ``x' = m_j + L_j L_i^-1 (x - m_i)``. Accepting it with probability ``min(1, exp(phi(x)
    - phi(x')) r_j(x') q(i | j) |L_j| / (r_i(x) q(j | i) |L_i|))`` leaves the density as it is, however good the normal
    approximations are. (Tjelmeland and Hegstad 2001; Pompe et al. 2020)

    Args:
        centres: m, ``[M, *batch, D]``.
        factors: L, lower triangular, ``[M, *batch, D, D]``.
        log_weights: log w, ``[M, *batch]``; ``-inf`` where a problem has fewer modes.

    Attributes:
        inverses: ``L^-1``, ``[M, *batch, D, D]``.
        log_dets: ``log|L|``, ``[*batch, M]``.
        log_rests: logs of the sums of the roots of all other weights, ``[*batch, M]``.
    """

    centres: Tensor
    factors: Tensor
    log_weights: Tensor
    # what follows from them, computed once and not at every transition
    inverses: Tensor = field(init=False)
    log_dets: Tensor = field(init=False)
    log_rests: Tensor = field(init=False)

    def __post_init__(self):
        unit = torch.eye(self.factors.shape[-1]).to(self.factors)
        # of logs: a difference of sums would lose all but the largest weights
        roots = 0.5 * self.log_weights.movedim(0, -1)
        own = torch.eye(roots.shape[-1], dtype=torch.bool, device=roots.device)
        derived = {
            "inverses": torch.linalg.solve_triangular(self.factors, unit, upper=False),
            "log_dets": self.factors.diagonal(dim1=-2, dim2=-1).log().sum(-1).movedim(0, -1),
            "log_rests": torch.where(own, -torch.inf, roots.unsqueeze(-2)).logsumexp(-1),
        }
        for name, value in derived.items():
            # the class is frozen
            object.__setattr__(self, name, value)

    @classmethod
    def between(cls, positions: Tensor, covariances: Tensor, log_masses: Tensor) -> Self:
        """Jumps between the modes of the largest masses, 256 at most, that have a covariance: ``[M, *batch, ...]``."""
        unit = torch.eye(positions.shape[-1], dtype=positions.dtype, device=positions.device)
        there = covariances.flatten(-2).isfinite().all(-1) & log_masses.isfinite()
        factors, failed = torch.linalg.cholesky_ex(torch.where(there[..., None, None], covariances, unit))
        there &= failed == 0
        log_weights = torch.where(there, log_masses.to(positions), -torch.inf)
        most = min(_MOST, max(1, _NUMBERS // max(1, factors[:1].numel())))
        order = log_weights.argsort(0, descending=True)[: min(most, max(1, int(there.sum(0).max())))]
        there, log_weights = there.gather(0, order), log_weights.gather(0, order)
        # a problem without a mode has one that no chain leaves
        log_weights[0] = torch.where(there[0], log_weights[0], 0.0)
        row, square = order.unsqueeze(-1), order[..., None, None]
        return cls(
            torch.where(there.unsqueeze(-1), positions.gather(0, row.expand(*order.shape, len(unit))), 0.0),
            torch.where(there[..., None, None], factors.gather(0, square.expand(*order.shape, *unit.shape)), unit),
            log_weights.log_softmax(0),
        )

    @property
    def counts(self) -> Tensor:
        """Number of modes, ``[*batch]``."""
        return self.log_weights.isfinite().sum(0)

    def __repr__(self) -> str:
        # its numbers would fill pages
        counts = self.counts
        least, most = int(counts.min()), int(counts.max())
        number = f"{least} mode{'s' * (least != 1)}" if least == most else f"{least} to {most} modes"
        return f"Jumps({number} of {self.centres.shape[-1]} coordinates)"

    def check(self, name: str, batch_shape: torch.Size, dim: int) -> None:
        """Raise ArgumentError unless the modes are those of such problems."""
        if self.centres.shape[1:] != (*batch_shape, dim):
            raise ArgumentError(
                f"{name}({self!r} of {tuple(self.centres.shape[1:-1])} problems): the problem has "
                f"{tuple(batch_shape)} problems of {dim} coordinates: give its own modes, dgm.modes(problem)"
            )

    def draws(self, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Centres and points of n draws from the mixture, each ``[n, *batch, D]``."""
        k = _drawn(self.log_weights.movedim(0, -1).expand(n, *self.centres.shape[1:-1], -1), rng)
        centre = _at(self.centres.movedim(0, -2), k, 1)
        noise = normal(centre.shape, centre, rng)
        return centre, centre + (_at(self.factors.movedim(0, -3), k, 2) @ noise.unsqueeze(-1)).squeeze(-1)

    def proposed(self, x: Tensor, rng: Any) -> tuple[Tensor, Tensor]:
        """A point of another mode for every one of ``x [chains, *batch, D]``, and the log of all but the densities.

        That is ``-inf``, and the point is x, for problems of one mode.
        """
        here = self._known(x)
        i = _drawn(here.log_r, rng)
        roots = 0.5 * self.log_weights.movedim(0, -1)
        j = _drawn(roots.expand_as(here.log_r).scatter(-1, i.unsqueeze(-1), -torch.inf), rng)
        factor, white = _at(self.factors.movedim(0, -3), j, 2), _at(here.white, i, 1)
        moved = _at(self.centres.movedim(0, -2), j, 1) + (factor @ white.unsqueeze(-1)).squeeze(-1)
        # log q(j | i) = roots_j - rests_i
        other = self.log_dets - roots - self.log_rests
        log_hastings = _at(self._known(moved).log_r + other, j) - _at(here.log_r + other, i)
        several = self.counts > 1
        moved = torch.where(several.unsqueeze(-1), moved, x)
        return moved, torch.where(several, log_hastings, -torch.inf)

    def to(self, like: Tensor) -> Self:
        """The same in the type and on the device of a tensor."""
        if self.centres.dtype == like.dtype and self.centres.device == like.device:
            return self
        return type(self)(self.centres.to(like), self.factors.to(like), self.log_weights.to(like))

    def decided(self, here: Point, there: Point, log_hastings: Tensor, rng: torch.Generator) -> "Landed":
        """Which of the chains jump from here to there, as :meth:`proposed`: at most half of them."""
        decision = metropolis(here, there, log_hastings, rng)
        # of two modes that are much alike, a jump at every transition would always lead to the other
        half = uniform(here.energy.shape, here.position, rng) < 0.5
        return Landed(half & (decision.point.position != here.position).any(-1), decision.probability)

    def centred(self, x: Tensor) -> Tensor:
        """``x - m``, each of ``x [chains, *batch, D]`` about the mode that it is most probably of."""
        return x - _at(self.centres.movedim(0, -2), self._known(x).log_r.argmax(-1), 1)

    def _known(self, x: Tensor) -> "_Known":
        # chains as columns, so that no factor is repeated
        columns = (x.unsqueeze(-2) - self.centres.movedim(0, -2)).movedim(0, -1)
        white = (self.inverses.movedim(0, -3) @ columns).movedim(-1, 0)
        log_joint = self.log_weights.movedim(0, -1) - self.log_dets - 0.5 * white.square().sum(-1)
        return _Known(white, log_joint.log_softmax(-1))


class _Known(NamedTuple):
    """Where points are among the modes."""

    white: Tensor
    """``L_k^-1 (x - m_k)``, ``[chains, *batch, M, D]``."""
    log_r: Tensor
    """``log r_k(x)``, ``[chains, *batch, M]``."""


def _drawn(log_weights: Tensor, rng: Any) -> Tensor:
    """An index for every row of log weights ``[..., M]``, in proportion to the weights: ``[...]``."""
    ends = (log_weights - log_weights.amax(-1, keepdim=True)).exp().cumsum(-1)
    at = uniform(ends[..., :1].shape, ends, rng) * ends[..., -1:]
    return (ends[..., :-1] <= at).sum(-1)


def _at(values: Tensor, index: Tensor, inner: int = 0) -> Tensor:
    """``values [(chains,) *batch, M, *inner]`` at indices ``[chains, *batch]``: ``[chains, *batch, *inner]``."""
    values = values.expand(*index.shape, *values.shape[values.ndim - inner - 1 :])
    return values.take_along_dim(index.reshape(*index.shape, *[1] * (inner + 1)), -1 - inner).squeeze(-1 - inner)
