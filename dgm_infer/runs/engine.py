"""Who makes the shards of a run: this process, an executor's workers, or the ranks of ``torchrun``."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from .. import errors
from ..errors import CheckpointError, DgmInferError, warn
from ..sampling.run import device_of, named
from .folder import RunFolder
from .kinds import Page, ShardReport, Signals, kind_of
from .store import Writer

# The process that loaded this module: another one that has it is a fork.
_PROCESS = os.getpid()
# Workers that a shard may lose without a new checkpoint in between.
_LOSSES = 3
# Seconds from one look at workers to the next, and those after which a lost one has let its shard go.
_LOOK, _PATIENCE = 0.05, 60.0


def go_on(
    call: str,
    folder: RunFolder,
    writer: Writer | None,
    problem: Any,
    places: list[torch.device] | None,
    executor: Any,
    progress: bool,
    ranked: tuple[int, int] = (0, 1),
) -> Any:
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
            reports = team.make(kind_of(folder).first(folder), signals)
            if not any(report.error for report in reports.values()):
                reports |= team.make(folder.names, signals)
        else:
            reports = _made_here(folder, problem, signals, progress, ranked)
        asked = signals.asked
    stopped_by = next((each.stopped_by for each in reports.values() if each.stopped_by), None)
    if asked is not None and stopped_by is None:
        stopped_by = f"interrupted (dgm.resume({str(folder.path)!r}) goes on)"
    for name, report in reports.items():
        if report.error is not None:
            raise getattr(errors, report.error, DgmInferError)(f"{call}(), {name}: {report.stopped_by}")
    if writer is not None:
        Page(folder).update(is_last=True)
    # a folder that vanished is told of by the reports
    with suppress(DgmInferError):
        if writer is not None and (changes := kind_of(folder).settled(folder)):
            folder.change(writer, **changes)
    try:
        return kind_of(folder).result(call, folder, problem, reports, stopped_by)
    except CheckpointError as error:
        if asked is not None:
            raise KeyboardInterrupt(f"dgm.resume({str(folder.path)!r}) goes on") from error
        raise


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


def _made_here(
    folder: RunFolder, problem: Any, signals: Signals, progress: bool, ranked: tuple[int, int]
) -> dict[str, ShardReport]:
    """Make the shards of this process, one after the other: all of them, or those of its rank."""
    rank, size = ranked
    kind, reports = kind_of(folder), {}

    def make(name: str) -> None:
        if signals.asked is None:
            reports[name] = kind.make(folder, name, problem, signals, looks=False, progress=progress)

    for name in kind.first(folder):
        if rank == 0 or not _await(folder, name, signals):
            make(name)
    for name in folder.names[rank::size]:
        make(name)
    for name in folder.names if size > 1 else []:
        # of a rank that was lost, what is left
        if name not in reports and not _await(folder, name, signals):
            make(name)
    return reports


def _await(folder: RunFolder, name: str, signals: Signals) -> bool:
    """Wait for a shard that another rank makes; whether it is finished, rather than left alone for a minute."""
    signals.raising(True)
    left = time.monotonic() + _PATIENCE
    while time.monotonic() < left:
        if kind_of(folder).is_finished(folder, name):
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
        kind = kind_of(self._folder)
        waiting = [name for name in names if not kind.is_finished(self._folder, name)]
        self._writer.write({"stop": b"0"})
        reports: dict[str, ShardReport] = {}
        losses: dict[str, tuple[int, int]] = {}
        free: list[Any] = list(self._places or [None] * len(waiting))
        running: dict[str, tuple[Any, Any]] = {}
        stops, page, submitted = False, Page(self._folder), 0
        try:
            while running or (waiting and not stops):
                if signals.asked is not None and not stops:
                    stops = True
                    self._writer.write({"stop": b"1"})
                while waiting and free and not stops:
                    name, place = waiting.pop(0), free.pop(0)
                    # numbered: an executor may take a call for one whose result it has
                    submitted += 1
                    try:
                        running[name] = self._executor.submit(work, *self._order(name, place), submitted), place
                    except BrokenExecutor as error:
                        # between two looks
                        self._count_loss(name, losses, error)
                        waiting.append(name)
                        free.append(place)
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
                page.update()
                time.sleep(_LOOK)
        except BaseException:
            # a second Ctrl-C, or a worker lost too often: the others end too
            with suppress(DgmInferError):
                self._writer.write({"stop": b"1"})
            raise
        return reports

    def _order(self, name: str, place: Any) -> tuple:
        shows = self._progress and name in (*kind_of(self._folder).first(self._folder), self._folder.names[0])
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
        made = kind_of(self._folder).progress(self._folder, name)
        last, n = losses.get(name, (-1, 0))
        losses[name] = made, n + 1 if made == last else 1
        broken = isinstance(error, BrokenExecutor) and not own
        if broken or losses[name][1] >= _LOSSES:
            raise DgmInferError(
                f"the worker of {name} was lost ({why}): dgm.resume({str(self._folder.path)!r}) goes on"
            ) from (error if isinstance(error, Exception) else None)
        warn(f"the worker of {name} was lost ({why}): another one goes on")


class _Pool:
    """Spawned processes; new ones when one of them was lost."""

    def __init__(self, n: int):
        self._n = n
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


def work(
    path: str, name: str, problem: Any, place: str | None, modules: list[str], progress: bool, submitted: int
) -> ShardReport:
    """Make what is left of a shard: what a worker does."""
    if os.getpid() != _PROCESS:
        # torch's threads are those of the process that it was forked from: whoever waits for them waits for ever
        torch.set_num_threads(1)
    for module in modules:
        if module != "__main__":
            import_module(module)
    with Signals(Path(path)) as signals:
        try:
            folder = RunFolder.open("resume", path)
            problem = problem_at(folder, problem, None if place is None else torch.device(place))
            return kind_of(folder).make(folder, name, problem, signals, looks=True, progress=progress)
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
