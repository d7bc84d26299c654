"""Runs of a function: each shard is called again after a stop, and takes up the loops that it had put down.

What a function computes between its loops follows from its inputs and from what the loops leave, random numbers
included: it is computed again. Only loops that have taken a second or more are in the folder.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, CheckpointError, warn
from ..progress import Progress, counted
from ..sampling.run import device_of
from ..target import reference
from .encoding import decode, encode
from .folder import RunFolder, read_progress
from .kinds import Kind, Page, ShardReport, Signals, Stopped, duration
from .store import Writer


@dataclass(frozen=True)
class LoopSettings:
    """When loops are put down."""

    shortest: float = 1.0
    """Seconds of a loop below which it is made again instead."""
    share: float = 0.02
    """Share of the time that checkpoints may take: large ones are made less often than asked for."""
    look: float = 1.0
    """Seconds from one look for a request to stop, by the process that began the run, to the next."""
    patience: float = 60.0
    """Seconds after which a process that was lost has let its shard go."""


LOOPS = LoopSettings()


class Checkpoints:
    """When a shard is put down, and whether it is asked to stop.

    Args:
        looks: whether another process began the run: it asks in the folder, and writes the page.
        began: when this process took the shard up, in seconds of ``time.monotonic``.
    """

    def __init__(self, folder: RunFolder, writer: Writer, signals: Signals, looks: bool, began: float):
        self._folder, self._signals, self._looks = folder, signals, looks
        self._every = folder.manifest["checkpoint_every"]
        self._began = began
        self._before = (read_progress(writer) or {}).get("seconds", 0.0)
        now = time.monotonic()
        self._due, self._look = now + self._every, now + LOOPS.look
        self._page = None if looks else Page(folder)

    @property
    def seconds(self) -> float:
        """Those that the shard has taken, of processes that were stopped up to their last checkpoint."""
        return self._before + time.monotonic() - self._began

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    @property
    def is_asked_to_stop(self) -> bool:
        if self._looks and time.monotonic() >= self._look:
            self._look = time.monotonic() + LOOPS.look
            # a folder that cannot be read is told of at the next checkpoint
            with suppress(CheckpointError):
                return self._folder.is_stopped or self._signals.asked is not None
        return self._signals.asked is not None

    def show(self) -> None:
        """Write the page, if it is due."""
        if self._page is not None:
            self._page.update()

    def wait(self, least: float = 0.0) -> None:
        """The next one is due in as many seconds as were asked for, or the least."""
        self._due = time.monotonic() + max(self._every, least)


class StoredCall(NamedTuple):
    """What is called for every shard, and what becomes of what it returns."""

    shard: Callable[[RunFolder, Any, dict[str, Any], int, Progress], tuple[Any, bool]]
    """From the folder, the problem, the inputs, the shard's number and a bar: a result, and whether it is whole."""
    result: Callable[[RunFolder, Any, dict[str, Any], list[Any]], Any]
    """From the folder, the problem, the inputs and the results of the first shards: what the user gets."""
    problem: Callable[[str, Any], Any]
    """From the call and what a user gives as ``problem=``."""
    describe: Callable[[list[Any]], str] = str
    """The text beside the bar, of the news of steps."""
    numbers: Callable[[Any], dict[str, float]] = lambda news: {}
    """From the news of a step, what :func:`watch` shows."""


class CallRun(Kind):
    """The kind of run whose shards are calls of a function."""

    def __init__(self, function: StoredCall):
        self._function = function

    def is_finished(self, folder: RunFolder, name: str) -> bool:
        if not (store := folder.shard(name)).exists:
            return False
        with store.reading() as reader:
            return bool(reader.names("result"))

    def progress(self, folder: RunFolder, name: str) -> int:
        found = folder.progress(name) or {}
        return 10**18 if found.get("finished") else found.get("loop", 0) * 10**9 + found.get("done", 0)

    def make(
        self, folder: RunFolder, name: str, problem: Any, signals: Signals, *, looks: bool, progress: bool
    ) -> ShardReport:
        inputs, devices = inputs_of(folder, problem)
        number, goes_on = folder.names.index(name), f" (dgm.resume({str(folder.path)!r}) goes on)"
        with folder.shard(name).writing(make=True, patience=LOOPS.patience) as writer:
            if writer.names("result"):
                return ShardReport()
            due = Checkpoints(folder, writer, signals, looks, time.monotonic())
            with Progress(progress, self._function.describe) as bar:
                if len(folder.names) > 1:
                    bar.prefix = f"part {number + 1} of {len(folder.names)}: "
                loops = bar.loops = Loops(writer, signals, due, devices, self._function.numbers)
                try:
                    signals.raising(True)
                    value, whole = self._function.shard(folder, problem, inputs, number, bar)
                    signals.raising(False)
                except KeyboardInterrupt:
                    # what other shards have made is returned
                    signals.asked = signals.asked or signal.SIGINT
                    return ShardReport("interrupted" + goes_on)
            if not whole:
                return ShardReport("interrupted" + goes_on, part=value)
            try:
                last = {"finished": True, "at": time.time(), "seconds": due.seconds} | loops.numbers
                old = dict.fromkeys(writer.names("loop/"))
                writer.write({"progress": json.dumps(last).encode(), "result": encode(value, "the result")} | old)
            except (ArgumentError, CheckpointError) as error:
                return ShardReport(f"the result is not in {folder.path} ({error})", part=value)
        return ShardReport()

    def result(
        self, call: str, folder: RunFolder, problem: Any, reports: dict[str, ShardReport], stopped_by: str | None
    ) -> Any:
        inputs, devices = inputs_of(folder, problem)
        values = []
        for name in folder.names:
            if name in reports and reports[name].part is not None:
                values.append(reports[name].part)
            elif self.is_finished(folder, name):
                with folder.shard(name).reading() as reader:
                    values.append(decode(reader.read("result") or b"", f"the result in {reader.path}", devices))
            else:
                break
        if not values:
            raise CheckpointError(f"{folder.path}: no result yet: collect later, or resume the run if it has ended")
        if stopped_by is not None:
            warn(stopped_by)
        return self._function.result(folder, problem, inputs, values)

    def problem(self, call: str, given: Any) -> Any:
        return self._function.problem(call, given)

    def view(self, folder: RunFolder) -> list[tuple[str, str]]:
        rows, several = [], len(folder.names) > 1
        for i, name in enumerate(folder.names):
            found = folder.progress(name)
            if found is None:
                where = "not begun"
            elif found.get("finished"):
                where = "finished"
            else:
                of = f" of {found['of']}" if found["of"] else ""
                where = f"{found['phase']}, step {found['done']}{of}"
                if left := time_left(found, found["of"]):
                    where += f" ({left} left of them)"
            rows.append((f"part {i + 1}" if several else "progress", where + _shown(found or {})))
        return rows

    def made(self, folder: RunFolder) -> int:
        return sum(self.is_finished(folder, name) for name in folder.names)


def inputs_of(folder: RunFolder, problem: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """What a run began with beside its problem, and for the device that it had the one that it has now."""
    here = folder.manifest["device"] if reference(problem) is None else str(device_of(problem))
    devices = {folder.manifest["device"]: here}
    return folder.inputs(devices), devices


class Loops:
    """Keeps the loops of a function: what :attr:`Progress.loops` calls."""

    def __init__(
        self,
        writer: Writer,
        signals: Signals,
        due: Checkpoints,
        devices: dict[str, str],
        numbers: Callable[[Any], dict[str, float]],
    ):
        self._writer, self._signals, self._due = writer, signals, due
        self._devices, self._numbers = devices, numbers
        self._count = 0
        self.before = due.seconds
        """Seconds that the shard had taken before this process."""
        self.numbers: dict[str, float] = {}

    def __call__(
        self,
        bar: Progress,
        phase: str,
        more: int | Callable[[], bool],
        live: Sequence[Any],
        news: Callable[[], Any] | None,
        made: Callable[[], int] | None,
    ) -> Iterator[int]:
        name, self._count = f"loop/{self._count:06d}", self._count + 1
        self._signals.raising(False)
        done = self._taken_up(name, live)
        bar.expect(-done)
        began, of = time.monotonic(), 0 if callable(more) else more
        where = {"phase": phase, "loop": self._count, "of": of, "began": [time.time(), done]}
        for i in counted(more, done, made):
            yield i
            done, stops = i + 1 if made is None else made(), self._due.is_asked_to_stop
            if stops or self._due.is_due:
                self._put_down(name, done, live, where, news)
            if stops:
                raise Stopped
        if news is not None:
            self.numbers = self._numbers(news())
        if time.monotonic() - began >= LOOPS.shortest:
            self._put_down(name, done, live, where, news)
        self._signals.raising(True)

    def _taken_up(self, name: str, live: Sequence[Any]) -> int:
        """Put the objects of a loop where they were; how many steps that is, 0 for a loop that was not put down."""
        if any(torch.device(old).type != torch.device(new).type for old, new in self._devices.items()):
            # random numbers of one kind of device cannot go on on another
            return 0
        if (content := self._writer.read(name)) is None:
            return 0
        done, states = decode(content, f"{name} in {self._writer.path}", self._devices, live)
        for each, state in zip(live, states, strict=True):
            if isinstance(each, torch.Generator):
                each.set_state(state)
            else:
                vars(each).update(state)
        return done

    def _put_down(
        self, name: str, done: int, live: Sequence[Any], where: dict[str, Any], news: Callable[[], Any] | None
    ) -> None:
        began = time.monotonic()
        states = [each.get_state() if isinstance(each, torch.Generator) else _state(each) for each in live]
        if news is not None:
            self.numbers = self._numbers(news())
        progress = {**where, "done": done, "at": time.time(), "seconds": self._due.seconds} | self.numbers
        try:
            state = encode((done, states), f"the state of {where['phase']}", live)
            self._writer.write({name: state, "progress": json.dumps(progress).encode()})
        except ArgumentError as error:
            # a disk may be full for a while: the work goes on
            warn(f"no checkpoint of {where['phase']}, step {done}: {error}")
        self._due.show()
        self._due.wait((time.monotonic() - began) / LOOPS.share)


def time_left(progress: dict[str, Any], of: int) -> str:
    """The time that the steps up to ``of`` will take at the rate of those since the process began them, in words."""
    at, done = progress["began"]
    made = progress["done"] - done
    return duration((of - progress["done"]) * (progress["at"] - at) / made) if made > 0 and of else ""


def _shown(numbers: dict[str, Any]) -> str:
    if "log_z" not in numbers:
        return ""
    error = f" +- {numbers['std_error']:.3g}" if "std_error" in numbers else ""
    return f": log Z {numbers['log_z']:.3f}{error}"


def _state(live: Any) -> dict[str, Any]:
    """The attributes of an object, or those that it says change."""
    found = live.__getstate__() if type(live).__getstate__ is not object.__getstate__ else vars(live)
    return dict(found)
