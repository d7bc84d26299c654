"""Run folders: ``runs/<name>/<time>/``, complete or absent."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

__all__ = ["new_run"]


@contextmanager
def new_run(name: str, root: str | os.PathLike = "runs") -> Iterator[Path]:
    """A folder ``root/name/<time>`` to write results to; removed when the block fails, so none is half-written."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, n = Path(root) / name / stamp, 1
    while folder.exists():
        n += 1
        folder = folder.with_name(f"{stamp}_{n}")
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder)
        raise
