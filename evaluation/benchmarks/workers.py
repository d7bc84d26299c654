"""What benchmarks share: processes that start measuring together, a record of the machine, options and results."""

import importlib
import math
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dgm_infer.errors import ConfigError, cause

__all__ = [
    "Clock",
    "Outcome",
    "Report",
    "available_cores",
    "check_counts",
    "check_device",
    "check_seed",
    "checked_cores",
    "machine",
    "one_thread",
    "options",
    "plain",
    "run_workers",
    "threads",
    "torch_threads",
    "writable_folder",
]

Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What became of one worker: its result, or one line that says why there is none."""

    result: Any = None
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
) -> list[Outcome]:
    """Run one fresh process a task, all at once, and wait for all of them.

    Every process imports what it needs, then waits until all have, so that imports are nobody's measured time. One
    that fails, dies or is late gives an :class:`Outcome` with an error; the others are not disturbed.

    Args:
        function: ``"module:name"``, called as ``name(task, report)``; ``report`` takes a line of progress.
        tasks: one a process; like the results, anything that pickles.
        environment: variables set in the processes from their start (numbers of threads are read at import).
        patience: seconds from the common start after which a process that still runs is ended.
        report: called with every line of progress.
    """
    context = multiprocessing.get_context("spawn")
    outcomes: list[Outcome | None] = [None] * len(tasks)
    workers, connections = [], []
    try:
        for task in tasks:
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, function, task), daemon=True)
            with _variables(environment):
                worker.start()
            theirs.close()
            workers.append(worker)
            connections.append(ours)
        open_connections = dict(zip(connections, range(len(tasks)), strict=True))
        _collect(open_connections, outcomes, "ready", math.inf, report)
        for connection in list(open_connections):
            connection.send("go")
        _collect(open_connections, outcomes, "result", patience, report)
        for i in open_connections.values():
            outcomes[i] = Outcome(error=f"still running after {patience:.0f} s, ended")
    finally:
        for worker, connection, outcome in zip(workers, connections, outcomes, strict=False):
            connection.close()
            # one that has sent its result is let go in peace
            worker.join(10 if outcome is not None and outcome.error is None else 0)
            worker.terminate()
            worker.join()
    return [outcome if outcome is not None else Outcome(error="never ran") for outcome in outcomes]


def _collect(
    connections: dict[Connection, int], outcomes: list[Outcome | None], awaited: str, patience: float, report: Report
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
                outcomes[connections.pop(connection)] = Outcome(result=content)
            elif kind != awaited:
                outcomes[connections.pop(connection)] = Outcome(error=content)


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
def _variables(values: Mapping[str, str]) -> Iterator[None]:
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


def available_cores() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Date, processor, load and versions, for the record of a benchmark."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "available_cores": available_cores(),
        "load_average_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def options(settings: Mapping[str, Any]) -> str:
    """Settings as a command line has them."""
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in values.items() if value is not None)


def check_counts(least: int = 1, **counts: int) -> None:
    for name, value in counts.items():
        if value < least:
            raise ConfigError(f"{name}: {value} must be {least} or more")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise ConfigError(f"seed: {seed} must be 0 or more, and less than 2**31")


def check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda, but PyTorch finds no GPU here: give --device cpu")


def checked_cores(cores: int | None) -> int:
    """The number of cores to use; None for all of them."""
    available = available_cores()
    if cores is None:
        return available
    if not 1 <= cores <= available:
        raise ConfigError(f"cores: {cores} must lie between 1 and the {available} available")
    return cores


def writable_folder(output: str) -> Path:
    """The folder of results, made if need be, before anything is measured."""
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output: no folder can be made at {output}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"output: {output} cannot be written to")
    return folder


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
