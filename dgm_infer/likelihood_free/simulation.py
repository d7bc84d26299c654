"""A simulator with its prior and data, called in batches that fit a memory budget."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..arguments import choice, finite, function, whole_number
from ..errors import ArgumentError, ModelError, cause
from ..progress import Progress
from ..target import Density, check_density


@dataclass(frozen=True)
class BatchSettings:
    """Rows that a simulator is called with."""

    copies: int = 16
    """Copies of its inputs and outputs that it is taken to hold at once."""
    most: int = 100_000
    """Rows of a call at most."""
    first: int = 4
    """Rows of the first call, which finds the size of the outputs."""


BATCHES = BatchSettings()


class Simulation:
    """``z ~ p(z)``, ``x ~ p(x | z)`` by a simulator alone, and the distance of x from observed data (math 2.8).

    Args:
        simulate: draws of x for draws of z: ``simulate(z, rng)``, ``[n, D] -> [n, K]``, rows independent.
        prior: density of z.
        observed: data y ``[K]``; of a simulator of summaries, their values.
        library: ``"torch"`` hands the simulator a tensor in float64 and a ``torch.Generator``, ``"numpy"`` an array and
            a ``numpy.random.Generator``.
        distance: ``[n, K], [K] -> [n]``; None for the Euclidean one.
        summaries: ``[n, K] -> [n, S]`` in torch, of simulated and of observed data; None for the data themselves.
        memory: bytes that a call of the simulator may take; it is called in batches accordingly.

    Raises:
        ArgumentError: an argument is unsuitable, or the distances are not one number per simulation.
        ModelError: the simulator fails, or gives something else than ``[n, K]``.
    """

    _progress: Progress | None = None

    def __init__(
        self,
        simulate: Callable[[Any, Any], Any],
        prior: Density,
        observed,
        *,
        library: Literal["torch", "numpy"] = "torch",
        distance: Callable[[Tensor, Tensor], Tensor] | None = None,
        summaries: Callable[[Tensor], Tensor] | None = None,
        memory: int = 2**28,
    ):
        self._simulate = function("Simulation", "simulate", simulate, "lambda z, rng: z + torch.randn(...)")
        check_density("Simulation", "prior", prior)
        self.prior, self.dim = prior, prior.dim
        self._library = choice("Simulation", "library", library, ("torch", "numpy"))
        y = finite("Simulation", "observed", observed, torch.float64)
        if y.ndim != 1 or not len(y):
            raise ArgumentError(f"Simulation(observed of shape {tuple(y.shape)}): must be one vector, [K]")
        self._distance, self._summaries = distance, summaries
        memory = whole_number("Simulation", "memory", memory)
        self._rows = BATCHES.first
        self.observed, self._summary = y, y[None]
        if summaries is not None:
            function("Simulation", "summaries", summaries, "lambda x: x.mean(-1, True)")
            try:
                self._summary = summaries(y[None])
            except Exception as error:
                raise ArgumentError(f"Simulation(summaries=): fails for the data: {cause(error)}") from error
        # draws of its own, so that a run's random numbers are left
        rng = torch.Generator().manual_seed(0)
        self.distances(self.draw_prior(BATCHES.first, rng), rng)
        self._rows = max(1, min(memory // (8 * BATCHES.copies * (self.dim + len(y))), BATCHES.most))

    def watched(self, progress: Progress) -> "Simulation":
        """The same, whose methods count their steps so."""
        other = copy.copy(self)
        other._progress = progress
        return other

    @property
    def progress(self) -> Progress:
        """What counts the steps of a run."""
        return Progress(False) if self._progress is None else self._progress

    @property
    def rows(self) -> int:
        """The most rows of one call of the simulator."""
        return self._rows

    def draw_prior(self, n: int, rng: torch.Generator) -> Tensor:
        """Prior draws in float64, ``[n, D]``."""
        return self.prior.sample((n,), generator=rng).double()

    def distances(self, z: Tensor, rng: torch.Generator) -> Tensor:
        """Distances of fresh simulations from the data, ``[n, D] -> [n]``; infinite where one is NaN."""
        return torch.cat([self._distances(part, rng) for part in z.split(self._rows)])

    def _distances(self, z: Tensor, rng: torch.Generator) -> Tensor:
        x = self._simulated(z, rng)
        try:
            found = x if self._summaries is None else self._summaries(x)
            if self._distance is None:
                distance = (found - self._summary).square().sum(-1).sqrt()
            else:
                distance = self._distance(found, self._summary[0])
        except Exception as error:
            raise ArgumentError(f"Simulation(distance=, summaries=): fails: {cause(error)}") from error
        if not isinstance(distance, Tensor) or distance.shape != (len(z),) or bool((distance < 0).any()):
            raise ArgumentError(
                "Simulation(distance=, summaries=): must give one non-negative number per simulation, shape "
                f"({len(z)},)"
            )
        return distance.double().nan_to_num(nan=math.inf)

    def _simulated(self, z: Tensor, rng: torch.Generator) -> Tensor:
        try:
            if self._library == "numpy":
                seed = int(torch.randint(2**62, (), generator=rng))
                x = torch.as_tensor(np.asarray(self._simulate(z.numpy().copy(), np.random.default_rng(seed))))
            else:
                with torch.no_grad():
                    x = torch.as_tensor(self._simulate(z, rng))
        except Exception as error:
            raise ModelError(f"the simulator fails for z of shape {tuple(z.shape)}: {cause(error)}") from error
        expected = (len(z), len(self.observed))
        if tuple(x.shape) != expected:
            raise ModelError(
                f"the simulator maps z of shape {tuple(z.shape)} to shape {tuple(x.shape)}: must be {expected}, one "
                "row like the observed data per row of z"
            )
        return x.double()
