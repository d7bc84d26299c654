"""What methods of tempering share: chains over x and a temperature each (T 5)."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...arguments import fraction, optional_positive, whole_number
from ...errors import ArgumentError, EvidenceError
from ...progress import Progress
from ...settings import Settings
from ..importance import importance_log_z
from ..method import Outcome, Status
from ..path import AnnealedPath, Point
from ..pilot import Pilot, anneal_pilot
from .record import Record, TemperedState

__all__ = ["TemperedChain", "Tempering", "draw_beta"]

# Draws of the base that a first guess of log Z is made of.
_GUESS = 100
# And that the target must have a density at, in batches of the former.
_INSIDE = 1000
_NO_DENSITY = (
    "the target has no density at {share} of the base's draws, which tempering has no weights for: use AIS or "
    "ImportanceSampling, or a base inside the target's support"
)


@dataclass(frozen=True, eq=False)
class Tempering(Settings):
    """What methods of tempering share: a pilot, a warm-up, and the estimates from every state of the chains."""

    draws: int = 400
    warmup: int = 100
    n_steps: int = 5
    step_size: float | Tensor | None = None
    log_zeta: str | float | Tensor | None = None
    thin: int = 1
    target_acceptance: float = 0.8
    pilot_temperatures: int = 100

    @property
    def status(self) -> Status:
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
        if isinstance(self.log_zeta, str) and self.log_zeta not in ("importance", "pilot"):
            raise ArgumentError(
                f"{name}(log_zeta={self.log_zeta!r}): must be 'pilot', 'importance', a number or one a problem"
            )
        if isinstance(self.log_zeta, int | float | Tensor) and not torch.as_tensor(self.log_zeta).isfinite().all():
            raise ArgumentError(f"{name}(log_zeta={self.log_zeta!r}): must be finite")

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        record, spent = self.recorded(path, chains, rng, progress)
        return record.outcome(spent)

    def recorded(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> tuple[Record, int]:
        """All states of the chains, and the gradients that tuning took."""
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
        # at all temperatures: chains that do not travel then disagree, and their spread shows it
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
        for _ in range(self.draws):
            record.add(chain.step())
            progress.update("tempering", lambda: record.estimate().log_z)
        return record, spent

    def _log_zeta(self, path: AnnealedPath, pilot: Pilot, rng: torch.Generator) -> Tensor:
        """``[*batch]``, float64.

        Raises:
            EvidenceError: the target has no density at draws of the base.
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
        """Share of the base's draws at which the target has no density, ``[*batch]``.

        A chain never leaves the support, so that the base's mass outside would be a bias that no spread shows.
        """
        # numbers of their own: those of the run do not depend on how many are looked at
        own = torch.Generator(rng.device).manual_seed(rng.initial_seed() + 1)
        shares = [importance_log_z(path, _GUESS, own)[1] for _ in range(_INSIDE // _GUESS)]
        return torch.stack([*shares, pilot.log_weights.isneginf().double().mean(0)]).mean(0)

    def _chain(
        self, path: AnnealedPath, pilot: Pilot, log_zeta: Tensor, point: Point, rng: torch.Generator
    ) -> "TemperedChain":
        raise NotImplementedError


class TemperedChain(Protocol):
    """Chains at work."""

    def step(self) -> TemperedState:
        """One transition."""
        ...

    def warm(self) -> None:
        """A transition that may adapt."""
        ...

    def freeze(self) -> None:
        """The end of adaptation."""
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
    """An exact draw of ``beta`` given x: exponential of rate Delta, truncated to [0, 1].

    With ``a = |Delta|``, ``t = -log1p(U expm1(-a))/a`` (``t = U`` when a < 1e-8), and beta is t where Delta >= 0, else
    ``1 - t``.
    """
    uniform = torch.rand(delta.shape, generator=rng, dtype=delta.dtype, device=delta.device)
    a = delta.abs()
    t = torch.where(a < 1e-8, uniform, -(uniform * torch.expm1(-a)).log1p() / a.clamp_min(1e-8))
    return torch.where(delta >= 0, t, 1 - t)
