"""What the engine needs to know of a kind of run, and the signals that stop one."""

import os
import signal
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import ArgumentError
from .folder import RunFolder


class ShardReport(NamedTuple):
    """What is said of a shard by who made it."""

    stopped_by: str | None = None
    error: str | None = None
    """The exception of this package that it raised."""
    part: Any = None
    """What it made, if the folder does not have it, or it is at hand."""


class Kind(Protocol):
    """What a run is of: chains, or whatever a function of its inputs computes, in shards that anybody may make."""

    def first(self, folder: RunFolder) -> list[str]:
        """Shards that are made before all others."""
        ...

    def is_finished(self, folder: RunFolder, name: str) -> bool:
        """Whether a shard has made all that it is to make."""
        ...

    def progress(self, folder: RunFolder, name: str) -> int:
        """How far a shard was at its last checkpoint."""
        ...

    def make(
        self, folder: RunFolder, name: str, problem: Any, signals: "Signals", *, looks: bool, progress: bool
    ) -> ShardReport:
        """Make what is left of a shard.

        Args:
            looks: whether another process asks to stop, in the folder.
        """
        ...

    def result(
        self, call: str, folder: RunFolder, problem: Any, reports: dict[str, ShardReport], stopped_by: str | None
    ) -> Any:
        """What the user gets: what the folder has, and the reports beyond that.

        Raises:
            CheckpointError: that is nothing yet.
        """
        ...

    def problem(self, call: str, given: Any) -> Any:
        """What a user gives as ``problem=``."""
        ...

    def extended(self, folder: RunFolder, problem: Any, more: int) -> dict[str, Any]:
        """The changes of the manifest that add draws.

        Raises:
            ArgumentError: it has none to add.
        """
        ...

    def made(self, folder: RunFolder) -> int:
        """Draws that the folder has."""
        ...

    def view(self, folder: RunFolder) -> list[tuple[str, str]]:
        """What to say of where the run is, by name."""
        ...

    def settled(self, folder: RunFolder) -> dict[str, Any]:
        """The changes of the manifest that follow from what was made."""
        ...


KINDS: dict[str, Kind] = {}
"""By the function that begins such runs: set by the rooms of these functions, which are above this one."""

_HOMES = {
    "sample": "dgm_infer.runs.chains",
    "log_evidence": "dgm_infer.evidence.estimate",
    "bidirectional": "dgm_infer.evidence.annealing",
    "sample_abc": "dgm_infer.likelihood_free.sample",
}


def kind_of(folder: RunFolder) -> Kind:
    """The kind of a run, whose room is loaded for it."""
    name = folder.manifest["kind"]
    if name not in KINDS:
        import_module(_HOMES[name])
    return KINDS[name]


def refuse_extension(folder: RunFolder) -> ArgumentError:
    kind = folder.manifest["kind"]
    return ArgumentError(
        f"extend({str(folder.path)!r}): is a run of {kind}(), to which no draws are added: begin another one with more"
    )


class Signals:
    """Ctrl-C and SIGTERM while a run is made: the first one ends it after the transition under way.

    A second one ends the transition too. A SIGTERM takes its usual effect once the checkpoint is written.
    """

    def __init__(self, run: Path):
        self._run = run
        self.asked: int | None = None
        self._raises: bool = False
        self._before: dict[int, Any] = {}

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

    def raising(self, raises: bool) -> "Signals":
        """Whether the first signal ends what is under way, too; one that came before does so now."""
        self._raises = raises
        if raises and self.asked is not None:
            raise KeyboardInterrupt
        return self

    def _note(self, number: int, frame: object) -> None:
        again = self.asked is not None
        self.asked = number
        if self._raises or again:
            raise KeyboardInterrupt
        with suppress(OSError):
            os.write(2, b"\nstopping after this transition; Ctrl-C again stops at once\n")


class Stopped(KeyboardInterrupt):
    """A request to stop, after the checkpoint."""
