"""Refinement: a base with what a run from it has found, and another run (math 6.16)."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from ..errors import EvidenceError
from ..references import Mixture
from ..references.density import Whitened
from ..references.scales import factorised
from ..target import as_target
from .checks import Components, Unseen
from .method import Outcome, replaced
from .path import AnnealedPath
from .warnings import few_round_trips

__all__ = ["base_with", "refined"]


# Standard deviations of a mode in a base, in those of Laplace's approximation: tails may be heavier.
_WIDER = 1.2


def refined(path: AnnealedPath, once: Callable[[AnnealedPath], tuple[Outcome, Unseen]]) -> Outcome:
    """A run, and another one of the problems whose draws contradict their base, from one that they improve.

    Problems with fewer round trips between base and target than chains get a base with the moments of the draws; modes
    that no draw has visited are added to the base. Only these problems run again, if the target can take some of its
    problems. The gradients of both runs count, those of the first as tuning.

    Args:
        path: from the first base.
        once: a run from a base, and what it has not seen.
    """
    first, unseen = once(path)
    again, shape = (unseen.modes > 0) | _stayed(first), path.batch_shape
    outcome, base = first, None
    if again.any() and not first.interrupted:
        # a covariance without a factor, or a base of a user that has no refined(): what is said of it stands
        with suppress(EvidenceError, NotImplementedError):
            base = _improved(path.base, first, unseen)
    if base is None:
        again = torch.zeros_like(again)
    else:
        target, rows = path.target, again.reshape(-1).nonzero().flatten()
        some = target.can_take and not again.all()
        if some:
            target, base = as_target(target.take(rows)), base.take(rows)
        second = AnnealedPath(target, base)
        spent = path.evaluations
        found, _ = once(second)
        path.evaluations += second.evaluations
        outcome = replaced(first, found, rows, shape) if some else found
        outcome = outcome._replace(pilot_evaluations=spent + found.pilot_evaluations)
        if found.interrupted:
            outcome, again = first._replace(interrupted=True), torch.zeros_like(again)
    done = {"refinements": again.long(), "added_modes": torch.where(again, unseen.modes, 0)}
    return outcome._replace(diagnostics=outcome.diagnostics | done)


def _stayed(outcome: Outcome) -> Tensor:
    """Problems whose chains made too few round trips, ``[*batch]``."""
    return few_round_trips(outcome.diagnostics, outcome.estimate.log_z, len(outcome.log_weights))


def _improved(base: Whitened, outcome: Outcome, unseen: Unseen) -> Whitened:
    """A base with what a run from this one has found, for all problems."""
    log_z = outcome.estimate.log_z
    if _stayed(outcome).any():
        base = base.refined(outcome.draws, outcome.log_weights, log_z)
    if unseen.components is not None and (unseen.modes > 0).any():
        base = base_with(base, unseen.components, log_z)
    return base


def base_with(base: Whitened, modes: Components, log_z: Tensor) -> Mixture:
    """A mixture that covers modes beside what the base covers already (math 6.16): ``[*batch]`` as before.

    Half of its weight is that of the base, the other half the modes' by their masses. A problem without modes keeps its
    density. Of a base that is no mixture of Gaussians the moments stay.

    Args:
        modes: ``[M, *batch]``.
        log_z: log Z without them, ``[*batch]``.

    Raises:
        EvidenceError: a covariance of a mode has no factor.
    """
    there = modes.log_masses > -torch.inf
    total = modes.log_masses.logsumexp(0)
    shares = torch.where(there, modes.log_masses - total, -torch.inf).to(base.mean)
    unit = torch.eye(base.dim, dtype=base.mean.dtype, device=base.mean.device)
    covariances = torch.where(there[..., None, None], modes.covariances.to(base.mean), unit)
    if isinstance(base, Mixture):
        means, old, log_weights = base.components.mean, base.components.covariance, base.log_weights
    else:
        means, old, log_weights = base.mean[None], base.covariance[None], torch.zeros_like(shares[:1])
    return Mixture(
        torch.cat([means, torch.where(there.unsqueeze(-1), modes.means.to(base.mean), base.mean)]),
        cholesky=torch.cat([factorised(old), _WIDER * factorised(covariances)]),
        log_weights=torch.cat([log_weights, shares]),
        log_zeta=torch.logaddexp(log_z.double(), total.double()),
    )
