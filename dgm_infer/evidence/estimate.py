"""``log_evidence()``: estimate, check, refine, in this order; and ``refine_base()``, which repeats them for a base."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import choice, flag, instance, random_seed, whole_number
from ..errors import ArgumentError, EvidenceError, uninterrupted
from ..linear_maps import KINDS, factorised
from ..probe import spacing
from ..progress import Progress, foretold
from ..references import Mixture
from ..references.density import Whitened
from ..runs.folder import refuse_what_is_there
from ..sampling.plan import Keeping
from ..sampling.preflight import fitting_threads
from ..target import as_target
from .checks import Components, Unseen, checked, count_minima
from .estimators import weight_ess
from .method import Method, Outcome, check_method, replaced
from .path import AnnealedPath
from .result import Evidence
from .run import EvidenceRun, Job, RunOptions, carried_out, kept_as
from .start import EvidenceProblem
from .tempering.continuous import GibbsTempering
from .tempering.parallel import ParallelTempering
from .warnings import few_round_trips


def log_evidence(
    target,
    base: Whitened | None = None,
    method: Method | None = None,
    *,
    chains: int = 16,
    seed: int | None = None,
    chunk: int | None = None,
    keep_draws: bool = True,
    coverage: bool = True,
    refine: bool | None = None,
    progress: bool = True,
    run: str | os.PathLike | None = None,
    checkpoint_every: float = 60.0,
    devices: Sequence[str | torch.device] | str | torch.device | None = None,
    executor: Any = None,
) -> Evidence:
    """Estimate ``log Z``, with ``Z`` the integral of ``exp(-energy(x))``, for every problem of a batch.

    Args:
        target: a :class:`Target`, or anything with ``energy``, ``dim`` and ``batch_shape``. If it has
            ``take(problems)``, which returns the target of the problems with these flat indices, a large batch is
            evaluated in chunks. A fibre with additive normal noise stands for its posterior, and ``(model, images)``,
            with a decoder and a prior, for the :class:`LatentPosterior` of the images.
        base: normalised density to start from (a Gaussian, a Mixture, a Flow or one's own), with the target's batch
            shape; its dtype is that of all positions. None for the encoder's posterior if there is an encoder, else
            Laplace's approximation, else a fit of the evidence lower bound, as one line says.
        method: an evidence method; None for :class:`ParallelTempering` if the target is one problem in which searches
            from widely spread starts end in several minima, :class:`GibbsTempering` otherwise.
        chains: independent chains per problem (runs of :class:`SMC`); a single one has no standard error.
        seed: seed of all randomness; None draws one and records it in ``Evidence.seed``.
        chunk: problems at a time; None for as many as fit 1 GiB.
        keep_draws: whether the result holds the weighted draws, most of its memory; ``thin`` saves memory too.
        coverage: whether to look for modes that no draw has visited, by minimisations from widely spread starts for at
            most a tenth of the run's gradients (math 6.14); bounds are not checked. A mode whose Laplace mass would
            move log Z by more than a standard error is a warning, and its shift is added to ``std_error`` in squares:
            diagnostics ``unseen_modes`` and ``unseen_shift``. Where it ends in several modes, a short parallel
            tempering, for at most a quarter of the gradients, says whether they are visited too rarely: ``rare_shift``.
            Up to ten dimensions independent points tell what is missed around the draws: ``wide_shift``; of one
            problem of up to 64 others, along a neck: ``neck_shift``.
        refine: whether problems whose draws contradict the base run again from a better one, up to three times (math
            6.16): with fewer round trips between base and target than chains the base takes the moments of the draws,
            and unseen modes join it, with a share of a half. None for True without a ``method``, and else False.
            Diagnostics ``refinements`` (how often, per problem) and ``added_modes``.
        progress: show a bar with the running estimate on the standard error stream.
        run: a new folder that keeps the run while it runs, its base and its method included: :func:`resume` goes on
            with it after a stop of any kind, :func:`collect` reads what is there. The numbers are the same as without.
        checkpoint_every: seconds from one checkpoint to the next, which is what a stop may cost. Checkpoints that take
            long are made less often, for at most 2 % of the time.
        devices, executor: who makes the chunks, as in :func:`sample`; an ``executor`` needs ``run``.

    Returns:
        :class:`Evidence`. An interrupt (Ctrl-C) returns what there is, with ``interrupted`` set and a warning: the
        estimates of finished chunks, NaN for the problems of others, and from shorter chains those of tempering,
        ``ImportanceSampling`` and ``Elbo``.

    Raises:
        ArgumentError: an argument is outside its range, or base and target do not fit.
        ModelError, ObservationError: of ``(model, images)``, the model has no decoder, or the images do not fit it.
        EvidenceError: no base can be fitted, all weights of a problem are zero, or the method has no weights for this
            target.
        KeyboardInterrupt: interrupted before there was any estimate.
    """
    call = "log_evidence"
    keeping = Keeping.checked(call, run, checkpoint_every, devices, executor)
    if run is not None:
        # before a base is fitted
        refuse_what_is_there(call, run)
    problem = EvidenceProblem.of(call, target, has_base=base is not None)
    with fitting_threads(call, problem.trial):
        with Progress(flag(call, "progress", progress)) as bar:
            target, base, said = problem.started(base, bar.say)
        if method is not None:
            check_method(method)
        own = EvidenceRun(
            call,
            target,
            base,
            GibbsTempering() if method is None else method,
            RunOptions(chains, seed, chunk, keep_draws, progress),
        )
        if method is None:
            own.method = _chosen(own)
        check = flag(call, "coverage", coverage) and own.method.status in ("unbiased", "consistent")
        refine = check and method is None if refine is None else flag(call, "refine", refine)
        if refine and not check:
            raise ArgumentError(
                f"{call}(refine=True): modes are looked for by coverage=True, of a method that is not a bound"
            )
        return carried_out(own, {"check": check, "refine": refine}, keeping, said)


def _work(run: EvidenceRun, more: dict[str, Any]) -> Callable[[AnnealedPath, slice | None], list[Outcome]]:
    """What is done for a chunk of problems: an estimate, its check, and other bases."""

    def estimate_and_check(path: AnnealedPath) -> tuple[Outcome, Unseen]:
        outcome = _estimated(run, path)
        run.bar.say("searches for modes that no draw has visited")
        if not more["check"]:
            return outcome, Unseen.none(outcome.estimate.log_z)
        # a generator of its own: the check leaves the numbers of a run as they are without it
        rng = torch.Generator(path.base.mean.device).manual_seed(run.seed + 1)
        return checked(path, outcome, rng, compare=not getattr(run.method, "explores", False))

    def work(path: AnnealedPath, problems: slice | None) -> list[Outcome]:
        return [run_and_refine(path, estimate_and_check) if more["refine"] else estimate_and_check(path)[0]]

    return work


def _evidence(run: EvidenceRun, outcomes: list[Outcome], more: dict[str, Any]) -> Evidence:
    return run.evidence(outcomes[0], type(run.method).__name__, run.method.status)


kept_as("log_evidence", Job(_work, _evidence))


def _chosen(run: EvidenceRun) -> Method:
    """The default method: parallel tempering of one problem with several minima, else Gibbs tempering."""
    if run.target.batch_shape.numel() > 1:
        return run.method
    rng = torch.Generator(run.base.mean.device).manual_seed(0)
    return ParallelTempering() if bool(count_minima(run.path(), rng) > 1) else run.method


def _estimated(run: EvidenceRun, path: AnnealedPath) -> Outcome:
    """The method's own outcome, with its drift and a leg in the error, effective chains, spacing of energies."""
    outcome = run.method.run(path, run.chains, run.rng, run.bar)
    effective = weight_ess(outcome.log_weights.logsumexp(1))
    draws = outcome.draws[:, -1] if outcome.draws.shape[1] else path.base.mean[None]
    found = {"effective_chains": effective, "energy_spacing": spacing(path.target, draws.to(path.base.mean))}
    estimate = outcome.estimate
    for name in ("drift", "leg_shift"):
        if (shift := outcome.diagnostics.get(name)) is not None:
            estimate = estimate._replace(std_error=estimate.std_error.hypot(shift))
    return outcome._replace(estimate=estimate, diagnostics=outcome.diagnostics | found)


@dataclass(frozen=True)
class RefineSettings:
    """How often bases are refined, and how wide their new modes are."""

    rounds: int = 3
    """Runs that may follow the first; normals fifty times narrower than the base, in ten dimensions, take two."""
    widen: float = 1.2
    """Standard deviations of a mode in a base, in those of Laplace's approximation: tails may be heavier."""
    dense: int = 512
    """Dimensions up to which a refined base has a covariance of its own, as the metric of HMC has one."""


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
        if outcome.interrupted or not again.any() or not outcome.estimate.log_z.isfinite().all():
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
        # a base without correlations may be what keeps chains from the target
        kind = "full" if base.dim <= REFINE.dense else None
        base = base.refined(outcome.draws, outcome.log_weights, log_z, kind=kind)
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


class Refined(NamedTuple):
    """Result of :func:`refine_base`."""

    base: Whitened
    """The refined base, with the last pilot's log evidence as ``log_zeta``."""
    pilots: list[Evidence]
    """One per round, run from the base that the round started with."""

    @property
    def gradient_evaluations(self) -> int:
        """Total over rounds, per chain and problem."""
        return sum(pilot.diagnostics["gradient_evaluations"] for pilot in self.pilots)


def refine_base(
    target,
    base: Whitened,
    method: Method | None = None,
    *,
    rounds: int = 2,
    kind: Literal["diagonal", "full", "low_rank"] | None = None,
    chains: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> Refined:
    """Refine a base in rounds: each gives it the target's moments and log Z as a pilot run estimates them.

    The pilots' draws are discarded: a run that starts from the frozen base with fresh randomness keeps the status of
    its method. Refinement improves a base only as far as the chains of its pilots travel.

    Args:
        target, base: as in :func:`log_evidence`.
        method: method of the pilots, which must draw from the target; None for ``GibbsTempering()``.
        rounds: number of pilots, each run from the base that the previous one refined.
        kind: kind of the refined scale; None keeps the base's own. A full or low-rank scale holds correlations that a
            diagonal fit leaves out.
        chains: chains per problem in every pilot.
        seed: seed of all randomness.
        progress: as in :func:`log_evidence`.

    Raises:
        ArgumentError: an argument is outside its range, or the method is a bound.
        EvidenceError: a pilot failed, or all its weights of a problem are zero.
    """
    method = GibbsTempering() if method is None else method
    instance("refine_base", "base", base, Whitened, "dgm.Gaussian.fit(target)")
    check_method(method)
    if method.status not in ("unbiased", "consistent"):
        raise ArgumentError(
            f"refine_base(method={type(method).__name__}): it draws from the base; use a method that draws from the "
            "target, such as GibbsTempering"
        )
    rounds = whole_number("refine_base", "rounds", rounds, 1)
    if kind is not None:
        choice("refine_base", "kind", kind, KINDS)
    seeds = torch.Generator().manual_seed(random_seed("refine_base", seed))
    pilots = []
    for _ in foretold(rounds, f"refine_base: {rounds} rounds"):
        own = int(torch.randint(2**31, (), generator=seeds))
        pilot = uninterrupted(log_evidence(target, base, method, chains=chains, seed=own, progress=progress))
        assert pilot.draws is not None
        base = base.refined(pilot.draws, pilot.log_weights, pilot.log_z, kind=kind)
        pilots.append(pilot)
    return Refined(base, pilots)
