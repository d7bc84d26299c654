"""Who makes the shards of a run: this process, an executor's workers, or the ranks of ``torchrun``."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch

from .. import errors
from ..errors import CheckpointError, DgmInferError
from ..sampling.draws import Draws
from ..sampling.report import finalise
from ..sampling.run import RunInputs, device_of, named
from ..target import reference
from .folder import WARMUP, RunFolder
from .shards import Part, Signals, collected, is_finished, progress_of, read_progress, run_shard
from .store import Writer

__all__ = ["go_on", "problem_at", "ranks"]

# Workers that a shard may lose without a new checkpoint in between.
_LOSSES = 3
# Seconds from one look at workers to the next, and those after which a lost one has let its shard go.
_LOOK, _PATIENCE = 0.05, 60.0


class ShardReport(NamedTuple):
    """What a worker says of a shard."""

    stopped_by: str | None = None
    kind: str | None = None
    """The exception of this package that it raised."""
    part: Part | None = None
    """What it made, if the folder does not have it, or it is at hand."""
    kernel: Any = None
    """The adapted kernel, if it is at hand."""


def go_on(
    call: str,
    folder: RunFolder,
    writer: Writer | None,
    problem: Any,
    places: list[torch.device] | None,
    executor: Any,
    progress: bool,
    ranked: tuple[int, int] = (0, 1),
) -> Draws:
    """Make what is left of a run.

    Args:
        call: the function that the user called.
        writer: of the folder's plan; None on the ranks that do not have it.
        problem: None to read it from the folder.
        places: devices of the workers; one is used from this process.
        ranked: the rank of this process, and of how many, that make the run together.
    """
    problem = problem_at(folder, problem, places[0] if places and len(places) == 1 else None)
    with Signals(folder.path) as signals, ExitStack() as stack:
        if writer is not None and (executor is not None or (places is not None and len(places) > 1)):
            if executor is None:
                executor = stack.enter_context(_Pool(len(places or ())))
            team = _Workers(folder, writer, problem, places, executor, progress)
            single = folder.manifest["shards"] == 1
            reports = {} if single else team.make([WARMUP], signals)
            if not any(report.kind for report in reports.values()):
                reports |= team.make(folder.names, signals)
        else:
            reports = _made_here(folder, problem, signals, progress, ranked)
        asked = signals.asked
    stopped_by = next((each.stopped_by for each in reports.values() if each.stopped_by), None)
    if asked == signal.SIGINT and stopped_by is None:
        stopped_by = f"interrupted (dgm.resume({str(folder.path)!r}) goes on)"
    for name, report in reports.items():
        if report.kind is not None:
            raise getattr(errors, report.kind, DgmInferError)(f"{call}(), {name}: {report.stopped_by}")
    parts = {name: report.part for name, report in reports.items() if report.part is not None}
    try:
        outcome = collected(folder, problem, parts)
        kernels = [report.kernel for report in reports.values() if report.kernel is not None]
        outcome = outcome._replace(kernel=kernels[-1]) if kernels else outcome
    except CheckpointError as error:
        if asked is not None:
            raise KeyboardInterrupt from error
        raise
    draws = finalise(outcome, stopped_by, stacklevel=5)
    draws.interrupted |= draws.shape[0] < folder.plan["chains"]
    return draws


def problem_at(folder: RunFolder, problem: Any, place: torch.device | None) -> Any:
    """The problem, on its own device or on this one."""
    if problem is not None and (place is None or device_of(problem) == place):
        return problem
    old = folder.manifest["device"]
    place = place or torch.device(old)
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"{folder.path}: the run is of {old}, which is not here: devices=['cpu'] goes on on the CPU, with other "
            "random numbers"
        ) from error
    return folder.stored("problem", {old: str(place)})


def _inputs(folder: RunFolder, problem: Any) -> tuple[RunInputs, dict[str, str]]:
    """What a shard begins with, and where its tensors go."""
    devices = {folder.manifest["device"]: str(device_of(problem))} if reference(problem) is not None else {}
    kernel, initial = (folder.stored(name, devices) for name in ("kernel", "initial"))
    return RunInputs(problem, kernel, initial, folder.manifest["undecided"]), devices


def _made_here(
    folder: RunFolder, problem: Any, signals: Signals, progress: bool, ranked: tuple[int, int]
) -> dict[str, ShardReport]:
    """Make the shards of this process, one after the other: all of them, or those of its rank."""
    rank, size = ranked
    inputs, devices = _inputs(folder, problem)
    reports: dict[str, ShardReport] = {}

    def make(name: str) -> None:
        if signals.asked is None:
            reports[name] = _made(folder, name, inputs, devices, signals, progress=progress)

    if folder.manifest["shards"] == 1:
        make(folder.names[0])
        return reports
    if rank == 0 or not _await(folder, WARMUP, signals):
        make(WARMUP)
    for name in folder.names[rank::size]:
        make(name)
    for name in folder.names if size > 1 else []:
        # of a rank that was lost, what is left
        if name not in reports and not _await(folder, name, signals):
            make(name)
    return reports


def _made(
    folder: RunFolder,
    name: str,
    inputs: RunInputs,
    devices: dict[str, str],
    signals: Signals,
    *,
    progress: bool,
    looks: bool = False,
) -> ShardReport:
    single = folder.manifest["shards"] == 1
    if not single and is_finished(folder, name):
        return ShardReport()
    sampling, stopped_by, kept = run_shard(folder, name, inputs, devices, signals, progress=progress, looks=looks)
    if kept and (looks or not single):
        return ShardReport(stopped_by)
    draws = sampling.draws()
    if looks:
        # to the process that asked for them, which may have other devices
        draws = {name: value.cpu() for name, value in draws.items()}
    return ShardReport(stopped_by, part=Part(progress_of(sampling), draws), kernel=None if looks else sampling.kernel)


def _await(folder: RunFolder, name: str, signals: Signals) -> bool:
    """Wait for a shard that another rank makes; whether it is finished, rather than left alone for a minute."""
    signals.raising(True)
    left = time.monotonic() + _PATIENCE
    while time.monotonic() < left:
        if is_finished(folder, name):
            signals.raising(False)
            return True
        if folder.shard(name).is_written:
            left = time.monotonic() + _PATIENCE
        time.sleep(_LOOK)
    signals.raising(False)
    return False


class _Workers:
    """An executor's workers, each of which makes one shard at a time."""

    def __init__(
        self,
        folder: RunFolder,
        writer: Writer,
        problem: Any,
        places: list[torch.device] | None,
        executor: Any,
        progress: bool,
    ):
        self._folder, self._writer, self._progress = folder, writer, progress
        # an executor may send what the folder cannot hold
        self._problem = problem if folder.manifest["unstored"] else None
        self._places, self._executor = places, executor

    def make(self, names: Sequence[str], signals: Signals) -> dict[str, ShardReport]:
        """The reports of shards that are not finished yet, made by workers.

        Raises:
            DgmInferError: workers were lost again and again.
        """
        waiting = [name for name in names if not is_finished(self._folder, name)]
        self._writer.write({"stop": b"0"})
        reports: dict[str, ShardReport] = {}
        losses: dict[str, tuple[int, int]] = {}
        free: list[Any] = list(self._places or [None] * len(waiting))
        running: dict[str, tuple[Any, Any]] = {}
        stops = False
        while running or (waiting and not stops):
            if signals.asked is not None and not stops:
                stops = True
                self._writer.write({"stop": b"1"})
            while waiting and free and not stops:
                name, place = waiting.pop(0), free.pop(0)
                running[name] = self._executor.submit(work, *self._order(name, place)), place
            for name, (future, place) in list(running.items()):
                if not future.done():
                    continue
                del running[name]
                free.append(place)
                try:
                    reports[name] = future.result()
                except (KeyboardInterrupt, Exception) as error:
                    self._count_loss(name, losses, error)
                    if not stops:
                        waiting.append(name)
            time.sleep(_LOOK)
        return reports

    def _order(self, name: str, place: Any) -> tuple:
        shows = self._progress and name in (WARMUP, self._folder.names[0])
        return (
            str(self._folder.path.absolute()),
            name,
            self._problem,
            None if place is None else str(place),
            self._folder.modules(),
            shows,
        )

    def _count_loss(self, name: str, losses: dict[str, tuple[int, int]], error: BaseException) -> None:
        """Note that a worker was lost; raise if it was one too many."""
        own = isinstance(self._executor, _Pool)
        why = self._executor.why() if own else f"{type(error).__name__}: {errors.cause(error)}"
        store, made = self._folder.shard(name), 0
        if store.exists:
            with store.reading() as reader:
                made = (read_progress(reader) or {"transitions": 0})["transitions"]
        last, n = losses.get(name, (-1, 0))
        losses[name] = made, n + 1 if made == last else 1
        broken = isinstance(error, BrokenExecutor) and not own
        if broken or losses[name][1] >= _LOSSES:
            raise DgmInferError(
                f"the worker of {name} was lost ({why}): dgm.resume({str(self._folder.path)!r}) goes on"
            ) from (error if isinstance(error, Exception) else None)
        warnings.warn(f"the worker of {name} was lost ({why}): another one goes on", stacklevel=5)


class _Pool:
    """Spawned processes; new ones when one of them was lost."""

    def __init__(self, n: int):
        self._n, self._why = n, ""
        self._threads = max(1, torch.get_num_threads() // n)

    def __enter__(self) -> "_Pool":
        self._pool = self._made()
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=exception[0] is None, cancel_futures=True)

    def _made(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._n, get_context("spawn"), initializer=_prepare, initargs=(self._threads,))

    def submit(self, function: Callable, *arguments: Any) -> Any:
        try:
            return self._pool.submit(function, *arguments)
        except BrokenExecutor:
            self._pool.shutdown(wait=False)
            self._pool = self._made()
            return self._pool.submit(function, *arguments)

    def why(self) -> str:
        """How its processes ended."""
        ended = [process.exitcode for process in list((getattr(self._pool, "_processes", None) or {}).values())]
        # the others are ended by the pool itself, by SIGTERM
        codes = [code for code in ended if code not in (None, 0, -signal.SIGTERM)] or [-signal.SIGTERM]
        if codes[0] < 0:
            return f"ended by {signal.Signals(-codes[0]).name}"
        return (
            f"ended with code {codes[0]}; in a script, what it does has to be below 'if __name__ == \"__main__\":', "
            "which a new process does not run"
        )


def _prepare(threads: int) -> None:
    """A worker shares the threads, leaves Ctrl-C to the process that began the run, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def work(path: str, name: str, problem: Any, place: str | None, modules: list[str], progress: bool) -> ShardReport:
    """Make what is left of a shard: what a worker does."""
    for module in modules:
        if module != "__main__":
            import_module(module)
    with Signals(Path(path)) as signals:
        try:
            folder = RunFolder.open("sample", path)
            problem = problem_at(folder, problem, None if place is None else torch.device(place))
            inputs, devices = _inputs(folder, problem)
            return _made(folder, name, inputs, devices, signals, progress=progress, looks=True)
        except KeyboardInterrupt:
            return ShardReport("interrupted")
        except DgmInferError as error:
            return ShardReport(str(error), type(error).__name__)
        except Exception as error:
            return ShardReport(named(error), "DgmInferError")


def ranks() -> tuple[int, int]:
    """This process's rank, and how many there are, by the environment of ``torchrun`` and Lightning Fabric."""
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, size) if 0 <= rank < size else (0, 1)
