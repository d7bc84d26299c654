"""Importance tempering (Gramacy, Samworth and King 2010): weights that depend on the temperature drawn (math 6.19)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...arguments import choice
from ...errors import ArgumentError, EvidenceError
from ...progress import Progress
from ...settings import Settings
from ..estimators import log_ratio
from ..method import EstimateStatus, Outcome
from ..path import AnnealedPath
from .simulated import SimulatedTempering

__all__ = ["ImportanceTempering"]


@dataclass(frozen=True, eq=False)
class ImportanceTempering(Settings):
    """Simulated tempering whose states are weighted by temperature: beside :class:`SimulatedTempering`, for comparison.

    A state x at ``beta_k`` has the weight ``w = p(K | x)/p(k | x)``, whose mean over states at any k is the share of
    the target's temperature: ``log Z = log zeta + log sum_k l_k sum_{n at k} w_n - log #(states at 0)``, for any
    shares l of sum 1, consistent (T (5.54), T (5.55)). :class:`SimulatedTempering` averages over the temperature
    instead (math 6.8), which has less variance: its estimate from these states is the diagnostic ``tempering_log_z``.

    Args:
        tempering: runs the chains, at 500 temperatures or fewer; None for 20 on the sigmoid schedule.
        shares: ``"ess"``, ``l_k`` proportional to the effective sample size of the weights at k, or ``"equal"``, the
            naive estimator T (5.56).
    """

    tempering: SimulatedTempering | None = field(default=None)
    shares: str = "ess"

    def __post_init__(self):
        choice("ImportanceTempering", "shares", self.shares, ("ess", "equal"))
        if not isinstance(self.tempering, SimulatedTempering | None):
            raise ArgumentError(
                f"ImportanceTempering(tempering={self.tempering!r}): must be a SimulatedTempering or None"
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
        share = self._shares(inside, log_w)
        at_base = (record.beta == 0).sum(1).double()
        if (at_base.sum(0) == 0).any():
            raise EvidenceError(
                "ImportanceTempering(): no chain visited the base: use fewer temperatures, or more draws"
            )
        estimate = log_ratio((share.log().unsqueeze(1) + sums).logsumexp(0), at_base.log())
        estimate = estimate._replace(log_z=record.log_zeta + estimate.log_z)
        # every temperature's weights sum to its share
        scale = share.log() - (sums.logsumexp(1) if self.shares == "ess" else 0.0)
        scale = torch.where(share > 0, scale, -math.inf)
        log_weights = (torch.where(inside, log_w, -math.inf) + scale.unsqueeze(1).unsqueeze(1)).amax(0)
        diagnostics = outcome.diagnostics | {"tempering_log_z": outcome.estimate.log_z}
        thin = record.thin
        return outcome._replace(
            estimate=estimate, log_weights=log_weights[:, thin - 1 :: thin], diagnostics=diagnostics
        )

    def _shares(self, inside: Tensor, log_w: Tensor) -> Tensor:
        """``l``, ``[temperatures, *batch]``; 0 for a temperature that was not visited."""
        visited = inside.any(2).any(1)
        if self.shares == "equal":
            share = visited.double()
        else:
            logs = torch.where(inside, log_w, -math.inf).flatten(1, 2)
            share = torch.where(visited, (2 * logs.logsumexp(1) - (2 * logs).logsumexp(1)).exp().nan_to_num(0.0), 0.0)
        return share / share.sum(0)
