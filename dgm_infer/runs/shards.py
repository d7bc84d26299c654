"""One shard of a run: chains that one process moves, put down in checkpoints, by signals too, and taken up again."""

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import other_seed
from ..errors import ArgumentError, CheckpointError
from ..kernels.stored import from_json, to_json
from ..progress import Progress
from ..sampling.run import RunInputs, RunOutcome, RunPlan, SamplingRun, diagnostics, run_until_stopped
from ..target import reference
from .encoding import decode, decode_tensors, encode, encode_tensors
from .folder import WARMUP, RunFolder
from .store import Reader, Writer

__all__ = [
    "Keeper",
    "Part",
    "Signals",
    "collected",
    "count_of",
    "is_finished",
    "progress_of",
    "read_progress",
    "run_shard",
]

# Seconds from one look for a request to stop, by the process that began the run, to the next.
_LOOK = 1.0
# Seconds after which a process that was lost has let its shard go.
_PATIENCE = 60.0


class Part(NamedTuple):
    """What a shard has made."""

    progress: dict[str, Any]
    """``transitions``, ``count``, ``kernel``, ``ancestors``, ``stayed``, ``adapts``, as JSON holds them."""
    draws: dict[str, Tensor]
    """Each ``[chains, count, ...]``."""


class Signals:
    """Ctrl-C and SIGTERM while a run is made: the first one ends it after the transition under way.

    A second one ends the transition too. A SIGTERM takes its usual effect once the checkpoint is written.
    """

    def __init__(self, run: Path):
        self._run = run
        self.asked: int | None = None
        self._raises: bool = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                usual = signal.getsignal(number)
                # a handler of the user's for Ctrl-C keeps its meaning
                if usual is signal.default_int_handler or (number == signal.SIGTERM and usual != signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, usual in self._before.items():
            signal.signal(number, usual)
        if self.asked == signal.SIGTERM:
            with suppress(OSError):
                os.write(2, f"stopped by SIGTERM: dgm.resume({str(self._run)!r}) goes on\n".encode())
            signal.raise_signal(signal.SIGTERM)

    def raising(self, raises: bool) -> "Signals":
        """Whether the first signal ends what is under way, too; one that came before does so now."""
        self._raises = raises
        if raises and self.asked is not None:
            raise KeyboardInterrupt
        return self

    def _note(self, number: int, frame: object) -> None:
        again = self.asked is not None
        self.asked = number
        if self._raises or again:
            raise KeyboardInterrupt
        with suppress(OSError):
            os.write(2, b"\nstopping after this transition; Ctrl-C again stops at once\n")


class _Stopped(KeyboardInterrupt):
    """A request to stop, after the checkpoint."""


class Keeper:
    """Writes a checkpoint every so many seconds, and the last one when the run is to stop."""

    def __init__(self, folder: RunFolder, writer: Writer, signals: Signals, looks: bool):
        self._folder, self._writer, self._signals, self._looks = folder, writer, signals, looks
        self._every = folder.manifest["checkpoint_every"]
        self._due, self._look = time.monotonic() + self._every, time.monotonic() + _LOOK

    def __call__(self, sampling: SamplingRun) -> None:
        now = time.monotonic()
        stops = self._signals.asked is not None
        if self._looks and now >= self._look:
            self._look = now + _LOOK
            # a folder that cannot be read is told of at the next checkpoint
            with suppress(CheckpointError):
                stops |= self._folder.is_stopped
        if stops or now >= self._due:
            try:
                self.write(sampling)
            except ArgumentError as error:
                # a disk may be full for a while: the chains go on
                warnings.warn(f"no checkpoint after {sampling.now.transitions} transitions: {error}", stacklevel=2)
            self._due = time.monotonic() + self._every
        if stops:
            raise _Stopped

    def write(self, sampling: SamplingRun) -> None:
        """A checkpoint of where the sampling is: what it holds beyond what the store has."""
        progress = read_progress(self._writer)
        before = 0 if progress is None else progress["count"]
        now = progress_of(sampling)
        if progress is not None and (progress["transitions"], progress["warms"]) == (now["transitions"], now["warms"]):
            return
        records = {"progress": json.dumps(now).encode(), "state": encode(sampling, "the state of this kernel")}
        if now["count"] > before:
            records[f"draws/{before:012d}"] = encode_tensors(sampling.draws(before))
        self._writer.write(records)


def progress_of(sampling: SamplingRun) -> dict[str, Any]:
    ancestors = sampling.ancestors
    return {
        "transitions": sampling.now.transitions,
        "count": sampling.count,
        "kernel": None if sampling.warms_up else to_json(sampling.kernel),
        "ancestors": None if ancestors is None else ancestors.tolist(),
        "stayed": sampling.now.stayed.tolist(),
        "adapts": sampling.adapts,
        "warms": sampling.warms_up,
    }


def read_progress(reader: Reader) -> dict[str, Any] | None:
    """The progress of the last checkpoint; None before the first."""
    content = reader.read("progress")
    return None if content is None else json.loads(content)


def read_part(reader: Reader, device: torch.device | str = "cpu") -> Part | None:
    """All that a shard has made by its last checkpoint; None before the first.

    Raises:
        CheckpointError: a record is missing or damaged.
    """
    progress = read_progress(reader)
    if progress is None:
        return None
    chunks, count = [], 0
    for name in reader.names("draws/"):
        chunks.append(decode_tensors(reader.read(name) or b"", device))
        if name != f"draws/{count:012d}":
            break
        count += next(iter(chunks[-1].values())).shape[1]
    if count != progress["count"]:
        raise CheckpointError(f"{reader.path} is damaged: it holds {count} of its {progress['count']} draws")
    return Part(progress, {n: torch.cat([chunk[n] for chunk in chunks], 1) for n in (chunks[0] if chunks else {})})


def shard_plan(folder: RunFolder, name: str) -> RunPlan:
    """The plan of a shard."""
    plan, n = RunPlan(**folder.plan), folder.manifest["shards"]
    if n == 1:
        return plan
    if name == WARMUP:
        return replace(plan, draws=0)
    number = folder.names.index(name)
    first, last = chains_of(plan.chains, n, number)
    return replace(plan, chains=last - first, warmup=0, is_open=False, seed=other_seed(name, plan.seed))


def chains_of(chains: int, shards: int, number: int) -> tuple[int, int]:
    """The first chain of a shard, and the one after its last."""
    return chains * number // shards, chains * (number + 1) // shards


def is_finished(folder: RunFolder, name: str) -> bool:
    """Whether a shard has made all that it is to make."""
    store = folder.shard(name)
    if not store.exists:
        return False
    with store.reading() as reader:
        progress = read_progress(reader)
    if progress is None:
        return False
    over = progress["transitions"] == shard_plan(folder, name).transitions
    return over and not (name == WARMUP and progress["warms"])


def run_shard(
    folder: RunFolder,
    name: str,
    inputs: RunInputs,
    devices: dict[str, str],
    signals: Signals,
    *,
    looks: bool,
    progress: bool,
) -> tuple[SamplingRun, str | None, bool]:
    """Make what is left of a shard.

    Args:
        devices: for the device of the run, that of the problem here.
        looks: whether to look for a request to stop in the folder.

    Returns:
        The chains, what stopped them, and whether the folder has all that they made.
    """
    plan = shard_plan(folder, name)
    # a process that was lost may not have ended yet
    with folder.shard(name).writing(make=True, patience=_PATIENCE) as writer:
        before = read_progress(writer)
        made = 0 if before is None else before["transitions"]
        with Progress(progress, diagnostics, plan.transitions - made) as bar:
            if before is not None:
                sampling = _taken_up(writer, inputs.problem, plan, devices)
                bar.note(f"{folder.path}: goes on at transition {made} of {plan.transitions}")
            elif folder.manifest["shards"] > 1 and name != WARMUP:
                sampling = _shard_of(folder, name, inputs.problem, plan, devices)
            else:
                signals.raising(True)
                sampling = SamplingRun.begin(inputs, plan, bar)
                signals.raising(False)
            keeper = Keeper(folder, writer, signals, looks)
            stopped_by = None
            # the search for starting points may have taken minutes
            kept = _written(keeper, sampling)
            try:
                stopped_by = run_until_stopped(sampling, bar, keeper)
            except KeyboardInterrupt as error:
                made = f"after transition {sampling.now.transitions} of {plan.transitions}"
                error.add_note(f"{made}: dgm.resume({str(folder.path)!r}) goes on")
                raise
        kept = _written(keeper, sampling)
    if kept is not None:
        stopped_by = f"not all draws are in {folder.path} ({kept})"
    elif stopped_by is not None:
        stopped_by += f" (dgm.resume({str(folder.path)!r}) goes on)"
    return sampling, stopped_by, kept is None


def _written(keeper: Keeper, sampling: SamplingRun) -> str | None:
    """Why a checkpoint could not be written, which leaves the draws in memory; None if it was."""
    try:
        keeper.write(sampling)
    except (ArgumentError, CheckpointError) as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted while they were written"
    return None


def _taken_up(reader: Reader, problem: Any, plan: RunPlan, devices: dict[str, str]) -> SamplingRun:
    """The chains of the last checkpoint."""
    sampling = decode(reader.read("state") or b"", f"the state in {reader.path}", devices)
    device = sampling.now.state.position.device
    part = read_part(reader, device)
    if any(device.type != torch.device(old).type for old in devices):
        # random numbers of one kind of device cannot go on on another
        fresh = torch.Generator(device).manual_seed(other_seed(f"{device} {sampling.now.transitions}", plan.seed))
        sampling.now = sampling.now._replace(random=fresh.get_state())
    sampling.resume(problem, {} if part is None else part.draws, plan)
    return sampling


def _shard_of(folder: RunFolder, name: str, problem: Any, plan: RunPlan, devices: dict[str, str]) -> SamplingRun:
    """A shard's chains where the common warm-up left them."""
    with folder.shard(WARMUP).reading() as reader:
        warm = decode(reader.read("state") or b"", f"the state in {reader.path}", devices)
    first, last = chains_of(folder.plan["chains"], folder.manifest["shards"], folder.names.index(name))
    position = warm.now.state.position[first:last]
    ancestors = None if warm.ancestors is None else warm.ancestors[first:last]
    rng = torch.Generator(position.device).manual_seed(plan.seed)
    state = warm.kernel.init(problem, position)
    sampling = SamplingRun(problem, warm.kernel, plan, state, rng, ancestors=ancestors)
    sampling.adapts = warm.adapts
    return sampling


def count_of(folder: RunFolder) -> int:
    """Draws that all shards have made together, by their last checkpoints."""
    count = 0
    for name in folder.names:
        if (store := folder.shard(name)).exists:
            with store.reading() as reader:
                count += (read_progress(reader) or {"count": 0})["count"]
    return count


def collected(folder: RunFolder, problem: Any, parts: dict[str, Part] | None = None) -> RunOutcome:
    """What the checkpoints have: of shards that differ, those chains and as many draws of each as make the most.

    Args:
        problem: what was sampled; None if it is not at hand.
        parts: what shards have that the folder does not, by name.

    Raises:
        CheckpointError: there are no draws yet, or a file is missing or damaged.
    """
    like = reference(problem) if problem is not None else None
    device = torch.device("cpu") if like is None else like.device
    found = list(_parts(folder, parts or {}, device))
    counts = sorted((part.progress["count"] for part in found), reverse=True)
    count = max(((n + 1) * each, each) for n, each in enumerate([*counts, 0]))[1]
    found = [part for part in found if part.progress["count"] >= count]
    plan = RunPlan(**folder.plan)
    if count == 0:
        raise CheckpointError(
            f"{folder.path}: no draws yet, {_transitions(folder)} of {plan.warmup} transitions of warm-up in the last "
            "checkpoint: collect later, or resume the run if it has ended"
        )
    ancestors = [part.progress["ancestors"] for part in found]
    draws = {name: value[:, :count].to(device) for name, value in found[0].draws.items()}
    if len(found) > 1:
        draws = {name: torch.cat([part.draws[name][:, :count].to(device) for part in found]) for name in draws}
    return RunOutcome(
        problem=problem,
        kernel=from_json(found[0].progress["kernel"]),
        plan=plan,
        draws=draws,
        made=count,
        # the warm-up has counted them over all chains
        ancestors=None if ancestors[0] is None else torch.cat([torch.tensor(a, device=device) for a in ancestors]),
        stayed=torch.cat([torch.tensor(part.progress["stayed"], device=device) for part in found]),
        adapted=found[0].progress["adapts"],
    )


def _parts(folder: RunFolder, parts: dict[str, Part], device: torch.device) -> Iterator[Part]:
    for name in folder.names:
        if name in parts:
            yield parts[name]
        elif (store := folder.shard(name)).exists:
            with store.reading() as reader:
                part = read_part(reader, device)
            if part is not None:
                yield part


def _transitions(folder: RunFolder) -> int:
    name = folder.names[0] if folder.manifest["shards"] == 1 else WARMUP
    if not (store := folder.shard(name)).exists:
        return 0
    with store.reading() as reader:
        return (read_progress(reader) or {"transitions": 0})["transitions"]
