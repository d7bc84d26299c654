"""Iterated refinement of a base from tempered pilots (T 5.5)."""

from typing import Literal, NamedTuple

import torch

from ..arguments import random_seed, whole_number
from ..errors import ArgumentError, uninterrupted
from ..references.density import Whitened
from .method import Method, check_method
from .result import Evidence
from .run import log_evidence
from .tempering.gibbs import GibbsTempering

__all__ = ["Refined", "refine_base"]


class Refined(NamedTuple):
    """Result of :func:`refine_base`."""

    base: Whitened
    """The refined base, with the last pilot's log evidence as ``log_zeta``."""
    pilots: list[Evidence]
    """One per round, run from the base that the round started with."""

    @property
    def gradient_evaluations(self) -> int:
        """Total over rounds, per chain and problem."""
        return sum(pilot.diagnostics["gradient_evaluations"] for pilot in self.pilots)


def refine_base(
    target,
    base: Whitened,
    method: Method | None = None,
    *,
    rounds: int = 2,
    kind: Literal["diagonal", "full", "low_rank"] | None = None,
    chains: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> Refined:
    """Refine a base in rounds: each gives it the target's moments and log Z as a pilot run estimates them.

    The pilots' draws are discarded: a run that starts from the frozen base with fresh randomness keeps the status of
    its method. Refinement improves a base only as far as the chains of its pilots travel.

    Args:
        target, base: as in :func:`log_evidence`.
        method: method of the pilots, which must draw from the target; None for ``GibbsTempering()``.
        rounds: number of pilots, each run from the base that the previous one refined.
        kind: kind of the refined scale; None keeps the base's own. A full or low-rank scale holds correlations that a
            diagonal fit leaves out.
        chains: chains per problem in every pilot.
        seed: seed of all randomness.
        progress: as in :func:`log_evidence`.

    Raises:
        ArgumentError: an argument is outside its range, or the method is a bound.
        EvidenceError: a pilot failed, or all its weights of a problem are zero.
    """
    method = GibbsTempering() if method is None else method
    check_method(method)
    if method.status not in ("unbiased", "consistent"):
        raise ArgumentError(
            f"refine_base(method={type(method).__name__}): it draws from the base; use a method that draws from the "
            "target, such as GibbsTempering"
        )
    rounds = whole_number("refine_base", "rounds", rounds, 1)
    seeds = torch.Generator().manual_seed(random_seed("refine_base", seed))
    pilots = []
    for _ in range(rounds):
        own = int(torch.randint(2**31, (), generator=seeds))
        pilot = uninterrupted(log_evidence(target, base, method, chains=chains, seed=own, progress=progress))
        assert pilot.draws is not None
        base = base.refined(pilot.draws, pilot.log_weights, pilot.log_z, kind=kind)
        pilots.append(pilot)
    return Refined(base, pilots)
