"""Disks that refuse files."""

import errno
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes: what writes more meets an error of the operating system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(monkeypatch, folder: Path) -> None:
    """From now on the disk that ``folder`` is on is full: a write there leaves half a file, and fails."""
    write = Path.write_bytes

    def refuse(self, data):
        if folder not in self.resolve().parents:
            return write(self, data)
        write(self, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", refuse)


WORKERS = 8


def together(work):
    """What the work returns to each of several threads that begin it at the same moment."""
    barrier = threading.Barrier(WORKERS)

    def begin(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(begin, range(WORKERS)))
