"""Refinement: a base with what a run from it has found, and another run, three times at most (math 6.16)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import EvidenceError
from ..linear_maps import factorised
from ..references import Mixture
from ..references.density import Whitened
from ..target import as_target
from .checks import Components, Unseen
from .method import Outcome, replaced
from .path import AnnealedPath
from .warnings import few_round_trips


@dataclass(frozen=True)
class RefineSettings:
    """How often bases are refined, and how wide their new modes are."""

    rounds: int = 3
    """Runs that may follow the first; normals fifty times narrower than the base, in ten dimensions, take two."""
    widen: float = 1.2
    """Standard deviations of a mode in a base, in those of Laplace's approximation: tails may be heavier."""


REFINE = RefineSettings()


def run_and_refine(path: AnnealedPath, once: Callable[[AnnealedPath], tuple[Outcome, Unseen]]) -> Outcome:
    """Repeat a run whose draws contradict its base, from one that they improve, three times at most.

    Problems with fewer round trips between base and target than chains get a base with the moments of the draws; modes
    that no draw has visited are added to the base. Only these problems run again, if the target can take some of its
    problems. The gradients of all runs count, those of all but the last as tuning.

    Args:
        path: from the first base.
        once: a run from a base, and what it has not seen.
    """
    outcome, unseen = once(path)
    whole, shape = outcome, path.batch_shape
    rows = torch.arange(shape.numel(), device=path.base.mean.device)
    times, added = (torch.zeros_like(unseen.modes).reshape(-1) for _ in range(2))
    spent, current = 0, path
    for _ in range(REFINE.rounds):
        again = (unseen.modes > 0) | _stayed(outcome)
        if outcome.interrupted or not again.any():
            break
        try:
            base = _improved(current.base, outcome, unseen)
        except (EvidenceError, NotImplementedError):
            # a covariance without a factor, or a base of a user that has no refined(): what is said of it stands
            break
        again, found, target = again.reshape(-1), unseen.modes.reshape(-1), current.target
        if target.can_take and not again.all():
            own = again.nonzero().flatten()
            rows, found, target, base = rows[own], found[own], as_target(target.take(own)), base.take(own)
        times[rows] += 1
        added[rows] += found
        spent += current.evaluations
        current = AnnealedPath(target, base)
        outcome, unseen = once(current)
        if outcome.interrupted:
            whole = whole._replace(interrupted=True)
            break
        whole = outcome if len(rows) == len(times) else replaced(whole, outcome, rows, shape)
    path.evaluations = spent + current.evaluations
    done = {"refinements": times.reshape(shape), "added_modes": added.reshape(shape)}
    return whole._replace(diagnostics=whole.diagnostics | done, pilot_evaluations=spent + outcome.pilot_evaluations)


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
    density. Bases that are not mixtures of Gaussians keep their moments.

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
        cholesky=torch.cat([factorised(old), REFINE.widen * factorised(covariances)]),
        log_weights=torch.cat([log_weights, shares]),
        log_zeta=torch.logaddexp(log_z.double(), total.double()),
    )
