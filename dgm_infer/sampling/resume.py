"""``resume()``, ``extend()`` and ``collect()``: runs that are kept in a folder, in this process or a later one."""

import os
from typing import Any

from ..arguments import flag, whole_number
from ..conditioning.fibre import Fibre
from ..runs.folder import RunFolder
from ..target import Target, as_target
from .draws import Draws
from .durable import collected, count_of, extended, go_on
from .reloaded import check_problem
from .report import as_draws
from .run import RunInputs

__all__ = ["collect", "extend", "resume"]


def resume(run: str | os.PathLike, problem: Any = None, *, progress: bool = True) -> Draws:
    """Go on with a run where its last checkpoint was made; its draws are those of a run that was never stopped.

    On the same device and with the same version of torch they agree to the last digit: the state of the chains, of the
    warm-up and of the random numbers is part of a checkpoint. A run that is finished is collected.

    Args:
        run: the folder that ``sample(..., run=...)`` was given. It holds pickles, which run code when they are read:
            resume runs of your own.
        problem: what is sampled, if the folder could not store it, or if its classes have moved.
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
    return _gone_on("resume", run, problem, 0, progress)


def extend(run: str | os.PathLike, draws: int, problem: Any = None, *, progress: bool = True) -> Draws:
    """Add draws to a run: a longer run from the start would have had the same ones.

    A run that is not finished is finished first. The kernel stays as warm-up left it.

    Args:
        run: the folder, as for :func:`resume`.
        draws: draws to add per chain.
        problem: as for :func:`resume`.
        progress: show a bar on the standard error stream.

    Returns:
        :class:`Draws`, the earlier ones included.

    Raises:
        CheckpointError: as for :func:`resume`.
        ArgumentError: as for :func:`resume`, or ``draws`` is not at least 1.
    """
    return _gone_on("extend", run, problem, whole_number("extend", "draws", draws), progress)


def collect(run: str | os.PathLike, problem: Any = None) -> Draws:
    """The draws in a folder so far, also while a process adds to them; of several shards, as many as all have.

    Args:
        run: the folder, as for :func:`resume`.
        problem: what is sampled; given one, nothing is read that runs code. None reads the stored one.

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
    return as_draws(collected(folder, _problem("collect", folder, problem)))


def _gone_on(call: str, run: str | os.PathLike, given: Any, more: int, progress: bool) -> Draws:
    flag(call, "progress", progress)
    folder = RunFolder.open(call, run)
    problem = None if given is None else _problem(call, folder, given)
    if problem is None:
        run_inputs = None
    else:
        run_inputs = RunInputs(problem, folder.stored("kernel"), folder.stored("initial"), folder.manifest["undecided"])
    if more:
        with folder.locked():
            extended(folder, more)
    return go_on(call, folder, run_inputs, progress)


def _problem(call: str, folder: RunFolder, given: Any) -> Fibre | Target:
    """The given problem if the draws are its own, else the stored one."""
    if given is None:
        return folder.stored("problem")
    problem = given if isinstance(given, Fibre | Target) else as_target(given)
    found = collected(folder, None) if count_of(folder) else None
    if found is not None and (inputs := found.draws.get("inputs")) is not None:
        check_problem(call, folder.path, problem, found.kernel, inputs, None)
    return problem
