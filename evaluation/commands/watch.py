"""The ``watch`` command: what a run is at, in the terminal, by reading its folder from another process."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dgm_infer.errors import CheckpointError, ConfigError
from dgm_infer.runs.folder import RunFolder
from dgm_infer.runs.kinds import is_over, progress_rows

from .options import make_parser, parse

__all__ = ["run", "watch"]


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer watch RUN [--every SECONDS] [--once]``."""
    parser = make_parser("watch", "train", description="What a run is at, until it is over; Ctrl-C ends the watching.")
    parser.add_argument("run", help="the folder of a run, or of a command that makes one")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one look to the next (default: 2)")
    parser.add_argument("--once", action="store_true", help="look once")
    watch(**vars(parse(parser, arguments)))


def watch(run: str, every: float = 2.0, once: bool = False) -> None:
    """Show what a run is at, until it is over.

    Args:
        run: the folder of a run, or of a command that makes one.
        every: seconds from one look to the next.
        once: look once.

    Raises:
        ConfigError: the seconds are not positive.
        CheckpointError: no run is there.
    """
    if not every > 0:
        raise ConfigError(f"--every {every}: must be positive")
    path, lines, terminal = Path(run), 0, sys.stdout.isatty()
    while True:
        folders = [RunFolder.open("watch", each) for each in _runs(path)]
        # of the parts of a command those under way, else the last
        folders = [folder for folder in folders if not is_over(folder)] or folders[-1:]
        text = "\n".join(f"{name:24} {value}" for folder in folders for name, value in progress_rows(folder)) + "\n"
        # over what was shown before
        print((f"\x1b[{lines}A\x1b[J" if lines and terminal else "") + text, end="", flush=True)
        lines = text.count("\n")
        if once or all(is_over(folder) for folder in folders):
            return
        try:
            time.sleep(every)
        except KeyboardInterrupt:
            return
        if not path.exists():
            return


def _runs(path: Path) -> list[Path]:
    """The folder of a run, or those of a command within its own.

    Raises:
        CheckpointError: there is none.
    """
    found = [path] if (path / "run.sqlite").exists() else []
    found += sorted(each.parent for each in path.glob("run*/**/run.sqlite"))
    if not found:
        raise CheckpointError(f"watch {path}: no run is there; a command that has finished keeps its results instead")
    return found
