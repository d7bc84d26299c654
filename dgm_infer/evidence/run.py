"""``log_evidence()`` and ``bidirectional()``: chunks of problems, seeds, progress, one result."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import allocatable, finite, flag, random_seed, whole_number
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, EvidenceError
from ..probe import energy_doubt, energy_fault, probe_points
from ..progress import Progress
from ..references.density import Whitened
from ..target import as_target
from .annealing import AIS, Annealed, Annealing, anneal, anneal_back, weight_diagnostics
from .chunks import joined
from .coverage import Unseen, count_minima
from .estimators import Estimate, bennett, log_mean, weight_ess
from .groups import run_in_groups
from .method import EstimateStatus, Method, Outcome, check_method
from .path import AnnealedPath
from .remedy import covered, until_seen
from .result import Evidence
from .start import started
from .tempering.gibbs import GibbsTempering
from .tempering.parallel import ParallelTempering
from .warnings import run_warnings

__all__ = ["Bounds", "bidirectional", "log_evidence"]

# Upper bound on the memory of chains that run at once.
_BYTES = 2**30
# Replicas of parallel tempering that run at once on a CPU, whose caches then hold their activations.
_ROWS = 2**12
# Memory of a target per chain and problem, besides the position: the activations of an image decoder.
_OWN_BYTES = 2**15


def log_evidence(
    target,
    base: Whitened | None = None,
    method: Method | None = None,
    *,
    chains: int = 16,
    groups: int = 1,
    seed: int | None = None,
    chunk: int | None = None,
    keep_draws: bool = True,
    coverage: bool = True,
    refine: bool | None = None,
    progress: bool = True,
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
        groups: groups of chains, each tuned on a pilot of its own, so that the luck of a pilot, which its chains share,
            is in ``std_error`` (math 6.18): 1, or 4 and more. Diagnostic ``between_groups`` is the sd between groups
            beyond that of their chains.
        seed: seed of all randomness; None draws one and records it in ``Evidence.seed``.
        chunk: problems at a time; None for as many as fit 1 GiB, and for parallel tempering on a CPU a few thousand
            replicas. On a CPU, chunks of a few thousand chains stay in its caches and can run 1.5 times faster.
        keep_draws: whether the result holds the weighted draws, most of its memory; ``thin`` saves memory too.
        coverage: whether to look for modes that no draw has visited, by minimisations from widely spread starts for at
            most a tenth of the run's gradients (math 6.15); bounds are not checked. A mode whose Laplace mass would
            move log Z by more than a standard error is a warning, and its shift is added to ``std_error`` in squares:
            diagnostics ``unseen_modes`` and ``unseen_shift``. Where it ends in several modes, a short parallel
            tempering, for at most a quarter of the gradients, says whether they are visited too rarely: ``rare_shift``.
        refine: whether problems whose draws contradict the base run again from a better one, up to three times (math
            6.17): with fewer round trips between base and target than chains the base takes the moments of the draws,
            and unseen modes join it, with a share of a half. None for True without a ``method``, and else False.
            Diagnostics ``refinements`` (how often, per problem) and ``added_modes``.
        progress: show a bar with the running estimate on the standard error stream.

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
    looks = flag("log_evidence", "coverage", coverage)
    target, base, said = started("log_evidence", target, base)
    run = _Run(target, base, method, chains, seed, chunk, keep_draws, progress, "log_evidence")
    run.said = said
    groups = whole_number("log_evidence", "groups", groups, 1)
    if groups > 1 and (run.chains % groups or run.chains < 2 * groups):
        raise ArgumentError(
            f"log_evidence(groups={groups}): must divide chains={run.chains} into groups of two or more chains"
        )
    looks &= run.method.status in ("unbiased", "consistent")
    refine = looks and method is None if refine is None else flag("log_evidence", "refine", refine)
    if refine and not looks:
        raise ArgumentError(
            "log_evidence(refine=True): modes are looked for by coverage=True, of a method that is not a bound"
        )

    def once(path: AnnealedPath) -> tuple[Outcome, Unseen]:
        outcome = run_in_groups(run.method, path, run.chains, groups, run.rng, run.bar)
        effective = weight_ess(outcome.log_weights.logsumexp(1))
        outcome = outcome._replace(diagnostics=outcome.diagnostics | {"effective_chains": effective})
        if not looks:
            return outcome, Unseen.none(outcome.estimate.log_z)
        # a generator of its own: the check leaves the numbers of a run as they are without it
        rng = torch.Generator(path.base.mean.device).manual_seed(run.seed + 1)
        return covered(path, outcome, rng, compare=not isinstance(run.method, ParallelTempering))

    def work(path: AnnealedPath, problems: slice | None) -> list[Outcome]:
        return [until_seen(path, once) if refine else once(path)[0]]

    (outcome,) = run.outcomes(work)
    return run.evidence(outcome, type(run.method).__name__, run.method.status)


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
) -> Bounds:
    """Bound log Z from both sides by annealing from the base and back from exact draws (Grosse et al. 2015).

    Args:
        target, base: as in :func:`log_evidence`.
        exact_draws: draws of the target, one per chain ``[chains, *batch, D]``, or one per problem ``[*batch, D]``,
            such as the latents that simulated the data. In the latter case all reverse chains of a problem start at
            its one draw: the bound holds on average over problems, and the standard error excludes the draw's spread.
        method: an :class:`AIS` or a :class:`HamiltonianAIS`, None for ``AIS()``; one plan, tuned on a pilot, serves
            both directions.
        exact: whether the draws are exact. If not, upper and combined are labelled ``"heuristic"``.
        chains, seed, chunk, keep_draws, progress: as in :func:`log_evidence`.

    Raises:
        ArgumentError: an argument is outside its range, or shapes do not fit.
        EvidenceError: all weights of a problem are zero, or the target has zero density at a draw.
    """
    method = AIS() if method is None else method
    if not isinstance(method, Annealing):
        raise ArgumentError(f"bidirectional(method={method!r}): expected an AIS or a HamiltonianAIS")
    flag("bidirectional", "exact", exact)
    run = _Run(target, base, method, chains, seed, chunk, keep_draws, progress, "bidirectional")
    draws = finite("bidirectional", "exact_draws", exact_draws).to(base.mean)
    shared = draws.shape == base.mean.shape
    if shared:
        draws = draws.expand(run.chains, *draws.shape)
    if draws.shape != (run.chains, *base.mean.shape):
        raise ArgumentError(
            f"bidirectional(exact_draws of shape {tuple(draws.shape)}): expected {tuple(base.mean.shape)}, or "
            f"{(run.chains, *base.mean.shape)} for {run.chains} chains"
        )
    with torch.no_grad():
        lost = ~run.target.energy(draws).isfinite().all(0)
    if lost.any():
        raise EvidenceError(
            f"the target has zero density at the exact draws of {int(lost.sum())} of {lost.numel()} problems: they "
            "come from another target"
        )

    def work(path: AnnealedPath, problems: slice | None) -> list[Outcome]:
        own = draws if problems is None else draws.reshape(run.chains, -1, base.dim)[:, problems]
        plan = method.plan(path, run.chains, run.rng, run.bar)
        spent = path.evaluations
        start = path.draws(run.chains, run.rng)
        forward = anneal(path, plan, start, method.moves(path, run.chains, run.rng), run.bar)
        back = anneal_back(path, plan, path.base.whiten(own), method.moves(path, run.chains, run.rng), run.bar)
        reverse = log_mean(back.log_weights)
        upper = Estimate(-reverse.log_z, reverse.std_error, -reverse.bias)

        def outcome(estimate: Estimate, done: Annealed) -> Outcome:
            x = path.base.unwhiten(done.point.v).unsqueeze(1)
            return Outcome(estimate, x, done.log_weights.unsqueeze(1), weight_diagnostics(done), spent)

        lower = outcome(log_mean(forward.log_weights), forward)
        estimate, overlap = bennett(forward.log_weights, back.log_weights)
        combined = lower._replace(estimate=estimate, diagnostics={"overlap": overlap})
        # a reverse weight estimates 1/Z and weighs no draw of the target: keep the given draws, with equal weights
        given = outcome(upper, back)._replace(
            draws=own.unsqueeze(1), log_weights=torch.zeros_like(back.log_weights).unsqueeze(1)
        )
        return [lower, given, combined]

    outcomes = run.outcomes(work)
    names = [(f"{type(method).__name__} {kind}", kind) for kind in ("lower", "upper")] + [("Bennett", "consistent")]
    results = []
    for outcome, (name, status) in zip(outcomes, names, strict=True):
        honest: EstimateStatus = status if exact or status == "lower" else "heuristic"  # type: ignore[assignment]
        result = run.evidence(outcome, name, honest)
        result.diagnostics["shared_exact_draw"] = shared
        results.append(result)
    return Bounds(*results)


class _Run:
    """One call: its checked arguments and its chunks."""

    def __init__(self, target, base, method, chains, seed, chunk, keep_draws: bool, progress: bool, name: str):
        target = as_target(target)
        if not isinstance(base, Whitened):
            raise ArgumentError(
                f"{name}(base={type(base).__name__}): expected a Gaussian, a Mixture or a Flow, for example "
                "Gaussian.fit(target)"
            )
        if base.dim != target.dim or base.batch_shape != target.batch_shape:
            raise ArgumentError(
                f"the base has [*batch, D] = {tuple(base.mean.shape)}, the target "
                f"{(*target.batch_shape, target.dim)}: they must be equal"
            )
        if method is not None:
            check_method(method)
        self.target, self.base, self.method = target, base, GibbsTempering() if method is None else method
        self.chains = whole_number(name, "chains", chains, 1)
        if target.batch_shape.numel() == 0:
            raise ArgumentError(f"{name}(): the target's batch, of shape {tuple(target.batch_shape)}, is empty")
        n = target.batch_shape.numel()
        can_take = target.can_take and n > 1
        if chunk is not None:
            chunk = whole_number(name, "chunk", chunk, 1)
            if chunk < n and not can_take:
                raise ArgumentError(
                    f"{name}(chunk={chunk}): a {type(target).__name__} has no take(problems), the target of some "
                    "problems: define it, or omit chunk"
                )
        elif can_take:
            row = _OWN_BYTES + 16 * base.dim * base.mean.element_size()
            rows = self.chains * getattr(self.method, "particles", 1)
            chunk = max(1, _BYTES // (row * rows))
            if isinstance(self.method, ParallelTempering) and base.mean.device.type == "cpu":
                chunk = max(1, min(chunk, _ROWS // rows))
        self.keep_draws, self.progress = flag(name, "keep_draws", keep_draws), flag(name, "progress", progress)
        held = self.chains * base.dim * (n if keep_draws else min(chunk or n, n))
        allocatable(name, "chains", chains, held, "run fewer chains", like=base.mean)
        self.seed = random_seed(name, seed)
        self.chunks: list[slice | None] = [None]
        if chunk is not None and chunk < n:
            self.chunks = [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)]
        self.rng = torch.Generator(base.mean.device).manual_seed(self.seed)
        self._probe(name)
        if method is None and n == 1 and self._has_several_modes():
            self.method = ParallelTempering()
        self.bar: Progress
        self.evaluations = 0
        self.seconds = 0.0
        self.estimated, self.interrupted = n, False
        self.said: str | None = None

    def _probe(self, name: str) -> None:
        """Name an energy that is faulty at draws of the base; the run's random numbers are left."""
        # the first chunk stands for the others, which together need not fit into memory
        path = self._path(self.chunks[0])
        rng = torch.Generator(self.base.mean.device).manual_seed(0)
        x = path.base.sample(probe_points(path.target), rng)
        fault = energy_fault(path.target, x, "; base.to(...) changes these")
        if fault:
            raise ArgumentError(f"{name}(): {fault}")
        if doubt := energy_doubt(path.target, x):
            warnings.warn(f"{name}(): {doubt}", stacklevel=4)

    def _has_several_modes(self) -> bool:
        rng = torch.Generator(self.base.mean.device).manual_seed(0)
        return bool(count_minima(self._path(None), rng) > 1)

    def outcomes(self, work: Callable[[AnnealedPath, slice | None], list[Outcome]]) -> list[Outcome]:
        """Run ``work`` on every chunk and join each of its outcomes over the chunks."""
        self.bar = Progress(self.progress, _mean_log_z)
        if self.said is not None:
            self.bar.note(self.said)
        started = time.perf_counter()
        done = []
        try:
            for i, problems in enumerate(self.chunks):
                if len(self.chunks) > 1:
                    self.bar.prefix = f"chunk {i + 1} of {len(self.chunks)}: "
                path = self._path(problems)
                parts = work(path, problems)
                if not self.keep_draws:
                    # a copy: a slice would keep all of them in memory
                    parts = [part._replace(draws=part.draws[:, :0].clone()) for part in parts]
                done.append(parts)
                self.bar.finish()
                # the number of adaptive temperatures differs between chunks
                self.evaluations = max(self.evaluations, path.evaluations)
                if any(part.interrupted for part in parts):
                    break
        except KeyboardInterrupt:
            if not done:
                raise
        finally:
            self.bar.close()
        self.seconds = time.perf_counter() - started
        self._say_interrupted(done)
        columns = [list(chunks) for chunks in zip(*done, strict=True)]
        return [parts[0] if len(self.chunks) == 1 else joined(parts, self.target.batch_shape) for parts in columns]

    def _say_interrupted(self, done: list[list[Outcome]]) -> None:
        n = self.target.batch_shape.numel()
        last = self.chunks[len(done) - 1]
        self.estimated = n if last is None else last.stop
        self.interrupted = self.estimated < n or any(part.interrupted for part in done[-1])
        if self.interrupted:
            warnings.warn(f"interrupted: estimates of {self.estimated} of {n} problems are kept", stacklevel=4)

    def _path(self, problems: slice | None) -> AnnealedPath:
        if problems is None:
            return AnnealedPath(self.target, self.base)
        indices = torch.arange(problems.start, problems.stop, device=self.base.mean.device)
        part = as_target(self.target.take(indices))
        if part.batch_shape != (len(indices),):
            raise ArgumentError(
                f"{type(self.target).__name__}.take({len(indices)} problems) has batch shape "
                f"{tuple(part.batch_shape)}: expected ({len(indices)},)"
            )
        return AnnealedPath(part, self.base.take(indices))

    def evidence(self, outcome: Outcome, name: str, status: EstimateStatus) -> Evidence:
        """The result, from an outcome over all problems."""
        log_z, std_error, bias = outcome.estimate
        lost = ~log_z.isfinite()
        lost.view(-1)[self.estimated :] = False
        if lost.any():
            first = int(lost.reshape(-1).nonzero()[0])
            raise EvidenceError(
                f"all weights are zero for {int(lost.sum())} of {lost.numel()} problems, the first of them {first}: "
                "the target's density is zero or not finite at all draws of the base; choose a base that covers it"
            )
        # of a run that was cut short that has been said
        lines = () if outcome.interrupted else run_warnings(outcome.diagnostics, std_error, status, self.chains)
        for doubt in lines:
            warnings.warn(f"{name}: {doubt}", DiagnosisWarning, stacklevel=4)
        diagnostics: dict[str, Any] = {
            **outcome.diagnostics,
            "gradient_evaluations": self.evaluations,
            "pilot_evaluations": outcome.pilot_evaluations,
            "seconds": self.seconds,
        }
        return Evidence(
            log_z=log_z,
            std_error=std_error,
            bias=bias,
            dof=self.chains - 1,
            status=status,
            method=name,
            diagnostics=diagnostics,
            draws=outcome.draws if self.keep_draws else None,
            log_weights=outcome.log_weights,
            seed=self.seed,
            interrupted=self.interrupted,
        )


def _mean_log_z(news: list[Callable[[], Tensor]]) -> str:
    """The latest running estimate, for the progress bar."""
    return f"mean log Z {news[-1]().mean().item():.3f}"
