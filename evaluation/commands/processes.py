"""The processes of one training: a signal to the first, or the failure of any, ends all of them, with one line."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from dgm_infer.errors import ConfigError, DgmInferError, cause

from .messages import one_line

__all__ = ["REPORTED", "is_launched", "together"]

REPORTED = (DgmInferError, MisconfigurationException, OSError)
"""Failures of a training that are answered in one line."""

# Where processes that the first one launched leave the line about their failure; set in their environment.
_REPORTS = "DGM_INFER_TRAIN_REPORTS"
# Seconds in which the first process must have ended after a stop, or after the failure of another.
_GRACE = 10.0
# Seconds between looks at the other processes.
_EVERY = 0.1


def is_launched() -> bool:
    """Whether this is one of the further processes that the first one launched: that one speaks for it."""
    return _REPORTS in os.environ and os.environ.get("LOCAL_RANK", "0") != "0"


@contextmanager
def together(trainer: Trainer, last_words: Callable[[], str]) -> Iterator[None]:
    """Within the block, which trains, all processes go on or none.

    A process that waits for another in a collective operation hears of no signal, and Lightning's handler waits for
    one in turn. So a thread of the first process listens: on Ctrl-C or SIGTERM, or when another process has failed, it
    ends the others, which breaks off whatever the first one waits in, and after a grace period the first one itself.

    Args:
        trainer: trainer of the run; nothing is done if it has one process.
        last_words: what to say if the first process has to be ended while it is stuck.

    Raises:
        KeyboardInterrupt: a signal asked the training to stop.
        ConfigError: another process failed; the message is what it said.
    """
    if trainer.world_size == 1:
        yield
    elif is_launched():
        yield from _as_launched()
    else:
        yield from _as_first(trainer, last_words)


def _as_launched() -> Iterator[None]:
    """A further process: signals are for the first to answer, and without the first there is nothing to do."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    first = os.getppid()
    threading.Thread(target=_end_with, args=(first,), daemon=True).start()
    try:
        yield
    except REPORTED as error:
        _report(f"process {os.environ['LOCAL_RANK']}: {one_line(cause(error, 300))}")
        # a traceback would repeat it, and so would the command
        os._exit(2)
    except BaseException as error:
        if os.getppid() != first or _is_consequence(error):
            os._exit(2)
        raise


def _is_consequence(error: BaseException) -> bool:
    """Whether it is the failure of a collective operation, because another process has failed."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError)
        and re.search("gloo|nccl|connection|peer", str(error), re.IGNORECASE) is not None
    )


def _end_with(first: int) -> None:
    while os.getppid() == first:
        time.sleep(1)
    os._exit(2)


def _report(line: str) -> None:
    with suppress(OSError):
        path = Path(os.environ[_REPORTS], os.environ["LOCAL_RANK"])
        part = path.with_suffix(".part")
        part.write_text(line)
        part.replace(path)


def _as_first(trainer: Trainer, last_words: Callable[[], str]) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="dgm-infer-") as reports:
        watch = _Watch(trainer, Path(reports), last_words)
        os.environ[_REPORTS] = reports
        try:
            with watch:
                yield
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            if watch.stopped:
                raise KeyboardInterrupt from error
            if watch.failure and _is_consequence(error):
                raise ConfigError(watch.failure) from error
            raise
        finally:
            del os.environ[_REPORTS]


class _Watch:
    """The thread of the first process that listens to signals and watches the others."""

    def __init__(self, trainer: Trainer, reports: Path, last_words: Callable[[], str]):
        self.trainer = trainer
        self.reports = reports
        self.last_words = last_words
        self.others: list[subprocess.Popen] = []
        # whether a signal asked for the end, and what another process has failed of
        self.stopped = False
        self.failure = ""
        self._failed, self._ended = threading.Event(), threading.Event()
        self._before = -1
        self._heard, self._tell = socket.socketpair()
        self._heard.setblocking(False)
        self._tell.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # unlike handlers, it is written to even while the interpreter waits for another process
            self._before = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and _is_consequence(error):
            # the report of what has failed elsewhere is on its way
            self._failed.wait(10 * _EVERY)
        self._ended.set()
        self._thread.join()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)
        self._heard.close()
        self._tell.close()
        try:
            if kind is None:
                self._let_end()
        finally:
            self._end_others()

    def _run(self) -> None:
        while not (self._ended.is_set() or self.stopped or self.failure):
            self._adopt()
            ready, _, _ = select.select([self._heard], [], [], _EVERY)
            if ready:
                numbers = set(self._heard.recv(64))
                self.stopped = bool(numbers & {signal.SIGINT, signal.SIGTERM})
            else:
                self.failure = self._failure()
        self._failed.set()
        self._adopt()
        if self._ended.is_set():
            return
        self._end_others()
        if not self._ended.wait(_GRACE):
            print(self.last_words() if self.stopped else f"dgm-infer train: error: {self.failure}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(130 if self.stopped else 2)

    def _adopt(self) -> None:
        """Take the processes over from Lightning, whose observer would kill the first one too, without a word."""
        launched = getattr(self.trainer.strategy.launcher, "procs", None)
        while launched and isinstance(launched[0], subprocess.Popen):
            self.others.append(launched.pop(0))

    def _failure(self) -> str:
        """What one of the others has failed of; empty if none has."""
        for path in sorted(self.reports.glob("[0-9]*")):
            if not path.suffix:
                return path.read_text()
        for rank, process in enumerate(self.others, 1):
            code = process.poll()
            if code is not None and code < 0:
                return f"process {rank} was ended by {signal.Signals(-code).name}"
            if code:
                return f"process {rank} ended with code {code}"
        return ""

    def _let_end(self) -> None:
        """Wait for the others, which have trained as far as this one."""
        limit = time.monotonic() + _GRACE
        for process in self.others:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0))

    def _end_others(self) -> None:
        for process in self.others:
            # what they alone write is nothing; the first one writes checkpoints
            process.kill()
            process.wait()
