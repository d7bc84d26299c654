"""What a run is at, by reading its folder: in words, and as a page that the folder holds."""

import html
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from .folder import RunFolder
from .kinds import kind_of

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
    over = "finished" if is_over(folder) else "under way, or stopped"
    rows = [("run", f"{manifest['kind']}() in {folder.path}: {over}"), *kind_of(folder).view(folder)]
    if manifest.get("stopped_by"):
        rows.append(("ended", manifest["stopped_by"]))
    return rows


def is_over(folder: RunFolder) -> bool:
    """Whether all that was asked for is made."""
    return all(kind_of(folder).is_finished(folder, name) for name in folder.names)


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
        rows = progress_rows(self._folder)
        again = max(_SETTINGS.again, int(self._every))
        refresh = "" if is_over(self._folder) else f'<meta http-equiv="refresh" content="{again}">'
        lines = "".join(f"<tr><th>{html.escape(name)}<td>{html.escape(value)}\n" for name, value in rows)
        style = "body{font:16px sans-serif;margin:2em}th{text-align:left;padding-right:2em;vertical-align:top}"
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}<title>{html.escape(rows[0][1])}'
            f"</title><style>{style}</style></head><body><table>\n{lines}</table>\n"
            f"<p>Written {time.strftime('%Y-%m-%d %H:%M:%S %Z')}.</body></html>\n"
        )
