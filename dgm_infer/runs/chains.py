"""Runs of chains, the kind that ``sample()`` begins."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ..conditioning.fibre import Fibre
from ..errors import CheckpointError, DgmInferError
from ..sampling.draws import Draws
from ..sampling.plan import RunInputs, RunOutcome, RunPlan
from ..sampling.report import as_draws, finalise
from ..sampling.until import worst_mixing
from ..target import Target, as_target
from .drawn import Part, check_disk, collected, count_of, progress_in
from .folder import WARMUP, RunFolder
from .kinds import KINDS, ShardReport, Signals
from .replay import inputs_of, time_left
from .shards import progress_of, run_shard, shard_plan


class Chains:
    """The kind of run that :func:`sample` begins."""

    def first(self, folder: RunFolder) -> list[str]:
        return [] if folder.manifest["shards"] == 1 else [WARMUP]

    def is_finished(self, folder: RunFolder, name: str) -> bool:
        progress = progress_in(folder, name)
        if progress is None:
            return False
        over = progress["transitions"] >= shard_plan(folder, name).transitions
        return over and not (name == WARMUP and progress["warms"])

    def progress(self, folder: RunFolder, name: str) -> int:
        return (progress_in(folder, name) or {"transitions": 0})["transitions"]

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
        plan = dataclasses.replace(plan, draws=plan.draws + more)
        check_disk("extend", folder.path, problem, plan, plan.draws - more)
        return {"plan": dataclasses.asdict(plan), "until": None, "stopped_by": None}

    def made(self, folder: RunFolder) -> int:
        return count_of(folder)

    def view(self, folder: RunFolder) -> list[tuple[str, str]]:
        plan, shards = RunPlan(**folder.plan), [*self.first(folder), *folder.names]
        found = {name: progress for name in shards if (progress := progress_in(folder, name)) is not None}
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
        progress = progress_in(folder, folder.names[0]) if folder.manifest["until"] else None
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
    yield "draws", f"{n} of {plan.draws} of each of {draws.shape[0]} of {plan.chains} chains"
    yield "acceptance", f"{stats['acceptance_rate'].double().mean():.2f}"
    if "constraint_error" in stats:
        yield "worst constraint error", f"{stats['constraint_error'].max():.1e}"
    yield "stuck chains", f"{int(outcome.stayed.sum())} of {outcome.stayed.numel()}" if n > 1 else "not known yet"
    if n >= 4:
        worst, fewest = worst_mixing(draws)
        yield "R-hat", f"at most {worst:.3f}"
        yield "bulk effective draws", f"at least {fewest:.0f}"
