"""``sample_abc()``: a simulation and a method become weighted draws."""

import copy
import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..arguments import allocatable, choice, finite, function, instance, random_seed, whole_number
from ..arguments.values import shown
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, ModelError, StartError, cause, warn
from ..progress import Progress
from ..runs.folder import RunFolder
from ..runs.kinds import KINDS
from ..runs.replay import CallRun, StoredCall
from ..runs.resume import begin
from ..sampling.plan import Keeping
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


@dataclass(frozen=True)
class Found:
    """What a method returns."""

    parameters: Tensor
    log_weights: Tensor
    distances: Tensor
    tolerance: float
    simulations: int
    acceptance_rate: float


@dataclass(frozen=True)
class ABCDraws(Found):
    """Draws from an ABC posterior.

    Args:
        parameters: z, ``[n, D]``.
        log_weights: of the draws, ``[n]``; all 0 where draws count equally.
        distances: of their simulations from the data, ``[n]``.
        tolerance: the tolerance that was reached.
        simulations: rows that were simulated in all.
        acceptance_rate: share of the simulations, or of the proposals, that were accepted.
        seed: seed of the run.
    """

    seed: int

    @property
    def weights(self) -> Tensor:
        """Normalised weights ``[n]``."""
        return self.log_weights.softmax(0)

    @property
    def ess(self) -> float:
        """``1/sum w^2``: how many equally weighted draws these are worth, if they are independent."""
        return 1 / self.weights.square().sum().item()

    @property
    def mean(self) -> Tensor:
        """Posterior means ``[D]``."""
        return self.weights @ self.parameters

    @property
    def sd(self) -> Tensor:
        """Posterior standard deviations ``[D]``."""
        return (self.weights @ (self.parameters - self.mean).square()).sqrt()


def nothing_accepted(tolerance: float, smallest: float, simulations: int) -> StartError:
    """The error of a run without any acceptance."""
    return StartError(
        f"none of {simulations} simulations was accepted at tolerance={tolerance:g}: the smallest distance seen is "
        f"{smallest:.3g}, and the acceptance rate is below {3 / simulations:.1g}: raise the tolerance, simulate "
        "more, or use ABCSMC()"
    )


def equal_weights(parameters: Tensor) -> Tensor:
    """Log weights of 0, ``[n]``."""
    return torch.zeros(len(parameters), dtype=parameters.dtype)


@runtime_checkable
class ABCMethod(Protocol):
    """An immutable configuration of a way to draw."""

    def run(self, simulation: Simulation, draws: int, rng: torch.Generator, /) -> Found: ...


def sample_abc(
    simulation: Simulation,
    method: ABCMethod,
    *,
    draws: int = 1000,
    seed: int | None = None,
    run: str | os.PathLike | None = None,
    checkpoint_every: float = 60.0,
) -> ABCDraws:
    """Draw from the ABC posterior of a simulator's parameters (math 2.8).

    Args:
        simulation: simulator, prior, data and distance.
        method: :class:`ABCRejection`, :class:`ABCImportance`, :class:`ABCMCMC` or :class:`ABCSMC`.
        draws: draws to return; of :class:`ABCImportance`, simulations.
        seed: seed of all randomness; None draws one and records it.
        run: a new folder that keeps the run while it runs: :func:`dgm_infer.resume` goes on with it after a stop of
            any kind. The draws are the same as without; so they are only if simulators draw all their random numbers
            from the generator that they are given.
        checkpoint_every: seconds from one checkpoint to the next, which is what a stop may cost.

    Raises:
        ArgumentError: an argument is outside its range, or the folder holds a run.
        StartError: nothing is accepted; the message names the smallest distance seen and bounds the acceptance rate.
    """
    instance("sample_abc", "simulation", simulation, Simulation, "Simulation(simulate, prior, observed)")
    if isinstance(method, type) or not isinstance(method, ABCMethod):
        raise ArgumentError(f"sample_abc(method={shown(method)}): must be a method, such as ABCSMC(tolerance=0.1)")
    draws = whole_number("sample_abc", "draws", draws, 2)
    allocatable("sample_abc", "draws", draws, draws * simulation.dim, "fewer draws")
    seed = random_seed("sample_abc", seed)
    keeping = Keeping.checked("sample_abc", run, checkpoint_every)
    if not keeping.is_asked_for:
        return _as_draws(method, draws, seed, _found(simulation, method, draws, seed, simulation.progress))
    numbers = {"draws": draws, "seed": seed}
    cpu = torch.device("cpu")
    return begin("sample_abc", keeping, simulation, {"method": method}, numbers, shards=1, device=cpu, progress=False)


def _found(simulation: Simulation, method: ABCMethod, draws: int, seed: int, progress: Progress) -> Found:
    return method.run(simulation.watched(progress), draws, torch.Generator().manual_seed(seed))


def _as_draws(method: ABCMethod, draws: int, seed: int, found: Found) -> ABCDraws:
    if len(found.parameters) < draws and hasattr(method, "max_simulations"):
        warn(
            f"sample_abc(draws={draws}): {found.simulations} simulations made only {len(found.parameters)} draws: "
            "raise max_simulations or the tolerance, or use ABCSMC()",
            DiagnosisWarning,
        )
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return ABCDraws(**fields, seed=seed)


def _shard(
    folder: RunFolder, simulation: Any, inputs: dict[str, Any], number: int, bar: Progress
) -> tuple[Found, bool]:
    draws, seed = (folder.manifest[name] for name in ("draws", "seed"))
    return _found(simulation, inputs["method"], draws, seed, bar), True


def _result(folder: RunFolder, simulation: Any, inputs: dict[str, Any], found: list[Found]) -> ABCDraws:
    return _as_draws(inputs["method"], folder.manifest["draws"], folder.manifest["seed"], found[0])


def _given(call: str, simulation: Any) -> Simulation:
    return instance(call, "problem", simulation, Simulation, "the Simulation of the run")


KINDS["sample_abc"] = CallRun(StoredCall(_shard, _result, _given))
