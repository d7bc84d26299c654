"""Simulated tempering (Marinari and Parisi 1992): chains over x and one of K + 1 temperatures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...arguments import choice, whole_number
from .. import schedules
from ..pilot import Pilot
from ..plan import tuned_betas
from .barrier import interpolated_rows
from .ladder import EvenLadder, Ladder, LadderChain, ListedLadder, even_knots, interpolated, is_even
from .tempering import Tempering

__all__ = ["SimulatedTempering"]

# Segments along which the prior weights of even temperatures follow the pilot; a draw costs time per segment.
_SEGMENTS = 16


@dataclass(frozen=True, eq=False)
class SimulatedTempering(Tempering):
    """Chains that alternate a Hamiltonian move of x at ``beta_k`` with an exact draw of k given x.

    ``p(x, k) ~ g_k exp(-beta_k (phi + log zeta) - (1 - beta_k) psi)`` with ``g_0 = g_K = 1``;
    ``log Z = log zeta + log sum p(K | x) - log sum p(0 | x)`` over all draws of all chains: consistent. Every draw of
    x has weight ``p(K | x)``, whatever its temperature.

    Args:
        draws: states kept per chain.
        warmup: states discarded before them.
        n_steps: leapfrog steps per state.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per temperature and
            problem on a pilot.
        log_zeta: guess of log Z, as in :class:`GibbsTempering`.
        thin: states per draw of x in the result; the estimates use all states.
        target_acceptance: mean acceptance probability that step sizes are adapted to.
        pilot_temperatures: temperatures of the annealing run that tunes step sizes and prior weights and starts the
            chains.
        temperatures: K. With even temperatures it affects neither time nor memory: k given x is a mixture of a few
            geometric distributions.
        schedule: ``"linear"`` (even), ``"sigmoid"``, ``"equalised"`` and ``"barrier"`` as in :class:`AIS`, a function
            of K, or the K + 1 values themselves, which then set K. With uneven temperatures a draw of k takes time
            proportional to K.
        weights: ``"pilot"``, g such that all temperatures are visited equally often, by the pilot's estimates of
            ``log Z(beta_k)``; ``"equal"``, all of them 1. They are frozen, and affect speed, not correctness.
    """

    temperatures: int = 1000
    schedule: str | Tensor | Callable[[int], Tensor] = "linear"
    weights: Literal["pilot", "equal"] = "pilot"

    def __post_init__(self):
        super().__post_init__()
        whole_number("SimulatedTempering", "temperatures", self.temperatures)
        schedules.check("SimulatedTempering", self.schedule, self.temperatures, schedules.TUNED)
        choice("SimulatedTempering", "weights", self.weights, ("pilot", "equal"))

    def _chain(self, path, pilot, log_zeta, point, rng):
        return LadderChain(path, pilot.step_sizes, self._ladder(pilot, log_zeta), point, rng, self.n_steps)

    def _held(self, path, chains):
        held = super()._held(path, chains)
        # values that are listed set K
        return held | {"temperatures": self.temperatures} if isinstance(self.schedule, str) else held

    def _ladder(self, pilot: Pilot, log_zeta: Tensor) -> Ladder:
        """``h_k = log g_k - beta_k log zeta``, which is ``-log Z(beta_k)`` for the pilot's weights."""
        known = pilot.betas.reshape(-1, *[1] * log_zeta.ndim) * log_zeta
        if self.weights == "pilot":
            # the pilot's curve, tilted to end at the guess; flat where all its weights were zero
            curve = pilot.log_z_path.nan_to_num(0.0, 0.0, 0.0)
            known = curve + known - pilot.betas.reshape(-1, *[1] * log_zeta.ndim) * curve[-1]
        if schedules.is_tuned(self.schedule):
            own = tuned_betas(self.schedule, self.temperatures, pilot)
            at = pilot.betas.reshape(-1, *[1] * log_zeta.ndim).expand_as(known).contiguous()
            return ListedLadder(own, -interpolated_rows(own, at, known.expand_as(at).contiguous()))
        own = schedules.values_of("SimulatedTempering", self.schedule, self.temperatures).to(log_zeta.device)
        if not is_even(own):
            return ListedLadder(own, -interpolated(own, pilot.betas, known))
        n = len(own) - 1
        knots = even_knots(n, pilot.betas, _SEGMENTS) if self.weights == "pilot" else own.new_tensor([0, n]).long()
        return EvenLadder(n, knots, -interpolated(knots.double() / n, pilot.betas, known))
