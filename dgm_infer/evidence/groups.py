"""Chains in groups, each with a pilot of its own, so that the pilot's luck is in the error (math 6.18)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..progress import Progress
from .estimators import Estimate
from .method import Method, Outcome
from .path import AnnealedPath

__all__ = ["pooled", "run_in_groups"]

# Counts over all chains; other diagnostics are means over the groups.
_SUMS = ("base_ess", "ess", "lost_chains", "round_trips")
# Level of the intervals that are right whether the error is from chains or from groups.
_LEVEL = 0.95


def run_in_groups(
    method: Method, path: AnnealedPath, chains: int, groups: int, rng: torch.Generator, progress: Progress
) -> Outcome:
    """Run a method once per group of ``chains/groups`` chains, one after the other, and pool the outcomes.

    The path counts the gradients per chain of the group that took the most.
    """
    if groups == 1:
        return method.run(path, chains, rng, progress)
    outcomes, spent = [], 0
    for _ in range(groups):
        own = AnnealedPath(path.target, path.base)
        outcomes.append(method.run(own, chains // groups, rng, progress))
        spent = max(spent, own.evaluations)
        if outcomes[-1].interrupted:
            break
    path.evaluations += spent
    return pooled(outcomes, chains, method.status == "unbiased")


def pooled(outcomes: Sequence[Outcome], chains: int, weights_compare: bool) -> Outcome:
    """Outcomes of groups of equally many chains as one of all chains, whose error has what differs between groups.

    Args:
        chains: of all groups.
        weights_compare: whether the weights of a group estimate Z, so that they count in different groups as they are;
            else every group has the same weight.
    """
    if len(outcomes) == 1:
        return outcomes[0]
    # an interrupted group may have fewer draws
    length = min(outcome.draws.shape[1] for outcome in outcomes)
    draws = torch.cat([outcome.draws[:, :length] for outcome in outcomes])
    log_weights = [outcome.log_weights[:, :length] for outcome in outcomes]
    if not weights_compare:
        log_weights = [each - each.flatten(0, 1).logsumexp(0) for each in log_weights]
    diagnostics = {name: _together(name, [o.diagnostics[name] for o in outcomes]) for name in outcomes[0].diagnostics}
    estimate, between = _pooled_estimate([outcome.estimate for outcome in outcomes], chains)
    return Outcome(
        estimate,
        draws,
        torch.cat(log_weights),
        diagnostics | {"between_groups": between},
        max(outcome.pilot_evaluations for outcome in outcomes),
        any(outcome.interrupted for outcome in outcomes),
    )


def _together(name: str, values: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(values))
    if stacked.dtype == torch.bool:
        return stacked.all(0)
    return stacked.sum(0) if name in _SUMS else stacked.double().mean(0)


def _pooled_estimate(estimates: Sequence[Estimate], chains: int) -> tuple[Estimate, Tensor]:
    """The mean of the groups' Z, and the sd between groups beyond that of their chains (math 6.18)."""
    from scipy.stats import t

    log_z, errors, biases = (torch.stack(parts).double() for parts in zip(*estimates, strict=True))
    groups = len(log_z)
    mean = log_z.logsumexp(0) - math.log(groups)
    share = log_z.softmax(0)
    inside = (share * errors).square().sum(0)
    # in units of the mean, as the logarithm's slope at it
    spread = ((groups * share - 1).square().sum(0) / (groups - 1)).nan_to_num(0.0)
    between = (spread - groups * inside).clamp_min(0)
    quantiles = t.ppf(0.5 + _LEVEL / 2, [groups - 1, chains - 1])
    factor = float(quantiles[0] / quantiles[1]) ** 2
    error = (inside + factor * between / groups).sqrt()
    return Estimate(mean, error, (share * biases).sum(0)), between.sqrt()
