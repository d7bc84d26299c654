"""A second opinion on targets with several modes: a short parallel tempering from a broad reference (math 6.15)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DgmInferError
from ..progress import Progress
from .method import Outcome
from .path import AnnealedPath
from .tempering.parallel import ParallelTempering

__all__ = ["Opinion", "second_opinion"]

# Share of the run's gradients that it may take, and its sizes, of which the first that fits is taken.
_SHARE = 0.25
_SIZES = ((64, 4), (64, 2), (32, 4), (32, 2))
_PILOT = 20
# Standard errors of the difference above which it counts.
_BEYOND = 2.0


class Opinion(NamedTuple):
    """What another method says, each ``[*batch]``."""

    shift: Tensor
    """By how much log Z is larger, 0 where that is within two errors of the difference."""
    spread: Tensor
    """What the standard error of the run lacks, by the difference: an error that adds to it in squares."""
    evaluations: int
    """Gradients per problem that it took."""


def second_opinion(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> Opinion:
    """By how much log Z is larger after a short parallel tempering, for at most a quarter of the run's gradients.

    The difference d has an error e from both. What its square exceeds that of e by is a variance that the run does not
    claim. Short runs give too small a log Z rather than too large, so that a smaller one says nothing. No opinion where
    the gradients do not suffice for one.
    """
    estimate = outcome.estimate
    nothing = Opinion(*[torch.zeros_like(estimate.log_z)] * 2, evaluations=0)
    affordable = _SHARE * path.evaluations * len(outcome.draws)
    for draws, chains in _SIZES:
        method = ParallelTempering(draws=draws, pilot_temperatures=_PILOT)
        # rounds of tuning take as many sweeps as the last
        if chains * method.n_steps * method.particles * 2 * draws <= affordable:
            break
    else:
        return nothing
    own = AnnealedPath(path.target, path.base)
    try:
        with Progress(False) as silent:
            other = method.run(own, chains, rng, silent).estimate
    except (DgmInferError, RuntimeError, ValueError, ArithmeticError):
        return nothing
    error = (other.std_error.square() + estimate.std_error.square()).sqrt().to(estimate.log_z)
    difference = (other.log_z - estimate.log_z).to(error).clamp_min(0.0).nan_to_num(0.0)
    spread = (difference.square() - error.square()).clamp_min(0.0).nan_to_num(0.0).sqrt()
    return Opinion(torch.where(difference > _BEYOND * error, difference, 0.0), spread, own.evaluations * chains)
