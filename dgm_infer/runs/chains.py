"""Runs of chains, which ``sample()`` begins: shards of one process each, put down in checkpoints and taken up again."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import other_seed
from ..conditioning.fibre import Fibre
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, CheckpointError, DgmInferError, warn
from ..progress import Progress
from ..sampling.draws import Draws
from ..sampling.plan import LOOK, RunInputs, RunOutcome, RunPlan, Until, worst_mixing
from ..sampling.run import SamplingRun, as_draws, diagnostics, finalise, run_until_stopped
from ..sampling.stored import to_json
from ..target import Target, as_target
from .drawn import Part, all_draws, check_disk, chunks, collected, count_of
from .encoding import decode, encode, encode_tensors
from .folder import WARMUP, RunFolder, read_progress
from .kinds import KINDS, Kind, ShardReport, Signals, Stopped
from .replay import LOOPS, Checkpoints, inputs_of, time_left
from .store import Reader, Writer


class Keeper:
    """Writes a checkpoint every so many seconds, and the last one when the run is to stop."""

    def __init__(self, folder: RunFolder, writer: Writer, due: Checkpoints):
        self._folder, self._writer, self._due = folder, writer, due
        self._began = time.monotonic()
        goal = folder.manifest["until"]
        self._until = None if goal is None else Until(**goal)
        self.enough: str | None = None
        # until when draws are not looked at again
        self._judged = self._began
        # fewer tell nothing
        self._enough_for_a_look = 4.0
        self._start: list[float] | None = None

    def __call__(self, sampling: SamplingRun) -> None:
        now, stops = time.monotonic(), self._due.is_asked_to_stop
        block = sampling.plan.block
        is_over = self._until is not None and self._until.is_over(now - self._began) and sampling.count > 0
        is_kept = stops or is_over or self._due.is_due or (block is not None and sampling.held >= block)
        if is_kept:
            try:
                self.write(sampling)
            except ArgumentError as error:
                # a disk may be full for a while: the chains go on
                warn(f"no checkpoint after {sampling.now.transitions} transitions: {error}")
            self._due.show()
        # draws that are in a file alone are read with checkpoints only
        is_read = now >= self._judged and sampling.count >= self._enough_for_a_look
        if self._until is not None and (is_over or (is_read and (is_kept or sampling.first == 0))):
            stops |= sampling.count < sampling.plan.draws and self._has_enough(sampling)
            ended = time.monotonic()
            # the first one, of few draws, imports what it needs
            self._judged = ended + (ended - now) / LOOK.share if self._enough_for_a_look > 4 else ended
            self._enough_for_a_look = 1 + LOOK.growth * sampling.count
        if is_kept:
            self._due.wait()
        if stops:
            raise Stopped

    def _has_enough(self, sampling: SamplingRun) -> bool:
        """Whether the draws so far are those that the run went on until: the next checkpoint says so."""
        if self._until is None or sampling.count == 0:
            return False
        draws = None
        if not self._until.is_time_alone:
            draws = as_draws(sampling.outcome() if sampling.first == 0 else collected(self._folder, sampling.problem))
        reached, said = self._until.reached(draws, time.monotonic() - self._began)
        if draws is not None and not reached and sampling.count == sampling.plan.draws:
            line = f"until= is not reached with {sampling.count} draws ({said}): dgm.extend(run, draws=...) adds some"
            warn(line, DiagnosisWarning)
        self.enough = f"until: {said}" if reached else None
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
        times = {"began": self._start, "at": time.time(), "seconds": self._due.seconds}
        now: dict[str, Any] = progress_of(sampling) | {"enough": self.enough} | times
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
        "modes": None if sampling.modes is None or sampling.warms_up else to_json(sampling.modes),
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
    plan, began = shard_plan(folder, name), time.monotonic()
    # a process that was lost may not have ended yet
    with folder.shard(name).writing(make=True, patience=LOOPS.patience) as writer:
        before = read_progress(writer)
        made = 0 if before is None else before["transitions"]
        is_most = folder.manifest["until"] is not None
        with Progress(progress, diagnostics, plan.transitions - made, is_most=is_most) as bar:
            if before is not None:
                sampling = _taken_up(writer, inputs.problem, plan, devices)
                bar.note(f"{folder.path}: goes on at transition {made} of {plan.transitions}")
            elif folder.manifest["shards"] > 1 and name != WARMUP:
                sampling = _shard_of(folder, name, inputs.problem, plan, devices)
            else:
                signals.raising(True)
                sampling = SamplingRun.begin(inputs, plan, bar)
                signals.raising(False)
            keeper = Keeper(folder, writer, Checkpoints(folder, writer, signals, looks, began))
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
    sampling = SamplingRun(problem, warm.kernel, plan, state, rng, ancestors=ancestors, modes=warm.modes)
    sampling.adapts = warm.adapts
    return sampling


class Chains(Kind):
    """The kind of run that :func:`sample` begins."""

    def first(self, folder: RunFolder) -> list[str]:
        return [] if folder.manifest["shards"] == 1 else [WARMUP]

    def is_finished(self, folder: RunFolder, name: str) -> bool:
        progress = folder.progress(name)
        if progress is None:
            return False
        over = progress["transitions"] >= shard_plan(folder, name).transitions
        return over and not (name == WARMUP and progress["warms"])

    def progress(self, folder: RunFolder, name: str) -> int:
        return (folder.progress(name) or {"transitions": 0})["transitions"]

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
        draws = as_draws(outcome) if call == "collect" else finalise(outcome, stopped_by)
        draws.interrupted |= draws.shape[0] < folder.plan["chains"]
        draws.stopped_by = folder.manifest["stopped_by"]
        return draws

    def problem(self, call: str, given: Any) -> Any:
        return given if isinstance(given, Fibre | Target) else as_target(given)

    def extended(self, folder: RunFolder, problem: Any, more: int) -> dict[str, Any]:
        plan = RunPlan(**folder.plan)
        plan = dataclasses.replace(plan, draws=plan.draws + more, is_limit=False, seconds=None)
        check_disk("extend", folder.path, problem, plan, plan.draws - more)
        return {"plan": dataclasses.asdict(plan), "until": None, "stopped_by": None}

    def made(self, folder: RunFolder) -> int:
        return count_of(folder)

    def view(self, folder: RunFolder) -> list[tuple[str, str]]:
        plan, shards = RunPlan(**folder.plan), [*self.first(folder), *folder.names]
        found = {name: progress for name in shards if (progress := folder.progress(name)) is not None}
        # in transitions of all chains
        weights = {name: shard_plan(folder, name).chains for name in shards}
        of = sum(weights[name] * shard_plan(folder, name).transitions for name in shards)
        made = sum(weights[name] * progress["transitions"] for name, progress in found.items())
        phase = "warm-up" if all(progress["warms"] for progress in found.values()) else "sampling"
        rows = [("progress", f"{100 * made / of:.0f} % of the transitions, {phase}")]
        working = [
            {"began": p["began"], "at": p["at"], "done": p["transitions"]} for p in found.values() if "began" in p
        ]
        if made < of and working:
            # at the rate of the latest checkpoint, by as many processes as have one
            latest = max(working, key=lambda each: each["at"])
            left = (of - made) / max(1, plan.chains // len(folder.names))
            rows.append(("time left", time_left(latest, latest["done"] + math.ceil(left)) or "not known yet"))
        with suppress(CheckpointError):
            rows += _numbers(collected(folder, _problem_of(folder)), plan)
        return rows

    def settled(self, folder: RunFolder) -> dict[str, Any]:
        progress = folder.progress(folder.names[0]) if folder.manifest["until"] else None
        if progress is None or progress["enough"] is None:
            return {}
        # the run is as if it had been asked for these draws
        plan = folder.plan | {"draws": progress["count"]}
        return {"plan": plan, "until": None, "stopped_by": progress["enough"]}


KINDS["sample"] = Chains()


def _problem_of(folder: RunFolder) -> Any:
    """The problem, None if it is not to be had here."""
    try:
        return folder.stored("problem", {folder.manifest["device"]: "cpu"})
    except DgmInferError:
        return None


def _numbers(outcome: RunOutcome, plan: RunPlan) -> Iterator[tuple[str, str]]:
    """What the draws so far are like."""
    draws = as_draws(outcome)
    stats, n = draws.stats, draws.shape[1]
    yield "draws", f"{n} of {plan.draws} per chain, {draws.shape[0]} of {plan.chains} chains"
    yield "acceptance", f"{stats['acceptance_rate'].double().mean():.2f}"
    if "constraint_error" in stats:
        yield "worst constraint error", f"{stats['constraint_error'].max():.1e}"
    yield "stuck chains", f"{int(outcome.stayed.sum())} of {outcome.stayed.numel()}" if n > 1 else "not known yet"
    if n >= 4:
        worst, fewest = worst_mixing(draws)
        yield "R-hat", f"at most {worst:.3f}"
        yield "bulk effective draws", f"at least {fewest:.0f}"
