"""The record of tempered chains: estimates from all their states, and checks of how far they travelled."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..estimators import Estimate, log_ratio, log_weights_at_ends, weight_ess
from ..importance import largest_share
from ..method import Outcome
from ..path import AnnealedPath, Point

__all__ = ["Record", "TemperedState", "base_check"]

_BINS = 10


class TemperedState(NamedTuple):
    """State of the chains after one transition."""

    point: Point
    beta: Tensor
    """``[chains, *batch]``, float64."""
    acceptance: Tensor
    log_ends: tuple[Tensor, Tensor] | None = None
    """Logs of ``p(1 | x)`` and ``p(0 | x)``, float64; None if the temperature is continuous."""


class Record:
    """Sums over the states of the chains."""

    def __init__(self, path: AnnealedPath, log_zeta: Tensor, chains: int, draws: int, thin: int):
        shape = (chains, draws, *path.batch_shape)
        mean = path.base.mean
        self.path, self.log_zeta, self.thin = path, log_zeta, thin
        self.log_w1 = torch.empty(shape, dtype=torch.float64, device=mean.device)
        self.log_w0 = torch.empty_like(self.log_w1)
        self.beta = torch.empty(shape, dtype=torch.float32, device=mean.device)
        self.kept = mean.new_empty(chains, draws // thin, *mean.shape)
        self.acceptance = torch.zeros_like(self.log_w1[:, 0])
        self.first = torch.zeros(chains, *mean.shape, dtype=torch.float64, device=mean.device)
        self.second = torch.zeros_like(self.first)
        self.last_end = torch.full(self.acceptance.shape, -1, dtype=torch.int8, device=mean.device)
        self.crossings = torch.zeros_like(self.last_end, dtype=torch.int32)
        self.count = 0
        self.interrupted = False
        # log prior weights of discrete temperatures
        self.log_prior: Callable[[Tensor], Tensor] | None = None

    def add(self, state: TemperedState) -> None:
        i = self.count
        ends = state.log_ends
        if ends is None:
            ends = log_weights_at_ends(self.path.difference(state.point) + self.log_zeta)
        (self.log_w1[:, i], self.log_w0[:, i]), self.beta[:, i] = ends, state.beta
        if (i + 1) % self.thin == 0:
            self.kept[:, i // self.thin] = self.path.base.unwhiten(state.point.v)
        self.acceptance += state.acceptance
        weight, v = ends[1].exp().unsqueeze(-1), state.point.v.double()
        self.first += weight * v
        self.second += weight * v.square()
        cold, hot = state.beta > 0.9, state.beta < 0.1
        self.crossings += (cold & (self.last_end == 0)) | (hot & (self.last_end == 1))
        self.last_end[cold], self.last_end[hot] = 1, 0
        # last, so that what is counted is there whenever an interrupt comes
        self.count = i + 1

    def end_early(self) -> None:
        """Drop the room for states that were not made: the estimates are consistent at every length."""
        n, self.interrupted = self.count, True
        self.log_w1, self.log_w0, self.beta = self.log_w1[:, :n], self.log_w0[:, :n], self.beta[:, :n]
        self.kept = self.kept[:, : n // self.thin]

    def estimate(self) -> Estimate:
        w1, w0 = self.log_w1[:, : self.count], self.log_w0[:, : self.count]
        ratio = log_ratio(w1.logsumexp(1), w0.logsumexp(1))
        return ratio._replace(log_z=self.log_zeta + ratio.log_z)

    def outcome(self, pilot_evaluations: int) -> Outcome:
        w1, w0 = self.log_w1, self.log_w0
        edges = (self.beta * _BINS).clamp(0, _BINS - 1).to(torch.int64)
        occupancy = torch.stack([(edges == b).double().mean((0, 1)) for b in range(_BINS)])
        diagnostics = {
            "ess": weight_ess(w1.flatten(0, 1)),
            "max_weight_share": largest_share(w1.flatten(0, 1)),
            "base_ess": weight_ess(w0.flatten(0, 1)),
            "beta_occupancy": occupancy,
            "round_trips": (self.crossings // 2).sum(0),
            "acceptance": (self.acceptance / self.count).mean(0),
            "log_zeta": self.log_zeta,
            **base_check(self.first, self.second, w0.exp().sum(1)),
        }
        log_weights = w1[:, self.thin - 1 :: self.thin]
        return Outcome(self.estimate(), self.kept, log_weights, diagnostics, pilot_evaluations, self.interrupted)


def base_check(first: Tensor, second: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Compare weighted moments at the base's end with those of a standard normal, in whitened coordinates.

    ``base_mean_error`` and ``base_sd_error`` are root mean squares over coordinates, in standard deviations of the
    base, and ``base_moment_error`` is the larger of them; ``base_moment_z`` is the error in standard errors, from the
    spread over chains: about 1 if chains mix. ``base_moments_agree`` if the error is below 0.3 and z below 4; an error
    of 0.3 is that of about eleven independent draws.

    Args:
        first, second: ``sum_n w0 v`` and ``sum_n w0 v^2`` per chain, ``[chains, *batch, D]``.
        weight: ``sum_n w0``, ``[chains, *batch]``.
    """
    chains = len(weight)
    total = weight.sum(0).unsqueeze(-1)
    share = weight.unsqueeze(-1) / (total / chains)

    def moment(sums: Tensor) -> tuple[Tensor, Tensor]:
        mean = sums.sum(0) / total
        residual = sums / (total / chains) - mean * share
        spread = residual.square().sum(0) / (max(chains - 1, 1) * chains)
        return mean, spread

    mean, mean_spread = moment(first)
    square, square_spread = moment(second)
    variance_error = square - mean.square() - 1
    mean_error = mean.square().mean(-1).sqrt()
    sd_error = ((square - mean.square()).clamp_min(0).sqrt() - 1).square().mean(-1).sqrt()
    z_mean = mean_error / mean_spread.mean(-1).sqrt()
    z_square = (variance_error.square().mean(-1) / square_spread.mean(-1)).sqrt()
    error, z = torch.maximum(mean_error, sd_error), torch.maximum(z_mean, z_square)
    return {
        "base_mean_error": mean_error,
        "base_sd_error": sd_error,
        "base_moment_error": error,
        "base_moment_z": z,
        "base_moments_agree": (error < 0.3) & (z < 4),
    }
