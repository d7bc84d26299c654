"""What the engine needs to know of a kind of run, the signals that stop one, and what to say of where it is."""

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..html import facts, page
from .folder import RunFolder


class ShardReport(NamedTuple):
    """What is said of a shard by who made it."""

    stopped_by: str | None = None
    error: str | None = None
    """The exception of this package that it raised."""
    part: Any = None
    """What it made, if the folder does not have it, or it is at hand."""


class Kind(ABC):
    """What a run is of: chains, or whatever a function of its inputs computes, in shards that anybody may make."""

    def first(self, folder: RunFolder) -> list[str]:
        """Shards that are made before all others."""
        return []

    @abstractmethod
    def is_finished(self, folder: RunFolder, name: str) -> bool:
        """Whether a shard has made all that it is to make."""

    @abstractmethod
    def progress(self, folder: RunFolder, name: str) -> int:
        """How far a shard was at its last checkpoint."""

    @abstractmethod
    def make(
        self, folder: RunFolder, name: str, problem: Any, signals: "Signals", *, looks: bool, progress: bool
    ) -> ShardReport:
        """Make what is left of a shard.

        Args:
            looks: whether another process asks to stop, in the folder.
        """

    @abstractmethod
    def result(
        self, call: str, folder: RunFolder, problem: Any, reports: dict[str, ShardReport], stopped_by: str | None
    ) -> Any:
        """What the user gets: what the folder has, and the reports beyond that.

        Raises:
            CheckpointError: that is nothing yet.
        """

    @abstractmethod
    def problem(self, call: str, given: Any) -> Any:
        """What a user gives as ``problem=``."""

    def extended(self, folder: RunFolder, problem: Any, more: int) -> dict[str, Any]:
        """The changes of the manifest that add draws.

        Raises:
            ArgumentError: it has none to add.
        """
        kind = folder.manifest["kind"]
        raise ArgumentError(
            f"extend({str(folder.path)!r}): is a run of {kind}(), to which no draws are added: begin another one with "
            "more"
        )

    @abstractmethod
    def made(self, folder: RunFolder) -> int:
        """Draws that the folder has."""

    @abstractmethod
    def view(self, folder: RunFolder) -> list[tuple[str, str]]:
        """What to say of where the run is, by name."""

    def settled(self, folder: RunFolder) -> dict[str, Any]:
        """The changes of the manifest that follow from what was made."""
        return {}


KINDS: dict[str, Kind] = {}
"""By the function that begins such runs: set by the rooms of these functions, which are above this one."""

_HOMES = {
    "sample": "dgm_infer.runs.chains",
    "log_evidence": "dgm_infer.evidence.estimate",
    "bidirectional": "dgm_infer.evidence.bounds",
    "sample_abc": "dgm_infer.likelihood_free.sample",
}


def kind_of(folder: RunFolder) -> Kind:
    """The kind of a run, whose room is loaded for it."""
    name = folder.manifest["kind"]
    if name not in KINDS:
        import_module(_HOMES[name])
    return KINDS[name]


class Signals:
    """Ctrl-C and SIGTERM while a run is made: the first one ends it after the transition under way.

    A second one ends the transition too. A SIGTERM takes its usual effect once the checkpoint is written.
    """

    def __init__(self, run: Path):
        self._run = run
        self.asked: int | None = None
        self._raises: bool = False
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                usual = signal.getsignal(number)
                # a handler of the user's for Ctrl-C keeps its meaning
                if usual is signal.default_int_handler or (number == signal.SIGTERM and usual != signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, usual in self._before.items():
            signal.signal(number, usual)
        # where it is what Ctrl-C is, the draws are returned as then
        if self.asked == signal.SIGTERM and self._before.get(self.asked) is not signal.default_int_handler:
            with suppress(OSError):
                os.write(2, f"stopped by SIGTERM: dgm.resume({str(self._run)!r}) goes on\n".encode())
            signal.raise_signal(signal.SIGTERM)

    def raising(self, raises: bool) -> None:
        """Whether the first signal ends what is under way, too; one that came before does so now."""
        self._raises = raises
        if raises and self.asked is not None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: object) -> None:
        if os.getpid() != self._process:
            # of a fork, which the process that began the run asks to stop
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        again = self.asked is not None
        self.asked = number
        if self._raises or again:
            raise KeyboardInterrupt
        with suppress(OSError):
            os.write(2, b"\nstopping after this transition; Ctrl-C again stops at once\n")


class Stopped(KeyboardInterrupt):
    """A request to stop, after the checkpoint."""


_PAGE = "index.html"


@dataclass(frozen=True)
class PageSettings:
    """When a page is written and read."""

    share: float = 0.01
    """Share of the time that it may take: R-hat of many draws takes seconds."""
    again: int = 5
    """Seconds after which a browser reads it again, at least."""


_SETTINGS = PageSettings()


def progress_rows(folder: RunFolder) -> list[tuple[str, str]]:
    """What there is to say of a run, by name."""
    manifest = folder.manifest
    kind, over = kind_of(folder), "finished" if is_over(folder) else "under way, or stopped"
    rows = [("run", f"{manifest['kind']}() in {folder.path}: {over}")]
    made = [found for name in (*kind.first(folder), *folder.names) if (found := folder.progress(name)) is not None]
    if made:
        last = at(max(found["at"] for found in made))
        rows.append(("computed", f"for {duration(folder.seconds)}, up to the checkpoint of {last}"))
    rows += kind.view(folder)
    if manifest.get("stopped_by"):
        rows.append(("ended", manifest["stopped_by"]))
    return rows


def is_over(folder: RunFolder) -> bool:
    """Whether all that was asked for is made."""
    return all(kind_of(folder).is_finished(folder, name) for name in folder.names)


def at(seconds: float) -> str:
    """A moment, in seconds of ``time.time``, in words."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def duration(seconds: float) -> str:
    """Seconds in words."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


class Page:
    """The page of a run that lasts: written with its checkpoints, and once more at its end."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._every = folder.manifest["checkpoint_every"]
        self._due = time.monotonic() + self._every

    def update(self, is_last: bool = False) -> None:
        """Write it if it is due; at the end, if it is there."""
        path = self._folder.path / _PAGE
        if time.monotonic() < self._due and not (is_last and path.exists()):
            return
        began = time.monotonic()
        # whatever is wrong with a page, the run goes on
        with suppress(Exception):
            # not by another file's name: a process that is killed would leave that
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
            content = self._page().encode()
            with open(os.open(path, flags, 0o644), "wb") as file:
                file.write(content)
        now = time.monotonic()
        self._due = now + max(self._every, (now - began) / _SETTINGS.share)

    def _page(self) -> str:
        over, rows = is_over(self._folder), progress_rows(self._folder)
        again = None if over else max(_SETTINGS.again, int(self._every))
        return page(self._folder.path.name, f"Written {at(time.time())}", [("Progress", facts(rows))], again=again)
