"""The folder of a run: plan and problem in ``run.sqlite``, and a file of checkpoints and draws for every shard."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ..arguments import file_path
from ..errors import ArgumentError, CheckpointError, cause
from ..files import make_folder
from ..sampling.stored import check_problem, known_problem, packed, unpacked
from .encoding import decode, encode, modules_of
from .store import Reader, Store, Writer

_FORMAT = "dgm-infer run 3"
_FILE = "run.sqlite"

WARMUP = "warmup"
"""The shard of the common warm-up of all chains, in runs of several shards."""


class RunFolder:
    """The folder of a run.

    Attributes:
        manifest: the plan of the run and what it was made with, as JSON holds it.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path, self.manifest = path, manifest
        self._store = Store(path / _FILE, "run")
        # the folder may vanish while the run is made
        self._inputs: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def begin(
        cls, path: str | os.PathLike, manifest: dict[str, Any], problem: Any, inputs: dict[str, Any], *, sent: bool
    ) -> Iterator[tuple["RunFolder", Writer]]:
        """A new run, and what writes its plan: as long as the block lasts, other processes are refused.

        A problem that cannot be stored is left out, and ``manifest["unstored"]`` then says why.

        Args:
            inputs: what else it begins with, by name.
            sent: whether other processes read the problem from the folder.

        Raises:
            ArgumentError: there is a run already, or anything else; the folder cannot be written to; or one of the
                inputs cannot be stored. Nothing has changed.
        """
        call = manifest["kind"]
        path = refuse_what_is_there(call, path)
        known = known_problem(problem)
        records = {name: encode(value, f"{call}({name}=...)") for name, value in inputs.items()}
        if known is not None:
            records["fingerprint"] = packed(known).numpy().tobytes()
        unstored = None
        try:
            records["problem"] = encode(problem, "the problem")
            # what comes back differently is asked for
            check_problem(call, path, decode(records["problem"], "the problem"), known, None)
        except (ArgumentError, CheckpointError) as error:
            unstored = str(error)
            records.pop("problem", None)
            if sent:
                raise ArgumentError(f"{call}(devices=...): {unstored}") from error
        manifest = {
            "format": _FORMAT,
            "id": secrets.token_hex(8),
            **manifest,
            "unstored": unstored,
            "inputs": list(inputs),
        }
        made: list[Path] = []
        with ExitStack() as stack:
            try:
                refuse_what_is_there(call, path)
                made = make_folder(path)
                folder = cls(path, manifest)
                writer = stack.enter_context(folder._store.writing(make=True))
                if writer.names():
                    raise ArgumentError(_taken(call, path))
                try:
                    writer.write({"manifest": json.dumps(manifest).encode(), **records})
                except BaseException:
                    # only who has the lock removes it
                    folder._store.path.unlink(missing_ok=True)
                    raise
            except BaseException as error:
                for each in made:
                    # refused where another run is in it
                    with suppress(OSError):
                        each.rmdir()
                if isinstance(error, OSError):
                    raise ArgumentError(f"{call}(run={str(path)!r}): cannot be written to: {error.strerror}") from error
                raise
            yield folder, writer

    @classmethod
    def open(cls, call: str, path: str | os.PathLike) -> "RunFolder":
        """The folder of a run that was begun.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        path = _checked_path(call, path)
        if not os.path.lexists(path / _FILE):
            raise CheckpointError(f"{call}({str(path)!r}): no run is there: sample(..., run={str(path)!r}) begins one")
        return cls(path, _manifest(path))

    @property
    def plan(self) -> dict[str, Any]:
        return self.manifest["plan"]

    @property
    def names(self) -> list[str]:
        """The shards that hold draws."""
        return [f"shard-{i}" for i in range(self.manifest["shards"])]

    def shard(self, name: str) -> Store:
        return Store(self.path / f"{name}.sqlite", f"{self.manifest['id']}/{name}")

    def progress(self, name: str) -> dict[str, Any] | None:
        """The progress of a shard's last checkpoint, as JSON holds it; None before the first."""
        if not (store := self.shard(name)).exists:
            return None
        with store.reading() as reader:
            return read_progress(reader)

    @property
    def seconds(self) -> float:
        """Those that its shards have taken, over all processes, up to the last checkpoint of each."""
        shards = (WARMUP, *self.names)
        return sum((self.progress(name) or {}).get("seconds", 0.0) for name in shards)

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """What writes the plan; other processes are refused meanwhile.

        Raises:
            ArgumentError: another process goes on with the run.
        """
        with self._store.writing() as writer:
            # another process may have changed it since
            self.manifest = _manifest(self.path)
            yield writer

    def change(self, writer: Writer, **changes: Any) -> None:
        """Replace entries of the manifest."""
        changed = {**self.manifest, **changes}
        writer.write({"manifest": json.dumps(changed).encode()})
        self.manifest = changed

    def stored(self, name: str, devices: dict[str, str] | None = None) -> Any:
        """The problem, or one of the inputs that :meth:`begin` was given; ``devices`` as for :func:`decode`.

        Raises:
            CheckpointError: it was not stored, is damaged, or needs a class that is not available.
        """
        content = self._read(name)
        if content is None:
            raise CheckpointError(f"{self.path} does not hold the problem ({self.manifest['unstored']}): give problem=")
        value = decode(content, f"the {name} in {self.path}", devices)
        if name == "problem":
            self.check("resume", value)
        return value

    def inputs(self, devices: dict[str, str]) -> dict[str, Any]:
        """What the run began with beside its problem, by name."""
        for name in self.manifest["inputs"]:
            if name not in self._inputs:
                self._inputs[name] = self.stored(name, devices)
        return self._inputs

    def modules(self) -> list[str]:
        """Modules that define what is stored."""
        return modules_of(
            *(content for name in ("problem", *self.manifest["inputs"]) if (content := self._read(name)) is not None)
        )

    def check(self, call: str, problem: Any) -> None:
        """Raise ArgumentError unless a problem is the one that was sampled."""
        content = self._read("fingerprint")
        known = None if content is None else unpacked(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        check_problem(call, self.path, problem, known, None)

    @property
    def is_stopped(self) -> bool:
        """Whether the process that began, or went on with, the run asks its workers to stop."""
        return self._read("stop") == b"1"

    def _read(self, name: str) -> bytes | None:
        with self._store.reading() as reader:
            return reader.read(name)


def read_progress(reader: Reader) -> dict[str, Any] | None:
    """The progress of the last checkpoint of a shard that is open; None before the first."""
    content = reader.read("progress")
    return None if content is None else json.loads(content)


def _manifest(path: Path) -> dict[str, Any]:
    with Store(path / _FILE, "run").reading() as reader:
        content = reader.read("manifest")
    try:
        found = json.loads(content or b"")
        if found["format"] != _FORMAT:
            raise ValueError("another format")
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _FILE} is not of a run that this version can read: {cause(error)}") from error


def _checked_path(call: str, run: str | os.PathLike) -> Path:
    """The path of a run's folder, ``~`` expanded.

    Raises:
        ArgumentError: it is none, or a link.
    """
    path = given = file_path(call, "run", run)
    try:
        path = given.expanduser()
        if path.is_symlink():
            raise ArgumentError(
                f"{call}(run={str(path)!r}): is a symbolic link, which is not followed: give its target"
            )
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{call}(run={str(given)[:60]!r}...): is not a path: {cause(error)}") from error
    return path


def refuse_what_is_there(call: str, run: str | os.PathLike) -> Path:
    """The path of a new run's folder.

    Raises:
        ArgumentError: something is there, a run or anything else.
    """
    path = _checked_path(call, run)
    if os.path.lexists(path / _FILE):
        with suppress(CheckpointError):
            _manifest(path)
            raise ArgumentError(_taken(call, path))
    if path.resolve() == path.resolve().parent:
        raise ArgumentError(f"{call}(run={str(path)!r}): is the root of a file system: give a new folder")
    # a process that was killed while it began a run leaves these, without a plan
    begun = {_FILE, f"{_FILE}-journal"}
    if path.exists() and (not path.is_dir() or {each.name for each in path.iterdir()} - begun):
        raise ArgumentError(f"{call}(run={str(path)!r}): holds something that is not a run: give a new folder")
    return path


def _taken(call: str, path: Path) -> str:
    more = f"dgm.extend({str(path)!r}, draws=...) adds draws, " if call == "sample" else ""
    return (
        f"{call}(run={str(path)!r}): there is a run in it already: dgm.resume({str(path)!r}) goes on with it, {more}"
        "another folder takes another run"
    )
