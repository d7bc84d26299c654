"""What a user calls: ``sample(run=...)``, ``resume()``, ``extend()`` and ``collect()``."""

import dataclasses
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from ..arguments import available_device, flag, whole_number
from ..arguments.values import is_sequence, shown
from ..autodiff.xla import compiler_version
from ..errors import ArgumentError, CheckpointError, DgmInferError, warn
from ..sampling.draws import Draws
from ..sampling.plan import Keeping, RunInputs, RunPlan, Until
from ..sampling.run import device_of
from ..sampling.stored import known_problem
from .drawn import MEMORY, check_disk
from .engine import go_on, problem_at, ranks
from .folder import RunFolder, refuse_what_is_there
from .kinds import kind_of

__all__ = ["begin", "collect", "extend", "resume"]

# Shards of a run that several processes may make: enough for eight devices.
_SHARDS = 8
# Seconds that ranks wait for the first one to begin a run, and from one look to the next.
_PATIENCE, _LOOK = 60.0, 0.2

Devices = Sequence[str | torch.device] | str | torch.device | None


def resume(
    run: str | os.PathLike, problem: Any = None, *, devices: Devices = None, executor: Any = None, progress: bool = True
) -> Any:
    """Go on with a run where its last checkpoint was made; its result is that of a run that was never stopped.

    On the same device and with the same versions of torch and JAX they agree to the last digit: the state of the
    chains, of the warm-up and of the random numbers is part of a checkpoint. A run that is finished is collected.

    Args:
        run: the folder that ``sample(..., run=...)`` was given.
        problem: what is sampled, if the folder could not store it, or if its classes have moved; it is compared with
            what the folder knows of it.
        devices: as for :func:`sample`; on another kind of device the random numbers after the stop are other ones.
        executor: as for :func:`sample`.
        progress: show a bar on the standard error stream.

    Returns:
        what the function returns that began the run, the ``Draws`` of ``sample``, those made before the stop
        included, the ``Evidence`` of ``log_evidence``, and so on.

    Raises:
        CheckpointError: no run is there, a file of it is damaged, or it needs a class that is not available.
        ArgumentError: another process goes on with this run, or the problem is another one.

    Example:
        >>> draws = dgm.sample(fibre, run="runs/lens")  # doctest: +SKIP
        >>> draws = dgm.resume("runs/lens")  # in another process, after that one was stopped  # doctest: +SKIP
    """
    return _gone_on("resume", run, problem, 0, devices, executor, progress)


def extend(
    run: str | os.PathLike,
    draws: int,
    problem: Any = None,
    *,
    devices: Devices = None,
    executor: Any = None,
    progress: bool = True,
) -> Draws:
    """Add draws to a run: a longer run from the start would have had the same ones.

    A run that is not finished is finished first. The kernel stays as warm-up left it.

    Args:
        run, problem, devices, executor, progress: as for :func:`resume`.
        draws: draws to add per chain.

    Returns:
        :class:`Draws`, the earlier ones included.

    Raises:
        CheckpointError: as for :func:`resume`.
        ArgumentError: as for :func:`resume`, or ``draws`` is not at least 1, or more than memory holds; the run is as
            it was.
    """
    more = whole_number("extend", "draws", draws)
    if ranks()[1] > 1:
        raise ArgumentError("extend(): ranks of torchrun do not agree on it: use one process, with executor=")
    return _gone_on("extend", run, problem, more, devices, executor, progress)


def collect(run: str | os.PathLike, problem: Any = None) -> Any:
    """The draws in a folder so far, also while a process adds to them; of other runs the result, of what is done.

    Where shards differ, the chains, and as many draws of each, that make the most.

    Args:
        run: the folder, as for :func:`resume`.
        problem: what is sampled; None reads the stored one.

    Returns:
        as ``resume``, ``interrupted`` as long as the run is not finished.

    Raises:
        CheckpointError: there are no draws, a file is damaged, or a class of the problem is not available.
        ArgumentError: the draws are not those of this problem.
    """
    folder = RunFolder.open("collect", run)
    kind = kind_of(folder)
    if kind.made(folder) == 0:
        # says how far it is, whatever the problem
        kind.result("collect", folder, None, {}, None)
    return kind.result("collect", folder, _given("collect", folder, problem), {}, None)


def begin_chains(
    inputs: RunInputs,
    plan: RunPlan,
    keeping: Keeping,
    *,
    shards: int | None,
    progress: bool,
    until: Mapping[str, Any] | None = None,
) -> Draws:
    """A run of chains in a folder, for ``run=None`` a temporary one, made here or by workers.

    Raises:
        ArgumentError: there is a run in the folder, a device is not there, or what to sample cannot be stored.
    """
    alone = keeping.devices is None and keeping.executor is None and (keeping.run is None or ranks()[1] == 1)
    shards = (1 if alone else _SHARDS) if shards is None else shards
    shards = min(whole_number("sample", "shards", shards), plan.chains)
    if until is not None and shards > 1:
        raise ArgumentError("sample(until=...): looks at all chains together: leave out devices=, executor=, shards=")
    known = None if until is None else known_problem(inputs.problem)
    latents = None if known is None else [name.removeprefix("latent ") for name in known if name.startswith("latent ")]
    goal = None if until is None else Until.checked("sample", until, latents)
    # a time says how long a run is
    is_limit = goal is not None and not goal.is_time_alone
    plan = dataclasses.replace(plan, block=MEMORY.block, is_limit=is_limit, seconds=goal and goal.seconds)
    if keeping.run is None:
        check_disk("sample", Path(tempfile.gettempdir()), inputs.problem, plan)
    elif ranks()[0] == 0:
        check_disk("sample", refuse_what_is_there("sample", keeping.run), inputs.problem, plan)
    return begin(
        "sample",
        keeping,
        inputs.problem,
        {"kernel": inputs.kernel, "initial": inputs.initial},
        {
            "plan": dataclasses.asdict(plan),
            "undecided": inputs.undecided,
            "until": goal and goal.to_json(),
            "stopped_by": None,
        },
        shards=shards,
        device=device_of(inputs.problem, inputs.initial),
        progress=progress,
    )


def begin(
    kind: str,
    keeping: Keeping,
    problem: Any,
    inputs: dict[str, Any],
    manifest: dict[str, Any],
    *,
    shards: int,
    device: torch.device,
    progress: bool,
) -> Any:
    """Begin a run of a kind in :data:`KINDS`, and make it.

    Args:
        inputs: what it begins with beside the problem, by name.
        manifest: what else the kind has to know, as JSON holds it.
        device: that of the problem.
    """
    run, executor = keeping.run, keeping.executor
    places = _workers(kind, keeping.devices, executor, device)
    ranked = ranks() if run is not None and places is None and executor is None else (0, 1)
    if executor is not None and run is None:
        raise ArgumentError(f"{kind}(executor=...): needs run=, a folder that all workers reach")
    manifest = {
        "kind": kind,
        **manifest,
        "shards": shards,
        "checkpoint_every": keeping.checkpoint_every,
        "device": str(device),
        "torch_version": str(torch.__version__),
        "jax_version": compiler_version(),
        "launch": _launch(),
    }
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="dgm-infer-")) if run is None else run
        if run is not None and ranked[0] > 0:
            return go_on(kind, _joined(run), None, problem, None, None, False, ranked)
        sent = places is not None and len(places) > 1
        folder, writer = stack.enter_context(RunFolder.begin(path, manifest, problem, inputs, sent=sent))
        if run is not None and (reason := folder.manifest["unstored"]):
            warn(f"{kind}(run=...): {reason}; dgm.resume(run, problem=...) will need it")
        return go_on(kind, folder, writer, problem, places, executor, progress, ranked)


def _workers(call: str, devices: Any, executor: Any, own: torch.device) -> list[torch.device] | None:
    """The devices asked for, of a problem on its ``own``; None for none.

    Raises:
        ArgumentError: they are none, or the executor is not one.
    """
    if executor is not None and (devices is not None or not callable(getattr(executor, "submit", None))):
        what = "give devices= or executor=, not both" if devices is not None else "must have submit(), as executors do"
        raise ArgumentError(f"{call}(executor={shown(executor)}): {what}")
    if devices is None:
        return None
    if isinstance(devices, str) and devices == "auto":
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [own]
    if isinstance(devices, str | torch.device):
        devices = [devices]
    if not is_sequence(devices) or len(devices) == 0:
        raise ArgumentError(
            f"{call}(devices={shown(devices)}): must be 'auto' or a list of devices, such as ['cuda:0', 'cuda:1']; "
            "['cpu', 'cpu'] is two processes"
        )
    return [available_device(call, "devices", device) for device in devices]


def _launch() -> str:
    """What the ranks of one launch have in common, and those of another do not."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return "/".join(os.environ.get(name, "") for name in names)


def _joined(run: str | os.PathLike) -> RunFolder:
    """The folder that rank 0 of this launch makes."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with suppress(CheckpointError):
            folder = RunFolder.open("sample", run)
            if folder.manifest["launch"] == _launch():
                return folder
        time.sleep(_LOOK)
    raise ArgumentError(f"sample(run={str(Path(run))!r}): rank 0 has begun no run there in {_PATIENCE:.0f} s")


def _gone_on(
    call: str, run: str | os.PathLike, given: Any, more: int, devices: Devices, executor: Any, progress: bool
) -> Any:
    flag(call, "progress", progress)
    folder = RunFolder.open(call, run)
    places = _workers(call, devices, executor, torch.device(folder.manifest["device"]))
    ranked = ranks() if places is None and executor is None else (0, 1)
    if ranked[0] > 0:
        return go_on(call, folder, None, _given(call, folder, given, places), None, None, False, ranked)
    with folder.writing() as writer:
        kind, problem, before = kind_of(folder), _given(call, folder, given, places), dict(folder.manifest)
        if more:
            folder.change(writer, **kind.extended(folder, problem, more))
        made = kind.made(folder)
        try:
            return go_on(call, folder, writer, problem, places, executor, progress, ranked)
        finally:
            # stopped before it added a draw: the run as it was
            with suppress(DgmInferError):
                if more and kind.made(folder) == made:
                    folder.change(writer, **before)


def _given(call: str, folder: RunFolder, given: Any, places: list[torch.device] | None = None) -> Any:
    """The given problem if it is the one that was sampled, else the stored one."""
    if given is None:
        return problem_at(folder, None, places[0] if places else None)
    problem = kind_of(folder).problem(call, given)
    folder.check(call, problem)
    return problem
