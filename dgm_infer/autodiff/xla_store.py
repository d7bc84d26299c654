"""Machine code on disk: what one process has compiled, the next one loads."""

import hashlib
import os
import pickle
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..files import write_file

FOLDER = "DGM_INFER_CACHE"
"""Environment variable that names the folder of compiled programs; empty for none."""

# Programs that are kept, of half a megabyte to two each: those that were used last.
_MOST = 200


def compiled(program: Any, options: Mapping[str, Any], place: Any) -> Any:
    """The code of a lowered program for a device of JAX: from disk, if this machine has compiled it before.

    A folder that cannot be used, and a file that cannot be read, cost the time of compiling and nothing else.

    Args:
        program: what ``jax.jit(f).lower(...)`` returns.
        options: the compiler's.
    """
    from jax.experimental import serialize_executable

    folder = _folder() if place.platform == "cpu" else None
    if folder is None:
        return program.compile(compiler_options=dict(options))
    path = folder / _key(program.as_text(), options)
    # the trees of arguments are pickled with the code
    with suppress(Exception):
        content = path.read_bytes()
        code = content[32:]
        if hashlib.sha256(code).digest() == content[:32]:
            found = serialize_executable.deserialize_and_load(
                *pickle.loads(code), backend=place.client, execution_devices=[place]
            )
            os.utime(path)
            return found
    made = program.compile(compiler_options=dict(options))
    # programs of some constants cannot be written
    with suppress(Exception):
        code = pickle.dumps(serialize_executable.serialize(made))
        _write(path, hashlib.sha256(code).digest() + code)
    return made


def _folder() -> Path | None:
    """Where programs are kept: loading one runs code, so in a folder that nobody else writes to."""
    given = os.environ.get(FOLDER)
    if given == "":
        return None
    # every user has one of his own
    with suppress(OSError, RuntimeError):
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(given) if given else Path(base) / "dgm_infer" / "programs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022):
            return folder
    return None


def _key(text: str, options: Mapping[str, Any]) -> str:
    """The name of a program's file: of all that its code depends on."""
    given = text, sorted(options.items()), os.environ.get("XLA_FLAGS", ""), torch.get_num_threads(), _machine()
    return hashlib.sha256(repr(given).encode()).hexdigest()


@cache
def _machine() -> str:
    """Compiler and processor: code of another one may hold instructions that this one has not."""
    words = [version("jax"), version("jaxlib"), platform.machine(), platform.processor(), os.environ.get("NPROC", "")]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        words += sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
    return "\n".join(words)


def _write(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all, and no more files than are kept."""
    write_file(path, content)
    kept = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
    for each in kept[_MOST:]:
        each.unlink(missing_ok=True)
