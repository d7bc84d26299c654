"""ABC by rejection, importance sampling, Markov chains, and sequential Monte Carlo over tolerances (math 2.8)."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import choice, fraction, positive, whole_number
from ..conditioning.abc_kernels import KERNELS
from ..errors import ArgumentError, warn
from ..settings import Settings
from ..target import Density, check_density
from .sample import Found, Simulation, equal_weights, nothing_accepted


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
        at = SimpleNamespace(kept=[], near=[], done=0, accepted=0, smallest=math.inf)

        def more() -> bool:
            return at.accepted < draws and at.done < self.max_simulations

        for _ in simulation.progress.steps("simulations", more, (at, rng)):
            # as many as the acceptance so far asks for, up to a batch
            wanted = (draws - at.accepted) / max(at.accepted / at.done, 1e-6) if at.done else 4 * draws
            n = int(min(simulation.rows, self.max_simulations - at.done, max(wanted, 1)))
            z = simulation.draw_prior(n, rng)
            distance = simulation.distances(z, rng)
            log_kernel = -KERNELS[self.kernel]((distance / self.tolerance).square())
            uniform = torch.rand(n, generator=rng, dtype=torch.float64)
            taken = uniform < log_kernel.exp()
            at.kept.append(z[taken])
            at.near.append(distance[taken])
            at.done, at.accepted = at.done + n, at.accepted + int(taken.sum())
            at.smallest = min(at.smallest, distance.min().item())
        if not at.accepted:
            raise nothing_accepted(self.tolerance, at.smallest, at.done)
        parameters, distances = torch.cat(at.kept)[:draws], torch.cat(at.near)[:draws]
        rate = at.accepted / at.done
        return Found(parameters, equal_weights(parameters), distances, self.tolerance, at.done, rate)


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
        at, parts = SimpleNamespace(distances=[]), z.split(simulation.rows)
        for i in simulation.progress.steps("simulations", len(parts), (at, rng)):
            at.distances.append(simulation.distances(parts[i], rng))
        distance = torch.cat(at.distances)
        log_weights = -KERNELS[self.kernel]((distance / self.tolerance).square())
        if self.proposal is not None:
            log_weights = log_weights + simulation.prior.log_prob(z) - self.proposal.log_prob(z)
        counted = log_weights > -math.inf
        if not counted.any():
            raise nothing_accepted(self.tolerance, distance.min().item(), draws)
        share = counted.double().mean().item()
        return Found(z[counted], log_weights[counted], distance[counted], self.tolerance, draws, share)


class Particles(NamedTuple):
    """Parameters ``[n, D]``, the distances of their simulations ``[n]`` and their log priors ``[n]``."""

    z: Tensor
    distance: Tensor
    log_prior: Tensor


def walk_factor(z: Tensor) -> Tensor:
    """A factor of the covariance ``2.38^2/D`` times that of draws ``[n, D]``, regularised."""
    covariance = torch.atleast_2d(z.mT.cov()) * (2.38**2 / z.shape[-1])
    scale = covariance.diagonal().mean().clamp_min(torch.finfo(z.dtype).tiny)
    return torch.linalg.cholesky(covariance + 1e-9 * scale * torch.eye(z.shape[-1], dtype=z.dtype))


def move(
    simulation: Simulation, here: Particles, factor: Tensor, tolerance: float, kernel: str, rng: torch.Generator
) -> tuple[Particles, Tensor]:
    """One Metropolis-Hastings step of each, with the kernel of its own simulation kept: particles, and what moved."""
    z = here.z + torch.randn(here.z.shape, generator=rng, dtype=here.z.dtype) @ factor.mT
    log_prior = simulation.prior.log_prob(z)
    uniform = torch.rand(len(z), generator=rng, dtype=z.dtype).log()
    # what the prior alone rejects need not be simulated, but for a kernel that may raise the ratio
    possible = log_prior > -torch.inf
    if kernel == "uniform":
        possible &= uniform < log_prior - here.log_prior
    distance = torch.full_like(here.distance, torch.inf)
    if possible.any():
        distance[possible] = simulation.distances(z[possible], rng)
    energy = [KERNELS[kernel]((d / tolerance).square()) for d in (here.distance, distance)]
    moved = possible & (uniform < log_prior - here.log_prior + energy[0] - energy[1])
    there = Particles(z, distance, log_prior)
    new = (torch.where(moved[:, None] if a.ndim > 1 else moved, a, b) for a, b in zip(there, here, strict=True))
    return Particles(*new), moved


@dataclass(frozen=True, eq=False)
class ABCMCMC(Settings):
    """Random-walk chains on the parameters, each proposal accepted by the kernel of one simulation.

    Chains start at draws by rejection at the same tolerance, whose covariance is that of the walk.

    Args:
        tolerance: eps.
        kernel: K, as of :class:`ABCRejection`.
        chains: chains, simulated together.
        warmup: steps of each chain that are not kept.
        scale: factor on the steps ``2.38/sqrt(D)`` standard deviations; positive.
        max_simulations: simulations by which the starts must be found.
    """

    tolerance: float
    kernel: str = "uniform"
    chains: int = 100
    warmup: int = 50
    scale: float = 1.0
    max_simulations: int = 1_000_000

    def __post_init__(self):
        positive("ABCMCMC", "tolerance", self.tolerance)
        choice("ABCMCMC", "kernel", self.kernel, tuple(KERNELS))
        whole_number("ABCMCMC", "chains", self.chains, 2)
        whole_number("ABCMCMC", "warmup", self.warmup, 0)
        positive("ABCMCMC", "scale", self.scale)
        whole_number("ABCMCMC", "max_simulations", self.max_simulations)

    def run(self, simulation: Simulation, draws: int, rng: torch.Generator) -> Found:
        start = ABCRejection(self.tolerance, self.kernel, self.max_simulations).run(simulation, self.chains, rng)
        # fewer starts than chains: some share one
        source = torch.arange(self.chains) % len(start.parameters)
        z = start.parameters[source]
        here = Particles(z, start.distances[source], simulation.prior.log_prob(z))
        spread = simulation.draw_prior(self.chains, rng) if len(start.parameters) <= simulation.dim else z
        factor = self.scale * walk_factor(spread)
        at = SimpleNamespace(here=here, kept=[], near=[], accepted=0.0)
        length = -(-draws // self.chains)
        for i in simulation.progress.steps("chains", self.warmup + length, (at, rng)):
            at.here, moved = move(simulation, at.here, factor, self.tolerance, self.kernel, rng)
            if i >= self.warmup:
                at.kept.append(at.here.z)
                at.near.append(at.here.distance)
                at.accepted += moved.double().mean().item()
        parameters, distances = torch.cat(at.kept)[:draws], torch.cat(at.near)[:draws]
        simulations, rate = start.simulations + self.chains * (self.warmup + length), at.accepted / length
        return Found(parameters, equal_weights(parameters), distances, self.tolerance, simulations, rate)


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
        at = SimpleNamespace(here=here, reached=here.distance.max().item(), done=draws, acceptance=1.0)
        for _ in simulation.progress.steps("tolerances", lambda: at.reached > self.tolerance, (at, rng)):
            here = at.here
            wanted = max(here.distance.quantile(self.survive).item(), self.tolerance)
            below = here.distance[here.distance < at.reached]
            if wanted >= at.reached and len(below):
                # equal distances, as of discrete outputs
                wanted = max(below.max().item(), self.tolerance)
            alive = here.distance <= wanted
            if not alive.any() or not wanted < float("inf"):
                raise nothing_accepted(self.tolerance, here.distance.min().item(), at.done)
            if at.acceptance < self.least_acceptance or wanted >= at.reached or at.done >= self.max_simulations:
                warn(
                    f"ABCSMC(tolerance={self.tolerance:g}): stopped at {at.reached:.3g} after {at.done} simulations, "
                    f"where {100 * at.acceptance:.2g} % of moves are accepted; the smallest distance seen is "
                    f"{here.distance.min():.3g}",
                )
                break
            at.reached = wanted
            survivors = alive.nonzero().flatten()
            picked = torch.randint(len(survivors), (draws,), generator=rng)
            # survivors stay, the others restart from them
            source = torch.where(alive, torch.arange(draws), survivors[picked])
            here = Particles(*(values[source] for values in here))
            factor = walk_factor(here.z[alive] if alive.sum() > simulation.dim else here.z)
            stayed = torch.ones(draws, dtype=torch.bool)
            moves = 0
            while moves < self.max_moves and stayed.double().mean() > 0.05:
                here, moved = move(simulation, here, factor, at.reached, "uniform", rng)
                stayed, moves, at.done = stayed & ~moved, moves + 1, at.done + draws
                at.acceptance = moved.double().mean().item()
            at.here = here
        here = at.here
        return Found(here.z, equal_weights(here.z), here.distance, at.reached, at.done, at.acceptance)
