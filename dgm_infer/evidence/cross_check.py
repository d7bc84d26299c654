"""A cross-check on targets with several modes: a short parallel tempering from a broad reference (math 6.15)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DgmInferError
from ..progress import Progress
from .method import Outcome
from .path import AnnealedPath
from .tempering.parallel import ParallelTempering

__all__ = ["CrossCheck", "cross_check"]

# Share of the run's gradients that it may take, and its sizes, of which the first that fits is taken; fewer leapfrog
# steps than by default, so that one fits sooner.
_SHARE = 0.25
_SIZES = ((64, 4), (64, 2), (32, 4), (32, 2))
_PILOT, _STEPS = 20, 3
# Probability of a warning where there is nothing to warn of, over all problems.
_FALSE = 0.05
# Standard errors of the difference above which it widens the error.
_BEYOND = 1.5


class CrossCheck(NamedTuple):
    """What another method says, each ``[*batch]``."""

    shift: Tensor
    """By how much log Z is larger, 0 where that can be chance."""
    spread: Tensor
    """What the standard error of the run lacks, by the difference: an error that adds to it in squares."""


def cross_check(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> CrossCheck:
    """By how much log Z is larger after a short parallel tempering, for at most a quarter of the run's gradients.

    The difference has an error from both. What it exceeds 1.5 of these by, in squares, is a variance that the run does
    not claim; it counts as a shift beyond the quantile of Student's t by which one batch in twenty has one by chance.
    Short runs give too small a log Z rather than too large, so that a smaller one says nothing. None is made where the
    gradients do not suffice for one.
    """
    from scipy.stats import t

    estimate = outcome.estimate
    nothing = CrossCheck(*[torch.zeros_like(estimate.log_z)] * 2)
    affordable = _SHARE * path.evaluations * len(outcome.draws)
    for draws, chains in _SIZES:
        method = ParallelTempering(draws=draws, n_steps=_STEPS, pilot_temperatures=_PILOT)
        # rounds of tuning take as many sweeps as the last
        if chains * method.n_steps * method.particles * 2 * draws <= affordable:
            break
    else:
        return nothing
    # a path of its own, so that the run's gradients stay its own
    own = AnnealedPath(path.target, path.base)
    try:
        with Progress(False) as silent:
            other = method.run(own, chains, rng, silent).estimate
    except (DgmInferError, RuntimeError, ValueError, ArithmeticError):
        return nothing
    errors = torch.stack([other.std_error, estimate.std_error]).double().square()
    total = errors.sum(0)
    # Welch's degrees of freedom
    free = total.new_tensor([chains - 1, max(len(outcome.draws) - 1, 1)]).reshape(2, *[1] * total.ndim)
    dof = total.square() / (errors.square() / free).sum(0)
    quantile = torch.as_tensor(t.isf(_FALSE / total.numel(), dof.clamp_min(1.0).cpu().numpy())).to(total)
    error = total.sqrt()
    difference = (other.log_z - estimate.log_z).double().clamp_min(0.0).nan_to_num(0.0)
    spread = (difference.square() - _BEYOND**2 * total).clamp_min(0.0).nan_to_num(0.0).sqrt()
    shift = torch.where(difference > quantile * error, difference, 0.0)
    return CrossCheck(shift.to(estimate.log_z), spread.to(estimate.log_z))
