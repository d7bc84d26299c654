"""ABC on parameters alone, with all the data: rejection and Markov chains, and how far they get (J 10.2)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dgm_infer import DirectedModel
from dgm_infer.likelihood_free import Simulation
from dgm_infer.likelihood_free.methods import Particles, move

__all__ = ["Attempt", "as_results", "chains", "describe", "rejection"]


@dataclass(frozen=True)
class Attempt:
    """What simulations under a uniform kernel reached."""

    label: str
    tolerance: float
    simulations: int
    accepted: int
    nearest: float
    """Smallest distance of a simulation from the data."""


class _Nearest:
    """The Euclidean distance, which remembers its smallest value."""

    def __init__(self):
        self.value = float("inf")

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        distance = (x - y).norm(dim=-1)
        self.value = min(self.value, distance.nan_to_num(nan=torch.inf).min().item())
        return distance


def rejection(model: DirectedModel, observed: Tensor, tolerance: float, *, simulations: int, seed: int) -> Attempt:
    """Prior draws whose simulation is within the tolerance."""
    simulation, nearest = _simulation(model, observed)
    rng = torch.Generator().manual_seed(seed)
    accepted = done = 0
    while done < simulations:
        n = min(simulation.rows, simulations - done)
        distance = simulation.distances(simulation.draw_prior(n, rng), rng)
        accepted, done = accepted + int((distance <= tolerance).sum()), done + n
    return Attempt(f"ABC rejection, ε = {tolerance:g}", tolerance, simulations, accepted, nearest.value)


def chains(
    model: DirectedModel,
    observed: Tensor,
    tolerance: float,
    starts: Tensor,
    *,
    step: float,
    updates: int,
    seed: int,
) -> Attempt:
    """Pseudo-marginal ABC-MCMC: random walks on ``u1`` with noise drawn again for every proposal (math 2.8).

    Args:
        model: as generator.
        observed: the data.
        tolerance: of the uniform kernel.
        starts: inputs ``[chains, D]`` that generate the data: their distance is 0, so that no start is to be found.
        step: standard deviation of proposals, in units of the prior's.
        updates: of each chain.
        seed: seed of all randomness.
    """
    simulation, nearest = _simulation(model, observed)
    rng = torch.Generator().manual_seed(seed)
    u1 = model.split(starts)[0]
    here = Particles(u1, u1.new_zeros(len(u1)), simulation.prior.log_prob(u1))
    factor = step * torch.eye(u1.shape[-1], dtype=u1.dtype)
    accepted = 0
    for _ in range(updates):
        here, moved = move(simulation, here, factor, tolerance, "uniform", rng)
        accepted += int(moved.sum())
    label = f"pseudo-marginal ABC-MCMC, ε = {tolerance:g}, steps of {step:g}"
    return Attempt(label, tolerance, updates * len(u1), accepted, nearest.value)


def describe(attempts: Sequence[Attempt]) -> str:
    """A line for each."""
    return "".join(
        f"{a.label}: {a.accepted} of {a.simulations} simulations accepted, the nearest {a.nearest:.4g} from the data\n"
        for a in attempts
    )


def as_results(attempts: Sequence[Attempt]) -> dict[str, dict]:
    """The same for JSON."""
    return {a.label: asdict(a) for a in attempts}


def _simulation(model: DirectedModel, observed: Tensor) -> tuple[Simulation, _Nearest]:
    """The model as a simulator of its global inputs, and a distance whose memory is empty."""
    nearest = _Nearest()

    def simulate(u1: Tensor, rng: torch.Generator) -> Tensor:
        u2 = model.local_density.sample((len(u1),), generator=rng, dtype=u1.dtype)
        return model.observed(torch.cat([u1, u2], -1))

    simulation = Simulation(simulate, model.global_density, observed, distance=nearest)
    # the simulation tries itself at prior draws when it is made
    nearest.value = float("inf")
    return simulation, nearest
