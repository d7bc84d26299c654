"""What a command has finished stays: results are written despite signals and full disks."""

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dgm_infer.errors import ArgumentError
from dgm_infer.files import writable_folder

__all__ = ["keep", "stopped_alike", "without_stops"]

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
