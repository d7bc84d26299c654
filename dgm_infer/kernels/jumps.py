"""Jumps between the modes of a target, by the affine maps between their normal approximations (math 8.15)."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..settings import Settings
from ..target import Target
from .kernel import Info, Kernel, Trial
from .metrics import metric_in_use
from .points import broken

__all__ = ["Jumps", "jump"]

# Modes that are kept.
_MOST = 64


@dataclass(frozen=True, eq=False, repr=False)
class Jumps(Settings):
    """Modes to jump between: normal densities ``N(m_k, L_k L_k^T)`` with weights, for every problem of a batch.

    From x a mode i is drawn with probability ``r_i(x) ~ w_i N(x | m_i, L_i L_i^T)``, another one j with ``q(j | i) ~
    w_j^(1/2)``, and proposed is ``x' = m_j + L_j L_i^-1 (x - m_i)``. Accepting it with probability ``min(1, exp(phi(x)
    - phi(x')) r_j(x') q(i | j) |L_j| / (r_i(x) q(j | i) |L_i|))`` leaves the density as it is, however good the normal
    approximations are. (Tjelmeland and Hegstad 2001; Pompe, Holmes and Latuszynski 2020)

    Args:
        centres: m, ``[M, *batch, D]``.
        factors: L, lower triangular, ``[M, *batch, D, D]``.
        log_weights: log w, ``[M, *batch]``; ``-inf`` where a problem has fewer modes.
    """

    centres: Tensor
    factors: Tensor
    log_weights: Tensor

    @classmethod
    def between(cls, positions: Tensor, covariances: Tensor, log_masses: Tensor) -> Self:
        """Jumps between the 64 modes of the largest masses, of ``[M, *batch, ...]``; none without a covariance."""
        unit = torch.eye(positions.shape[-1], dtype=positions.dtype, device=positions.device)
        there = covariances.flatten(-2).isfinite().all(-1) & log_masses.isfinite()
        factors, failed = torch.linalg.cholesky_ex(torch.where(there[..., None, None], covariances, unit))
        there &= failed == 0
        log_weights = torch.where(there, log_masses.to(positions), -torch.inf)
        order = log_weights.argsort(0, descending=True)[: min(_MOST, max(1, int(there.sum(0).max())))]
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
        return f"Jumps({least if least == most else f'{least} to {most}'} modes of {self.centres.shape[-1]} coordinates)"

    def check(self, name: str, batch_shape: torch.Size, dim: int) -> None:
        """Raise ArgumentError unless the modes are those of such problems."""
        if self.centres.shape[1:] != (*batch_shape, dim):
            raise ArgumentError(
                f"{name}({self!r} of {tuple(self.centres.shape[1:-1])} problems): the problem has "
                f"{tuple(batch_shape)} problems of {dim} coordinates: give its own modes, dgm.modes(problem)"
            )

    def draws(self, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Centres and points of n draws from the mixture, each ``[n, *batch, D]``."""
        k = _drawn(self.log_weights.movedim(0, -1).exp().expand(n, *self.centres.shape[1:-1], -1), rng)
        centre = _at(self.centres.movedim(0, -2), k, 1)
        noise = torch.randn(centre.shape, generator=rng, dtype=centre.dtype, device=centre.device)
        return centre, centre + (_at(self.factors.movedim(0, -3), k, 2) @ noise.unsqueeze(-1)).squeeze(-1)

    def propose(self, x: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """A point of another mode for every one of ``x [chains, *batch, D]``, and the log of all but the densities.

        That is ``-inf``, and the point is x, for problems of one mode.
        """
        white, log_r = self._known(x)
        i = _drawn(log_r.exp(), rng)
        roots = (0.5 * self.log_weights.movedim(0, -1)).exp()
        others = roots.expand_as(log_r).scatter(-1, i.unsqueeze(-1), 0.0)
        j = _drawn(others, rng)
        factors = self.factors.movedim(0, -3)
        moved = (_at(factors, j, 2) @ _at(white, i, 1).unsqueeze(-1)).squeeze(-1) + _at(self.centres.movedim(0, -2), j, 1)
        log_det = factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        # q(j | i) = root_j / rest_i
        rests = roots.sum(-1, keepdim=True) - roots
        _, log_there = self._known(moved)
        every = log_det - roots.log() - rests.log()
        log_hastings = _at(log_there + every, j) - _at(log_r + every, i)
        several = self.counts > 1
        return torch.where(several.unsqueeze(-1), moved, x), torch.where(several, log_hastings, -torch.inf)

    def about(self, x: Tensor) -> Tensor:
        """The centre of the mode that each of ``x [chains, *batch, D]`` is most probably of."""
        return _at(self.centres.movedim(0, -2), self._known(x)[1].argmax(-1), 1)

    def _known(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``L_k^-1 (x - m_k)``, ``[chains, *batch, M, D]``, and ``log r_k(x)``, ``[chains, *batch, M]``."""
        # chains as columns, so that no factor is repeated
        columns = (x.unsqueeze(-2) - self.centres.movedim(0, -2)).movedim(0, -1)
        factors = self.factors.movedim(0, -3)
        white = torch.linalg.solve_triangular(factors, columns, upper=False).movedim(-1, 0)
        log_det = factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_joint = self.log_weights.movedim(0, -1) - log_det - 0.5 * white.square().sum(-1)
        return white, log_joint.log_softmax(-1)


def _drawn(weights: Tensor, rng: torch.Generator) -> Tensor:
    """An index for every row of weights ``[..., M]``, in proportion to them: ``[...]``."""
    ends = weights.cumsum(-1)
    at = torch.rand(ends[..., :1].shape, generator=rng, dtype=ends.dtype, device=ends.device) * ends[..., -1:]
    return (ends[..., :-1] <= at).sum(-1)


def _at(values: Tensor, index: Tensor, inner: int = 0) -> Tensor:
    """``values [(chains,) *batch, M, *inner]`` at indices ``[chains, *batch]``: ``[chains, *batch, *inner]``."""
    values = values.expand(*index.shape, *values.shape[values.ndim - inner - 1 :])
    return values.take_along_dim(index.reshape(*index.shape, *[1] * (inner + 1)), -1 - inner).squeeze(-1 - inner)


def jump(
    problem: Target, kernel: Kernel, jumps: Jumps, before: Any, after: Any, info: Info, rng: torch.Generator
) -> tuple[Any, Info]:
    """One jump of every chain after a transition of a kernel, accepted or not.

    Args:
        problem: the target.
        kernel: what makes states at positions.
        before: state that the transition started from.
        after, info: what it led to.
    """
    position, log_hastings = jumps.propose(after.position, rng)
    there = kernel.init(problem, position)
    failed = broken(there.energy)
    log_ratio = torch.where(failed, -torch.inf, after.energy - there.energy + log_hastings)
    probability = log_ratio.clamp_max(0).exp()
    uniform = torch.rand(probability.shape, generator=rng, dtype=probability.dtype, device=probability.device)
    landed = there.where(uniform < probability, after)
    return landed, dataclasses.replace(
        info,
        # with the momentum's part, which a jump leaves as it is
        energy=info.energy + (landed.energy - after.energy),
        stats={**info.stats, "jump_acceptance": probability},
        tuning=info.tuning and _within_modes(info.tuning, kernel, jumps, before, after),
    )


def _within_modes(trial: Trial, kernel: Any, jumps: Jumps, before: Any, after: Any) -> Trial:
    """The same with positions about the centres of their modes: warm-up adapts to these, not to how far they are apart."""
    if trial.position is not None:
        trial = trial._replace(position=trial.position - jumps.about(after.position))
    if trial.end is not None:
        centre = metric_in_use(kernel.metric).whiten(jumps.about(before.position))
        end = trial.end._replace(start=trial.end.start - centre, position=trial.end.position - centre)
        trial = trial._replace(end=end)
    return trial
