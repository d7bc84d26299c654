"""Estimates that are of no use, or little, and how they show."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..arguments.objects import of_problems
from ..diagnosis import Finding, finding
from .method import EstimateStatus

__all__ = ["few_round_trips", "further_findings", "run_warnings"]

# Share of the weights that one draw may have, the acceptance of moves below which none are made, and a standard error
# of log Z, in nats, that says nothing.
_SHARE, _MOVES, _NATS = 0.999, 1e-3, 10.0
# An error from the spread over chains needs more of them than this, by their shares of the weight, of at least so many.
_EFFECTIVE, _CHAINS = 1.5, 8
# Independent arrivals at the target, per chain, below which parallel tempering of several modes is too short: the first
# of them are of where its chains began. On machines of known log Z all runs with fewer are too low.
_RESTARTS = 14
# The same whatever the target is: fewer say nothing of it.
_ANY_RESTARTS = 2
# A share of the weights on one draw, and a standard error in nats, that leave an estimate imprecise; effective chains
# below which the spread of weights, the logs of which are nearly normal, is seen too small.
_LARGE_SHARE, _WIDE, _FEW = 0.5, 1.0, 4.0


def run_warnings(
    diagnostics: Mapping[str, Tensor], std_error: Tensor, status: EstimateStatus, chains: int
) -> Iterator[Finding]:
    """Problems whose estimate or standard error misleads, whatever their status promises: a run warns of them.

    Args:
        diagnostics: of an outcome, each ``[..., *batch]``.
        std_error: of log Z, ``[*batch]``.
        status: that of the method; bounds may rest on few draws and are bounds still.
        chains: chains per problem; of one alone nothing is said.
    """
    if chains == 1 or status not in ("unbiased", "consistent"):
        return
    share = diagnostics.get("max_weight_share")
    if share is not None and (share > _SHARE).any():
        yield finding(
            "useless",
            f"all weight is on one draw{of_problems(share > _SHARE)}",
            "the estimate is far too low, and its standard error means nothing: use a base near the target, or more "
            "temperatures",
            share > _SHARE,
        )
    few = _few_chains(diagnostics, chains)
    if few is not None and few.any():
        yield finding(
            "misleading",
            f"the estimate rests on one or two of {chains} chains{of_problems(few)} (effectively "
            f"{diagnostics['effective_chains'][few].min().item():.2g})",
            "its standard error is too small; use more chains, or a base nearer the target",
            few,
        )
    shift = diagnostics.get("unseen_shift")
    if shift is not None and (shift > 0).any():
        yield finding(
            "misleading",
            f"a search found modes that no draw has visited{of_problems(shift > 0)}",
            f"log Z may be too low by about {shift.max().item():.2g}, which std_error now includes; use refine=True, "
            "ParallelTempering, or a base that covers them, such as Gaussian.broad(target)",
            shift > 0,
        )
    rare = diagnostics.get("rare_shift")
    # both are of the same mass: a smaller one adds nothing
    rare = None if rare is None else rare * (True if shift is None else rare > shift)
    if rare is not None and (rare > 0).any():
        yield finding(
            "misleading",
            f"the draws visit some modes too rarely{of_problems(rare > 0)}",
            f"a short parallel tempering finds log Z larger by about {rare.max().item():.2g}, which std_error now "
            "includes; use ParallelTempering",
            rare > 0,
        )
    restarts, named = diagnostics.get("restarts"), torch.zeros_like(std_error, dtype=torch.bool)
    if restarts is not None:
        several = diagnostics.get("minima", torch.zeros_like(restarts)) > 1
        if (short := (restarts < _RESTARTS) & several).any():
            times = f"only {restarts[short].min().item():.2g} times{of_problems(short)}"
            yield finding(
                "misleading",
                f"the target has several modes, and chains came to it anew {times}",
                "log Z may be too low, by more than std_error says; use more draws",
                short,
            )
        if (seldom := (restarts < _ANY_RESTARTS) & ~several).any():
            times = f"only {restarts[seldom].min().item():.2g} times each{of_problems(seldom)}"
            yield finding(
                "misleading",
                f"chains came to the target anew {times}",
                "log Z and std_error say little; use more draws and temperatures",
                seldom,
            )
        named = short | seldom
    if (none := few_round_trips(diagnostics, std_error, 1) & ~named).any():
        yield finding(
            "misleading",
            f"no chain went from the base to the target and back{of_problems(none)}",
            "log Z and std_error are unreliable; use refine=True, a base nearer the target, or more draws",
            none,
        )
    acceptance = diagnostics.get("acceptance")
    if acceptance is not None and (acceptance < _MOVES).any():
        yield finding(
            "useless",
            f"no chain moved{of_problems(acceptance < _MOVES)}",
            "use a base near the target, more temperatures, or a smaller step_size",
            acceptance < _MOVES,
        )
    wide = std_error > _NATS
    if wide.any():
        yield finding(
            "useless",
            f"the standard error of log Z is {std_error[wide].max().item():.2g}{of_problems(wide)}",
            "the estimate says nothing: use a base near the target, more temperatures, or more draws",
            wide,
        )


def further_findings(
    diagnostics: Mapping[str, Tensor], std_error: Tensor, status: EstimateStatus, chains: int
) -> Iterator[Finding]:
    """What is wrong by less than a run warns of, where :func:`run_warnings` says nothing; arguments as there."""
    known = ~std_error.isnan()
    if chains == 1 and not known.all():
        yield finding("misleading", "there is one chain, and no standard error", "run 4 or more (chains=)", ~known)
    if chains == 1 or status not in ("unbiased", "consistent"):
        return
    few_trips = few_round_trips(diagnostics, std_error, chains) & ~few_round_trips(diagnostics, std_error, 1)
    if few_trips.any():
        yield finding(
            "misleading",
            f"only {int(diagnostics['round_trips'][few_trips].min())} round trips between base and target for {chains} "
            f"chains{of_problems(few_trips)}",
            "std_error assumes that every chain makes one: use refine=True, a base nearer the target, or more draws",
            few_trips,
        )
    agree = diagnostics.get("base_moments_agree")
    if agree is not None and (off := ~agree & known & ~few_round_trips(diagnostics, std_error, chains)).any():
        error = diagnostics.get("base_moment_error")
        by = "" if error is None or error.shape != off.shape else f" (off by {error[off].max().item():.2g})"
        yield finding(
            "misleading",
            f"base moments are not recovered at beta = 0{of_problems(off)}{by}",
            "chains mix poorly, and errors are too small: use more draws or a better base",
            off,
        )
    share, few = diagnostics.get("max_weight_share"), _few_chains(diagnostics, chains)
    if status == "unbiased" and few is not None:
        effective = diagnostics["effective_chains"]
        if (thin := (effective < _FEW) & ~few & (True if share is None else share <= _LARGE_SHARE)).any():
            yield finding(
                "misleading",
                f"the estimate rests on effectively {effective[thin].min().item():.2g} of {chains} chains"
                f"{of_problems(thin)}",
                "it is probably too low, and errors are underestimated: use more temperatures or chains",
                thin,
            )
    # weights of tempering are averages over chains, of which a few may count
    if status == "unbiased" and share is not None:
        large = (share > _LARGE_SHARE) & (share <= _SHARE)
        if (large := large if few is None else large & ~few).any():
            yield finding(
                "misleading",
                f"one draw has {100 * share[large].max().item():.0f} % of the weight{of_problems(large)}",
                "errors are underestimated: use more temperatures or chains",
                large,
            )
    if (wide := (std_error > _WIDE) & (std_error <= _NATS)).any():
        yield finding(
            "imprecise",
            f"the standard error of log Z is {std_error[wide].max().item():.2g}{of_problems(wide)}",
            "Z is known to a factor of e at best: use a base nearer the target, more temperatures, or more draws",
            wide,
        )


def _few_chains(diagnostics: Mapping[str, Tensor], chains: int) -> Tensor | None:
    """Whether an estimate rests on one or two of many chains, ``[*batch]``, where not on one draw."""
    effective, share = diagnostics.get("effective_chains"), diagnostics.get("max_weight_share")
    if effective is None or chains < _CHAINS:
        return None
    return effective < _EFFECTIVE if share is None else (effective < _EFFECTIVE) & (share <= _SHARE)


def few_round_trips(diagnostics: Mapping[str, Tensor], like: Tensor, least: int) -> Tensor:
    """Problems with fewer round trips between base and target, of all chains, than ``least``: ``[*batch]``.

    An error from the spread over chains assumes that each of them travels. False where no chain is meant to.
    """
    trips = diagnostics.get("round_trips")
    return torch.zeros_like(like, dtype=torch.bool) if trips is None else trips < least
