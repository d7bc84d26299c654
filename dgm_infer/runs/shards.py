"""Runs of chains: a shard is chains that one process moves, put down in checkpoints and taken up again."""

import dataclasses
import json
import math
import mmap
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, CheckpointError
from ..kernels.stored import from_json, to_json
from ..progress import Progress
from ..sampling.draws import Draws, other_seed
from ..sampling.preflight import check_size
from ..sampling.report import as_draws, finalise
from ..sampling.run import RunInputs, RunOutcome, RunPlan, SamplingRun, diagnostics, run_until_stopped
from ..sampling.until import Until
from ..target import Target, as_target, reference
from .encoding import decode, decode_tensors, encode, encode_tensors
from .folder import WARMUP, RunFolder
from .kinds import ShardReport, Signals, Stopped
from .replay import inputs_of
from .store import Reader, Writer

__all__ = ["BLOCK", "Chains", "Keeper", "Part", "check_disk", "collected", "count_of"]

BLOCK = 2**24
"""Bytes of draws that a shard holds in memory, and a tensor that is read, above which it is mapped: 16 MiB."""

# Seconds from one look for a request to stop, by the process that began the run, to the next.
_LOOK = 1.0
# Seconds after which a process that was lost has let its shard go.
_PATIENCE = 60.0


class Part(NamedTuple):
    """What a shard has made."""

    progress: dict[str, Any]
    """``transitions``, ``count``, ``kernel``, ``ancestors``, ``stayed``, ``adapts``, as JSON holds them."""
    draws: dict[str, Tensor] | None
    """Each ``[chains, count, ...]``; None if they are in the folder."""
    kernel: Any = None
    """The adapted kernel, if it is at hand."""


class Chains:
    """The kind of run that :func:`sample` begins."""

    def first(self, folder: RunFolder) -> list[str]:
        return [] if folder.manifest["shards"] == 1 else [WARMUP]

    def is_finished(self, folder: RunFolder, name: str) -> bool:
        progress = _progress_in(folder, name)
        if progress is None:
            return False
        over = progress["transitions"] >= shard_plan(folder, name).transitions
        return over and not (name == WARMUP and progress["warms"])

    def progress(self, folder: RunFolder, name: str) -> int:
        return (_progress_in(folder, name) or {"transitions": 0})["transitions"]

    def make(
        self, folder: RunFolder, name: str, problem: Any, signals: Signals, *, looks: bool, progress: bool
    ) -> ShardReport:
        single = folder.manifest["shards"] == 1
        if not single and self.is_finished(folder, name):
            return ShardReport()
        inputs, devices = inputs_of(folder, problem)
        begun = RunInputs(problem, inputs["kernel"], inputs["initial"], folder.manifest["undecided"])
        sampling, stopped_by, kept = run_shard(folder, name, begun, devices, signals, progress=progress, looks=looks)
        if kept and (looks or not single):
            return ShardReport(stopped_by)
        draws = sampling.draws() if sampling.first == 0 else None
        if looks and draws is not None:
            # to the process that asked for them, which may have other devices
            draws = {name: value.cpu() for name, value in draws.items()}
        return ShardReport(stopped_by, part=Part(progress_of(sampling), draws, None if looks else sampling.kernel))

    def result(
        self, call: str, folder: RunFolder, problem: Any, reports: dict[str, ShardReport], stopped_by: str | None
    ) -> Draws:
        parts = {name: report.part for name, report in reports.items() if report.part is not None}
        outcome = collected(folder, problem, parts)
        kernels = [part.kernel for part in parts.values() if part.kernel is not None]
        outcome = outcome._replace(kernel=kernels[-1]) if kernels else outcome
        # what is collected has been judged when it was made
        draws = as_draws(outcome) if call == "collect" else finalise(outcome, stopped_by, stacklevel=6)
        draws.interrupted |= draws.shape[0] < folder.plan["chains"]
        draws.stopped_by = folder.manifest["stopped_by"]
        return draws

    def problem(self, call: str, given: Any) -> Any:
        return given if isinstance(given, Fibre | Target) else as_target(given)

    def extended(self, folder: RunFolder, problem: Any, more: int) -> dict[str, Any]:
        plan = RunPlan(**folder.plan)
        plan = replace(plan, draws=plan.draws + more)
        check_disk("extend", folder.path, problem, plan, plan.draws - more)
        return {"plan": dataclasses.asdict(plan), "until": None, "stopped_by": None}

    def made(self, folder: RunFolder) -> int:
        return count_of(folder)

    def settled(self, folder: RunFolder) -> dict[str, Any]:
        progress = _progress_in(folder, folder.names[0]) if folder.manifest["until"] else None
        if progress is None or progress["enough"] is None:
            return {}
        # the run is as if it had been asked for these draws
        plan = folder.plan | {"draws": progress["count"]}
        return {"plan": plan, "until": None, "stopped_by": progress["enough"]}


class Keeper:
    """Writes a checkpoint every so many seconds, and the last one when the run is to stop."""

    def __init__(self, folder: RunFolder, writer: Writer, signals: Signals, looks: bool):
        self._folder, self._writer, self._signals, self._looks = folder, writer, signals, looks
        self._every = folder.manifest["checkpoint_every"]
        self._began = time.monotonic()
        self._due, self._look = self._began + self._every, self._began + _LOOK
        goal = folder.manifest["until"]
        self._until = None if goal is None else Until(**goal)
        self.enough: str | None = None

    def __call__(self, sampling: SamplingRun) -> None:
        now = time.monotonic()
        stops = self._signals.asked is not None
        if self._looks and now >= self._look:
            self._look = now + _LOOK
            # a folder that cannot be read is told of at the next checkpoint
            with suppress(CheckpointError):
                stops |= self._folder.is_stopped
        block = sampling.plan.block
        if stops or now >= self._due or (block is not None and sampling.held >= block):
            try:
                self.write(sampling)
            except ArgumentError as error:
                # a disk may be full for a while: the chains go on
                warnings.warn(f"no checkpoint after {sampling.now.transitions} transitions: {error}", stacklevel=2)
            stops |= sampling.count < sampling.plan.draws and self._has_enough(sampling)
            self._due = time.monotonic() + self._every
        if stops:
            raise Stopped

    def _has_enough(self, sampling: SamplingRun) -> bool:
        """Whether the draws so far are those that the run went on until: the next checkpoint says so."""
        if self._until is None or sampling.count == 0:
            return False
        outcome = sampling.outcome() if sampling.first == 0 else collected(self._folder, sampling.problem)
        reached, said = self._until.reached(as_draws(outcome), time.monotonic() - self._began)
        self.enough = f"until: {said}" if reached else None
        if not reached and sampling.count == sampling.plan.draws:
            line = f"until= is not reached with {sampling.count} draws ({said}): dgm.extend(run, draws=...) adds some"
            warnings.warn(line, DiagnosisWarning, stacklevel=2)
        return reached

    def ends(self, sampling: SamplingRun) -> bool:
        """Whether it ended the run, or the last draws are enough."""
        if self.enough is None and sampling.count == sampling.plan.draws:
            self._has_enough(sampling)
        return self.enough is not None

    def write(self, sampling: SamplingRun) -> None:
        """A checkpoint of where the sampling is: what it holds beyond what the store has."""
        progress = read_progress(self._writer)
        before = 0 if progress is None else progress["count"]
        now = progress_of(sampling) | {"enough": self.enough}
        same = ("transitions", "warms", "enough")
        if progress is not None and all(progress[name] == now[name] for name in same):
            return
        records = {"progress": json.dumps(now).encode(), "state": encode(sampling, "the state of this kernel")}
        if now["count"] > before:
            records[f"draws/{before:012d}"] = encode_tensors(sampling.draws(before))
        self._writer.write(records)
        if _is_long(sampling.plan, sampling.draws()):
            sampling.forget()


def _is_long(plan: RunPlan, draws: dict[str, Tensor]) -> bool:
    """Whether all draws of a plan, like these of which there are at least one, exceed what is held in memory."""
    each = sum(value.nbytes / max(value.shape[1], 1) for value in draws.values())
    return plan.block is not None and plan.draws * each > plan.block


def progress_of(sampling: SamplingRun) -> dict[str, Any]:
    ancestors = sampling.ancestors
    return {
        "chains": len(sampling.now.stayed),
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


def chunks(reader: Reader, device: torch.device | str = "cpu") -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The draws of the last checkpoint in the parts that they were written in, each with the number of its first draw.

    Raises:
        CheckpointError: a record is missing or damaged.
    """
    count, progress = 0, read_progress(reader) or {"count": 0}
    for name in reader.names("draws/"):
        if name != f"draws/{count:012d}":
            break
        chunk = decode_tensors(reader.read(name) or b"", device)
        yield count, chunk
        count += next(iter(chunk.values())).shape[1]
    if count != progress["count"]:
        raise CheckpointError(f"{reader.path} is damaged: it holds {count} of its {progress['count']} draws")


def all_draws(reader: Reader, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The same, put together."""
    parts = [chunk for _, chunk in chunks(reader, device)]
    return {name: torch.cat([part[name] for part in parts], 1) for name in (parts[0] if parts else {})}


def check_disk(call: str, path: Path, problem: Any, plan: RunPlan, made: int = 0) -> None:
    """Raise ArgumentError for draws beyond those made that the disk of a folder does not hold."""
    numbers = {name: getattr(plan, name) for name in ("chains", "warmup", "draws", "thin", "keep")}
    needed = check_size(problem, **numbers, streams=True)
    needed -= needed * made // plan.draws
    while not path.exists():
        path = path.parent
    there = shutil.disk_usage(path).free
    if needed > there:
        raise ArgumentError(
            f"{call}(draws={plan.draws - made}): needs {needed / 2**30:.3g} GiB of {there / 2**30:.3g} GiB free at "
            f"{path}: make fewer draws, or thin="
        )


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


def _progress_in(folder: RunFolder, name: str) -> dict[str, Any] | None:
    """The progress of a shard's last checkpoint; None before the first."""
    if not (store := folder.shard(name)).exists:
        return None
    with store.reading() as reader:
        return read_progress(reader)


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
            if before is not None and before["enough"] and folder.manifest["until"]:
                # what was to be said of it was not
                return sampling, None, True
            # the search for starting points may have taken minutes
            kept = _written(keeper, sampling)
            try:
                stopped_by = run_until_stopped(sampling, bar, keeper)
                if keeper.ends(sampling):
                    bar.note(keeper.enough or "")
                    stopped_by = None
            except KeyboardInterrupt as error:
                made = f"after transition {sampling.now.transitions} of {plan.transitions}"
                error.add_note(f"{made}: dgm.resume({str(folder.path)!r}) goes on")
                raise
        kept = _written(keeper, sampling)
        if kept is not None and sampling.first > 0:
            # a file that has vanished can be read as long as it is open
            with suppress(CheckpointError):
                sampling.take_back(all_draws(writer, sampling.now.state.position.device))
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
    held = next(chunks(reader, device), (0, {}))[1]
    if held and not _is_long(plan, held):
        held = all_draws(reader, device)
    elif held:
        held = {}
    if any(device.type != torch.device(old).type for old in devices):
        # random numbers of one kind of device cannot go on on another
        fresh = torch.Generator(device).manual_seed(other_seed(f"{device} {sampling.now.transitions}", plan.seed))
        sampling.now = sampling.now._replace(random=fresh.get_state())
    sampling.resume(problem, held, plan)
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
    return sum((_progress_in(folder, name) or {"count": 0})["count"] for name in folder.names)


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
    parts = parts or {}
    found = {name: parts[name].progress for name in parts if name in folder.names}
    found |= {n: progress for n in folder.names if n not in found and (progress := _progress_in(folder, n)) is not None}
    found = {name: found[name] for name in folder.names if name in found}
    counts = sorted((progress["count"] for progress in found.values()), reverse=True)
    count = max(((n + 1) * each, each) for n, each in enumerate([*counts, 0]))[1]
    found = {name: progress for name, progress in found.items() if progress["count"] >= count}
    plan = RunPlan(**folder.plan)
    if count == 0:
        chains = Chains()
        made = chains.progress(folder, [*chains.first(folder), *folder.names][0])
        raise CheckpointError(
            f"{folder.path}: no draws yet, {made} of {plan.warmup} transitions of warm-up in the last checkpoint: "
            "collect later, or resume the run if it has ended"
        )
    in_memory = {name: draws for name in found if name in parts and (draws := parts[name].draws) is not None}
    draws = _put_together(folder, {name: each["chains"] for name, each in found.items()}, count, in_memory, device)
    first, ancestors = next(iter(found.values())), [each["ancestors"] for each in found.values()]
    return RunOutcome(
        problem=problem,
        kernel=from_json(first["kernel"]),
        plan=plan,
        draws=draws,
        made=count,
        # the warm-up has counted them over all chains
        ancestors=None if ancestors[0] is None else torch.cat([torch.tensor(a, device=device) for a in ancestors]),
        stayed=torch.cat([torch.tensor(each["stayed"], device=device) for each in found.values()]),
        adapted=first["adapts"],
    )


def _put_together(
    folder: RunFolder,
    chains: dict[str, int],
    count: int,
    in_memory: dict[str, dict[str, Tensor]],
    device: torch.device,
) -> dict[str, Tensor]:
    """The first draws of shards of so many chains, each ``[chains, count, ...]``, read part by part."""
    if len(chains) == 1 and in_memory:
        (draws,) = in_memory.values()
        return {name: value[:, :count].to(device) for name, value in draws.items()}
    room = Room(folder.path, sum(chains.values()), count, device)
    start = 0
    for name, n in chains.items():
        with ExitStack() as stack:
            parts = iter([(0, in_memory[name])] if name in in_memory else [])
            if name not in in_memory:
                parts = chunks(stack.enter_context(folder.shard(name).reading()), device)
            for first, chunk in parts:
                room.put(start, first, chunk)
        start += n
    return room.draws


class Room:
    """Draws that are put together: in memory, or if they are many in a nameless file that is mapped to it.

    Mapped tensors are like any others; what is read of them comes from the disk, and goes again when memory is short.

    Args:
        folder: where the file is.
    """

    def __init__(self, folder: Path, chains: int, count: int, device: torch.device):
        self._folder, self._shape, self._device = folder, (chains, count), device
        self._maps: list[mmap.mmap] = []
        self.draws: dict[str, Tensor] = {}

    def put(self, chain: int, first: int, chunk: dict[str, Tensor]) -> None:
        """Put the draws of a shard, from the number ``first`` on, into the rows from ``chain`` on."""
        for name, value in chunk.items():
            if name not in self.draws:
                self.draws[name] = self._made(value)
            left = max(0, self._shape[1] - first)
            value = value[:, :left]
            self.draws[name][chain : chain + len(value), first : first + value.shape[1]] = value.to(self._device)
        for each in self._maps:
            # what is written stays in the file, not in the memory of this process
            each.madvise(mmap.MADV_DONTNEED)

    def _made(self, like: Tensor) -> Tensor:
        shape = (*self._shape, *like.shape[2:])
        size = math.prod(shape) * like.element_size()
        if size > BLOCK and self._device.type == "cpu" and hasattr(mmap, "MADV_DONTNEED"):
            for place in (self._folder, None):
                with suppress(OSError), tempfile.TemporaryFile(dir=place) as file:
                    # a disk without room says so here, and not by a signal later
                    os.posix_fallocate(file.fileno(), 0, size)
                    mapped = mmap.mmap(file.fileno(), size)
                    self._maps.append(mapped)
                    return torch.frombuffer(mapped, dtype=like.dtype).view(shape)
        return like.new_empty(shape, device=self._device)
