"""Runs that are kept in a folder while they run: checkpoints, and shards of chains in processes of their own."""

import dataclasses
import os
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import available_device
from ..arguments.objects import is_sequence, shown
from ..errors import ArgumentError, CheckpointError, DgmInferError
from ..kernels.stored import from_json, to_json
from ..progress import Progress
from ..runs.folder import RunFolder, Shard
from ..target import reference
from .draws import Draws, other_seed
from .processes import in_processes
from .report import finalise
from .run import RunInputs, RunOutcome, RunPlan, SamplingRun, device_of, diagnostics, run_until_stopped

__all__ = ["begin_run", "collected", "count_of", "extended", "go_on"]


class Keeper:
    """Writes a checkpoint of a sampling every so many seconds."""

    def __init__(self, shard: Shard, every: float):
        progress = shard.progress() or {"count": 0, "transitions": -1}
        self._shard, self._every = shard, every
        self._count, self._transitions = progress["count"], progress["transitions"]
        self._due = time.monotonic() + every

    def __call__(self, sampling: SamplingRun) -> None:
        if time.monotonic() >= self._due:
            try:
                self.write(sampling)
            except ArgumentError as error:
                # a disk may be full for a while: the chains go on
                warnings.warn(f"no checkpoint after {sampling.now.transitions} transitions: {error}", stacklevel=2)
            self._due = time.monotonic() + self._every

    def write(self, sampling: SamplingRun) -> None:
        """A checkpoint of where the sampling is, unless the last one is of there."""
        if sampling.now.transitions == self._transitions:
            return
        count, ancestors = sampling.count, sampling.ancestors
        # a part of a tensor would be stored with all of it
        news = (
            {name: value.clone() for name, value in sampling.draws(self._count).items()} if count > self._count else {}
        )
        progress = {
            "transitions": sampling.now.transitions,
            "count": count,
            "kernel": None if sampling.warms_up else to_json(sampling.kernel),
            "ancestors": None if ancestors is None else ancestors.tolist(),
            "stayed": sampling.now.stayed.tolist(),
            "adapts": sampling.adapts,
        }
        self._shard.write(progress, sampling, news)
        self._count, self._transitions = count, sampling.now.transitions


def begin_run(
    run: str | os.PathLike | None,
    run_inputs: RunInputs,
    plan: RunPlan,
    *,
    checkpoint_every: float,
    devices: Any,
    progress: bool,
) -> Draws:
    """A run kept in a folder, for ``run=None`` a temporary one, on one device or several.

    Raises:
        ArgumentError: there is a run in the folder, a device is not there, or what to sample cannot be stored.
    """
    own = device_of(run_inputs.problem, run_inputs.initial)
    places = _devices(devices, own)[: plan.chains]
    shares = [plan.chains // len(places) + (rank < plan.chains % len(places)) for rank in range(len(places))]
    manifest = {
        "plan": asdict(plan),
        "shards": [
            {"device": str(place), "chains": share, "seed": _seed(plan.seed, rank)}
            for rank, (place, share) in enumerate(zip(places, shares, strict=True))
        ],
        "undecided": run_inputs.undecided,
        "checkpoint_every": checkpoint_every,
        "torch_version": str(torch.__version__),
    }
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="dgm-infer-")) if run is None else run
        stored = {"kernel": run_inputs.kernel, "initial": run_inputs.initial}
        folder = RunFolder.make(path, manifest, run_inputs.problem, stored)
        elsewhere = places != [own]
        if reason := folder.manifest["unstored"]:
            if elsewhere:
                folder.remove()
                raise ArgumentError(f"sample(devices={shown(devices)}): {reason}")
            warnings.warn(f"sample(run=...): {reason}; dgm.resume(run, problem=...) will need it", stacklevel=3)
        return go_on("sample", folder, None if elsewhere else run_inputs, progress)


def _seed(seed: int, rank: int) -> int:
    """The stream of a shard; that of the first, and of a run on one device, is the run's own."""
    return other_seed(f"shard {rank}", seed) if rank else seed


def go_on(call: str, folder: RunFolder, run_inputs: RunInputs | None, progress: bool) -> Draws:
    """Make what is left of a run.

    Args:
        call: the function that the user called.
        run_inputs: what it began with, where its only shard is; None to read it from the folder.
    """
    with folder.locked():
        if len(folder.manifest["shards"]) > 1:
            stopped_by = in_processes(_work, folder, progress)
            if count_of(folder) == 0:
                if stopped_by == "interrupted":
                    raise KeyboardInterrupt
                raise DgmInferError(f"{call}(): {stopped_by}, before the first draw")
            outcome = collected(folder, folder.stored("problem"))
        else:
            sampling, stopped_by = _shard(folder, 0, run_inputs, progress)
            outcome = sampling.outcome()
    return finalise(outcome, stopped_by, stacklevel=5)


def _work(path: Path, rank: int, progress: bool) -> str | None:
    folder = RunFolder(path)
    # a process may outlive the one that has locked the folder
    with folder.shards[rank].locked():
        return _shard(folder, rank, None, progress)[1]


def _shard(
    folder: RunFolder, rank: int, run_inputs: RunInputs | None, progress: bool
) -> tuple[SamplingRun, str | None]:
    manifest, shard = folder.manifest, folder.shards[rank]
    own = manifest["shards"][rank]
    plan = RunPlan(**{**manifest["plan"], "chains": own["chains"], "seed": own["seed"]})
    device = torch.device(own["device"])
    if run_inputs is None:
        kernel, initial = folder.stored("kernel", device), folder.stored("initial", device)
        if initial is not None:
            first = sum(other["chains"] for other in manifest["shards"][:rank])
            initial = initial[first : first + plan.chains]
        run_inputs = RunInputs(folder.stored("problem", device), kernel, initial, manifest["undecided"])
    checkpoint = shard.read(device)
    before = 0 if checkpoint is None else checkpoint.progress["transitions"]
    with Progress(progress, diagnostics, plan.transitions - before) as bar:
        if checkpoint is None:
            sampling = SamplingRun.begin(run_inputs, plan, bar)
        else:
            sampling = checkpoint.state
            sampling.resume(run_inputs.problem, shard.draws(device), plan)
            bar.note(f"{folder.path}: goes on at transition {before} of {plan.transitions}")
        keeper = Keeper(shard, manifest["checkpoint_every"])
        # the search for starting points may have taken minutes
        keeper.write(sampling)
        stopped_by = run_until_stopped(sampling, bar, keeper)
    try:
        keeper.write(sampling)
    except ArgumentError as error:
        # the draws are in memory, whatever becomes of the folder
        stopped_by = f"not all draws are in {folder.path} ({error})"
    return sampling, stopped_by


def count_of(folder: RunFolder) -> int:
    """Draws that every shard has made, by its last checkpoint."""
    progress = [shard.progress() for shard in folder.shards]
    return min(0 if each is None else each["count"] for each in progress)


def collected(folder: RunFolder, problem: Any) -> RunOutcome:
    """What the checkpoints of all shards have; of shards that differ, as many draws as the shortest has.

    Args:
        problem: what was sampled; None if it is not at hand.

    Raises:
        CheckpointError: there are no draws yet.
    """
    plan = RunPlan(**folder.manifest["plan"])
    count, states = count_of(folder), [shard.progress() for shard in folder.shards]
    states = [progress for progress in states if progress is not None]
    if count == 0:
        made = min((progress["transitions"] for progress in states), default=0)
        raise CheckpointError(
            f"{folder.path}: no draws yet, {made} of {plan.warmup} transitions of warm-up in the last checkpoint: "
            "collect later, or resume the run if it has ended"
        )
    like = reference(problem) if problem is not None else None
    device = torch.device("cpu") if like is None else like.device
    draws = [{name: value[:, :count] for name, value in shard.draws(device).items()} for shard in folder.shards]
    return RunOutcome(
        problem=problem,
        kernel=from_json(states[0]["kernel"]),
        plan=plan,
        draws={name: torch.cat([part[name] for part in draws]) for name in draws[0]},
        made=count,
        ancestors=_ancestors(states, device),
        stayed=torch.cat([torch.tensor(progress["stayed"], device=device) for progress in states]),
        adapted=states[0]["adapts"],
    )


def _ancestors(states: list[dict[str, Any]], device: torch.device) -> Tensor | None:
    """Those of all shards, counted on over them; None if every chain has its own."""
    if all(progress["ancestors"] is None for progress in states):
        return None
    found, before = [], 0
    for progress in states:
        stayed = torch.tensor(progress["stayed"], device=device)
        own = torch.arange(len(stayed), device=device).view(-1, *[1] * (stayed.ndim - 1)).expand_as(stayed)
        mine = own if progress["ancestors"] is None else torch.tensor(progress["ancestors"], device=device)
        found.append(mine + before)
        before += len(stayed)
    return torch.cat(found)


def extended(folder: RunFolder, draws: int) -> None:
    """RunPlan that many more draws."""
    manifest = folder.manifest
    plan = RunPlan(**manifest["plan"])
    folder.rewrite({**manifest, "plan": asdict(dataclasses.replace(plan, draws=plan.draws + draws))})


def _devices(devices: Any, own: torch.device) -> list[torch.device]:
    """The devices of the shards, of a problem on its ``own``."""
    if devices is None:
        return [own]
    if devices == "auto":
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [own]
    if isinstance(devices, str | torch.device):
        devices = [devices]
    if not is_sequence(devices) or len(devices) == 0:
        raise ArgumentError(
            f"sample(devices={shown(devices)}): must be 'auto' or a list of devices, such as ['cuda:0', 'cuda:1']; "
            "['cpu', 'cpu'] runs the chains in two processes"
        )
    return [available_device("sample", "devices", device) for device in devices]
