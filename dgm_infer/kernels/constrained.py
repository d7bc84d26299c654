"""Constrained Hamiltonian Monte Carlo on the fibre of an observation (J Algorithm 1, T Algorithm 11)."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..fibre import Fibre, Linearisation
from ..integrators import geodesic
from ..projection import SOLVERS, project
from .kernel import (
    Info,
    Settings,
    accept,
    broadcast_step_size,
    check_count,
    check_n_steps,
    check_step_size,
    draw_n_steps,
)

__all__ = ["ConstrainedHMC", "ConstrainedState"]


class ConstrainedState(NamedTuple):
    position: Tensor
    """``[chains, *batch, D]``."""
    linearisation: Linearisation
    """Jacobian, energy and gradient there; one flat batch of ``chains * prod(batch)`` rows."""

    @property
    def energy(self) -> Tensor:
        """``[chains, *batch]``."""
        return self.linearisation.energy.reshape(self.position.shape[:-1])


@dataclass(frozen=True, eq=False)
class ConstrainedHMC(Settings):
    """Constrained HMC with geodesic trajectories of random length, unit mass.

    Args:
        step_size: positive number or tensor ``[*batch]``, fixed; None to adapt it in warm-up, per problem.
        n_steps: integrator steps a transition, or the inclusive range they are drawn from.
        n_geodesic: geodesic sub-steps a step (Ng).
        solver: ``"quasi_newton"`` (one factorisation a projection) or ``"newton"`` (one an iteration).
        tolerance: a projection has converged when ``max|c| < tolerance * max(1, |y|_max)``; None for 1e-8 in
            float64 and 1e-5 in float32. A reversed sub-step must return within ``sqrt(tolerance)``.
        max_iterations: constraint evaluations after which a projection has failed.
    """

    step_size: float | Tensor | None = None
    n_steps: int | tuple[int, int] = (5, 10)
    n_geodesic: int = 4
    solver: str = "quasi_newton"
    tolerance: float | None = None
    max_iterations: int = 50

    def __post_init__(self):
        name = type(self).__name__
        check_step_size(name, self.step_size)
        check_n_steps(name, self.n_steps)
        check_count(name, "n_geodesic", self.n_geodesic)
        check_count(name, "max_iterations", self.max_iterations)
        if self.solver not in SOLVERS:
            raise ArgumentError(f"{name}(solver={self.solver!r}): must be one of {', '.join(SOLVERS)}")
        if self.tolerance is not None and not (isinstance(self.tolerance, int | float) and self.tolerance > 0):
            raise ArgumentError(f"{name}(tolerance={self.tolerance}): must be positive, or None for the default")

    def check(self, problem) -> None:
        if not isinstance(problem, Fibre):
            raise ArgumentError(
                f"ConstrainedHMC samples a Fibre, not a {type(problem).__name__}: use HMC, or condition(...) without "
                "tolerance"
            )
        if problem.values.shape[-1] >= problem.dim:
            raise ArgumentError(
                f"{problem.values.shape[-1]} observed values fix all {problem.dim} inputs up to isolated points, "
                "between which no chain can move: observe fewer, or give the model noise, WithNoise(model, sd=...)"
            )

    def relative_tolerance(self, dtype: torch.dtype) -> float:
        """The tolerance in use for this dtype."""
        if self.tolerance is not None:
            return self.tolerance
        return 1e-8 if dtype == torch.float64 else 1e-5

    def init(self, problem: Fibre, position: Tensor) -> ConstrainedState:
        flat = problem.rows(position.shape[0])
        return ConstrainedState(position, flat.linearise(position.reshape(-1, problem.dim)))

    def step(self, problem: Fibre, state: ConstrainedState, rng: torch.Generator) -> tuple[ConstrainedState, Info]:
        shape = state.position.shape[:-1]
        flat = problem.rows(shape[0])
        u, here = state.position.reshape(-1, problem.dim), state.linearisation
        tolerance = self.relative_tolerance(u.dtype)
        step_size = broadcast_step_size(self.step_size, u.new_empty(shape)).reshape(-1)
        n_steps = draw_n_steps(self.n_steps, rng)
        momentum = here.jacobian.tangent(torch.randn(u.shape, generator=rng, dtype=u.dtype, device=u.device))
        solver = partial(
            project, tolerance=tolerance * flat.scale, solver=self.solver, max_iterations=self.max_iterations
        )
        end = geodesic(flat, u, momentum, here, step_size, n_steps, self.n_geodesic, solver, tolerance**0.5)
        h_old = here.energy + 0.5 * momentum.square().sum(-1)
        h_new = end.linearisation.energy + 0.5 * end.momentum.square().sum(-1)
        accepted, probability, status = accept(h_old, h_new, end.status, rng)
        keep = accepted.unsqueeze(-1)
        u = torch.where(keep, end.position, u)
        there = end.linearisation
        here = Linearisation(
            there.jacobian.where(accepted, here.jacobian),
            torch.where(accepted, there.energy, here.energy),
            torch.where(keep, there.gradient, here.gradient),
            torch.where(accepted, there.constraint_error, here.constraint_error),
        )
        info = Info(
            acceptance_rate=probability.reshape(shape),
            status=status.reshape(shape),
            n_steps=torch.full(shape, n_steps, dtype=torch.int32, device=u.device),
            step_size=step_size.reshape(shape),
            energy=torch.where(accepted, h_new, h_old).reshape(shape),
            constraint_error=here.constraint_error.reshape(shape),
        )
        return ConstrainedState(u.reshape(state.position.shape), here), info
