"""One call of an estimate: its target and base, its checked arguments, its chunks of problems, and its result."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..arguments import allocatable, context, digits, flag, numbers, other_seed, random_seed, whole_number
from ..conditioning import Everything, Fibre, LatentPosterior, condition
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, EvidenceError, cause, warn
from ..models import GenerativeModel, LatentVariableModel, reference_tensor
from ..probe import energy_doubt, energy_fault, probe_points, refuse_shapes
from ..progress import Progress
from ..references import Gaussian
from ..references.density import Whitened, origin
from ..runs.folder import RunFolder
from ..runs.kinds import KINDS
from ..runs.replay import CallRun, Loops, StoredCall
from ..runs.resume import begin
from ..sampling.plan import Keeping
from ..sampling.preflight import compare_threads
from ..target import Target, as_target
from .method import EstimateStatus, Method, Outcome, joined
from .path import AnnealedPath
from .result import Evidence
from .warnings import run_warnings


@dataclass(frozen=True)
class RunLimits:
    """Sizes by which bases are chosen and problems are cut into chunks."""

    hessians: int = 2**16
    """Rows of Hessians, over all problems, that Laplace's approximation may hold at once."""
    full: int = 100
    """Dimensions up to which a fit has a full covariance."""
    memory: int = 2**30
    """Bytes of chains that run at once."""
    activations: int = 2**15
    """Bytes of a target per chain and problem, besides the position: the activations of an image decoder."""
    rows: int = 8
    """Positions at which threads are compared: a search evaluates several at once."""


LIMITS = RunLimits()


class Started(NamedTuple):
    """A target with its base."""

    target: Target
    base: Whitened
    said: str | None
    """One line on a base that was chosen."""


def started(call: str, problem: Any, base: Whitened | None, report: Callable[[str], None] = lambda _: None) -> Started:
    """The target of a problem, with its base: the encoder's posterior, else Laplace's approximation, else a fit.

    Args:
        call: the public function, for messages.
        problem: a target, a fibre, or ``(model, images)`` of a model with a decoder and a prior, or with noise
            of its own.
        base: None to choose one.
        report: told what is looked for, which may take minutes.

    Raises:
        ArgumentError: the problem is a pair of other things.
        ModelError: the model has no decoder or no prior.
        ObservationError: the images do not fit the decoder.
        EvidenceError: no base can be fitted.
    """
    context(call)
    parts, images = None, None
    if isinstance(problem, tuple | list):
        parts, images, target = _of_pair(call, problem)
    else:
        target = as_target(problem)
        if isinstance(problem, Fibre) and base is None:
            parts, images = _of_fibre(problem)
    compare_threads_of(call, target)
    if base is not None:
        return Started(target, base, None)
    if parts is not None and parts.encoder is not None and images is not None:
        own = Gaussian.from_encoder(parts.encode, images)
        if own.mean.shape == (*target.batch_shape, target.dim):
            return Started(target, own.to(getattr(target, "values", own.mean)), "base: the encoder's posterior")
    refuse_shapes(call, target, origin(target, torch.float64))
    why = "there are too many Hessians"
    if target.batch_shape.numel() * target.dim <= LIMITS.hessians:
        report("start-up, looking for the mode of every problem")
        try:
            return Started(target, Gaussian.laplace(target), "base: Laplace's approximation at a mode")
        except (EvidenceError, RuntimeError) as error:
            # an energy may have no mode, or no second derivative
            why = cause(error).split(":")[0]
    kind = "full" if target.dim <= LIMITS.full else "diagonal"
    report("start-up, fitting a Gaussian to every problem")
    said = f"base: a {kind} Gaussian fit, as {why}; nothing to do: std_error includes what a base costs"
    return Started(target, Gaussian.fit(target, kind), said)


def compare_threads_of(call: str, target: Target) -> None:
    """Warn where threads wait for other programs, before the search for a base, which would take as much longer."""
    x = origin(target, torch.float64)
    if x.device.type == "cpu" and target.has_gradient:
        # a faulty energy is named where it is looked at
        with suppress(Exception):
            compare_threads(call, lambda: target.energy_and_gradient(x.expand(LIMITS.rows, *x.shape)))


def _of_pair(call: str, problem: Any) -> tuple[LatentVariableModel | None, Tensor, Target]:
    if len(problem) != 2 or not isinstance(problem[0], nn.Module):
        kinds = ", ".join(type(each).__name__ for each in problem)
        raise ArgumentError(f"{call}(({kinds})): expected a target, or a pair (model, images)")
    images = numbers(call, "images", problem[1], digits(problem[1]))
    if LatentVariableModel.find(problem[0]) is None and isinstance(problem[0], GenerativeModel):
        # without a decoder, the density is that of its own noise
        return None, images, as_target(condition(problem[0], images))
    parts = LatentVariableModel.of(problem[0])
    images = images.to(reference_tensor(parts.decoder)) if digits(problem[1]) else images
    size = torch.Size(parts.output_shape).numel()
    fits = [k for k in range(1, images.ndim + 1) if images.shape[-k:].numel() == size]
    # a channel of its own would look like a batch of one
    if fits and images.ndim - fits[0] > 1 and images.shape[-fits[0] - 1] == 1:
        images = images.flatten(images.ndim - fits[0] - 1)
    target = LatentPosterior(parts.decoder, images, parts.prior)
    return parts, target.images.reshape(*target.batch_shape, -1), target


def _of_fibre(fibre: Fibre) -> tuple[LatentVariableModel | None, Tensor]:
    """The parts of a model all of whose outputs are observed, and these."""
    whole = isinstance(fibre.observed.operator, Everything)
    return (LatentVariableModel.find(fibre.model) if whole else None), fibre.values


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
        return _of_pair(call, given)[2] if isinstance(given, tuple | list) else as_target(given)

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
