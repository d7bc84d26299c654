"""Faults of a target's energy, found by central differences and by a few more points."""

import math
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments.distributions import validated
from .differences import differences, disagreement, sharper
from .errors import ArgumentError, DgmInferError, cause
from .settings import Settings
from .target import Target


@dataclass(frozen=True)
class ProbeSettings(Settings):
    """Where energies are looked at before a run, and what counts as a fault."""

    energies: int = 1024
    """Energies computed at once."""
    fewest: int = 2
    """Fewest points per problem."""
    most: int = 32
    """Most points per problem."""
    compared: int = 4
    """Points at which gradients are compared with differences."""
    apart: float = 0.05
    """Difference of gradients, as a share of their size, that is a fault."""
    closer: float = 1e-3
    """Another step of differences in 32 bits, a thirtieth of the first: for energies that bend within that one and are
    large enough to have digits for this one."""
    nan: float = 0.1
    """Share of the points at which an energy may be NaN without a word: chains reject them like divergences."""
    near: float = 1e4
    """Distance in units of the points' spread; from here to :attr:`far` a density with a finite integral falls."""
    far: float = 1e8
    spacing: float = 0.1
    """Nats between neighbouring numbers of an energy's size from which sampled densities are visibly others."""
    flat_points: int = 8
    """Gradients beyond as many as there are dimensions by which a direction is told that none has a part of."""
    flat_numbers: int = 2**18
    """Numbers in these above which they are not looked at: 500 dimensions."""
    slope: tuple[float, float] = (2.0, 20.0)
    """Distances between which the slope of an energy that overflows before that is taken."""


SETTINGS = ProbeSettings()
WRITES = (
    "writes into its argument, which would move the chains: let it work on a copy, x = x.clone(), or without x += 1, "
    "x.mul_(2), x[...] = 0 and inplace=True"
)
COARSE = "energies are so large that their digits are {x:.2g} nats apart{of}"
FINER = "their differences decide, and are lost: subtract a constant from the energy, or compute in float64"
# By type: singular values of gradients, as a share of the largest, that are rounding.
_FLAT = {torch.float64: 1e-11, torch.float32: 1e-5}
# Targets whose gradients agree.
_AGREEING: weakref.WeakSet[Target] = weakref.WeakSet()


def probe_points(target: Target) -> int:
    """Number of points to probe per problem: fewer in a large batch."""
    return min(max(SETTINGS.energies // max(target.batch_shape.numel(), 1), SETTINGS.fewest), SETTINGS.most)


@torch.no_grad()
def energy_fault(
    target: Target, x: Tensor, remedy: str = "", around: Tensor | None = None, *, differentiated: bool = True
) -> str | None:
    """Describe a fault of the energy at points ``x [n, *batch, D]`` or far from them; None if there is none.

    It must be one real number per point, the same at every call and whatever the other points are, must leave the
    points as they are, must not fall without end, as ``exp(-energy)`` would have no integral, and must have the
    gradient that the target gives, if it gives one. An energy that is NaN or infinite at all points is left to the
    search for a start or a base, which reports more about it; one that is NaN at some, or levels off, to
    :func:`energy_doubt`.

    Args:
        remedy: added where the energy fails, such as how to have other points.
        around: points ``[n, *batch, D]`` whose spread sets the distances from their center; None for ``x``.
        differentiated: whether the gradient will be used.
    """
    given = x.clone()
    try:
        _check_arguments(target, x)
        energy, again = target.energy(given), target.energy(x.clone())
    except DgmInferError:
        raise
    except Exception as error:
        remedy = _of_one_point(target, x) or remedy
        return f"the energy fails at x of shape {tuple(x.shape)}, {x.dtype} on {x.device}{remedy}: {cause(error, 150)}"
    if fault := _shape_fault(energy, x):
        return fault + _of_one_point(target, x)
    if not torch.equal(given, x):
        return f"the energy {WRITES}"
    apart = _difference(energy, again, 1e3 * torch.finfo(energy.dtype).eps)
    if apart > 0:
        return (
            f"the energy differs from call to call at the same points, by {apart:.3g}: it must not draw random numbers"
        )
    if apart := _mixing(target, x, energy, around):
        return (
            f"the energy of a point changes when the other points of its batch change, by {apart:.3g}: compute every "
            "point by itself, without batch statistics or branches on all points, and count dimensions from the right, "
            "as in x.sum(-1)"
        )
    if _falls(_far_energies(target, x if around is None else around)):
        return "the energy falls without end far from the origin, so that exp(-energy) has no integral: check its sign"
    return target.own_fault(x) or (_gradient_fault(target, x) if differentiated else None)


def _of_one_point(target: Target, x: Tensor) -> str:
    """What helps an energy that is written for a single point; empty for others."""
    if target.batch_shape:
        return ""
    with suppress(Exception):
        if target.energy(x[0].clone()).shape == ():
            return (
                ", and not at one point: x has all chains, [..., D], so write x[..., 0] in place of x[0], sum(-1) in "
                "place of sum()"
            )
    return ""


def _shape_fault(energy: object, x: Tensor) -> str | None:
    """Describe an energy at points ``x [n, *batch, D]`` that is not one real number each; None if it is."""
    if not isinstance(energy, Tensor):
        return f"the energy is a {type(energy).__name__}: must be a tensor, one value per point"
    if energy.shape != x.shape[:-1] or not energy.is_floating_point():
        what = f"of shape {tuple(energy.shape)}" if energy.is_floating_point() else energy.dtype
        expected = f"one real value per point, shape {tuple(x.shape[:-1])}"
        return f"the energy at x of shape {tuple(x.shape)} is {what}: expected {expected}"
    return None


@torch.no_grad()
def refuse_shapes(call: str, target: Target, origin: Tensor) -> None:
    """Raise ArgumentError if an energy is not one number per point, at some points ``origin [*batch, D]``."""
    # not as many as there are dimensions
    x, fault = origin.expand(3 if target.dim == 2 else 2, *origin.shape), None
    # what fails otherwise is named where it is looked at
    with suppress(Exception):
        fault = _shape_fault(target.energy(x.clone()), x)
    if fault is not None:
        raise ArgumentError(f"{call}(): {fault}{_of_one_point(target, x)}")


def _check_arguments(target: Target, x: Tensor) -> None:
    """Let torch's distributions check what they are given, which they do not in a run.

    What they refuse at every point is a mistake, such as data out of their support, and raised; at some points alone it
    is a point without density.
    """
    fault: ValueError | None = None
    with validated():
        for point in x.split(1):
            try:
                target.energy(point.clone())
            except DgmInferError:
                raise
            except ValueError as error:
                fault = fault or error
            else:
                return
    if fault is not None:
        raise fault


@torch.no_grad()
def energy_doubt(target: Target, x: Tensor, around: Tensor | None = None) -> str | None:
    """Describe what is dubious in an energy without faults; None if nothing is.

    It may be NaN at more than a tenth of the points ``x [n, *batch, D]``, though not at all: chains never move to such
    a point and its weight counts as zero, as with an infinite energy, which is right where the density is zero, and
    otherwise loses a part of the density. Or it levels off along a line from these points, so that most of
    ``exp(-energy)`` is infinitely far away.
    """
    energy = target.energy(x)
    lost = energy.isnan()
    if SETTINGS.nan * lost.numel() < lost.sum() < lost.numel():
        return (
            f"the energy is NaN at {int(lost.sum())} of {lost.numel()} points tried: these count as points without "
            "density; return inf where that is so, and mend the energy elsewhere"
        )
    around = x if around is None else around
    level = _level(_far_energies(target, around), energy, target.dim)
    if (flat := _flat_directions(target, around)) is not None:
        # from where the energy is least, beside which that of other lines might seem to rise
        lowest = energy.masked_fill(~energy.isfinite(), torch.inf).argmin(0)
        there = x.gather(0, lowest[None, ..., None].expand_as(x[:1]))[0]
        level |= _level(_energies_along(target, there, flat), energy, target.dim) & flat[0].any(-1)
    if level.any():
        problems = level.reshape(-1, target.batch_shape.numel()).any(0)
        of = f" of problem {int(problems.nonzero()[0])}" if target.batch_shape else ""
        return (
            f"the energy{of} levels off far from the origin, so that exp(-energy) has no integral: chains drift away "
            "and log Z is infinite; give every variable a prior"
        )
    return None


def _gradient_fault(target: Target, x: Tensor) -> str | None:
    """Describe a gradient that is not that of the energy; a target is looked at once.

    An energy without derivatives is not a fault: some kernels need none.
    """
    if not target.has_gradient or target in _AGREEING:
        return None
    x = x[: SETTINGS.compared]
    rng = torch.Generator(x.device).manual_seed(0)
    spread = x.std(0).clamp_min(1e-3) if len(x) > 1 else torch.ones_like(x[0])
    v = spread * torch.randn(x.shape, generator=rng, dtype=x.dtype, device=x.device)

    def energy(points: Tensor) -> Tensor:
        return target.energy(points).unsqueeze(-1)

    try:
        gradient = target.energy_and_gradient(x)[1]
        found = differences(energy, x, v)
        if x.dtype == torch.float32:
            found = sharper(found, differences(energy, x, v, step=SETTINGS.closer))
        apart = disagreement(found, torch.linalg.vecdot(gradient, v).to(found.combined))
    except Exception:
        # what keeps it from being differentiated is said where derivatives are needed
        return None
    if apart > SETTINGS.apart:
        return (
            f"the gradient of this {type(target).__name__} is not that of its energy (finite differences differ by "
            f"{apart:.2g} of their size): look for detach(), no_grad() or rounding in the energy, for a backward of "
            "another function, or correct energy_and_gradient"
        )
    with suppress(TypeError):
        _AGREEING.add(target)
    return None


def _reordered(energy: Tensor) -> float:
    """Relative difference up to which energies are equal where sums round in another order, of 32 bits within too."""
    return max(torch.finfo(energy.dtype).eps ** 0.5, 64 * torch.finfo(torch.float32).eps)


def _difference(energy: Tensor, again: Tensor, rounding: float) -> float:
    """Largest difference of two evaluations, 0 up to ``rounding`` of their size."""
    both = energy.isfinite() & again.isfinite()
    if not torch.equal(energy.isfinite(), again.isfinite()):
        return float("inf")
    difference = (energy - again).abs()[both]
    least = rounding * energy.abs()[both].clamp_min(1)
    return difference[difference > least].max().item() if (difference > least).any() else 0.0


def _mixing(target: Target, x: Tensor, energy: Tensor, around: Tensor | None) -> float:
    """By how much energies depend on the other points of a batch, on their number, or on points of other problems.

    Points are evaluated again behind copies of the last one, which also stands at every second problem, and the first
    one by itself. A target is looked at once.
    """
    if target in _AGREEING:
        return 0.0
    problems = torch.arange(target.batch_shape.numel(), device=x.device)
    kept = (problems % 2 == 0).reshape(target.batch_shape)
    apart = 0.0
    # a model may refuse points around given ones, which alone may all be the same
    with suppress(Exception):
        if around is not None and around is not x:
            x, energy = around, target.energy(around)
        n = (len(x) + 1) // 2
        behind = torch.cat([x[-1:].expand_as(x[:n]), x[:n]]).where(kept.unsqueeze(-1), x[-1])
        for own, moved in ((energy[:n], target.energy(behind)[n:]), (energy[:1], target.energy(x[:1]))):
            apart = max(apart, _difference(own[..., kept], moved[..., kept], _reordered(energy)))
    return apart


@torch.no_grad()
def dependence(target: Target, x: Tensor, n: int) -> float:
    """By how much the energies of ``n`` of the points ``x [m, *batch, D]`` differ from those of each alone; 0 up to
    rounding, or where they cannot be computed."""
    every = max(1, len(x) // n)
    try:
        together = target.energy(x)[::every]
        alone = torch.stack([target.energy(x[i : i + 1])[0] for i in range(0, len(x), every)])
    except Exception:
        return 0.0
    return _difference(together, alone, _reordered(together))


@torch.no_grad()
def spacing(target: Target, x: Tensor) -> Tensor:
    """Distance of neighbouring numbers of the size of the energies at typical points ``[n, *batch, D]``: ``[*batch]``.

    Differences of energies decide what is accepted, and those below it are lost. 0 where energies cannot be computed.
    """
    try:
        energy = target.energy(x)
    except Exception:
        return torch.zeros(target.batch_shape, dtype=torch.float64, device=x.device)
    # also where 32 bits were used within
    single = bool((energy.float().to(energy) == energy).all()) and len(x) > 1
    eps = torch.finfo(torch.float32 if single else energy.dtype).eps
    size = energy.double().abs().nan_to_num(0.0, 0.0).median(0).values
    # of a constant, such as 0, nothing is lost
    return torch.where(energy.isfinite().any(0), eps * size.log2().floor().exp2(), 0.0)


def _flat_directions(target: Target, x: Tensor) -> Tensor | None:
    """Two opposite directions that are orthogonal to all gradients near points ``x``, ``[2, *batch, D]``, zero for
    problems that have none; None where that is not known, or the prior is one that has an integral.

    A variable without a prior, or a shift of several that changes nothing, is on no line between draws.
    """
    n = target.dim + SETTINGS.flat_points
    if target.standardised or not target.has_gradient or n * x[0].numel() > SETTINGS.flat_numbers or len(x) < 2:
        return None
    rng = torch.Generator(x.device).manual_seed(0)
    spread = x.std(0)
    noise = torch.randn(n, *x.shape[1:], generator=rng, dtype=x.dtype, device=x.device)
    try:
        gradients = target.energy_and_gradient(x.mean(0) + spread * noise)[1] * spread
        known = gradients.isfinite().all(-1)
        rows = torch.where(known.unsqueeze(-1), gradients, 0.0).movedim(0, -2).double()
        # of one size, so that the steep do not hide the others
        rows = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(1e-300)
        values, axes = torch.linalg.svd(rows, full_matrices=False)[1:]
    except Exception:
        return None
    flat = (values[..., -1] < _FLAT.get(x.dtype, 0.0) * values[..., 0]) & (known.sum(0) > target.dim)
    direction = torch.where(flat.unsqueeze(-1), axes[..., -1, :], 0.0).to(x) * spread
    return torch.stack([direction, -direction]) if flat.any() else None


def _far_energies(target: Target, x: Tensor) -> list[Tensor]:
    """Energies at four distances along lines from the center of the points, ``[8, *batch]``."""
    center = x.mean(0)
    return _energies_along(target, center, (x - center)[:8])


def _energies_along(target: Target, center: Tensor, directions: Tensor) -> list[Tensor]:
    """Energies at four distances from ``center [*batch, D]``, as many ``[n, *batch]`` as directions."""
    try:
        with warnings.catch_warnings():
            # overflows are expected out there
            warnings.simplefilter("ignore")
            return [
                target.energy(center + distance * directions)
                for distance in (*SETTINGS.slope, SETTINGS.near, SETTINGS.far)
            ]
    except Exception:
        # a model may refuse such points
        return [center.new_full(directions.shape[:-1], torch.inf)] * 4


def _level(energies: list[Tensor], here: Tensor, dim: int) -> Tensor:
    """Whether the mass in shells far away grows with their radius, ``[*batch]``.

    A shell at distance r has a volume of order ``r^D``: the energy of a density rises by more than ``D log r``, and is
    by more than that above where it is least.
    """
    _, _, near, far = energies
    least = here.masked_fill(~here.isfinite(), torch.inf).amin(0)
    level = (far - near < dim * math.log(SETTINGS.far / SETTINGS.near)) & (far - least < dim * math.log(SETTINGS.far))
    return (near.isfinite() & far.isfinite() & level).any(0)


def _falls(energies: list[Tensor]) -> bool:
    """Whether the energy still falls at distances where that of any density rises."""
    inner, outer, near, far = energies
    falling = near.isfinite() & (far < near - near.abs().mul(0.1).clamp_min(1))
    # minus infinity beyond an edge is not a fall: no chain moves there
    overflown = near.isneginf() & outer.isfinite() & (outer < inner - 1)
    return bool((falling | overflown).any())
