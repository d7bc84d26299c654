"""What would fail in a long run, found before it begins: sizes, faulty energies, derivatives and latents."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..arguments import allocatable
from ..conditioning.fibre import Fibre
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, ModelError, ObservationError, warn
from ..kernels.mode_jumps import innermost
from ..probe import energy_doubt, energy_fault, probe_points
from ..target import Target, first_points, reference
from .inference_data import names_dimension
from .plan import RunPlan


@dataclass(frozen=True)
class SizeSettings:
    """What runs are taken for before they begin."""

    iterations: int = 10**10
    """Iterations that no run reaches: at a microsecond each they take three hours, and none is that fast."""
    statistics: int = 7
    """Statistics that are kept of a draw of a chain and problem."""


@dataclass(frozen=True)
class ThreadSettings:
    """When threads are compared."""

    least: float = 5e-3
    """Seconds of an evaluation from which a wait for threads shows."""
    most: float = 1.0
    """Seconds above which a comparison takes too long."""
    slower: float = 3.0
    """Ratio of times from which a run takes one thread: a machine that is left alone has less than one."""


@dataclass(frozen=True)
class BesideSettings:
    """Where points on a fibre have neighbours that are on it, too."""

    points: int = 32
    distance: float = 0.1
    """In standard deviations of the inputs."""
    within: Mapping[torch.dtype, float] = field(default_factory=lambda: {torch.float64: 2e-8, torch.float32: 2e-5})
    """Residual of a point on a fibre, over its observed value: just above the tolerance, and far below what chance
    meets."""
    share: float = 0.25
    """Share of the points: about half of them are where a clamped output ends."""


_SIZES, _THREADS, _BESIDE = SizeSettings(), ThreadSettings(), BesideSettings()


def check_size(problem: Fibre | Target, plan: RunPlan, *, streams: bool) -> int:
    """Raise ArgumentError for a run that would not end, or draws that no memory holds; the bytes of the draws.

    Args:
        streams: whether draws go to a file, and memory need not hold them.
    """
    like, chains, draws = getattr(problem, "values", None), plan.chains, plan.draws
    chain = math.prod(problem.batch_shape) * problem.dim
    allocatable("sample", "chains", chains, chains * chain, "run fewer chains", like=like)
    # of latents at least one number is kept
    kept = chain if plan.keep == "inputs" else math.prod(problem.batch_shape)
    remedy = "make fewer draws, or keep='latents'" if plan.keep == "inputs" else "make fewer draws"
    # statistics of every draw are kept too
    numbers = chains * draws * (kept + _SIZES.statistics * math.prod(problem.batch_shape))
    if not streams:
        allocatable("sample", "draws", draws, numbers, f"{remedy}, or give a folder (run=)", like=like)
    if plan.transitions > _SIZES.iterations:
        shown = f"{float(min(plan.transitions, 10**300)):.3g}"
        raise ArgumentError(
            f"sample(draws={draws}, thin={plan.thin}, warmup={plan.warmup}): {shown} iterations, of "
            f"{_SIZES.iterations:.0e} at most: make fewer draws, or thin less"
        )
    return numbers * (8 if like is None else like.element_size())


def check_energy(problem: Target, kernel: Any, device: torch.device, given: Tensor | None = None) -> None:
    """Name an energy that is faulty where chains would start; the run's random numbers are left.

    Args:
        kernel: what samples it; only those with trajectories use a gradient.
        given: where they start, if the user said so, ``[chains, *batch, D]``.
    """
    rng, n = torch.Generator(device).manual_seed(0), probe_points(problem)
    if given is None:
        points = around = first_points(problem, n, rng)
    else:
        # all chains may start at one point, whose spread would be no distance
        noise = torch.randn(n, *given.shape[1:], generator=rng, dtype=given.dtype, device=given.device)
        points, around = given[:n], given[0] + noise
    differentiated = hasattr(innermost(kernel), "n_steps")
    fault = energy_fault(problem, points, "", around, differentiated=differentiated)
    if fault:
        raise ArgumentError(f"sample(): {fault}")
    if doubt := energy_doubt(problem, points, around):
        warn(f"sample(): {doubt}")


def check_resolved(fibre: Fibre, position: Tensor) -> None:
    """Raise ObservationError if data do not tell the starting points from points beside them.

    A clamped output has a plateau, and one saturated at a value other than 0 changes by less than the tolerance: such a
    value is an event, and has no surface of inputs. Prior draws may never meet it.

    Args:
        position: points on the fibre, ``[chains, *batch, D]``.
    """
    if fibre.values.dtype not in _BESIDE.within:
        return
    rng = torch.Generator(position.device).manual_seed(8)
    # one chain has as many neighbours as many have
    points = position[torch.arange(_BESIDE.points, device=position.device) % len(position)]
    noise = torch.randn(points.shape, generator=rng, dtype=points.dtype, device=points.device)
    with torch.no_grad():
        # no more at once than the run itself has
        parts = (points + _BESIDE.distance * noise).split(len(position))
        missed = torch.cat([fibre.constraint(part).abs() for part in parts])
    # in the scale of each value: beside one of 1e9 the tolerance of a kernel is met by all others
    within = _BESIDE.within[fibre.values.dtype] * fibre.observed.in_units(fibre.values.abs())
    same = (missed <= within).double().mean(0) >= _BESIDE.share
    if same.any():
        raise ObservationError(
            f"{int(same.sum())} of {same.numel()} observed values, such as {fibre.values[same][0].item():.4g}, are "
            f"what {type(fibre.model).__name__} gives at all inputs around, too: a clamped, censored or saturated "
            "output is an event: observe the others, pixels(mask), and multiply the probability of the event, by "
            "log_factor or as a soft observation of a program; or allow for noise, condition(..., noise=sd)"
        )


def check_latents(problem: Any, position: Tensor, kept_draws: int = 0) -> None:
    """Raise ModelError unless ``latents`` are tensors ``[chains, *batch, *shape]`` that a file can hold, by name.

    Each is a function of its position: not of other positions, nor of random numbers.

    Raises:
        ArgumentError: no memory holds ``kept_draws`` of them.
    """
    name = f"{type(getattr(problem, 'model', problem)).__name__}.latents"
    latents = problem.latents(position)
    if not isinstance(latents, Mapping):
        raise ModelError(f"{name} returns a {type(latents).__name__}: must return a dict of tensors by name")
    for key, value in latents.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise ModelError(f"{name} names a latent {key!r}: must be a name without '/', such as 'z'")
        if names_dimension(key) or key == "." or "\0" in key:
            raise ModelError(
                f"{name} names a latent {key!r}, like a dimension of the draws or no name at all: rename it"
            )
        if not isinstance(value, Tensor) or value.shape[: position.ndim - 1] != position.shape[:-1]:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            lead = ", ".join(map(str, position.shape[:-1]))
            raise ModelError(
                f"{name} gives {key!r} of {what} for inputs of shape {tuple(position.shape)}: must be a tensor of "
                f"shape ({lead}, ...)"
            )
        if value.is_complex() or value.dtype == torch.bfloat16:
            remedy = "torch.view_as_real(...)" if value.is_complex() else "float()"
            raise ModelError(f"{name} gives {key!r} of {value.dtype}, which no file of draws holds: use {remedy}")
    each = sum(value.numel() for value in latents.values())
    allocatable("sample", "draws", kept_draws, kept_draws * each, "make fewer draws, or thin=", like=position)
    # chains may all start at one point, where latents are zero
    moved = position + 0.5
    alone, again = problem.latents(moved), problem.latents(torch.cat([moved[-1:] + 1, moved]))
    for key, value in alone.items():
        # a corner of each stands for a field
        corner = (..., *[slice(8)] * (value.ndim - position.ndim + 1))
        size = value[corner].double()
        apart = size - again[key][1:][corner].double()
        apart, size = (each.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for each in (apart, size))
        if apart > torch.finfo(position.dtype).eps ** 0.5 * max(size, 1e-3):
            raise ModelError(
                f"{name} gives {key!r} that changes with the other positions of its batch, or from call to call (by "
                f"{apart:.3g}): compute it from each position by itself, without random numbers"
            )


def trial(problem: Fibre | Target, kernel: Any, chains: int) -> None:
    """What a kernel computes at ``chains`` points that are not looked for: nothing but its time matters."""
    like = reference(problem)
    dtype, device = (torch.float64, torch.device("cpu")) if like is None else (like.dtype, like.device)
    if device.type == "cpu":
        shape, rng = (chains, *problem.batch_shape, problem.dim), torch.Generator().manual_seed(0)
        kernel.init(problem, torch.randn(shape, generator=rng, dtype=dtype))


@contextmanager
def fitting_threads(call: str, evaluate: Callable[[], Any]) -> Iterator[None]:
    """One of torch's threads in this block where they wait for other programs, and one alone is several times faster.

    Results depend on their number, in the last digits.

    Args:
        call: the public function that says so.
        evaluate: what is timed; its errors are left to the run.
    """
    n, times = torch.get_num_threads(), 0.0
    if n > 1:
        with suppress(Exception):
            times = _times_as_long(evaluate, n)
    if times <= _THREADS.slower:
        yield
        return
    warn(
        f"{call}: with {n} threads an evaluation takes {times:.0f} times as long as with one, as other programs use "
        "the processor: this run takes one; for the same digits at any time, OMP_NUM_THREADS=1 before Python",
        DiagnosisWarning,
    )
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n)


def _times_as_long(evaluate: Callable[[], Any], n: int) -> float:
    """Seconds of an evaluation with ``n`` threads to those with one; 0 where it is too fast or too slow to tell."""
    together = _seconds(evaluate)
    if not _THREADS.least < together < _THREADS.most:
        return 0.0
    try:
        torch.set_num_threads(1)
        alone = min(_seconds(evaluate), _seconds(evaluate))
    finally:
        torch.set_num_threads(n)
    return min(together, _seconds(evaluate)) / alone


def _seconds(evaluate: Callable[[], Any]) -> float:
    began = time.perf_counter()
    evaluate()
    return time.perf_counter() - began
