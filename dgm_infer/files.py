"""Results on disk: run folders ``runs/<name>/<time>/``, and files that are written atomically."""

import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from .arguments import allocatable, file_path
from .errors import ArgumentError, ConfigError, cause, reported_as

REFERENCE_DATA = "DGM_INFER_REFERENCE_DATA"
"""Environment variable that names the folder of reference data."""


# Bytes that a disk must take before a run begins.
_ROOM = 2**16

# How often a folder is tried to be made whose parent has vanished meanwhile.
_RETRIES = 100

CONFIGURATION = "config.yaml"
"""The file of a run folder that is written before there are results."""


def make_folder(folder: Path) -> list[Path]:
    """Make a missing folder; returns it and the parents made with it, for :func:`remove_folders`."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


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
def complete_file(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; moved there when the block is done, removed when it fails.

    A link's target is replaced, not the link; a file that is there keeps its mode.

    Raises:
        ArgumentError: the folder does not exist, the path is a folder or a device, or the file cannot be written.
    """
    path = file_path("save", "path", path)
    if path.is_symlink():
        path = path.resolve()
    if not path.parent.is_dir():
        raise ArgumentError(f"cannot save {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ArgumentError(f"cannot save {path}: it is a folder, name a file in it")
    if path.exists() and not path.is_file():
        raise ArgumentError(f"cannot save {path}: it is a device or a pipe, not a file")
    # unique: neither a thread nor another process writes to it
    part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        part.touch()
        if path.exists():
            part.chmod(path.stat().st_mode & 0o7777)
        yield part
        os.replace(part, path)
    except OSError as error:
        raise ArgumentError(f"cannot save {path}: {error.strerror or cause(error)}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def write_file(path: str | os.PathLike, content: str | bytes | io.BytesIO) -> None:
    """Write a whole file atomically, from memory: a disk that is full leaves neither a part of it nor a damaged one.

    Raises:
        ArgumentError: the folder does not exist, the path is a folder, or the file cannot be written.
    """
    if isinstance(content, io.BytesIO):
        data: bytes | memoryview = content.getbuffer()
    else:
        data = content.encode() if isinstance(content, str) else content
    with complete_file(path) as part:
        part.write_bytes(data)


def read_arrays(path: Path, fits: Callable[[dict[str, tuple[int, ...]]], bool] = lambda shapes: True) -> dict[str, Any]:
    """The arrays of an ``.npz`` file by name; nothing in the file is executed.

    Args:
        path: the file.
        fits: whether arrays of these shapes are what is expected; asked before any is unpacked.

    Raises:
        ArgumentError: they need more memory than there is.
        FileNotFoundError: the file does not exist.
        ValueError, OSError, EOFError, zipfile.BadZipFile: it is damaged, or its shapes do not fit.
    """
    # opened here: NumPy leaves a damaged file open
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        shapes, size = {}, 0
        for name in arrays.files:
            with arrays.zip.open(f"{name}.npy") as member:
                read = npy.read_array_header_1_0 if npy.read_magic(member) == (1, 0) else npy.read_array_header_2_0
                shapes[name], _, dtype = read(member)
            size += prod(shapes[name]) * dtype.itemsize
        # a small file may unpack to anything
        allocatable("read", "path", path, size // 8 + 1, "it is damaged, or of another machine")
        if not fits(shapes):
            raise ValueError(f"its arrays are of shapes that do not fit: {shapes}")
        return {name: arrays[name] for name in arrays.files}


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
