"""Folders of commands, ``runs/<name>/<time>/``: one for each process, and never removed with a result in it."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from dgm_infer.errors import ConfigError, reported_as
from dgm_infer.files import make_folder, write_file

__all__ = [
    "CONFIGURATION",
    "check_room",
    "complete_run",
    "held",
    "new_folder",
    "remove_folders",
    "remove_unfinished",
]

# Bytes that a disk must take before a run begins.
_ROOM = 2**16

# How often a folder is tried to be made whose parent has vanished meanwhile.
_RETRIES = 100

CONFIGURATION = "config.yaml"
"""The file of a run folder that is written before there are results."""


def new_folder(name: str, root: str | os.PathLike = "runs") -> list[Path]:
    """Make ``root/name/<time>``, of which only one of several processes gets each; returns it and the parents made.

    Raises:
        OSError: it cannot be made.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    parent, n, vanished = Path(root) / name, 1, 0
    while True:
        folder = parent / (stamp if n == 1 else f"{stamp}_{n}")
        try:
            made = make_folder(parent)
            folder.mkdir()
            return [folder, *made]
        except FileExistsError:
            if folder.is_file() or parent.is_file():
                raise
            n += 1
        except FileNotFoundError:
            # another process, whose run failed, may have removed the parent that it had made
            vanished += 1
            if vanished == _RETRIES:
                raise


def check_room(folder: Path) -> None:
    """Raise OSError if the disk of a folder does not take a small file: before the work, not after it."""
    probe = folder / f"{secrets.token_hex(4)}.part"
    try:
        probe.write_bytes(bytes(_ROOM))
    finally:
        with suppress(OSError):
            probe.unlink()


def remove_folders(made: list[Path]) -> None:
    """Undo :func:`make_folder`: remove the folder with its contents, and its parents unless another run uses them."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    for path in made[1:]:
        with suppress(OSError):
            path.rmdir()


def remove_unfinished(made: list[Path]) -> bool:
    """Undo :func:`new_folder` unless the folder holds more than a configuration; whether it is gone."""
    folder = made[0]
    if not folder.exists():
        return True
    with suppress(OSError):
        if any(path.name != CONFIGURATION for path in folder.iterdir()):
            return False
        (folder / CONFIGURATION).unlink(missing_ok=True)
    gone = False
    for path in made:
        # refused where another run is in it
        with suppress(OSError):
            path.rmdir()
            gone = gone or path == folder
    # whatever is at the path by now may be another run's
    return gone


@contextmanager
def complete_run(
    name: str, root: str | os.PathLike = "runs", configuration: str | None = None, resume: Path | None = None
) -> Iterator[Path]:
    """A new folder to write results to, with the configuration of the run in it; or that of a run that goes on.

    If the block fails, the folder stays with the results that it holds, which a note of the exception names; without
    any it is removed.

    Raises:
        ConfigError: the name is not a plain name, or the folder cannot be made or written to.
    """
    if not name or name in (".", "..") or Path(name).name != name:
        raise ConfigError(f"name: {name!r} must be a plain name, for a folder in {root}")
    try:
        made = new_folder(name, root) if resume is None else [resume]
    except OSError as error:
        raise ConfigError(f"output: cannot make a folder in {root}: {error.strerror}") from error
    folder = made[0]
    try:
        if configuration is not None and resume is None:
            with reported_as(ConfigError):
                write_file(folder / CONFIGURATION, configuration)
        try:
            check_room(folder)
        except OSError as error:
            raise ConfigError(f"output: cannot write to {folder}: {error.strerror}") from error
        yield folder
    except BaseException as error:
        if resume is not None or not remove_unfinished(made):
            error.add_note(f"{folder} keeps what was finished: {held(folder)}")
        raise


def held(folder: Path) -> str:
    """The names of the files in a folder, in words."""
    return ", ".join(sorted(path.name for path in folder.iterdir()))
