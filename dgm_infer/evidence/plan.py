"""The plan that an annealing run is frozen to, and the pilot that tunes it."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..arguments import fraction, optional_positive, whole_number
from ..progress import Progress
from . import schedules
from .method import check_held
from .path import AnnealedPath
from .pilot import Pilot, StepSizes, anneal_pilot

__all__ = ["Plan", "check_settings", "frozen_plan", "temperatures_of", "tuned_betas", "tuned_steps"]


class Plan(NamedTuple):
    """A frozen annealing run, ``beta_0 = 0`` to ``beta_K = 1``."""

    betas: Tensor
    """``[K + 1, *batch]``, float64."""
    step_sizes: Tensor
    """``[K + 1, *batch]``."""


class Planned(Protocol):
    """Settings that determine a plan."""

    @property
    def temperatures(self) -> int: ...
    @property
    def schedule(self) -> schedules.Schedule: ...
    @property
    def step_size(self) -> float | Tensor | None: ...
    @property
    def target_acceptance(self) -> float: ...
    @property
    def pilot_temperatures(self) -> int: ...


def check_settings(method: Planned, *also: str) -> None:
    """Raise ArgumentError if a setting is outside its range; ``also`` names the method's own schedules."""
    name = type(method).__name__
    for field in ("temperatures", "pilot_temperatures"):
        whole_number(name, field, getattr(method, field))
    optional_positive(name, "step_size", method.step_size)
    fraction(name, "target_acceptance", method.target_acceptance)
    schedules.check(name, method.schedule, method.temperatures, (*schedules.TUNED, *also))


def tuned_steps(
    method: Planned,
    path: AnnealedPath,
    chains: int,
    n_steps: int,
    rng: torch.Generator,
    progress: Progress,
) -> tuple[StepSizes, Pilot | None]:
    """Step sizes, and the pilot if one was needed."""
    problems = path.batch_shape.numel()
    # of other schedules the number of temperatures is a limit, or not used
    if isinstance(method.schedule, str) and method.schedule in (*schedules.SCHEDULES, *schedules.TUNED):
        check_held(method, path, temperatures=method.temperatures * problems)
    if method.step_size is not None and not schedules.is_tuned(method.schedule):
        return StepSizes.constant(method.step_size, path.batch_shape, path.base.mean), None
    check_held(method, path, pilot_temperatures=method.pilot_temperatures * problems)
    progress.expect(method.pilot_temperatures)
    pilot = anneal_pilot(
        path,
        max(chains, 4),
        rng,
        temperatures=method.pilot_temperatures,
        n_steps=n_steps,
        target_acceptance=method.target_acceptance,
        step_size=method.step_size,
        progress=progress,
    )
    if method.step_size is not None:
        return StepSizes.constant(method.step_size, path.batch_shape, path.base.mean), pilot
    return pilot.step_sizes, pilot


def temperatures_of(method: Planned, path: AnnealedPath, pilot: Pilot | None) -> Tensor:
    """Inverse temperatures ``[K + 1, *batch]``, float64, from the pilot if that determines the schedule."""
    if schedules.is_tuned(method.schedule):
        assert pilot is not None
        betas = tuned_betas(method.schedule, method.temperatures, pilot)
    else:
        betas = schedules.values_of(type(method).__name__, method.schedule, method.temperatures)
    betas = betas.to(path.base.mean.device)
    if betas.ndim == 1:
        betas = betas.reshape(-1, *[1] * len(path.batch_shape)).expand(len(betas), *path.batch_shape)
    return betas


def frozen_plan(
    method: Planned, path: AnnealedPath, chains: int, n_steps: int, rng: torch.Generator, progress: Progress
) -> Plan:
    """Schedule and step sizes, tuned on a pilot of ``chains`` chains if needed."""
    sizes, pilot = tuned_steps(method, path, chains, n_steps, rng, progress)
    betas = temperatures_of(method, path, pilot)
    return Plan(betas, sizes.at(betas))


def tuned_betas(schedule: schedules.Schedule, n: int, pilot: Pilot) -> Tensor:
    """The temperatures ``[n + 1, *batch]`` of a schedule in :data:`schedules.TUNED`."""
    if schedule == "barrier":
        return schedules.barrier(n, pilot.betas, pilot.rates)
    return schedules.equalised(n, pilot.betas, pilot.variances)
