"""The progress bar of sampling and of evidence: one line on the standard error stream."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from tqdm import tqdm

__all__ = ["Progress"]


class Progress:
    """A bar over a run's transitions; its text is computed only when it is redrawn, a few times per second.

    Args:
        shown: whether to show it at all.
        describe: the text after the bar, given the news of all transitions since it was last drawn.
        total: transitions expected so far; :meth:`expect` announces more.
    """

    def __init__(self, shown: bool, describe: Callable[[list[Any]], str] = str, total: int = 0):
        # in a log file every update is a separate line
        interval = 0.2 if sys.stderr.isatty() else 10
        self.bar = _Bar(total=total, disable=not shown, mininterval=interval, dynamic_ncols=True)
        self.prefix = ""
        self._describe = describe
        self._phase = ""
        self._news: list[Any] = []
        self._said = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._news:
            self.finish()
        self.close()

    def expect(self, transitions: int) -> None:
        """Announce work to come."""
        if not self.bar.disable:
            self.bar.total += transitions

    def say(self, text: str) -> None:
        """Show progress before the transitions that the bar counts."""
        if not self.bar.disable and time.monotonic() - self._said > self.bar.mininterval:
            self.bar.set_description(text)
            self._said = time.monotonic()

    def note(self, text: str) -> None:
        """Write a line that stays, above the bar."""
        if not self.bar.disable:
            self.bar.write(text, file=sys.stderr)

    def update(self, phase: str, news: Any = None, count: int = 1) -> None:
        """Count transitions, with their news unless None."""
        if self.bar.disable:
            return
        if phase != self._phase:
            self._phase = phase
            # what came before, and the first transition with its preparations, say nothing about those to come
            self.bar.restart_clock(count)
        if news is not None:
            self._news.append(news)
        if self.bar.update(count):
            self._show()

    def _show(self) -> None:
        self.bar.set_description(f"{self.prefix}{self._phase}", refresh=False)
        if self._news:
            self.bar.set_postfix_str(self._describe(self._news))
            self._news.clear()

    def finish(self) -> None:
        """Show the last news of a part of the run."""
        if not self.bar.disable:
            self._show()

    def close(self) -> None:
        self.bar.close()


class _Bar(tqdm):
    """A bar whose rate, and so the time left, is that of the running phase; the elapsed time is that of the run."""

    # tqdm's own lock is shared with forked processes: one that is killed while it holds it stops all others for good
    _lock = threading.RLock()
    monitor_interval = 0

    _phase_start: tuple[float, int] | None = None

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
