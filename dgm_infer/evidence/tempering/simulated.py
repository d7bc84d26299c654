"""Simulated tempering (Marinari and Parisi 1992), and importance tempering, which weights its states otherwise."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...arguments import choice, whole_number
from ...arguments.values import shown
from ...errors import ArgumentError, EvidenceError
from ...progress import Progress
from ...settings import Settings
from ..estimators import known_where, log_ratio
from ..method import EstimateStatus, Outcome, of_whole_base
from ..path import AnnealedPath
from ..plan import TUNED, Pilot, check_temperatures, interpolated, values_of
from .continuous import LadderChain
from .temperatures import Ladder, ListedLadder
from .tempering import Tempering


@dataclass(frozen=True, eq=False)
class SimulatedTempering(Tempering):
    """Chains that alternate a Hamiltonian move of x at ``beta_k`` with an exact draw of k given x.

    ``p(x, k) ~ g_k exp(-beta_k (phi + log zeta) - (1 - beta_k) psi)`` with ``g_0 = g_K = 1``;
    ``log Z = log zeta + log sum p(K | x) - log sum p(0 | x)`` over all draws of all chains: consistent. Every draw of
    x has weight ``p(K | x)``, whatever its temperature.

    Args:
        draws, warmup, n_steps, step_size, log_zeta, thin, target_acceptance: as in :class:`GibbsTempering`.
        pilot_temperatures: temperatures of the annealing run that tunes step sizes and prior weights and starts the
            chains.
        temperatures: K.
        schedule: ``"linear"`` (even), ``"sigmoid"`` and ``"barrier"`` as in :class:`AIS`, a function
            of K, or the K + 1 values themselves, which then set K.
        weights: ``"pilot"``, g such that all temperatures are visited equally often, by the pilot's estimates of
            ``log Z(beta_k)``; ``"equal"``, all of them 1. They are frozen, and affect speed, not correctness.
    """

    temperatures: int = 100
    schedule: str | Tensor | Callable[[int], Tensor] = "linear"
    weights: Literal["pilot", "equal"] = "pilot"

    def __post_init__(self):
        super().__post_init__()
        whole_number("SimulatedTempering", "temperatures", self.temperatures)
        check_temperatures("SimulatedTempering", self.schedule, self.temperatures)
        choice("SimulatedTempering", "weights", self.weights, ("pilot", "equal"))

    def _chain(self, path, pilot, log_zeta, point, rng):
        return LadderChain(path, pilot.step_sizes, self._ladder(pilot, log_zeta), point, rng, self.n_steps)

    def _held(self, path, chains):
        held = super()._held(path, chains)
        # values that are listed set K
        return held | {"temperatures": self.temperatures} if isinstance(self.schedule, str) else held

    def _ladder(self, pilot: Pilot, log_zeta: Tensor) -> Ladder:
        """``h_k = log g_k - beta_k log zeta``, which is ``-log Z(beta_k)`` for the pilot's weights."""
        at = pilot.columns
        known = at * log_zeta
        if self.weights == "pilot":
            # the pilot's curve, tilted to end at the guess; flat where all its weights were zero
            curve = pilot.log_z_path.nan_to_num(0.0, 0.0, 0.0)
            known = curve + known - at * curve[-1]
        if isinstance(self.schedule, str) and self.schedule == TUNED:
            own = pilot.barrier(self.temperatures)
            return ListedLadder(own, -interpolated(own, at, known))
        own = values_of("SimulatedTempering", self.schedule, self.temperatures).to(log_zeta.device)
        columns = own.reshape(-1, *[1] * log_zeta.ndim).expand(-1, *log_zeta.shape)
        return ListedLadder(own, -interpolated(columns, at, known))


@dataclass(frozen=True, eq=False)
class ImportanceTempering(Settings):
    """Simulated tempering whose states are weighted by temperature: beside :class:`SimulatedTempering`, for comparison.

    A state x at ``beta_k`` has the weight ``w = p(K | x)/p(k | x)``, whose mean over states at any k is the share of
    the target's temperature: ``log Z = log zeta + log sum_k l_k sum_{n at k} w_n - log #(states at 0)``, for any
    shares l of sum 1, consistent (T (5.54), T (5.55)). :class:`SimulatedTempering` averages over the temperature
    instead (math 6.8), which has less variance: its estimate from these states is the diagnostic ``tempering_log_z``,
    and no error is smaller than the difference between the two.

    Args:
        tempering: runs the chains, at 500 temperatures or fewer; None for 20 on the sigmoid schedule.
        shares: ``"ess"``, ``l_k`` proportional to the effective sample size of the weights at k, or ``"equal"``, the
            naive estimator T (5.56).
    """

    tempering: SimulatedTempering | None = None
    shares: str = "ess"

    def __post_init__(self):
        choice("ImportanceTempering", "shares", self.shares, ("ess", "equal"))
        if not isinstance(self.tempering, SimulatedTempering | None):
            raise ArgumentError(
                f"ImportanceTempering(tempering={shown(self.tempering)}): must be a SimulatedTempering or None"
            )
        if (
            self.tempering is not None
            and isinstance(self.tempering.schedule, str)
            and self.tempering.temperatures > 500
        ):
            raise ArgumentError(
                f"ImportanceTempering(tempering=...): {self.tempering.temperatures} temperatures have few states each; "
                "use 500 or fewer"
            )

    @property
    def status(self) -> EstimateStatus:
        return "consistent"

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        tempering = self.tempering or SimulatedTempering(temperatures=20, schedule="sigmoid")
        record, spent = tempering.recorded(path, chains, rng, progress)
        outcome = record.outcome(spent)
        assert record.log_prior is not None
        h_last, h_own = record.log_prior(torch.ones_like(record.beta)), record.log_prior(record.beta)
        # phi - psi, from the odds of the two ends
        difference = h_last - (record.log_w1 - record.log_w0)
        log_w = h_last - h_own - (1 - record.beta.double()) * difference
        betas = record.beta.unique()
        inside = torch.stack([record.beta == beta for beta in betas])
        # [temperatures, chains, *batch]
        sums = torch.where(inside, log_w, -math.inf).logsumexp(2)
        share = self._shares_by_others(inside, log_w)
        at_base = (record.beta == 0).sum(1).double()
        arrived = at_base.sum(0) > 0
        if not arrived.any():
            raise EvidenceError(
                "ImportanceTempering(): no chain visited the base: use fewer temperatures, or more draws"
            )
        estimate = log_ratio((share.log() + sums).logsumexp(0), at_base.log())
        log_z, averaged = record.log_zeta + estimate.log_z, outcome.estimate.log_z
        # where tails are heavier than the base's, weights have no variance, and their spread tells too small an error
        difference = (log_z - averaged).abs().nan_to_num(0.0, posinf=0.0)
        estimate = estimate._replace(log_z=log_z, std_error=torch.maximum(estimate.std_error, difference))
        estimate = known_where(arrived, estimate, outcome.estimate)
        # every temperature's weights sum to its share
        scale = share.log() - (sums.logsumexp(1, keepdim=True) if self.shares == "ess" else 0.0)
        scale = torch.where(share > 0, scale, -math.inf)
        log_weights = (torch.where(inside, log_w, -math.inf) + scale.unsqueeze(2)).amax(0)
        whole = of_whole_base(outcome, path.inside).estimate.log_z
        diagnostics = outcome.diagnostics | {"tempering_log_z": whole}
        thin = record.thin
        outcome = outcome._replace(
            estimate=estimate, log_weights=log_weights[:, thin - 1 :: thin], diagnostics=diagnostics
        )
        return of_whole_base(outcome, path.inside)

    def _shares_by_others(self, inside: Tensor, log_w: Tensor) -> Tensor:
        """The shares of each half of the chains by the states of the other, ``[temperatures, chains, *batch]``.

        By its own states, a large weight takes its temperature's share away, and log Z is too small. One chain has no
        other.
        """
        half = (log_w.shape[0] + 1) // 2
        first = self._shares(inside[:, :half], log_w[:half])
        second = self._shares(inside[:, half:], log_w[half:]) if half < len(log_w) else first
        return torch.stack([second] * half + [first] * (len(log_w) - half), 1)

    def _shares(self, inside: Tensor, log_w: Tensor) -> Tensor:
        """``l``, ``[temperatures, *batch]``; 0 for a temperature that was not visited."""
        visited = inside.any(2).any(1)
        if self.shares == "equal":
            share = visited.double()
        else:
            logs = torch.where(inside, log_w, -math.inf).flatten(1, 2)
            share = torch.where(visited, (2 * logs.logsumexp(1) - (2 * logs).logsumexp(1)).exp().nan_to_num(0.0), 0.0)
        return share / share.sum(0)
