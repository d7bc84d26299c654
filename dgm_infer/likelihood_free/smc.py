"""Sequential Monte Carlo without likelihoods, with tolerances that adapt (math 2.8)."""

import warnings
from dataclasses import dataclass

import torch

from ..arguments import fraction, positive, whole_number
from ..settings import Settings
from .mcmc import Particles, move, walk_factor
from .result import Found, equal_weights, nothing_accepted
from .simulation import Simulation

__all__ = ["ABCSMC"]


@dataclass(frozen=True, eq=False)
class ABCSMC(Settings):
    """Prior draws, brought to the tolerance by falling tolerances, each followed by resampling and moves.

    Every tolerance is the one that keeps a share of the particles; the others restart from these. Moves are random
    walks with the covariance of the particles, repeated until most have moved. A run ends at the tolerance, or where
    too few moves are accepted, with a warning that names the tolerance it reached.

    Args:
        tolerance: eps of the last particles, with a uniform kernel.
        survive: share of the particles that each tolerance keeps.
        least_acceptance: acceptance of moves below which a run ends early.
        max_moves: moves per tolerance at most.
        max_simulations: simulations in all at most.
    """

    tolerance: float
    survive: float = 0.5
    least_acceptance: float = 0.01
    max_moves: int = 20
    max_simulations: int = 10_000_000

    def __post_init__(self):
        positive("ABCSMC", "tolerance", self.tolerance)
        fraction("ABCSMC", "survive", self.survive)
        fraction("ABCSMC", "least_acceptance", self.least_acceptance)
        whole_number("ABCSMC", "max_moves", self.max_moves)
        whole_number("ABCSMC", "max_simulations", self.max_simulations)

    def run(self, simulation: Simulation, draws: int, rng: torch.Generator) -> Found:
        z = simulation.draw_prior(draws, rng)
        here = Particles(z, simulation.distances(z, rng), simulation.prior.log_prob(z))
        reached, done, acceptance = here.distance.max().item(), draws, 1.0
        while reached > self.tolerance:
            wanted = max(here.distance.quantile(self.survive).item(), self.tolerance)
            below = here.distance[here.distance < reached]
            if wanted >= reached and len(below):
                # equal distances, as of discrete outputs
                wanted = max(below.max().item(), self.tolerance)
            alive = here.distance <= wanted
            if not alive.any() or not wanted < float("inf"):
                raise nothing_accepted(self.tolerance, here.distance.min().item(), done)
            if acceptance < self.least_acceptance or wanted >= reached or done >= self.max_simulations:
                warnings.warn(
                    f"ABCSMC(tolerance={self.tolerance:g}): stopped at {reached:.3g} after {done} simulations, where "
                    f"{100 * acceptance:.2g} % of moves are accepted; the smallest distance seen is "
                    f"{here.distance.min():.3g}",
                    stacklevel=4,
                )
                break
            reached = wanted
            survivors = alive.nonzero().flatten()
            picked = torch.randint(len(survivors), (draws,), generator=rng)
            # survivors stay, the others restart from them
            source = torch.where(alive, torch.arange(draws), survivors[picked])
            here = Particles(*(values[source] for values in here))
            factor = walk_factor(here.z[alive] if alive.sum() > simulation.dim else here.z)
            stayed = torch.ones(draws, dtype=torch.bool)
            moves = 0
            while moves < self.max_moves and stayed.double().mean() > 0.05:
                here, moved = move(simulation, here, factor, reached, "uniform", rng)
                stayed, moves, done = stayed & ~moved, moves + 1, done + draws
                acceptance = moved.double().mean().item()
        return Found(here.z, equal_weights(here.z), here.distance, reached, done, acceptance)
