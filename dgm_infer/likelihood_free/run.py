"""``sample_abc()``: a simulation and a method become weighted draws."""

import dataclasses
from typing import Protocol, runtime_checkable

import torch

from ..arguments import instance, random_seed, whole_number
from ..arguments.objects import shown
from ..errors import ArgumentError
from .result import ABCDraws, Found
from .simulation import Simulation

__all__ = ["ABCMethod", "sample_abc"]


@runtime_checkable
class ABCMethod(Protocol):
    """An immutable configuration of a way to draw."""

    def run(self, simulation: Simulation, draws: int, rng: torch.Generator, /) -> Found: ...


def sample_abc(simulation: Simulation, method: ABCMethod, *, draws: int = 1000, seed: int | None = None) -> ABCDraws:
    """Draw from the ABC posterior of a simulator's parameters (math 2.8).

    Args:
        simulation: simulator, prior, data and distance.
        method: :class:`ABCRejection`, :class:`ABCImportance`, :class:`ABCMCMC` or :class:`ABCSMC`.
        draws: draws to return; of :class:`ABCImportance`, simulations.
        seed: seed of all randomness; None draws one and records it.

    Raises:
        ArgumentError: an argument is outside its range.
        StartError: nothing is accepted; the message names the smallest distance seen and bounds the acceptance rate.
    """
    instance("sample_abc", "simulation", simulation, Simulation, "Simulation(simulate, prior, observed)")
    if isinstance(method, type) or not isinstance(method, ABCMethod):
        raise ArgumentError(f"sample_abc(method={shown(method)}): must be a method, such as ABCSMC(tolerance=0.1)")
    draws = whole_number("sample_abc", "draws", draws, 2)
    seed = random_seed("sample_abc", seed)
    found = method.run(simulation, draws, torch.Generator().manual_seed(seed))
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return ABCDraws(**fields, seed=seed)
