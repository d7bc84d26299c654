"""The common part of the tempering methods: chains over x and a temperature (T 5)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...arguments import choice, finite, fraction, optional_positive, whole_number
from ...errors import ArgumentError, EvidenceError
from ...progress import Progress
from ...settings import Settings
from ..importance import importance_log_z
from ..method import EstimateStatus, Outcome, check_held
from ..path import AnnealedPath, Point
from ..pilot import Pilot, anneal_pilot
from .record import Record, TemperedState

__all__ = ["TemperedChain", "Tempering", "draw_beta"]

# Draws of the base for a first guess of log Z.
_GUESS = 100
# Draws of the base at which the target must have a density, in batches of _GUESS.
_INSIDE = 1000
_NO_DENSITY = (
    "the target has zero density at {share} of the base's draws, to which tempering cannot give weights: use AIS or "
    "ImportanceSampling, or a base inside the target's support"
)


@dataclass(frozen=True, eq=False)
class Tempering(Settings):
    """Base of the tempering methods: a pilot, a warm-up, and estimates from every state of the chains."""

    draws: int = 400
    warmup: int = 100
    n_steps: int = 5
    step_size: float | Tensor | None = None
    log_zeta: str | float | Tensor | None = None
    thin: int = 1
    target_acceptance: float = 0.8
    pilot_temperatures: int = 100

    @property
    def status(self) -> EstimateStatus:
        return "consistent"

    def __post_init__(self):
        name = type(self).__name__
        for field in ("draws", "n_steps", "thin", "pilot_temperatures"):
            whole_number(name, field, getattr(self, field))
        whole_number(name, "warmup", self.warmup, 0)
        if self.thin > self.draws:
            raise ArgumentError(f"{name}(thin={self.thin}): must be at most draws={self.draws}")
        optional_positive(name, "step_size", self.step_size)
        fraction(name, "target_acceptance", self.target_acceptance)
        if isinstance(self.log_zeta, str):
            choice(name, "log_zeta", self.log_zeta, ("pilot", "importance"))
        elif self.log_zeta is not None:
            finite(name, "log_zeta", self.log_zeta)

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        record, spent = self.recorded(path, chains, rng, progress)
        return record.outcome(spent)

    def recorded(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> tuple[Record, int]:
        """All states of the chains, and the gradient evaluations spent on tuning."""
        check_held(self, path, **self._held(path, chains))
        progress.expect(self.pilot_temperatures + self.warmup + self.draws)
        pilot = anneal_pilot(
            path,
            max(chains, 4),
            rng,
            temperatures=self.pilot_temperatures,
            n_steps=self.n_steps,
            target_acceptance=self.target_acceptance,
            step_size=self.step_size,
            progress=progress,
        )
        log_zeta = self._log_zeta(path, pilot, rng)
        # start at all temperatures: chains that do not travel then disagree, as their spread shows
        start = torch.linspace(0, len(pilot.point.v) - 1, chains, device=pilot.point.v.device).long()
        point = Point(*(part[start] for part in pilot.point))
        if not point.energy.isfinite().all():
            raise EvidenceError(_NO_DENSITY.format(share="some"))
        chain = self._chain(path, pilot, log_zeta, point, rng)
        for _ in range(self.warmup):
            chain.warm()
            progress.update("warm-up")
        chain.freeze()
        spent = path.evaluations
        record = Record(path, log_zeta, chains, self.draws, self.thin)
        record.log_prior = chain.log_prior
        try:
            for _ in range(self.draws):
                record.add(chain.step())
                progress.update("tempering", lambda: record.estimate().log_z)
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
        """Guess of log Z, ``[*batch]``, float64.

        Raises:
            EvidenceError: the target has zero density at draws of the base.
        """
        guess, _ = importance_log_z(path, _GUESS, rng)
        lost = self._outside(path, pilot, rng)
        if (lost > 0).any():
            raise EvidenceError(_NO_DENSITY.format(share=f"{100 * lost.max().item():.2g} %"))
        if isinstance(self.log_zeta, str):
            return pilot.log_z if self.log_zeta == "pilot" else guess
        if self.log_zeta is not None:
            return _fitting(type(self).__name__, self.log_zeta, guess)
        return pilot.log_z if path.base.log_zeta is None else path.base.log_zeta.to(guess)

    def _outside(self, path: AnnealedPath, pilot: Pilot, rng: torch.Generator) -> Tensor:
        """Share of the base's draws at which the target has zero density, ``[*batch]``.

        A chain never leaves the support, so base mass outside it would be a bias that the spread over chains hides.
        """
        # a generator of its own: the run's random numbers do not depend on how many are drawn here
        own = torch.Generator(rng.device).manual_seed(rng.initial_seed() + 1)
        shares = [importance_log_z(path, _GUESS, own)[1] for _ in range(_INSIDE // _GUESS)]
        return torch.stack([*shares, pilot.log_weights.isneginf().double().mean(0)]).mean(0)

    def _chain(
        self, path: AnnealedPath, pilot: Pilot, log_zeta: Tensor, point: Point, rng: torch.Generator
    ) -> "TemperedChain":
        raise NotImplementedError


class TemperedChain(Protocol):
    """Running chains."""

    @property
    def log_prior(self) -> Callable[[Tensor], Tensor] | None:
        """Log prior weights of temperatures, if these are discrete."""
        ...

    def step(self) -> TemperedState:
        """One transition."""
        ...

    def warm(self) -> None:
        """One transition, which may adapt."""
        ...

    def freeze(self) -> None:
        """End the adaptation."""
        ...


def _fitting(name: str, log_zeta: float | Tensor, like: Tensor) -> Tensor:
    try:
        return torch.as_tensor(log_zeta).to(like).expand(like.shape)
    except RuntimeError:
        raise ArgumentError(
            f"{name}(log_zeta of shape {tuple(torch.as_tensor(log_zeta).shape)}): expected a number or "
            f"{tuple(like.shape)}"
        ) from None


def draw_beta(delta: Tensor, rng: torch.Generator) -> Tensor:
    """An exact draw of ``beta`` given x: exponential with rate Delta, truncated to [0, 1].

    With ``a = |Delta|``, ``t = -log1p(U expm1(-a))/a`` (``t = U`` when a < 1e-8), and beta is t where Delta >= 0, else
    ``1 - t``.
    """
    uniform = torch.rand(delta.shape, generator=rng, dtype=delta.dtype, device=delta.device)
    a = delta.abs()
    t = torch.where(a < 1e-8, uniform, -(uniform * torch.expm1(-a)).log1p() / a.clamp_min(1e-8))
    return torch.where(delta >= 0, t, 1 - t)
