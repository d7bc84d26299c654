"""Estimates that are of no use, and how they show."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..arguments.shown import of_problems
from .method import EstimateStatus

__all__ = ["doubts"]

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


def doubts(diagnostics: Mapping[str, Tensor], std_error: Tensor, status: EstimateStatus, chains: int) -> Iterator[str]:
    """Lines that name problems whose estimate or standard error misleads, whatever their status promises.

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
        yield (
            f"all weight is on one draw{of_problems(share > _SHARE)}: the estimate is far too low, and its standard "
            "error means nothing: use a base near the target, or more temperatures"
        )
    effective = diagnostics.get("effective_chains")
    if effective is not None and chains >= _CHAINS:
        # what rests on one draw has been said
        few = effective < _EFFECTIVE if share is None else (effective < _EFFECTIVE) & (share <= _SHARE)
        if few.any():
            yield (
                f"the estimate rests on one or two of {chains} chains{of_problems(few)} (effectively "
                f"{effective[few].min().item():.2g}): its standard error is too small; use more chains, or a base "
                "nearer the target"
            )
    shift = diagnostics.get("unseen_shift")
    if shift is not None and (shift > 0).any():
        yield (
            f"a search found modes that no draw has visited{of_problems(shift > 0)}: log Z may be too low by about "
            f"{shift.max().item():.2g}, which std_error now includes; use refine=True, ParallelTempering, or a "
            "base that covers them, such as Gaussian.broad(target)"
        )
    rare = diagnostics.get("rare_shift")
    # of what nobody has visited one line is enough
    rare = None if rare is None else rare * (True if shift is None else shift == 0)
    if rare is not None and (rare > 0).any():
        yield (
            f"the draws visit some modes too rarely{of_problems(rare > 0)}: a short parallel tempering finds log Z "
            f"larger by about {rare.max().item():.2g}, which std_error now includes; use ParallelTempering"
        )
    restarts = diagnostics.get("restarts")
    if restarts is not None:
        several = diagnostics.get("minima", torch.zeros_like(restarts)) > 1
        if (short := (restarts < _RESTARTS) & several).any():
            times = f"only {restarts[short].min().item():.2g} times{of_problems(short)}"
            yield (
                f"the target has several modes, and chains came to it anew {times}: log Z may be too low, by more than "
                "std_error says; use more draws"
            )
        if (seldom := (restarts < _ANY_RESTARTS) & ~several).any():
            times = f"only {restarts[seldom].min().item():.2g} times each{of_problems(seldom)}"
            yield (
                f"chains came to the target anew {times}: log Z and std_error say little; use more draws and "
                "temperatures"
            )
    trips, agree = diagnostics.get("round_trips"), diagnostics.get("base_moments_agree")
    if trips is not None and agree is not None and (none := (trips == 0) & ~agree).any():
        yield (
            f"no chain went from the base to the target and back{of_problems(none)}, and at the base they are not as "
            "draws of it: log Z and std_error say little; use a base nearer the target, or more temperatures and draws"
        )
    acceptance = diagnostics.get("acceptance")
    if acceptance is not None and (acceptance < _MOVES).any():
        yield (
            f"no chain moved{of_problems(acceptance < _MOVES)}: use a base near the target, more temperatures, or a "
            "smaller step_size"
        )
    wide = std_error > _NATS
    if wide.any():
        yield (
            f"the standard error of log Z is {std_error[wide].max().item():.2g}{of_problems(wide)}: the estimate says "
            "nothing: use a base near the target, more temperatures, or more draws"
        )
