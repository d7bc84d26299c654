"""The progress bar of an estimate."""

import sys
from collections.abc import Callable

from torch import Tensor

__all__ = ["Progress"]


class Progress:
    """A bar over a run's transitions with the running estimate, read from the device a few times a second."""

    def __init__(self, shown: bool):
        from tqdm import tqdm

        # in a log file every update is a line of its own
        interval = 0.2 if sys.stderr.isatty() else 10
        self.bar = tqdm(total=0, disable=not shown, mininterval=interval, dynamic_ncols=True)
        self.prefix = ""
        self._latest: tuple[str, Callable[[], Tensor] | None] = ("", None)

    def expect(self, transitions: int) -> None:
        """Announce work to come."""
        if not self.bar.disable:
            self.bar.total += transitions

    def update(self, phase: str, estimate: Callable[[], Tensor] | None = None) -> None:
        """One transition is done; ``estimate`` gives the running log Z of the problems at work."""
        self._latest = phase, estimate
        if self.bar.update():
            self._show()

    def _show(self) -> None:
        phase, estimate = self._latest
        self.bar.set_description(f"{self.prefix}{phase}", refresh=False)
        if estimate is not None:
            self.bar.set_postfix_str(f"mean log Z {estimate().mean().item():.3f}")

    def finish(self) -> None:
        """Show the last estimate of a part of the run."""
        if not self.bar.disable:
            self._show()

    def close(self) -> None:
        self.bar.close()
