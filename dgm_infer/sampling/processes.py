"""Shards of a run in processes of their own, one per device."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from .. import errors
from ..errors import DgmInferError
from ..runs.folder import RunFolder
from .run import named

__all__ = ["in_processes"]

Work = Callable[[Path, int, bool], str | None]
"""``work(path, rank, progress)``: makes what is left of a shard, and returns what stopped it."""

Message = tuple[str | None, str | None]
"""The name of an exception of this package, if a process raised one, and what it says or what stopped the process."""


def in_processes(work: Work, folder: RunFolder, progress: bool) -> str | None:
    """Do the work of every shard in a new process; what stopped the first one that was stopped.

    The processes share torch's threads. An interrupt is passed on to them; they write their checkpoints and end. The
    first one shows its progress.

    Raises:
        DgmInferError: what a process raised, of its kind.
    """
    context = multiprocessing.get_context("spawn")
    n = len(folder.shards)
    threads = max(1, torch.get_num_threads() // n)
    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    processes = [
        context.Process(
            target=_process, args=(work, folder.path, rank, progress and rank == 0, threads, pipes[rank][1])
        )
        for rank in range(n)
    ]
    for process in processes:
        process.start()
    interrupted = False
    for process in processes:
        while process.is_alive():
            try:
                process.join()
            except KeyboardInterrupt:
                interrupted = True
                _interrupt(processes)
    messages = [_message(process, start) for process, (start, _) in zip(processes, pipes, strict=True)]
    for kind, text in messages:
        if kind is not None:
            raise getattr(errors, kind, DgmInferError)(text)
    stopped = "interrupted" if interrupted else None
    return next((text for _, text in messages if text is not None), stopped)


def _process(work: Work, path: Path, rank: int, progress: bool, threads: int, end: Connection) -> None:
    # a terminal interrupts all processes at once, and the first one passes it on: once is enough
    signal.signal(signal.SIGINT, _interrupt_once)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    message: Message
    try:
        message = None, work(path, rank, progress)
    except KeyboardInterrupt:
        message = None, "interrupted"
    except DgmInferError as error:
        message = type(error).__name__, str(error)
    except Exception as error:
        message = None, named(error)
    with suppress(BrokenPipeError):
        end.send(message)


def _interrupt_once(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        signal.raise_signal(signal.SIGINT)


def _interrupt(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)


def _message(process: BaseProcess, end: Connection) -> Message:
    if end.poll():
        return end.recv()
    return None, (
        f"a process of a shard ended with code {process.exitcode} (in a script, what it does has to be below "
        "'if __name__ == \"__main__\":', which a new process does not run)"
    )
