"""Kernels of a user's own: one without any parameter, one with a step size alone, and one that is wrong."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dgm_infer.errors import ArgumentError, Status
from dgm_infer.kernels import Info
from dgm_infer.kernels.kernel import Tuning
from dgm_infer.settings import Settings
from dgm_infer.target import Target


class Place(NamedTuple):
    position: Tensor
    energy: Tensor


def check_target(problem) -> None:
    if not isinstance(problem, Target):
        raise ArgumentError(f"a random walk samples a Target, not a {type(problem).__name__}")


def place(problem, position: Tensor) -> Place:
    with torch.no_grad():
        return Place(position, problem.energy(position))


def walk(problem, state: Place, scale: Tensor, rng: torch.Generator) -> tuple[Place, Place, Tensor, Tensor]:
    """The proposal of a random walk, the state after it, its acceptance probability and its status."""
    noise = torch.randn(state.position.shape, generator=rng, dtype=state.position.dtype)
    there = place(problem, state.position + scale.unsqueeze(-1) * noise)
    fine = there.energy.isfinite()
    probability = torch.where(fine, (state.energy - there.energy).clamp_max(0).exp(), 0.0)
    accepted = torch.rand(fine.shape, generator=rng, dtype=probability.dtype) < probability
    position = torch.where(accepted.unsqueeze(-1), there.position, state.position)
    after = Place(position, torch.where(accepted, there.energy, state.energy))
    status = torch.where(fine, int(Status.OK), int(Status.DIVERGED))
    return there, after, probability, status


class Wanderer:
    """A random walk of steps of 0.8, which has no parameter and only what is required of a kernel."""

    def check(self, problem):
        check_target(problem)

    def init(self, problem, position):
        return place(problem, position)

    def step(self, problem, state, rng):
        _, after, probability, status = walk(problem, state, torch.full_like(state.energy, 0.8), rng)
        return after, Info(probability, status, after.energy)


@dataclass(frozen=True, eq=False)
class RandomWalk(Settings):
    """A random walk whose step size warm-up chooses; it has no trajectories."""

    step_size: float | Tensor | None = None

    def check(self, problem):
        check_target(problem)

    def tuning(self, problem):
        return Tuning(step_size=self.step_size is None)

    def probe(self, step_size, n_steps):
        return self.replace(step_size=step_size)

    def init(self, problem, position):
        return place(problem, position)

    def step(self, problem, state, rng):
        scale = torch.as_tensor(self.step_size, dtype=state.energy.dtype).expand_as(state.energy)
        _, after, probability, status = walk(problem, state, scale, rng)
        return after, Info(probability, status, after.energy, stats={"step_size": scale})


class CarelessWalk(RandomWalk):
    """The mistake: proposals are taken whatever their energy."""

    def step(self, problem, state, rng):
        _, info = super().step(problem, state, rng)
        there, _, _, _ = walk(problem, state, info.stats["step_size"], rng)
        return there, info
