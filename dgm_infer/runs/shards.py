"""One shard of a run of chains: what one process moves, put down in checkpoints and taken up again."""

import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import other_seed
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, CheckpointError, warn
from ..kernels.stored import to_json
from ..progress import Progress
from ..sampling.plan import RunInputs, RunPlan
from ..sampling.report import as_draws
from ..sampling.run import SamplingRun, diagnostics, run_until_stopped
from ..sampling.until import Until
from .drawn import all_draws, chunks, collected, read_progress
from .encoding import decode, encode, encode_tensors
from .folder import WARMUP, RunFolder
from .kinds import Signals, Stopped
from .store import Reader, Writer
from .watch import Page

# Seconds from one look for a request to stop, by the process that began the run, to the next.
_LOOK = 1.0
# Seconds after which a process that was lost has let its shard go.
_PATIENCE = 60.0


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
        self._start: list[float] | None = None
        self._page = None if looks else Page(folder)

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
                warn(f"no checkpoint after {sampling.now.transitions} transitions: {error}")
            if self._page is not None:
                self._page.update()
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
            warn(line, DiagnosisWarning)
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
        transitions = sampling.now.transitions
        self._start = self._start or [time.time(), transitions]
        now = progress_of(sampling) | {"enough": self.enough, "began": self._start, "at": time.time()}
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
