"""The folder of a durable run: what was asked for, the problem, and shards of chains, each written by one process."""

import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import file_path
from ..errors import ArgumentError, CheckpointError, cause
from ..files import check_room, make_folder, remove_folders, write_file

__all__ = ["Checkpoint", "RunFolder", "Shard"]

_FORMAT = "dgm-infer run 1"
_MANIFEST, _PROBLEM, _PROGRESS, _LOCK = "run.json", "problem.pt", "progress.json", "lock"
# What pickling raises for what it cannot hold, and unpickling for what is not there.
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RuntimeError, NotImplementedError, ValueError)
_NOT_THERE = (pickle.UnpicklingError, AttributeError, ImportError, TypeError, RuntimeError, EOFError, OSError)


class Checkpoint(NamedTuple):
    """Chains as they were put down."""

    progress: dict[str, Any]
    """What a reader needs, as JSON holds it."""
    state: Any
    """What the next transition needs."""


class Shard:
    """Chains that one process moves: draws in parts that are only added to, and the state after the last of them.

    A checkpoint counts once ``progress.json`` names its files: a process that ends before leaves the one before it.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def progress(self) -> dict[str, Any] | None:
        """The progress of the last checkpoint; None before the first.

        Raises:
            CheckpointError: it is damaged.
        """
        path = self.folder / _PROGRESS
        return _read_json(path) if path.exists() else None

    def write(self, progress: dict[str, Any], state: Any, draws: dict[str, Tensor]) -> None:
        """Make a checkpoint, with the draws ``[chains, new draws, ...]`` that the last one has not.

        Raises:
            ArgumentError: it cannot be written, or the state cannot be pickled; the last one stays as it was.
        """
        make_folder(self.folder)
        before = self.progress() or {"parts": [], "number": -1}
        number, parts = before["number"] + 1, list(before["parts"])
        state_file = f"state-{number}.pt"
        write_file(self.folder / state_file, _pickled(state, "the state of this kernel"))
        if draws:
            parts.append(f"draws-{number}.pt")
            write_file(self.folder / parts[-1], _tensors(draws))
        files = {"number": number, "parts": parts, "state": state_file}
        write_file(self.folder / _PROGRESS, json.dumps({**progress, **files}))
        self._remove_all_but({*parts, state_file, _PROGRESS, _LOCK})

    def read(self, device: torch.device | None = None) -> Checkpoint | None:
        """The last checkpoint, on a device; None before the first.

        Raises:
            CheckpointError: a file of it is missing or damaged, or holds a class that is not available.
        """
        progress = self.progress()
        if progress is None:
            return None
        return Checkpoint(progress, _unpickled(self.folder / progress["state"], device))

    def draws(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """The draws of all checkpoints, each ``[chains, draws, ...]``, on a device; reads no pickle.

        Raises:
            CheckpointError: a file of them is missing or damaged.
        """
        progress = self.progress()
        parts = [] if progress is None else [_read_tensors(self.folder / name, device) for name in progress["parts"]]
        return {name: torch.cat([part[name] for part in parts], 1) for name in (parts[0] if parts else {})}

    def locked(self) -> AbstractContextManager[None]:
        """As :meth:`RunFolder.locked`, for a process that makes this shard alone."""
        make_folder(self.folder)
        return _locked(self.folder)

    def _remove_all_but(self, names: set[str]) -> None:
        """Remove earlier states, and what processes left that ended while they wrote."""
        for path in self.folder.iterdir():
            if path.name not in names:
                with suppress(OSError):
                    path.unlink()


class RunFolder:
    """The folder of a run."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def make(
        cls, path: str | os.PathLike, manifest: dict[str, Any], problem: Any, others: dict[str, Any]
    ) -> "RunFolder":
        """A new folder with the manifest of a run and what it is made from.

        A problem that cannot be pickled is left out, and ``manifest["unstored"]`` then says why.

        Raises:
            ArgumentError: there is a run already, the folder cannot be written to, or one of the others cannot be
                pickled.
        """
        path = file_path("sample", "run", path)
        if (path / _MANIFEST).exists():
            raise ArgumentError(
                f"sample(run={str(path)!r}): there is a run in it already: dgm.resume({str(path)!r}) goes on with it, "
                f"dgm.extend({str(path)!r}, draws=...) adds draws, another folder takes another run"
            )
        unstored = None
        content = {name: _pickled(value, f"sample({name}=...)") for name, value in others.items()}
        try:
            content["problem"] = _pickled(problem, "the problem")
        except ArgumentError as error:
            unstored = str(error)
        made: list[Path] = []
        try:
            made = make_folder(path)
            check_room(path)
            write_file(path / _PROBLEM, _tensors(content))
            write_file(path / _MANIFEST, json.dumps({"format": _FORMAT, **manifest, "unstored": unstored}, indent=1))
        except OSError as error:
            remove_folders(made)
            raise ArgumentError(f"sample(run={str(path)!r}): cannot be written to: {error.strerror}") from error
        except ArgumentError:
            remove_folders(made)
            raise
        return cls(path)

    @classmethod
    def open(cls, call: str, path: str | os.PathLike) -> "RunFolder":
        """The folder of a run that was begun.

        Raises:
            CheckpointError: there is none.
        """
        folder = cls(file_path(call, "run", path))
        if not (folder.path / _MANIFEST).is_file():
            raise CheckpointError(f"{call}({str(path)!r}): no run is there: sample(..., run={str(path)!r}) begins one")
        if folder.manifest.get("format") != _FORMAT:
            raise CheckpointError(f"{folder.path / _MANIFEST} is not the manifest of a run that this version can read")
        return folder

    @property
    def manifest(self) -> dict[str, Any]:
        return _read_json(self.path / _MANIFEST)

    def rewrite(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest as a whole."""
        write_file(self.path / _MANIFEST, json.dumps(manifest, indent=1))

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        remove_folders([self.path])

    @property
    def shards(self) -> list[Shard]:
        return [Shard(self.path / f"shard-{rank}") for rank in range(len(self.manifest["shards"]))]

    def stored(self, name: str, device: torch.device | None = None) -> Any:
        """The problem, or one of the others that :meth:`make` was given, on a device.

        Raises:
            CheckpointError: it was not stored, or needs a class that is not available.
        """
        content = _read_tensors(self.path / _PROBLEM, None)
        if name not in content:
            raise CheckpointError(f"{self.path} does not hold the problem ({self.manifest['unstored']}): give problem=")
        return _unpickled(self.path / _PROBLEM, device, content[name])

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from going on with this run; the lock ends with the process.

        Raises:
            ArgumentError: another process is at work.
        """
        return _locked(self.path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # of Windows, where nothing keeps them
        yield
        return
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ArgumentError(f"{folder}: another process goes on with this run: wait for it to end") from error
        yield


def _pickled(value: Any, what: str) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except _UNPICKLABLE as error:
        raise ArgumentError(
            f"{what} cannot be stored: {cause(error)}; functions and classes have to be those of a module, not lambdas"
        ) from error
    return file.getvalue()


def _unpickled(path: Path, device: torch.device | None, content: Tensor | None = None) -> Any:
    try:
        file = io.BytesIO(path.read_bytes() if content is None else content.numpy().tobytes())
        # made by this user's own run: what others made is not to be resumed
        return torch.load(file, map_location=device, weights_only=False)
    except _NOT_THERE as error:
        raise CheckpointError(
            f"{path} cannot be read here: {cause(error)}; import the module that defines its classes, or give problem="
        ) from error


def _tensors(values: dict[str, Any]) -> bytes:
    """Tensors by name, and bytes as tensors."""
    file = io.BytesIO()
    torch.save(
        {
            n: torch.frombuffer(bytearray(v), dtype=torch.uint8) if isinstance(v, bytes) else v
            for n, v in values.items()
        },
        file,
    )
    return file.getvalue()


def _read_tensors(path: Path, device: torch.device | None) -> dict[str, Tensor]:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except _NOT_THERE as error:
        raise CheckpointError(f"{path} is missing or damaged: {cause(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {cause(error)}") from error
