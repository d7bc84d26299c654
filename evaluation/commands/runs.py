"""The ``runs`` command: what is in the folder of all runs, a line each."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from dgm_infer.errors import ConfigError

__all__ = ["run", "told"]

# what makes a folder a run of a command, or of sample(run=...)
_CONFIGURED, _STORED, _LOG, _PAGE = "config.yaml", "run.sqlite", "log.txt", "report.html"


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer runs [FOLDER]``: runs in a folder, those of ``runs`` without one, the newest first."""
    folder = Path(arguments[0] if arguments else "runs")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name one with runs in it")
    lines = sorted(told(folder), reverse=True)
    print("\n".join(line for _, line in lines) if lines else f"no runs in {folder}")


def told(folder: Path) -> Iterator[tuple[float, str]]:
    """The time of every run below a folder, and its line."""
    marks = (_CONFIGURED, "results.json", _STORED)
    for path in sorted({found.parent for mark in marks for found in folder.rglob(mark)}):
        log = path / _LOG
        made = path.stat().st_mtime
        words = log.read_text(errors="replace").strip().partition("\n")[0] if log.is_file() else "not finished"
        page = f"  ({path / _PAGE})" if (path / _PAGE).is_file() else ""
        yield made, f"{datetime.fromtimestamp(made):%Y-%m-%d %H:%M}  {path}  {words}{page}"
