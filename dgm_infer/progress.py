"""The progress bar of sampling and of evidence, one line on the standard error stream; and work that will not end."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tqdm import tqdm

from .diagnosis import DiagnosisWarning
from .errors import warn
from .settings import Settings


@dataclass(frozen=True)
class ProgressSettings(Settings):
    """When a run says how long it will take, whether it shows a bar or not."""

    long: float = 86400.0
    """Seconds left above which it does: a run of a day is planned, one of years is a mistyped number."""
    after: float = 0.5
    """Seconds of transitions whose rate is trusted."""


SETTINGS = ProgressSettings()
# a bar before its first transition: a count that stands still would look like a run that does
_BEFORE = "{desc}[{elapsed}]"
_UNITS = (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("seconds", 1))


def foretell(what: str, seconds: float) -> bool:
    """Warn that work will take this long if that is above a day; whether it is."""
    if seconds <= SETTINGS.long:
        return False
    unit, size = next(pair for pair in _UNITS if seconds >= pair[1])
    warn(f"{what}: will take about {seconds / size:.3g} {unit} at this rate", DiagnosisWarning)
    return True


def foretold(steps: int, what: str) -> Iterator[int]:
    """The numbers from 0 to ``steps - 1``; what takes above a day is said after the second."""
    for i in range(steps):
        start = time.monotonic()
        yield i
        # the first has preparations
        if i == 1:
            foretell(what, (steps - 2) * (time.monotonic() - start))


def counted(more: int | Callable[[], bool], first: int = 0, made: Callable[[], int] | None = None) -> Iterator[int]:
    """The numbers from the first one on, below ``more`` or as long as there are more.

    Args:
        made: how many there were, for a loop that does several at once.
    """
    i = first
    while more() if callable(more) else i < more:
        yield i
        i = i + 1 if made is None else made()


class Progress:
    """A bar over a run's transitions; its text is computed only when it is redrawn, a few times per second.

    Args:
        shown: whether to show it at all.
        describe: the text after the bar, given the news of all transitions since it was last drawn.
        total: transitions expected so far; :meth:`expect` announces more.
        is_most: whether fewer of them may do, so that nothing is said of the time they would take.
    """

    def __init__(
        self, shown: bool, describe: Callable[[list[Any]], str] = str, total: int = 0, *, is_most: bool = False
    ):
        # in a log file every update is a separate line
        # None without a console
        stream: Any = sys.stderr
        interval = 0.2 if stream is not None and stream.isatty() else 10
        self.bar = _Bar(
            total=total,
            desc="start-up: " if total else None,
            bar_format=_BEFORE,
            disable=not shown or stream is None,
            mininterval=interval,
            dynamic_ncols=True,
        )
        self.prefix = ""
        self._describe = describe
        self._phase, self._restarts = "", False
        self._news: list[Any] = []
        self._said = 0.0
        self._total, self._made, self.is_most = total, 0, is_most
        self._clock: tuple[float, int] | None = None
        self._timed = ""
        self.loops: Callable[..., Iterator[int]] | None = None
        """What keeps loops, set by who keeps the run: :meth:`steps` with this object first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._news:
            self.finish()
        self.close()

    def expect(self, transitions: int) -> None:
        """Announce work to come."""
        self._total += transitions
        if not self.bar.disable:
            self.bar.total += transitions

    def say(self, text: str) -> None:
        """Show progress before the transitions that the bar counts, which stay out of sight until the first."""
        if not self.bar.disable and time.monotonic() - self._said > self.bar.mininterval:
            if not self._made:
                self.bar.bar_format = _BEFORE
            self.bar.set_description(text)
            self._said = time.monotonic()

    def note(self, text: str) -> None:
        """Write a line that stays, above the bar: what it tells of may take time, as compiling does."""
        self._restarts = True
        if not self.bar.disable:
            self.bar.clear()
            print(text, file=sys.stderr)

    def update(self, phase: str, news: Any = None, count: int = 1) -> None:
        """Count transitions, with their news unless None."""
        self._made += count
        if not self.is_most:
            self._foretell(phase)
        if self.bar.disable:
            return
        if phase != self._phase:
            self._phase, self.bar.bar_format = phase, None
            self.bar.set_description(f"{self.prefix}{phase}", refresh=False)
            self._restarts = True
        if self._restarts:
            # what came before, and the first transition with its preparations, say nothing about those to come
            self._restarts = False
            self.bar.restart_clock(count)
        if news is not None:
            self._news.append(news)
        if self.bar.update(count):
            self._show()

    def _foretell(self, phase: str) -> None:
        """Say how long the transitions that are left will take, once a phase, as soon as its rate is known."""
        now = time.monotonic()
        if phase != self._timed:
            self._timed, self._clock = phase, (now, self._made)
        elif self._clock is not None and now - self._clock[0] > SETTINGS.after:
            seconds, made, left = now - self._clock[0], self._made - self._clock[1], self._total - self._made
            foretell(f"{phase}, {left} transitions left", seconds / max(made, 1) * left)
            self._clock = None

    def _show(self) -> None:
        self.bar.set_description(f"{self.prefix}{self._phase}", refresh=False)
        if self._news:
            self.bar.set_postfix_str(self._describe(self._news))
            self._news.clear()

    def steps(
        self,
        phase: str,
        more: int | Callable[[], bool],
        live: Sequence[Any],
        news: Callable[[], Any] | None = None,
        made: Callable[[], int] | None = None,
    ) -> Iterator[int]:
        """The numbers of the steps of a loop, each counted when it is done.

        A run that is kept in a folder puts the loop down between two steps, and takes it up there again.

        Args:
            more: how many steps, or whether there is another one.
            live: the objects that steps change, generators of random numbers included; they refer to each other and to
                what does not change.
            news: as of :meth:`update`, after any step.
            made: how many steps were made, where several are made at once; the numbers are those of the first ones.
        """
        numbers = counted(more, made=made) if self.loops is None else self.loops(self, phase, more, live, news, made)
        for i in numbers:
            yield i
            self.update(phase, news, 1 if made is None else made() - i)

    def finish(self) -> None:
        """Show the last news of a part of the run."""
        if not self.bar.disable:
            self._show()

    def close(self) -> None:
        if not self.bar.disable:
            self.bar.leave = self.bar.has_begun
            self.bar.bar_format = None if self.bar.total else self.bar.bar_format
        self.bar.close()


class _Bar(tqdm):
    """A bar whose rate, and so the time left, is that of the running phase; the elapsed time is that of the run."""

    # tqdm's own lock is shared with forked processes: one that is killed while it holds it stops all others for good
    _lock = threading.RLock()
    monitor_interval = 0

    _phase_start: tuple[float, int] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is something to draw."""
        return bool(self.total or self.n or self.desc)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        return super().display(msg, pos) if self.has_begun or msg is not None else None

    def restart_clock(self, counted: int) -> None:
        """A phase begins now, after this many transitions more than the bar has counted."""
        self._phase_start = (time.monotonic(), self.n + counted)

    @property
    def format_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = dict(super().format_dict)
        if self._phase_start is not None:
            start, before = self._phase_start
            seconds = time.monotonic() - start
            # 0 is shown as unknown
            shown["rate"] = max(0, self.n - before) / seconds if seconds > 0 else 0
        else:
            shown["rate"] = 0
        return shown
