"""The draws of a run in its folder: those of every shard in parts, put together in memory or in a mapped file."""

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, CheckpointError
from ..sampling.plan import RunOutcome, RunPlan
from ..sampling.preflight import check_size
from ..sampling.stored import from_json
from ..target import reference
from .encoding import decode_tensors
from .folder import WARMUP, RunFolder, read_progress
from .store import Reader


@dataclass(frozen=True)
class MemorySettings:
    """How much of a run is in memory."""

    block: int = 2**24
    """Bytes of draws that a shard holds: writing a block takes four times as much, and a disk far longer than its
    bookkeeping."""
    read: int = 2**18
    """Bytes of a tensor that is read above which it is mapped: ten statistics that are read while a run goes on stay
    below a hundredth of the memory of torch. Below some pages a file of its own would be most of the work."""


MEMORY = MemorySettings()


class Part(NamedTuple):
    """What a shard has made."""

    progress: dict[str, Any]
    """``transitions``, ``count``, ``kernel``, ``ancestors``, ``modes``, ``stayed``, ``adapts``, as JSON holds them."""
    draws: dict[str, Tensor] | None
    """Each ``[chains, count, ...]``; None if they are in the folder."""
    kernel: Any = None
    """The adapted kernel, if it is at hand."""


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
    needed = check_size(problem, plan, streams=True)
    needed -= needed * made // plan.draws
    while not path.exists():
        path = path.parent
    there = shutil.disk_usage(path).free
    if needed > there:
        raise ArgumentError(
            f"{call}(draws={plan.draws - made}): needs {needed / 2**30:.3g} GiB of {there / 2**30:.3g} GiB free at "
            f"{path}: make fewer draws, or thin="
        )


def count_of(folder: RunFolder) -> int:
    """Draws that all shards have made together, by their last checkpoints."""
    return sum((folder.progress(name) or {"count": 0})["count"] for name in folder.names)


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
    found |= {n: progress for n in folder.names if n not in found and (progress := folder.progress(n)) is not None}
    found = {name: found[name] for name in folder.names if name in found}
    counts = sorted((progress["count"] for progress in found.values()), reverse=True)
    count = max(((n + 1) * each, each) for n, each in enumerate([*counts, 0]))[1]
    found = {name: progress for name, progress in found.items() if progress["count"] >= count}
    plan = RunPlan(**folder.plan)
    if count == 0:
        first = folder.names[0] if folder.manifest["shards"] == 1 else WARMUP
        made = (folder.progress(first) or {"transitions": 0})["transitions"]
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
        modes=None if first["modes"] is None else from_json(first["modes"]),
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
        if size > MEMORY.read and self._device.type == "cpu" and hasattr(mmap, "MADV_DONTNEED"):
            for place in (self._folder, None):
                with suppress(OSError), tempfile.TemporaryFile(dir=place) as file:
                    # a disk without room says so here, and not by a signal later
                    os.posix_fallocate(file.fileno(), 0, size)
                    mapped = mmap.mmap(file.fileno(), size)
                    self._maps.append(mapped)
                    return torch.frombuffer(mapped, dtype=like.dtype).view(shape)
        return like.new_empty(shape, device=self._device)
