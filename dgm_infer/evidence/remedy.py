"""What follows from what a run has not seen: a wider error, or a base that covers it and another run (math 6.17)."""

from collections.abc import Callable

import torch

from ..bases import Gaussian
from ..errors import EvidenceError
from .coverage import Components, Unseen, look_for_unseen, widened
from .method import Outcome
from .opinion import second_opinion
from .path import AnnealedPath

__all__ = ["base_with", "covered", "until_seen"]

# Runs that may follow the first.
_ROUNDS = 3


def covered(
    path: AnnealedPath, outcome: Outcome, rng: torch.Generator, *, opinion: bool = True
) -> tuple[Outcome, Unseen]:
    """The outcome with what its draws have not seen, or too rarely, in its error and diagnostics; and the unseen.

    Args:
        opinion: whether to ask for a second opinion where there are several modes.
    """
    rare = spread = torch.zeros_like(outcome.estimate.log_z)
    try:
        unseen = look_for_unseen(path, outcome, rng)
        if opinion and (unseen.found > 1).any():
            second = second_opinion(path, outcome, rng)
            rare, spread = (torch.where(unseen.found > 1, each, 0.0) for each in second)
    except KeyboardInterrupt:
        # the estimates are whole, and are kept; further chunks are not begun
        outcome, unseen = outcome._replace(interrupted=True), Unseen.none(outcome.estimate.log_z)
    error, unseen = widened(outcome.estimate.std_error, unseen)
    # the two are of the same mass: the larger counts
    error = torch.maximum(error, (outcome.estimate.std_error.square() + spread.square()).sqrt())
    found = {
        "minima": unseen.found,
        "unseen_modes": unseen.modes,
        "unseen_shift": unseen.shift,
        "rare_shift": rare,
    }
    estimate = outcome.estimate._replace(std_error=error)
    return outcome._replace(estimate=estimate, diagnostics=outcome.diagnostics | found), unseen


def until_seen(path: AnnealedPath, once: Callable[[AnnealedPath], tuple[Outcome, Unseen]]) -> Outcome:
    """Run again, from a base with the modes that no draw has visited, until there are none: three times at most.

    The gradients of all runs count, those of all but the last as tuning.

    Args:
        path: from the first base.
        once: a run from a base, and what it has not seen.
    """
    outcome, unseen = once(path)
    times, added = (torch.zeros_like(unseen.modes) for _ in range(2))
    spent, current = 0, path
    for _ in range(_ROUNDS):
        if outcome.interrupted or unseen.components is None or not (unseen.modes > 0).any():
            break
        try:
            base = base_with(current.base, unseen.components, outcome.estimate.log_z)
        except EvidenceError:
            # a covariance without a factor: what is said of the modes stands
            break
        times, added = times + (unseen.modes > 0), added + unseen.modes
        spent += current.evaluations
        current = AnnealedPath(path.target, base)
        outcome, unseen = once(current)
    path.evaluations = spent + current.evaluations
    done = {"refinements": times, "added_modes": added}
    return outcome._replace(diagnostics=outcome.diagnostics | done, pilot_evaluations=spent + outcome.pilot_evaluations)


def base_with(base: Gaussian, modes: Components, log_z: torch.Tensor) -> Gaussian:
    """A base that covers modes beside what it covers already: ``[*batch]`` as before, with full covariances.

    Moments of the mixture of the base and the modes, half of its weight on the base, the other half by the modes'
    masses: its variances are at least half of the base's. A problem without modes keeps its density. A mixture itself
    would be a nearer base: this is the place for one.

    Args:
        modes: ``[M, *batch]``.
        log_z: log Z without them, ``[*batch]``.
    """
    there = modes.log_masses > -torch.inf
    total = modes.log_masses.logsumexp(0)
    weights = torch.where(there, modes.log_masses - total, -torch.inf).to(base.mean)
    means = torch.cat([base.mean[None], modes.means.to(base.mean)])
    unit = torch.eye(base.dim, dtype=base.mean.dtype, device=base.mean.device)
    covariances = torch.where(there[..., None, None], modes.covariances.to(base.mean), unit)
    covariances = torch.cat([base.covariance[None], covariances])
    log_weights = torch.cat([torch.zeros_like(weights[:1]), weights])
    mixed = Gaussian.of_mixture(means, covariances, log_weights, tolerance=0.0)
    log_zeta = torch.logaddexp(log_z.double(), total.double())
    return Gaussian._of(mixed.mean, mixed.scale, log_zeta=log_zeta)
