"""``sample_abc()``: a simulation and a method become weighted draws."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..arguments import allocatable, instance, random_seed, whole_number
from ..arguments.objects import shown
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, StartError, warn
from ..progress import Progress
from ..runs.folder import RunFolder
from ..runs.kinds import KINDS
from ..runs.replay import CallRun, StoredCall
from ..runs.resume import begin
from ..sampling.plan import Keeping
from .simulation import Simulation


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
