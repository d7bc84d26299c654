"""Processes that start measuring together, clocks, and numbers of threads."""

import importlib
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from dgm_infer.errors import cause

__all__ = ["Clock", "Report", "WorkerResult", "one_thread", "run_workers", "threads", "torch_threads", "variables"]

Report = Callable[[str], None]


@dataclass(frozen=True)
class WorkerResult:
    """What became of one worker: its result, or one line that says why there is none."""

    value: Any = None
    error: str | None = None


class Clock:
    """Wall-clock and processor seconds since it was made, against a budget of wall-clock seconds."""

    def __init__(self, budget: float):
        self.budget = budget
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._wall

    @property
    def left(self) -> float:
        return self.budget - self.elapsed

    @property
    def cpu(self) -> float:
        """Processor seconds of this process, all its threads together."""
        return time.process_time() - self._cpu


def run_workers(
    function: str,
    tasks: Sequence[Any],
    *,
    environment: Mapping[str, str],
    patience: float,
    report: Report = lambda line: None,
) -> list[WorkerResult]:
    """Run one fresh process a task, all at once, and wait for all of them.

    Every process imports what it needs, then waits until all have, so that imports are nobody's measured time. One
    that fails, dies or is late gives an :class:`WorkerResult` with an error; the others are not disturbed.

    Args:
        function: ``"module:name"``, called as ``name(task, report)``; ``report`` takes a line of progress.
        tasks: one per process; like the results, anything that pickles.
        environment: variables set in the processes from their start (numbers of threads are read at import).
        patience: seconds from the common start after which a process that still runs is ended.
        report: called with every line of progress.
    """
    context = multiprocessing.get_context("spawn")
    results: list[WorkerResult | None] = [None] * len(tasks)
    workers, connections = [], []
    try:
        for task in tasks:
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, function, task), daemon=True)
            with variables(environment):
                worker.start()
            theirs.close()
            workers.append(worker)
            connections.append(ours)
        open_connections = dict(zip(connections, range(len(tasks)), strict=True))
        _collect(open_connections, results, "ready", math.inf, report)
        for connection in list(open_connections):
            connection.send("go")
        _collect(open_connections, results, "result", patience, report)
        for i in open_connections.values():
            results[i] = WorkerResult(error=f"still running after {patience:.0f} s, ended")
    finally:
        for worker, connection, result in zip(workers, connections, results, strict=False):
            connection.close()
            # one that has sent its result is let go in peace
            worker.join(10 if result is not None and result.error is None else 0)
            worker.terminate()
            worker.join()
    return [result if result is not None else WorkerResult(error="never ran") for result in results]


def _collect(
    connections: dict[Connection, int],
    results: list[WorkerResult | None],
    awaited: str,
    patience: float,
    report: Report,
) -> None:
    """Receive until every connection has sent a message of the kind ``awaited``; drops those that end."""
    deadline = time.perf_counter() + patience
    pending = set(connections)
    while pending and (left := deadline - time.perf_counter()) > 0:
        for connection in wait(list(pending), timeout=None if math.isinf(left) else left):
            assert isinstance(connection, Connection)
            try:
                kind, content = connection.recv()
            except EOFError:
                kind, content = "error", "the process died (out of memory?)"
            if kind == "report":
                report(content)
                continue
            pending.discard(connection)
            if kind == "result":
                results[connections.pop(connection)] = WorkerResult(value=content)
            elif kind != awaited:
                results[connections.pop(connection)] = WorkerResult(error=content)


def _work(connection: Connection, function: str, task: Any) -> None:
    """A worker process: import, say so, wait for the start, run, send the result."""
    # an interrupt reaches the whole group: the parent ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        module, name = function.split(":")
        run = getattr(importlib.import_module(module), name)
        connection.send(("ready", None))
        connection.recv()
        connection.send(("result", run(task, lambda line: connection.send(("report", line)))))
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr)
        connection.send(("error", f"{type(error).__name__}: {cause(error)}"))


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables, as they are for the processes started within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def threads(n: int) -> dict[str, str]:
    """Environment of a process in which the linear algebra of NumPy and PyTorch uses ``n`` threads."""
    return {name: str(n) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def one_thread() -> dict[str, str]:
    """Environment of a process that uses one thread, JAX included."""
    return {**threads(1), "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """PyTorch with n threads within the block."""
    # here: a peer's process has no use for it
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
