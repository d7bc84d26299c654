"""The common part of the tempering methods: chains over x and a temperature, and the record of their states (T 5)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...arguments import choice, finite, whole_number
from ...errors import ArgumentError, EvidenceError
from ...progress import Progress
from ..estimators import Estimate, drift, largest_share, log_mean, log_ratio, weight_ess
from ..method import Outcome, check_held, of_whole_base
from ..path import AnnealedPath, Inside, PathPoint
from ..plan import Pilot, Piloted


class TemperedState(NamedTuple):
    """State of the chains after one transition."""

    point: PathPoint
    beta: Tensor
    """``[chains, *batch]``, float64."""
    acceptance: Tensor
    log_ends: tuple[Tensor, Tensor]
    """Logs of ``p(1 | x)`` and ``p(0 | x)`` up to one constant, float64."""


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
        (self.log_w1[:, i], self.log_w0[:, i]), self.beta[:, i] = state.log_ends, state.beta
        if (i + 1) % self.thin == 0:
            self.kept[:, i // self.thin] = self.path.base.unwhiten(state.point.v)
        self.acceptance += state.acceptance
        weight, v = state.log_ends[1].exp().unsqueeze(-1), state.point.v.double()
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

    def _drift(self) -> Tensor:
        n = self.count // 2
        if not n:
            return torch.zeros_like(self.log_zeta)
        halves = (torch.stack([w[:, :n], w[:, n : 2 * n]]).logsumexp(2) for w in (self.log_w1, self.log_w0))
        return drift(*(half.unsqueeze(2) for half in halves))

    def outcome(self, pilot_evaluations: int) -> Outcome:
        w1, w0 = self.log_w1, self.log_w0
        tenths = (self.beta * 10).clamp(0, 9).to(torch.int64)
        occupancy = torch.stack([(tenths == b).double().mean((0, 1)) for b in range(10)])
        diagnostics = {
            "ess": weight_ess(w1.flatten(0, 1)),
            "max_weight_share": largest_share(w1.flatten(0, 1)),
            "base_ess": weight_ess(w0.flatten(0, 1)),
            "beta_occupancy": occupancy,
            "round_trips": (self.crossings // 2).sum(0),
            "acceptance": (self.acceptance / self.count).mean(0),
            "log_zeta": self.log_zeta,
            "drift": self._drift(),
            **base_check(self.first, self.second, w0.exp().sum(1), self.path.inside),
        }
        log_weights = w1[:, self.thin - 1 :: self.thin]
        return Outcome(self.estimate(), self.kept, log_weights, diagnostics, pilot_evaluations, self.interrupted)


def base_check(first: Tensor, second: Tensor, weight: Tensor, inside: Inside | None = None) -> dict[str, Tensor]:
    """Compare weighted moments at the base's end with those of a standard normal, or of the part of it that chains
    start in, in whitened coordinates.

    ``base_mean_error`` and ``base_sd_error`` are root mean squares over coordinates, in standard deviations of the
    base, and ``base_moment_error`` is the larger of them; ``base_moment_z`` is the error in standard errors, from the
    spread over chains: about 1 if chains mix. ``base_moments_agree`` if the error is below 0.3 and z below 4; an error
    of 0.3 is that of about eleven independent draws.

    Args:
        first, second: ``sum_n w0 v`` and ``sum_n w0 v^2`` per chain, ``[chains, *batch, D]``.
        weight: ``sum_n w0``, ``[chains, *batch]``.
        inside: the part, if there is one.
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
    own_mean, own_variance = (torch.zeros_like(mean), torch.ones_like(mean)) if inside is None else inside[2:]
    variance_error = square - mean.square() - own_variance
    mean_error = (mean - own_mean).square().mean(-1).sqrt()
    sd_error = ((square - mean.square()).clamp_min(0).sqrt() - own_variance.sqrt()).square().mean(-1).sqrt()
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


# Draws of the base for a first guess of log Z.
_GUESS = 100


@dataclass(frozen=True, eq=False)
class Tempering(Piloted):
    """Base of the tempering methods: a pilot, a warm-up, and estimates from every state of the chains."""

    draws: int = 400
    warmup: int = 100
    log_zeta: str | float | Tensor | None = None
    thin: int = 1

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        for field in ("draws", "thin"):
            whole_number(name, field, getattr(self, field))
        whole_number(name, "warmup", self.warmup, 0)
        if self.thin > self.draws:
            raise ArgumentError(f"{name}(thin={self.thin}): must be at most draws={self.draws}")
        if isinstance(self.log_zeta, str):
            choice(name, "log_zeta", self.log_zeta, ("pilot", "importance"))
        elif self.log_zeta is not None:
            finite(name, "log_zeta", self.log_zeta)

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        record, spent = self.recorded(path, chains, rng, progress)
        return of_whole_base(record.outcome(spent), path.inside)

    def recorded(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> tuple[Record, int]:
        """All states of the chains, and the gradient evaluations spent on tuning."""
        check_held(self, path, **self._held(path, chains))
        progress.expect(self.pilot_temperatures + self.warmup + self.draws)
        path.restrict(rng)
        pilot = self.pilot(path, chains, rng, progress)
        log_zeta = self._log_zeta(path, pilot, rng)
        # start at all temperatures: chains that do not travel then disagree, as their spread shows
        start = torch.linspace(0, len(pilot.point.v) - 1, chains, device=pilot.point.v.device).long()
        point = PathPoint(*(part[start] for part in pilot.point))
        if not point.energy.isfinite().all():
            raise EvidenceError("all chains of the pilot are where the target has zero density: use another base")
        chain = self._chain(path, pilot, log_zeta, point, rng)
        for _ in progress.steps("warm-up", self.warmup, (chain, path, rng)):
            chain.warm()
        chain.freeze()
        spent = path.evaluations
        record = Record(path, log_zeta, chains, self.draws, self.thin)
        record.log_prior = chain.log_prior
        try:
            for _ in progress.steps("tempering", self.draws, (record, chain, path, rng), record.estimate):
                record.add(chain.step())
        except KeyboardInterrupt:
            if record.count < self.thin:
                raise
            record.end_early()
        return record, spent

    def _held(self, path: AnnealedPath, chains: int) -> dict[str, int]:
        """By setting, the numbers that a run holds at once because of it."""
        problems = path.batch_shape.numel()
        # two log weights per state, and the draws
        states = 2 * self.draws * problems + self.draws // self.thin * path.base.mean.numel()
        return {"draws": chains * states, "pilot_temperatures": self.pilot_temperatures * problems}

    def _log_zeta(self, path: AnnealedPath, pilot: Pilot, rng: torch.Generator) -> Tensor:
        """Guess of log Z, ``[*batch]``, float64."""
        log_weights = -path.differences(path.draws(_GUESS, rng))
        guess = log_mean(log_weights).log_z
        if isinstance(self.log_zeta, str):
            return pilot.log_z if self.log_zeta == "pilot" else guess
        if self.log_zeta is not None:
            return _fitting(type(self).__name__, self.log_zeta, guess)
        return pilot.log_z if path.base.log_zeta is None else path.base.log_zeta.to(guess)

    def _chain(
        self, path: AnnealedPath, pilot: Pilot, log_zeta: Tensor, point: PathPoint, rng: torch.Generator
    ) -> "TemperedChain":
        raise NotImplementedError


class TemperedChain:
    """Running chains, which may adapt while they warm up."""

    log_prior: Callable[[Tensor], Tensor] | None = None
    """Log prior weights of temperatures, if these are discrete."""

    def step(self) -> TemperedState:
        """One transition."""
        raise NotImplementedError

    def warm(self) -> None:
        """One transition of the warm-up."""
        self.step()

    def freeze(self) -> None:
        """End the adaptation."""


def _fitting(name: str, log_zeta: float | Tensor, like: Tensor) -> Tensor:
    try:
        return torch.as_tensor(log_zeta, dtype=like.dtype, device=like.device).expand(like.shape)
    except RuntimeError:
        raise ArgumentError(
            f"{name}(log_zeta of shape {tuple(torch.as_tensor(log_zeta).shape)}): expected a number or "
            f"{tuple(like.shape)}"
        ) from None
