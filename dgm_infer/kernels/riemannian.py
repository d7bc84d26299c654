"""Riemannian-manifold Hamiltonian Monte Carlo under a Gaussian tolerance (J 7, J (80))."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import choice, fraction, whole_number
from ..conditioning.abc_kernels import InputPosterior, NoiseEmbedding
from ..conditioning.projection import SOLVERS
from ..errors import ArgumentError
from .constrained import ConstrainedHMC, ConstrainedState
from .hmc import Scheduled
from .kernel import Info, Tuning


class RiemannianState(NamedTuple):
    position: Tensor
    """``[chains, *batch, D]``."""
    energy: Tensor
    """``[chains, *batch]``."""
    lifted: ConstrainedState
    """The positions on the graph of the noise, ``[chains, *batch, D + K]``."""


@dataclass(frozen=True, eq=False)
class RiemannianHMC(Scheduled):
    """HMC under the metric ``G(u) = I + J^T J / eps^2`` of an ABC posterior of Gaussian width eps (math 8.14, J (80)).

    ``H(u, p) = phi(u) + log|G(u)| / 2 + p^T G(u)^-1 p / 2``

    The metric is that of the Euclidean space of inputs and noise on the graph ``n(u) = (y - g(u)) / eps``. Trajectories
    are integrated there, by an implicit scheme with a quasi-Newton or Newton solve per step, each reversed to check it:
    with the generalised leapfrog in u itself, steps must fall with eps. It moves along ridges that HMC crosses to and
    fro. ``condition(WithNoise(model, eps), y)`` poses the same problem, there with starts whose noise is annealed.

    Args:
        step_size, n_steps, trajectory_length, solver, max_iterations: as in :class:`ConstrainedHMC`.
        tolerance: of the solver, as in :class:`ConstrainedHMC`; no ABC tolerance.
    """

    solver: str | None = None
    tolerance: float | None = None
    max_iterations: int = 50

    def __post_init__(self):
        super().__post_init__()
        choice("RiemannianHMC", "solver", self.solver, (*SOLVERS, None))
        whole_number("RiemannianHMC", "max_iterations", self.max_iterations)
        if self.tolerance is not None:
            fraction("RiemannianHMC", "tolerance", self.tolerance)

    @property
    def lifted(self) -> ConstrainedHMC:
        """The kernel on the graph."""
        return ConstrainedHMC(
            self.step_size,
            self.n_steps,
            n_geodesic=1,
            trajectory_length=self.trajectory_length,
            solver=self.solver,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )

    def check(self, problem) -> None:
        if not isinstance(problem, InputPosterior):
            raise ArgumentError(
                f"RiemannianHMC samples what condition(..., tolerance=eps) returns, not a {type(problem).__name__}: "
                "use HMC, or on a fibre ConstrainedHMC"
            )
        _embedding(problem)
        self.check_batch(problem.batch_shape, "step_size", "trajectory_length")

    def tuning(self, problem: InputPosterior) -> Tuning:
        return self.lifted.tuning(_embedding(problem).fibre)

    def init(self, problem: InputPosterior, position: Tensor) -> RiemannianState:
        embedding = _embedding(problem)
        return _state(embedding, self.lifted.init(embedding.fibre, embedding.lift(position)))

    def step(
        self, problem: InputPosterior, state: RiemannianState, rng: torch.Generator
    ) -> tuple[RiemannianState, Info]:
        embedding = _embedding(problem)
        after, info = self.lifted.step(embedding.fibre, state.lifted, rng)
        stats = {name: value for name, value in info.stats.items() if name != "constraint_error"}
        return _state(embedding, after), replace(info, stats=stats)


def _embedding(problem: InputPosterior) -> NoiseEmbedding:
    """The graph of the noise of a problem.

    Raises:
        ArgumentError: its kernel is not Gaussian, or its outputs have no derivative.
    """
    embedding = problem.embedding
    if embedding is None:
        raise ArgumentError(
            "RiemannianHMC needs condition(..., tolerance=eps) with kernel='gaussian', the Euclidean distance and a "
            "differentiable model: use EllipticalSlice, LinearSlice or RandomWalk"
        )
    return embedding


def _state(embedding: NoiseEmbedding, lifted: ConstrainedState) -> RiemannianState:
    # the energy of the fibre is that of the tolerance and log|J J^T + eps^2 I| / 2, of which no part is the posterior's
    gram = lifted.linearisation.jacobian.log_det.reshape(lifted.position.shape[:-1])
    return RiemannianState(embedding.project(lifted.position), lifted.energy - 0.5 * gram, lifted)
