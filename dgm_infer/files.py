"""Files that are written whole or not at all, and archives that are looked at before they are unpacked."""

import io
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from .arguments import allocatable, file_path
from .errors import ArgumentError, cause

REFERENCE_DATA = "DGM_INFER_REFERENCE_DATA"
"""Environment variable that names the folder of reference data."""


def make_folder(folder: Path) -> list[Path]:
    """Make a missing folder; returns it and the parents made with it."""
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
