"""Run folders: ``runs/<name>/<time>/``."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

__all__ = ["complete_run", "unused_folder"]


def unused_folder(name: str, root: str | os.PathLike = "runs") -> Path:
    """``root/name/<time>``, a path where nothing is yet."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, n = Path(root) / name / stamp, 1
    while folder.exists():
        n += 1
        folder = folder.with_name(f"{stamp}_{n}")
    return folder


@contextmanager
def complete_run(name: str, root: str | os.PathLike = "runs") -> Iterator[Path]:
    """A new folder to write results to; removed when the block fails, so that none is half-written."""
    folder = unused_folder(name, root)
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder)
        raise
