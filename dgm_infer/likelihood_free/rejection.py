"""ABC by rejection and by importance sampling (math 2.8)."""

import math
from dataclasses import dataclass

import torch

from ..arguments import choice, positive, whole_number
from ..conditioning.abc_kernels import KERNELS
from ..errors import ArgumentError
from ..settings import Settings
from ..target import Density, check_density
from .sample import Found, equal_weights, nothing_accepted
from .simulation import Simulation

__all__ = ["ABCImportance", "ABCRejection"]


@dataclass(frozen=True, eq=False)
class ABCRejection(Settings):
    """Prior draws whose simulation is accepted with probability ``K(d/eps)``: exact draws from the ABC posterior.

    Args:
        tolerance: eps.
        kernel: K: ``"uniform"``, ``"epanechnikov"`` or ``"gaussian"``.
        max_simulations: simulations after which a run ends with the draws that it has.
    """

    tolerance: float
    kernel: str = "uniform"
    max_simulations: int = 1_000_000

    def __post_init__(self):
        positive("ABCRejection", "tolerance", self.tolerance)
        choice("ABCRejection", "kernel", self.kernel, tuple(KERNELS))
        whole_number("ABCRejection", "max_simulations", self.max_simulations)

    def run(self, simulation: Simulation, draws: int, rng: torch.Generator) -> Found:
        kept, near, done, accepted, smallest = [], [], 0, 0, math.inf
        while accepted < draws and done < self.max_simulations:
            # as many as the acceptance so far asks for, up to a batch
            wanted = (draws - accepted) / max(accepted / done, 1e-6) if done else 4 * draws
            n = int(min(simulation.rows, self.max_simulations - done, max(wanted, 1)))
            z = simulation.draw_prior(n, rng)
            distance = simulation.distances(z, rng)
            log_kernel = -KERNELS[self.kernel]((distance / self.tolerance).square())
            uniform = torch.rand(n, generator=rng, dtype=torch.float64)
            taken = uniform < log_kernel.exp()
            kept.append(z[taken])
            near.append(distance[taken])
            done, accepted, smallest = done + n, accepted + int(taken.sum()), min(smallest, distance.min().item())
        if not accepted:
            raise nothing_accepted(self.tolerance, smallest, done)
        parameters, distances = torch.cat(kept)[:draws], torch.cat(near)[:draws]
        return Found(parameters, equal_weights(parameters), distances, self.tolerance, done, accepted / done)


@dataclass(frozen=True, eq=False)
class ABCImportance(Settings):
    """Draws of a proposal with weights ``p(z) K(d/eps)/q(z)``: every simulation counts.

    Args:
        tolerance: eps.
        kernel: K: ``"gaussian"``, ``"epanechnikov"`` or ``"uniform"``.
        proposal: q; None for the prior.
    """

    tolerance: float
    kernel: str = "gaussian"
    proposal: Density | None = None

    def __post_init__(self):
        positive("ABCImportance", "tolerance", self.tolerance)
        choice("ABCImportance", "kernel", self.kernel, tuple(KERNELS))
        if self.proposal is not None:
            check_density("ABCImportance", "proposal", self.proposal)

    def run(self, simulation: Simulation, draws: int, rng: torch.Generator) -> Found:
        proposal = simulation.prior if self.proposal is None else self.proposal
        z = proposal.sample((draws,), generator=rng).double()
        if tuple(z.shape) != (draws, simulation.dim):
            raise ArgumentError(
                f"ABCImportance(proposal of {z.shape[-1]} coordinates): the simulator has {simulation.dim} parameters"
            )
        distance = simulation.distances(z, rng)
        log_weights = -KERNELS[self.kernel]((distance / self.tolerance).square())
        if self.proposal is not None:
            log_weights = log_weights + simulation.prior.log_prob(z) - self.proposal.log_prob(z)
        counted = log_weights > -math.inf
        if not counted.any():
            raise nothing_accepted(self.tolerance, distance.min().item(), draws)
        share = counted.double().mean().item()
        return Found(z[counted], log_weights[counted], distance[counted], self.tolerance, draws, share)
