"""Bounds on log Z from both sides, by annealing from the base and from exact draws (Grosse et al. 2015; math 7.2)."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import digits, finite, flag
from ..arguments.values import of_problems, shown
from ..diagnosis import Diagnosis, DiagnosisWarning, Finding, diagnosis, finding
from ..errors import ArgumentError, EvidenceError, warn
from ..references.density import Whitened
from ..sampling.plan import Keeping
from .annealing import AIS, Annealing, anneal
from .estimators import Estimate, bennett, exceeded, welch
from .method import EstimateStatus, Outcome
from .path import AnnealedPath
from .result import Evidence
from .run import EvidenceRun, Job, RunOptions, carried_out, kept_as

# Probability that bounds are said to cross by chance, over all problems.
_CHANCE = 1e-3


@dataclass(frozen=True)
class Bounds:
    """Result of :func:`bidirectional`, each an :class:`Evidence`.

    Attributes:
        lower: forward annealing; the expectation of its ``log_z`` is at most log Z.
        upper: reverse annealing; the expectation of its ``log_z`` is at least log Z if the draws are exact.
        combined: Bennett's acceptance ratio of both.
    """

    lower: Evidence
    upper: Evidence
    combined: Evidence

    @property
    def gap(self) -> Tensor:
        """``upper - lower``, ``[*batch]``; noise can make it negative."""
        return self.upper.log_z - self.lower.log_z

    def diagnose(self) -> Diagnosis:
        """What is wrong with these bounds, as :meth:`Evidence.diagnose`, of the combined estimate and of their order.

        A lower bound that exceeds the upper one by more than chance is a fault: draws of another density, such as the
        posterior of other data, or chains that miss the same mass in both directions.
        """
        own = self.combined.diagnose()
        return diagnosis((*self._crossed(), *own), own.numbers)

    def _crossed(self) -> list[Finding]:
        lower, upper = self.lower, self.upper
        excess = (lower.log_z - upper.log_z).double()
        if lower.diagnostics.get("shared_exact_draw"):
            # such a bound holds on average over problems
            known = excess[excess.isfinite()]
            n = len(known)
            if n < 2 or not known.mean() > float(exceeded(_CHANCE, n - 1)) * known.std() / math.sqrt(n):
                return []
            which, excess = torch.ones_like(excess, dtype=torch.bool), known.mean().expand_as(excess)
        else:
            errors = torch.stack([lower.std_error, upper.std_error.to(lower.std_error)]).double()
            variance, dof = welch(errors, (lower.dof, upper.dof))
            quantile = exceeded(_CHANCE / max(excess.numel(), 1), dof).to(excess)
            which = excess > quantile * variance.sqrt()
        if not which.any():
            return []
        what = f"the lower bound exceeds the upper one by {excess[which].max().item():.2g} nats{of_problems(which)}"
        remedy = (
            "they contradict each other: take exact_draws from this target, the latents that simulated these data, or "
            "more temperatures"
        )
        return [finding("misleading", what, remedy, which)]

    def __repr__(self):
        return f"Bounds({self.lower}, {self.upper}, {self.combined})"


def bidirectional(
    target,
    base: Whitened,
    exact_draws: Tensor,
    method: Annealing | None = None,
    *,
    exact: bool = True,
    chains: int = 16,
    seed: int | None = None,
    chunk: int | None = None,
    keep_draws: bool = True,
    progress: bool = True,
    run: str | os.PathLike | None = None,
    checkpoint_every: float = 60.0,
    devices: Sequence[str | torch.device] | str | torch.device | None = None,
    executor: Any = None,
) -> Bounds:
    """Bound log Z from both sides by annealing from the base and back from exact draws (Grosse et al. 2015).

    Args:
        target, base: as in :func:`log_evidence`.
        exact_draws: draws of the target, one per chain ``[chains, *batch, D]``, or one per problem ``[*batch, D]``,
            such as the latents that simulated the data. With such draws all reverse chains of a problem start at
            its one draw: the bound holds on average over problems, and the standard error excludes the draw's spread.
        method: an :class:`AIS` or a :class:`HamiltonianAIS`, None for ``AIS()``; one plan, tuned on a pilot, serves
            both directions.
        exact: whether the draws are exact. If not, upper and combined are labelled ``"heuristic"``.
        chains, seed, chunk, keep_draws, progress: as in :func:`log_evidence`.
        run, checkpoint_every, devices, executor: as in :func:`log_evidence`.

    Raises:
        ArgumentError: an argument is outside its range, or shapes do not fit.
        EvidenceError: all weights of a problem are zero, or the target has zero density at a draw.
    """
    method = AIS() if method is None else method
    if not isinstance(method, Annealing):
        raise ArgumentError(f"bidirectional(method={shown(method)}): expected an AIS or a HamiltonianAIS")
    flag("bidirectional", "exact", exact)
    keeping = Keeping.checked("bidirectional", run, checkpoint_every, devices, executor)
    own = EvidenceRun("bidirectional", target, base, method, RunOptions(chains, seed, chunk, keep_draws, progress))
    draws = finite("bidirectional", "exact_draws", exact_draws, digits(exact_draws)).to(base.mean)
    shared = draws.shape == base.mean.shape
    if shared:
        draws = draws.expand(own.chains, *draws.shape)
    if draws.shape != (own.chains, *base.mean.shape):
        raise ArgumentError(
            f"bidirectional(exact_draws of shape {tuple(draws.shape)}): expected {tuple(base.mean.shape)}, or "
            f"{(own.chains, *base.mean.shape)} for {own.chains} chains"
        )
    with torch.no_grad():
        lost = ~own.target.energy(draws).isfinite().all(0)
    if lost.any():
        raise EvidenceError(
            f"the target has zero density at the exact draws of {int(lost.sum())} of {lost.numel()} problems: they "
            "come from another target"
        )
    more = {"draws": draws.contiguous(), "shared": shared, "exact": exact}
    return carried_out(own, more, keeping)


def _work(run: EvidenceRun, more: dict[str, Any]) -> Callable[[AnnealedPath, slice | None], list[Outcome]]:
    """What is done for a chunk of problems: chains from the base, and chains back from the exact draws."""
    base, method, draws = run.base, run.method, more["draws"]
    assert isinstance(method, Annealing)

    def work(path: AnnealedPath, problems: slice | None) -> list[Outcome]:
        own = draws if problems is None else draws.reshape(run.chains, -1, base.dim)[:, problems]
        plan = method.plan(path, run.chains, run.rng, run.bar)
        spent = path.evaluations
        start = path.draws(run.chains, run.rng)
        forward = anneal(path, plan, start, method.moves, run.rng, run.bar)
        back = anneal(path, plan, path.base.whiten(own), method.moves, run.rng, run.bar, back=True)
        lower, upper = forward.outcome(path, spent), back.outcome(path, spent)
        log_z, std_error, bias = upper.estimate
        # a reverse weight estimates 1/Z and weighs no draw of the target: keep the given draws, with equal weights
        upper = upper._replace(
            estimate=Estimate(-log_z, std_error, -bias),
            draws=own.unsqueeze(1),
            log_weights=torch.zeros_like(upper.log_weights),
        )
        estimate, overlap = bennett(forward.log_weights, back.log_weights)
        return [lower, upper, lower._replace(estimate=estimate, diagnostics={"overlap": overlap})]

    return work


def _bounds(run: EvidenceRun, outcomes: list[Outcome], more: dict[str, Any]) -> Bounds:
    method = type(run.method).__name__
    names = [(f"{method} {kind}", kind) for kind in ("lower", "upper")] + [("Bennett", "consistent")]
    results = []
    for outcome, (name, status) in zip(outcomes, names, strict=True):
        honest: EstimateStatus = status if more["exact"] or status == "lower" else "heuristic"  # type: ignore[assignment]
        result = run.evidence(outcome, name, honest)
        result.diagnostics["shared_exact_draw"] = more["shared"]
        results.append(result)
    bounds = Bounds(*results)
    for found in bounds._crossed():
        warn(f"{run.name}: {found.line}", DiagnosisWarning)
    return bounds


kept_as("bidirectional", Job(_work, _bounds))
