"""What a command computes in parts, each of which is kept until the command is done: one that was stopped goes on."""

import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, DgmInferError, warn
from dgm_infer.files import writable_folder
from dgm_infer.runs.encoding import decode, encode
from dgm_infer.runs.folder import RunFolder, refuse_what_is_there
from dgm_infer.runs.kinds import kind_of
from dgm_infer.runs.store import Store

__all__ = ["NOT_KEPT", "KeptRun", "Parts", "go_on", "kept_run"]

_Value = TypeVar("_Value")

_VALUES = "values.sqlite"


@dataclass
class KeptRun:
    """The run of a part of a command, or the folder of its parts."""

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


def _has_checkpoint(path: Path) -> bool:
    """Whether a run, or a part in a folder of them, has made something."""
    try:
        folders = [RunFolder.open("resume", found.parent) for found in path.rglob("run.sqlite")]
        made = any(
            kind_of(folder).progress(folder, name) > 0
            for folder in folders
            for name in (*kind_of(folder).first(folder), *folder.names)
        )
        return made or (path / _VALUES).exists() or (not folders and path.exists())
    except (DgmInferError, OSError):
        # what is damaged may be worth a look
        return path.exists()


class Parts:
    """The parts of a long computation, in the order of its calls: each is computed once, however often it is stopped.

    A part that is done gives what it gave before, one that was stopped goes on from its last checkpoint.

    Args:
        folder: where they are kept; None to keep nothing.
    """

    def __init__(self, folder: Path | None = None):
        self._folder, self._count = folder, 0

    def run(self, function: Callable[..., Any], problem: Any, *arguments: Any, **options: Any) -> tuple[Any, float]:
        """What ``function(problem, *arguments, run=..., **options)`` returns, and the seconds that it took.

        Args:
            function: :func:`dgm_infer.sample`, :func:`dgm_infer.log_evidence` or another one that takes ``run=``.
        """
        began = time.perf_counter()
        if self._folder is None:
            return function(problem, *arguments, **options), time.perf_counter() - began
        run = KeptRun(self._folder / self._next())
        result = go_on(run, partial(function, problem, *arguments, **options), problem)
        try:
            return result, RunFolder.open("resume", run.path).seconds
        except DgmInferError:
            # the folder has vanished
            return result, time.perf_counter() - began

    def value(self, make: Callable[[], _Value]) -> tuple[_Value, float]:
        """What a function returns, tensors and plain values, and the seconds that it took; a stop begins it again."""
        name, store = self._next(), self._values
        if store is not None and store.exists:
            with store.reading() as reader:
                content = reader.read(name)
            if content is not None:
                return decode(content, f"part {name} in {store.path}")
        began = time.perf_counter()
        made = make()
        found = made, time.perf_counter() - began
        if store is not None:
            try:
                content = encode(found, f"part {name}")
                writable_folder(store.path.parent)
                with store.writing(make=True) as writer:
                    writer.write({name: content})
            except DgmInferError as error:
                warn(f"part {name} is not kept: {error}")
        return found

    @property
    def seconds(self) -> float:
        """Those that all parts in the folder have taken so far."""
        if self._folder is None:
            return 0.0
        total = sum(RunFolder.open("resume", each.parent).seconds for each in self._folder.glob("*/run.sqlite"))
        store = self._values
        if store is not None and store.exists:
            with store.reading() as reader:
                total += sum(decode(reader.read(name) or b"", f"part {name}")[1] for name in reader.names())
        return total

    @property
    def _values(self) -> Store | None:
        return None if self._folder is None else Store(self._folder / _VALUES, "values")

    def _next(self) -> str:
        self._count += 1
        return f"{self._count:03d}"


NOT_KEPT = Parts()
"""Parts that are computed again at every call."""
