"""What a command has finished stays: results are written despite signals and full disks."""

import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, DgmInferError
from dgm_infer.files import writable_folder
from dgm_infer.runs.folder import RunFolder, refuse_what_is_there
from dgm_infer.runs.kinds import kind_of

__all__ = ["KeptRun", "go_on", "keep", "kept_run", "stopped_alike", "without_stops"]

_STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopped_alike() -> Iterator[None]:
    """Within the block, SIGTERM is what Ctrl-C is: a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        # only the main thread hears of signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class KeptRun:
    """The run of a part of a command."""

    path: Path
    is_saved: bool = False
    """Whether all that it gives is in files of its own."""

    def clear(self) -> None:
        """Remove it, if its results are saved."""
        if self.is_saved:
            shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def kept_run(folder: Path, name: str, command: str) -> Iterator[KeptRun]:
    """A run in a folder of this name, which is gone when its results are saved.

    One that was stopped stays, unless it has no checkpoint, and a note of the exception says how to go on.
    """
    run = KeptRun(folder / name)
    with warnings.catch_warnings():
        # its problem is at hand when the command goes on, and its last line says how
        warnings.filterwarnings("ignore", message=r".* will need it$", category=UserWarning)
        warnings.filterwarnings("ignore", message="interrupted", category=UserWarning)
        try:
            yield run
        except BaseException as error:
            run.is_saved |= not _has_checkpoint(run.path)
            if not run.is_saved:
                error.add_note(f"dgm-infer {command} --resume {folder} goes on")
            raise
        finally:
            run.clear()


def go_on(run: KeptRun, begin: Callable[..., Any], problem: Any) -> Any:
    """What a run gives: one that ``begin(run=...)`` begins, or that was stopped and goes on."""
    try:
        refuse_what_is_there("resume", run.path)
    except ArgumentError:
        return dgm.resume(run.path, problem)
    return begin(run=run.path)


def _has_checkpoint(run: Path) -> bool:
    try:
        folder = RunFolder.open("resume", run)
        kind = kind_of(folder)
        return any(kind.progress(folder, name) > 0 for name in (*kind.first(folder), *folder.names))
    except (DgmInferError, OSError):
        # what is damaged may be worth a look
        return run.exists()


@contextmanager
def without_stops() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect after the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[tuple[int, Any]] = []
    before = {stop: signal.getsignal(stop) for stop in _STOPS}
    # what is ignored, as by a job in the background, stays so
    heard = {stop: handler for stop, handler in before.items() if callable(handler)}
    for stop in heard:
        signal.signal(stop, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        for stop, handler in heard.items():
            signal.signal(stop, handler)
    if asked:
        number, frame = asked[0]
        heard[signal.Signals(number)](number, frame)


def keep(save: Callable[[Path], Any], path: Path) -> None:
    """Save a finished result to a path; where that fails, to the system's temporary folder.

    Its folder is made again if it has vanished, and no signal stops the writing.

    Raises:
        ArgumentError: the path cannot be written; the message says where the result is instead.
    """
    with without_stops():
        try:
            writable_folder(path.parent)
            save(path)
        except ArgumentError as error:
            instead = _saved_elsewhere(save, path.name)
            raise ArgumentError(f"{error}; it is in {instead}" if instead else str(error)) from error


def _saved_elsewhere(save: Callable[[Path], Any], name: str) -> Path | None:
    """Where a result is in the system's temporary folder, or None if that is full too."""
    with suppress(ArgumentError, OSError):
        path = Path(tempfile.mkdtemp(prefix="dgm-infer-")) / name
        save(path)
        return path
    return None
