"""Starting points of low energy on the fibre of a generator without noise; strays give way to others (math 5.8)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..conditioning.search import towards
from ..conditioning.solve import search_once

__all__ = ["low_points"]

# Nats above the lowest point of a problem from which a point has strayed: with normal inputs, pieces of a fibre that
# is nearly flat have masses in proportion to exp(-energy) at their lowest points.
_ASTRAY = 20.0
# Rounds in which strays are searched for anew, each from one prior draw.
_ROUNDS = 2


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
    towards the origin, the mode of the prior. Those that end more than 20 nats above the lowest of their problem are
    searched for anew, twice, and then begin where another chain does. A transition or two lead from a mode to typical
    points; dozens do from too high an energy, of which a momentum takes little at a time.

    Args:
        problem: a fibre with ``searches``, of a model with standard normal inputs.
        chains: points per problem.
        rng: generator of the prior draws.
        tolerance: relative tolerance of the points.
        report: called with lines of progress.

    Raises:
        StartError: no points on the fibre were found.
    """
    u = problem.start(chains, rng, tolerance=tolerance, report=report, typical=False).flatten(0, -2)
    rows = problem.rows(chains)
    u, energy = _descended(rows, u, tolerance)
    for _ in range(_ROUNDS):
        astray = _astray(energy, chains).nonzero().squeeze(-1)
        if len(astray) == 0:
            break
        report(f"start-up, {len(astray)} of {len(u)} chains begin anew: of negligible mass where they were")
        own = rows.take(astray)
        again, found = search_once(own, rng, tolerance=tolerance * own.scale)
        if found.any():
            astray, own = astray[found], own.take(found.nonzero().squeeze(-1))
            again, lower = _descended(own, again[found], tolerance)
            better = lower < energy[astray]
            u[astray[better]], energy[astray[better]] = again[better], lower[better]
    ancestors = _sources(_astray(energy, chains).reshape(chains, -1), rng)
    position = u.reshape(chains, -1, problem.dim).take_along_dim(ancestors.unsqueeze(-1), 0)
    return position.reshape(chains, *problem.batch_shape, problem.dim), ancestors.reshape(chains, *problem.batch_shape)


def _descended(rows: Fibre, u: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Points ``[R, D]`` moved towards the origin, and their energies ``[R]``."""
    fibre = rows.for_searches
    active = torch.ones(len(u), dtype=torch.bool, device=u.device)
    u = towards(fibre, u, torch.zeros_like(u), tolerance=tolerance * rows.scale, active=active)
    # without the gradient of the Gram term, which takes most of the time
    cheap = fibre.without_gram_force()
    return u, cheap.evaluate(type(cheap).linearise, u).energy.nan_to_num(nan=torch.inf)


def _astray(energy: Tensor, chains: int) -> Tensor:
    """Which points ``[chains * problems]`` are too far above the lowest of their problem."""
    own = energy.reshape(chains, -1)
    return (own > own.amin(0) + _ASTRAY).flatten()


def _sources(astray: Tensor, rng: torch.Generator) -> Tensor:
    """The chain ``[chains, problems]`` that each begins with: itself, or for strays another one, each as often."""
    chains = len(astray)
    order = torch.rand(astray.shape, generator=rng, device=astray.device).masked_fill(astray, 2).argsort(0)
    there = (~astray).sum(0).clamp_min(1)
    turn = (astray.cumsum(0) - 1).clamp_min(0) % there
    own = torch.arange(chains, device=astray.device).unsqueeze(-1).expand_as(astray)
    return torch.where(astray, order.gather(0, turn), own)
