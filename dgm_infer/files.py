"""Results on disk: run folders ``runs/<name>/<time>/``, and files that are written atomically."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from .arguments import file_path
from .errors import ArgumentError, ConfigError, cause

__all__ = [
    "REFERENCE_DATA",
    "complete_file",
    "complete_run",
    "make_folder",
    "remove_folders",
    "unused_folder",
    "writable_folder",
]


REFERENCE_DATA = "DGM_INFER_REFERENCE_DATA"
"""Environment variable that names the folder of reference data."""


def unused_folder(name: str, root: str | os.PathLike = "runs") -> Path:
    """``root/name/<time>``, a path that does not exist yet."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, n = Path(root) / name / stamp, 1
    while folder.exists():
        n += 1
        folder = folder.with_name(f"{stamp}_{n}")
    return folder


def make_folder(folder: Path) -> list[Path]:
    """Make a missing folder; returns it and the parents made with it, for :func:`remove_folders`."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def writable_folder(folder: Path) -> Path:
    """The folder, made with its parents if need be.

    Raises:
        ArgumentError: it cannot be made, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot make a folder at {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ArgumentError(f"the folder {folder} cannot be written to")
    return folder


def remove_folders(made: list[Path]) -> None:
    """Undo :func:`make_folder`: remove the folder with its contents, and its parents unless another run uses them."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    for path in made[1:]:
        with suppress(OSError):
            path.rmdir()


@contextmanager
def complete_file(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; moved there when the block is done, removed when it fails.

    Raises:
        ArgumentError: the folder does not exist, the path is a folder, or the file cannot be written.
    """
    path = file_path("save", "path", path)
    if not path.parent.is_dir():
        raise ArgumentError(f"cannot save {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ArgumentError(f"cannot save {path}: it is a folder, name a file in it")
    # unique: neither a thread nor another process writes to it
    part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        part.touch()
        yield part
        os.replace(part, path)
    except OSError as error:
        raise ArgumentError(f"cannot save {path}: {error.strerror or cause(error)}") from error
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def complete_run(name: str, root: str | os.PathLike = "runs") -> Iterator[Path]:
    """A new folder to write results to; removed if the block fails, so that none is half-written.

    Raises:
        ConfigError: the name is not a plain name, or the folder cannot be made.
    """
    if not name or name in (".", "..") or Path(name).name != name:
        raise ConfigError(f"name: {name!r} must be a plain name, for a folder in {root}")
    folder = unused_folder(name, root)
    try:
        made = make_folder(folder)
    except OSError as error:
        raise ConfigError(f"output: cannot make a folder in {root}: {error.strerror}") from error
    try:
        yield folder
    except BaseException:
        remove_folders(made)
        raise
