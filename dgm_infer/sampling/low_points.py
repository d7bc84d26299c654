"""Low points of fibres without noise: where chains start, and the basins that their draws are in (math 5.8, 5.9)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..conditioning.projection import solver_tolerance
from ..conditioning.start_points import search_once, towards
from ..errors import ArgumentError
from .chain_groups import connected, numbered


@dataclass(frozen=True)
class StraySettings:
    """Settings of starts that end too high."""

    astray: float = 30.0
    """Nats above the lowest point of a problem from which a point has strayed: with normal inputs, pieces of a fibre
    that is nearly flat have masses in proportion to exp(-energy) at their lowest points. On fibres of faces, those
    up to 25 above were found to mix with the others."""
    rounds: int = 1
    """Rounds in which strays are searched for again, each from one prior draw: a search for a face takes seconds."""
    enough: float = 0.75
    """Share of long searches that have to end on the fibre: the last ones take as long as all others."""


_STRAYS = StraySettings()


def low_points(
    problem: Fibre,
    chains: int,
    rng: torch.Generator,
    *,
    tolerance: float,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Tensor, Tensor]:
    """Points near modes on the fibre, ``[chains, *batch, D]``, and the chain that found each, ``[chains, *batch]``.

    Searches from prior draws end on the fibre tens of nats above typical points, some of them in pieces of negligible
    mass, which a chain may not leave while the run lasts. From where a search ends the point moves along the fibre
    towards the origin, the mode of the prior. Those that end more than 30 nats above the lowest of their problem, and
    the last quarter of long searches, which are given up, are searched for once more; chains that then have no low
    point begin where another one does. A transition or two lead from a mode to typical points; dozens do from too high
    an energy, of which a momentum takes little at a time.

    Args:
        problem: a fibre with ``searches``, of a model with standard normal inputs.
        chains: points per problem.
        rng: generator of the prior draws.
        tolerance: relative tolerance of the points.
        report: called with lines of progress.

    Raises:
        StartError: no points on the fibre were found.
    """
    rows, size = problem.rows(chains), problem.batch_shape.numel()
    own = torch.arange(size, device=problem.values.device).repeat(chains)

    def every_problem(found: Tensor) -> bool:
        return len(own[found].unique()) == size

    u, energy = _searched(rows, rng, tolerance, report, lambda found: _most(found) and every_problem(found))
    if not every_problem(energy.isfinite()):
        # more attempts, and what to say if they fail
        u = problem.start(chains, rng, tolerance=tolerance, report=report, typical=False).flatten(0, -2)
        u, energy = _descended(rows, u, tolerance)
    for _ in range(_STRAYS.rounds):
        astray = _astray(energy, chains).nonzero().squeeze(-1)
        if len(astray) == 0:
            break
        report(f"start-up, {len(astray)} of {len(u)} chains begin again")
        again, lower = _searched(rows.take(astray), rng, tolerance, report, _most)
        better = lower < energy[astray]
        u[astray[better]], energy[astray[better]] = again[better], lower[better]
    ancestors = _sources(_astray(energy, chains).reshape(chains, -1), rng)
    position = u.reshape(chains, -1, problem.dim).take_along_dim(ancestors.unsqueeze(-1), 0)
    return position.reshape(chains, *problem.batch_shape, problem.dim), ancestors.reshape(chains, *problem.batch_shape)


def _searched(
    rows: Fibre, rng: torch.Generator, tolerance: float, report: Callable[[str], None], enough: Callable[[Tensor], bool]
) -> tuple[Tensor, Tensor]:
    """A point ``[R, D]`` from a search for every row, and its energy ``[R]``: infinite if it found none."""
    u, found = search_once(rows, rng, tolerance=tolerance * rows.scale, report=report, enough=enough)
    energy = torch.full_like(rows.scale, torch.inf)
    at = found.nonzero().squeeze(-1)
    if len(at):
        u[at], energy[at] = _descended(rows.take(at), u[at], tolerance)
    return u, energy


def _most(found: Tensor) -> bool:
    """Whether few enough searches are left to be given up."""
    return int(found.sum()) >= _STRAYS.enough * len(found)


def _descended(rows: Fibre, u: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Points ``[R, D]`` moved towards the origin, and their energies ``[R]``."""
    fibre = rows.for_searches
    active = torch.ones(len(u), dtype=torch.bool, device=u.device)
    u = towards(fibre, u, torch.zeros_like(u), tolerance=tolerance * rows.scale, active=active)
    # without the gradient of the Gram term, which takes most of the time
    cheap = fibre.computed(gram_force=False)
    return u, cheap.evaluate(type(cheap).linearise, u).energy.nan_to_num(nan=torch.inf)


def _astray(energy: Tensor, chains: int) -> Tensor:
    """Which points ``[chains * problems]`` are too far above the lowest of their problem."""
    own = energy.reshape(chains, -1)
    return (own > own.amin(0) + _STRAYS.astray).flatten()


def _sources(astray: Tensor, rng: torch.Generator) -> Tensor:
    """The chain ``[chains, problems]`` that each begins with: itself, or for strays another one, each as often."""
    chains = len(astray)
    # of one type, whatever the default
    order = (
        torch.rand(astray.shape, generator=rng, dtype=torch.float32, device=astray.device)
        .masked_fill(astray, 2)
        .argsort(0)
    )
    there = (~astray).sum(0).clamp_min(1)
    turn = (astray.cumsum(0) - 1).clamp_min(0) % there
    own = torch.arange(chains, device=astray.device).unsqueeze(-1).expand_as(astray)
    return torch.where(astray, order.gather(0, turn), own)


@dataclass(frozen=True)
class BasinSettings:
    """Settings of moves down a fibre; distances are root mean squares over the inputs."""

    rounds: int = 4
    """Rounds of moves after which a point is as low as it gets."""
    still: float = 0.01
    """Distance moved in a round below which it is before."""
    same: float = 0.1
    """Distance up to which two low points are the same: prior draws are 1.4 apart."""


_BASINS = BasinSettings()


class Basins(NamedTuple):
    """Where the draws of each chain lead to when they go down the fibre."""

    mode: Tensor
    """``[chains, *batch]``: number of the mode that each chain is in, 0 for that of most chains. Modes are basins, and
    those that a chain has gone between are one."""
    energy: Tensor
    """``[looks, chains, *batch]``: energy at the low point of each draw that was looked at."""
    point: Tensor
    """``[looks, chains, *batch, D]``: the low points."""


def basins(fibre: Fibre, position: Tensor) -> Basins:
    """The modes that chains are in, by the low points below some of their draws.

    From each draw a point moves along the fibre towards the origin, as far as that goes (math 5.5, 5.8). Draws whose
    low points coincide are in one basin. It tells modes apart by few draws, in which chains need not have mixed.

    Args:
        fibre: of a model with standard normal inputs.
        position: ``[looks, chains, *batch, D]``, draws that are some transitions apart.

    Raises:
        ArgumentError: the inputs are not standard normal.
    """
    if not fibre.model.input_density.is_standard_normal:
        raise ArgumentError("basins of a fibre need standard normal inputs, whose mode is the origin")
    looks, chains = position.shape[:2]
    rows = fibre.rows(looks * chains)
    cheap = rows.for_searches.computed(gram_force=False)
    point = position.reshape(-1, fibre.dim).clone()
    left = torch.arange(len(point), device=point.device)
    for _ in range(_BASINS.rounds):
        here = cheap.take(left)
        tolerance = solver_tolerance(point.dtype) * here.scale
        start, active = point[left], torch.ones_like(tolerance, dtype=torch.bool)
        point[left] = towards(here, start, torch.zeros_like(start), tolerance=tolerance, active=active)
        left = left[(point[left] - start).square().mean(-1).sqrt() > _BASINS.still]
        if not len(left):
            break
    energy = cheap.evaluate(type(cheap).linearise, point).energy
    mode = _modes(point.reshape(looks, chains, -1, fibre.dim).movedim(2, 0))
    shape = position.shape
    return Basins(mode.T.reshape(shape[1:-1]), energy.reshape(shape[:-1]), point.reshape(shape))


def _modes(point: Tensor) -> Tensor:
    """Numbers of the modes ``[P, chains]`` of low points ``[P, looks, chains, D]``."""
    _, looks, chains, dim = point.shape
    flat = point.flatten(1, 2)
    linked = torch.cdist(flat, flat) < _BASINS.same * math.sqrt(dim)
    # draws of one chain are linked by what it did between them
    chain = torch.arange(chains, device=point.device).repeat(looks)
    linked |= chain == chain.unsqueeze(-1)
    linked = connected(linked)[:, :chains, :chains]
    return numbered(linked, torch.ones_like(linked[..., 0]))
