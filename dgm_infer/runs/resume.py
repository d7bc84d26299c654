"""``resume()``, ``extend()`` and ``collect()``: runs that are kept in a folder, in this process or a later one."""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ..arguments import flag, whole_number
from ..conditioning.fibre import Fibre
from ..errors import ArgumentError, DgmInferError
from ..sampling.conclusion import as_draws
from ..sampling.course import Plan
from ..sampling.draws import Draws
from ..sampling.preflight import check_size
from ..target import Target, as_target
from .engine import check_workers, collected, count_of, go_on, problem_at, ranks
from .folder import RunFolder

__all__ = ["collect", "extend", "resume"]

Devices = Sequence[str | torch.device] | str | torch.device | None


def resume(
    run: str | os.PathLike, problem: Any = None, *, devices: Devices = None, executor: Any = None, progress: bool = True
) -> Draws:
    """Go on with a run where its last checkpoint was made; its draws are those of a run that was never stopped.

    On the same device and with the same version of torch they agree to the last digit: the state of the chains, of the
    warm-up and of the random numbers is part of a checkpoint. A run that is finished is collected.

    Args:
        run: the folder that ``sample(..., run=...)`` was given.
        problem: what is sampled, if the folder could not store it, or if its classes have moved; it is compared with
            what the folder knows of it.
        devices: as for :func:`sample`; on another kind of device the random numbers after the stop are other ones.
        executor: as for :func:`sample`.
        progress: show a bar on the standard error stream.

    Returns:
        :class:`Draws`, those made before the stop included.

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
        run: the folder, as for :func:`resume`.
        draws: draws to add per chain.
        problem: as for :func:`resume`.
        devices: as for :func:`resume`.
        executor: as for :func:`resume`.
        progress: show a bar on the standard error stream.

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


def collect(run: str | os.PathLike, problem: Any = None) -> Draws:
    """The draws in a folder so far, also while a process adds to them; of several shards, as many as all have.

    Args:
        run: the folder, as for :func:`resume`.
        problem: what is sampled; None reads the stored one.

    Returns:
        :class:`Draws`, ``interrupted`` as long as the run is not finished.

    Raises:
        CheckpointError: there are no draws, a file is damaged, or a class of the problem is not available.
        ArgumentError: the draws are not those of this problem.
    """
    folder = RunFolder.open("collect", run)
    if count_of(folder) == 0:
        # says how far it is, whatever the problem
        collected(folder, None)
    return as_draws(collected(folder, _given("collect", folder, problem)))


def _gone_on(
    call: str, run: str | os.PathLike, given: Any, more: int, devices: Devices, executor: Any, progress: bool
) -> Draws:
    flag(call, "progress", progress)
    folder = RunFolder.open(call, run)
    places = check_workers(call, devices, executor, torch.device(folder.manifest["device"]))
    ranked = ranks() if places is None and executor is None else (0, 1)
    if ranked[0] > 0:
        return go_on(call, folder, None, _given(call, folder, given, places), None, None, False, ranked)
    with folder.writing() as writer:
        before = Plan(**folder.plan)
        problem = _given(call, folder, given, places)
        if more:
            plan = dataclasses.replace(before, draws=before.draws + more)
            numbers = {name: getattr(plan, name) for name in ("chains", "warmup", "draws", "thin", "keep")}
            check_size(problem, **numbers)
            folder.change(writer, plan=dataclasses.asdict(plan))
        made = count_of(folder)
        try:
            return go_on(call, folder, writer, problem, places, executor, progress, ranked)
        finally:
            # stopped before it added a draw: the run as it was
            with suppress(DgmInferError):
                if more and count_of(folder) == made:
                    folder.change(writer, plan=dataclasses.asdict(before))


def _given(call: str, folder: RunFolder, given: Any, places: list[torch.device] | None = None) -> Fibre | Target:
    """The given problem if it is the one that was sampled, else the stored one."""
    if given is None:
        return problem_at(folder, None, places[0] if places else None)
    problem = given if isinstance(given, Fibre | Target) else as_target(given)
    folder.check(call, problem)
    return problem
