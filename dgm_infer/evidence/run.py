"""One call of an estimate: its checked arguments, its chunks of problems, and its result."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import allocatable, flag, other_seed, random_seed, whole_number
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, EvidenceError, warn
from ..probe import energy_doubt, energy_fault, probe_points
from ..progress import Progress
from ..references.density import Whitened
from ..runs.folder import RunFolder
from ..runs.kinds import KINDS
from ..runs.replay import CallRun, Loops, StoredCall
from ..runs.resume import begin
from ..sampling.plan import Keeping
from ..target import Target, as_target
from .method import EstimateStatus, Method, Outcome, joined
from .path import AnnealedPath
from .result import Evidence
from .start import EvidenceProblem
from .warnings import run_warnings


@dataclass(frozen=True)
class RunLimits:
    """Sizes by which problems are cut into chunks."""

    memory: int = 2**30
    """Bytes of chains that run at once."""
    activations: int = 2**15
    """Bytes of a target per chain and problem, besides the position: the activations of an image decoder."""


LIMITS = RunLimits()


class Chunk(NamedTuple):
    """What was found for a chunk of problems."""

    outcomes: list[Outcome]
    evaluations: int
    """Gradients per chain and problem."""
    seconds: float


class RunOptions(NamedTuple):
    """Arguments of :func:`log_evidence` that say how a run goes, unchecked."""

    chains: int
    seed: int | None
    chunk: int | None
    keep_draws: bool
    progress: bool


Work = Callable[[AnnealedPath, slice | None], list[Outcome]]


class EvidenceRun:
    """One call of the public function ``name``: its checked arguments and its chunks."""

    def __init__(
        self, name: str, target: Target, base: Whitened, method: Method, options: RunOptions, *, probe: bool = True
    ):
        self.name, target = name, as_target(target)
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
        self.target, self.base, self.method = target, base, method
        self.chains = whole_number(name, "chains", options.chains, 1)
        n = target.batch_shape.numel()
        if n == 0:
            raise ArgumentError(f"{name}(): the target's batch, of shape {tuple(target.batch_shape)}, is empty")
        chunk = self._chunk(name, options.chunk, n)
        self.keep_draws = flag(name, "keep_draws", options.keep_draws)
        self.progress = flag(name, "progress", options.progress)
        held = self.chains * base.dim * (n if self.keep_draws else min(chunk, n))
        allocatable(name, "chains", options.chains, held, "run fewer chains", like=base.mean)
        self.seed = random_seed(name, options.seed)
        # as JSON holds them, and chunks as they are whatever the limits become
        self.options = RunOptions(self.chains, self.seed, chunk, self.keep_draws, self.progress)
        self.chunks = [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)] if chunk < n else [None]
        self.rng = torch.Generator(base.mean.device).manual_seed(self.seed)
        if probe:
            self._probe(name)
        self.bar: Progress
        self.evaluations, self.seconds = 0, 0.0
        self.estimated, self.interrupted = n, False

    def _chunk(self, name: str, chunk: int | None, n: int) -> int:
        """Problems at a time: those that are asked for, or as many as the memory holds."""
        can_take = self.target.can_take and n > 1
        if chunk is not None:
            chunk = whole_number(name, "chunk", chunk, 1)
            if chunk < n and not can_take:
                raise ArgumentError(
                    f"{name}(chunk={chunk}): a {type(self.target).__name__} has no take(problems), the target of some "
                    "problems: define it, or omit chunk"
                )
            return chunk
        if not can_take:
            return n
        row = LIMITS.activations + 16 * self.base.dim * self.base.mean.element_size()
        return max(1, LIMITS.memory // (row * self.chains * getattr(self.method, "particles", 1)))

    def _probe(self, name: str) -> None:
        """Name an energy that is faulty at draws of the base; the run's random numbers are left."""
        # the first chunk stands for the others, which together need not fit into memory
        path = self.path(self.chunks[0])
        rng = torch.Generator(self.base.mean.device).manual_seed(0)
        x = path.base.sample(probe_points(path.target), rng)
        fault = energy_fault(path.target, x, "; base.to(...) changes these")
        if fault:
            raise ArgumentError(f"{name}(): {fault}")
        if doubt := energy_doubt(path.target, x):
            warn(f"{name}(): {doubt}")

    def outcomes(self, work: Work, said: str | None = None) -> list[Outcome]:
        """Run ``work`` on every chunk and join each of its outcomes over the chunks; ``said`` is noted before."""
        bar = Progress(self.progress, described)
        if said is not None:
            bar.note(said)
        done: list[Chunk] = []
        try:
            for i in range(len(self.chunks)):
                if len(self.chunks) > 1:
                    bar.prefix = f"chunk {i + 1} of {len(self.chunks)}: "
                done.append(self.chunk(i, work, bar))
                bar.finish()
                if any(part.interrupted for part in done[-1].outcomes):
                    break
        except KeyboardInterrupt:
            if not done:
                raise
        finally:
            bar.close()
        return self.joined(done)

    def chunk(self, number: int, work: Work, bar: Progress) -> Chunk:
        """Run ``work`` on a chunk of problems, which has random numbers of its own."""
        self.bar = bar
        if number > 0:
            own = other_seed(f"chunk {number}", self.seed)
            self.rng = torch.Generator(self.base.mean.device).manual_seed(own)
        began, problems = time.perf_counter(), self.chunks[number]
        path = self.path(problems)
        parts = work(path, problems)
        if not self.keep_draws:
            # a copy: a slice would keep all of them in memory
            parts = [part._replace(draws=part.draws[:, :0].clone()) for part in parts]
        before = bar.loops.before if isinstance(bar.loops, Loops) else 0.0
        return Chunk(parts, path.evaluations, before + time.perf_counter() - began)

    def joined(self, done: list[Chunk]) -> list[Outcome]:
        """The outcomes of the first chunks, each over all problems: NaN for those of other chunks."""
        # the number of adaptive temperatures differs between chunks
        self.evaluations = max(chunk.evaluations for chunk in done)
        self.seconds = sum(chunk.seconds for chunk in done)
        self._say_interrupted([chunk.outcomes for chunk in done])
        columns = [list(parts) for parts in zip(*(chunk.outcomes for chunk in done), strict=True)]
        return [parts[0] if len(self.chunks) == 1 else joined(parts, self.target.batch_shape) for parts in columns]

    def _say_interrupted(self, done: list[list[Outcome]]) -> None:
        n = self.target.batch_shape.numel()
        last = self.chunks[len(done) - 1]
        self.estimated = n if last is None else last.stop
        self.interrupted = self.estimated < n or any(part.interrupted for part in done[-1])
        if self.interrupted:
            warn(f"interrupted: estimates of {self.estimated} of {n} problems are kept")

    def path(self, problems: slice | None = None) -> AnnealedPath:
        """The path of a chunk, or of all problems."""
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
            warn(f"{name}: {doubt.line}", DiagnosisWarning)
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


def estimate_numbers(news: Any) -> dict[str, float]:
    """The latest running estimate, by name: its mean over problems, and the largest error."""
    if isinstance(news, Tensor):
        return {"log_z": news.mean().item()}
    return {"log_z": news.log_z.mean().item(), "std_error": news.std_error.max().item()}


def described(news: list[Callable[[], Any]]) -> str:
    """The same for the progress bar."""
    return f"mean log Z {estimate_numbers(news[-1]())['log_z']:.3f}"


class Job(NamedTuple):
    """What a function does for every chunk, and makes of all of them."""

    work: Callable[[EvidenceRun, dict[str, Any]], Work]
    """From the run and what else the function was given."""
    result: Callable[[EvidenceRun, list[Outcome], dict[str, Any]], Any]


def kept_as(name: str, job: Job) -> None:
    """Let runs of the function ``name`` be kept in a folder, with a chunk of problems as a shard."""

    def opened(folder: RunFolder, target: Any, inputs: dict[str, Any]) -> EvidenceRun:
        options = RunOptions(**folder.manifest["options"])
        return EvidenceRun(name, target, inputs["base"], inputs["method"], options, probe=False)

    def shard(folder: RunFolder, target: Any, inputs: dict[str, Any], number: int, bar: Progress) -> tuple[Chunk, bool]:
        run = opened(folder, target, inputs)
        chunk = run.chunk(number, job.work(run, inputs["more"]), bar)
        return chunk, not any(part.interrupted for part in chunk.outcomes)

    def result(folder: RunFolder, target: Any, inputs: dict[str, Any], chunks: list[Chunk]) -> Any:
        run = opened(folder, target, inputs)
        return job.result(run, run.joined(chunks), inputs["more"])

    def problem(call: str, given: Any) -> Target:
        return EvidenceProblem.of(call, given, has_base=True).target

    JOBS[name] = job
    KINDS[name] = CallRun(StoredCall(shard, result, problem, described, estimate_numbers))


JOBS: dict[str, Job] = {}


def carried_out(run: EvidenceRun, more: dict[str, Any], keeping: Keeping, said: str | None = None) -> Any:
    """What the function of the run's name returns: computed here, or kept in a folder as it is computed.

    Args:
        more: what else it was given.
        said: a line on the bar.
    """
    job = JOBS[run.name]
    if not keeping.is_asked_for:
        return job.result(run, run.outcomes(job.work(run, more), said), more)
    if said is not None:
        with Progress(run.progress) as bar:
            bar.note(said)
    return begin(
        run.name,
        keeping,
        run.target,
        {"base": run.base, "method": run.method, "more": more},
        {"options": run.options._asdict()},
        shards=len(run.chunks),
        device=run.base.mean.device,
        progress=run.progress,
    )
