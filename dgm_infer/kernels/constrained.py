"""Constrained HMC on fibres (J Algorithm 1, T Algorithm 11), and by it Riemannian HMC under a tolerance (J 7)."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..arguments import choice, flag, fraction, whole_number
from ..autodiff.loops import is_captured
from ..autodiff.row_execution import captured_rows
from ..autodiff.xla import compiles
from ..conditioning.abc_kernels import InputPosterior, NoiseEmbedding
from ..conditioning.fibre import Fibre, Linearisation
from ..conditioning.projection import SOLVERS, Projection, project, solver_tolerance
from ..errors import ArgumentError, Status
from ..structures import JacobianMap
from .hmc import Scheduled, accept, draw_momentum
from .integrators import CIRCULAR, STRAIGHT, geodesic
from .kernel import Info, TrajectoryEnd, Trial, Tuning
from .metropolis import Point, point_at


@dataclass(frozen=True)
class ConstrainedSettings:
    """What :class:`ConstrainedHMC` goes by where its fields are None."""

    few_rows: int = 16
    """Rows of a Jacobian without structure up to which Newton's method, with one for each iteration, is worth its
    time."""


_SETTINGS = ConstrainedSettings()


class ConstrainedState(NamedTuple):
    position: Tensor
    """``[chains, *batch, D]``."""
    linearisation: Linearisation
    """Jacobian, energy and gradient at the position; one flat batch of ``chains * prod(batch)`` rows."""

    @property
    def energy(self) -> Tensor:
        """``[chains, *batch]``."""
        return self.linearisation.energy.reshape(self.position.shape[:-1])

    @property
    def constraint_error(self) -> Tensor:
        """``max|c|``, ``[chains, *batch]``."""
        return self.linearisation.constraint_error.reshape(self.position.shape[:-1])

    def where(self, condition: Tensor, other: "ConstrainedState") -> "ConstrainedState":
        """This state where the condition ``[chains, *batch]`` holds, else the other."""
        return ConstrainedState(
            torch.where(condition.unsqueeze(-1), self.position, other.position),
            self.linearisation.where(condition.flatten(), other.linearisation),
        )


@dataclass(frozen=True, eq=False)
class ConstrainedHMC(Scheduled):
    """Constrained HMC with geodesic trajectories of random length, unit mass.

    Args:
        step_size, n_steps, trajectory_length: as in :class:`HMC`.
        n_geodesic: geodesic sub-steps per step (Ng); None for one where Newton's method comes first, else two.
        solver: solver that a projection tries first: ``"quasi_newton"`` (one factorisation per projection),
            ``"broyden"`` (corrected by the steps made) or ``"newton"`` (one factorisation per iteration); chains on
            which it fails fall back to Newton, or from Newton to Broyden. None chooses Newton if its Jacobian is cheap
            (structured, with at most 8 global inputs), else Broyden, alone if the Jacobian has no structure and more
            than 16 rows.
        split: whether drifts follow the exact motion of a standard normal density (Gaussian split) instead of straight
            lines; None if the input density is standard normal.
        tolerance: a projection has converged when ``max|c| < tolerance * max(1, |y|_max)``; None for 1e-8 in
            float64 and 1e-5 in float32. A reversed sub-step must return within ``sqrt(tolerance)``.
        max_iterations: updates after which a solver has failed.
        compile: as in :class:`HMC`, on a CPU alone; it takes 12 to 20 s. None does not for networks with convolutions,
            whose arithmetic takes the time.
        float32_jacobians: whether Jacobians are computed in float32 and the constraint alone in the type of the
            positions: faster where a network's arithmetic takes the time, on a CPU 2 to 3 times for convolutions. The
            energy then has rounding errors of about 1e-7 times the condition number of the Jacobian (math 3.8). None
            does so for networks with convolutions.
        gram_force: whether trajectories follow the gradient of the Gram term ``log|J J^T| / 2``. The energy that
            decides on acceptance has the term either way, so that the law is the same; without its gradient a step
            through a network takes half the time or less, and fewer trajectories are accepted, above all long ones.
    """

    n_geodesic: int | None = None
    solver: str | None = None
    split: bool | None = None
    tolerance: float | None = None
    max_iterations: int = 50
    compile: bool | None = None
    float32_jacobians: bool | None = None
    gram_force: bool = True

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        if self.n_geodesic is not None:
            whole_number(name, "n_geodesic", self.n_geodesic)
        whole_number(name, "max_iterations", self.max_iterations)
        choice(name, "solver", self.solver, (*SOLVERS, None))
        choice(name, "split", self.split, (True, False, None))
        choice(name, "compile", self.compile, (True, False, None))
        choice(name, "float32_jacobians", self.float32_jacobians, (True, False, None))
        flag(name, "gram_force", self.gram_force)
        if self.tolerance is not None:
            fraction(name, "tolerance", self.tolerance)

    def check(self, problem) -> None:
        if not isinstance(problem, Fibre):
            raise ArgumentError(
                f"ConstrainedHMC samples a Fibre, not a {type(problem).__name__}: use HMC, or condition(...) without "
                "tolerance"
            )
        if problem.values.shape[-1] >= problem.dim:
            raise ArgumentError(
                f"{problem.values.shape[-1]} observed values fix all {problem.dim} inputs up to isolated points, "
                "between which no chain can move: observe fewer (leave out those that follow from others), or give the "
                "model noise, WithNoise(model, sd=...)"
            )
        self.check_batch(problem.batch_shape, "step_size", "trajectory_length")

    def relative_tolerance(self, dtype: torch.dtype) -> float:
        """The tolerance for this dtype."""
        return solver_tolerance(dtype) if self.tolerance is None else self.tolerance

    def solvers(self, problem: Fibre) -> tuple[str, ...]:
        """The solvers, in the order in which a projection tries them."""
        first = self.solver or ("newton" if problem.structure.is_cheap else "broyden")
        if self.solver is None and problem.units is None and problem.values.shape[-1] > _SETTINGS.few_rows:
            # what Broyden's method cannot solve is rejected: that is cheaper than so many Jacobians
            return (first,)
        return first, "broyden" if first == "newton" else "newton"

    def sub_steps(self, problem: Fibre) -> int:
        """Geodesic sub-steps per step."""
        return self.n_geodesic or (1 if self.solvers(problem)[0] == "newton" else 2)

    def splits(self, problem: Fibre) -> bool:
        """Whether drifts follow the Gaussian split."""
        return problem.model.input_density.is_standard_normal if self.split is None else self.split

    def longest_step(self, problem: Fibre) -> float:
        """Upper bound on the step size."""
        # arcs well below the half period, after which the end does not depend on the momentum
        return math.pi / 2 * self.sub_steps(problem) if self.splits(problem) else math.inf

    def tuning(self, problem: Fibre) -> Tuning:
        return self.schedule_tuning(self.longest_step(problem))

    def is_program(self, problem: Fibre) -> bool:
        """Whether :meth:`step` can be captured as one program: on a GPU by JAX, as loops have loops within."""
        return compiles(problem.values.device)

    def annealing(self) -> Self:
        # annealing uses each of many fibres once: compiling would take longer
        return self.replace(compile=False)

    def _rows(self, problem: Fibre, chains: int) -> Any:
        """One flat batch of all chains and problems: a fibre, or what stands for it in a program."""
        coarse = problem.prefers_float32 if self.float32_jacobians is None else self.float32_jacobians
        flat = problem.computed(float32=coarse, gram_force=self.gram_force, traced=problem.traces).rows(chains)
        return captured_rows(flat) if is_captured() else flat

    def _project(
        self,
        tolerance: float,
        solvers: tuple[str, ...],
        fibre: Any,
        v: Tensor,
        base: JacobianMap,
        **options: Any,
    ) -> Projection:
        options |= {"solvers": solvers, "max_iterations": self.max_iterations}
        return project(fibre, v, base, tolerance=tolerance * fibre.scale, **options)

    def saves_calls(self, problem: Fibre) -> bool:
        """Whether calls take the time of a transition: of networks with convolutions arithmetic does."""
        return not problem.observed.convolves

    def init(self, problem: Fibre, position: Tensor) -> ConstrainedState:
        flat = self._rows(problem, position.shape[0])
        there = position.reshape(-1, problem.dim)
        return ConstrainedState(position, flat.evaluate(type(flat).linearise, there))

    def inputs_of(self, problem: Fibre, state: ConstrainedState) -> Point:
        """The global inputs and their energy under the marginal density."""
        assert problem.marginal is not None, "check() refuses jumps on this problem"
        return point_at(problem.marginal, state.position[..., : problem.marginal.dim])

    def at_inputs(self, problem: Fibre, u1: Tensor, rng: torch.Generator) -> ConstrainedState:
        """State at global inputs ``[chains, *batch, L]``, with noise that gives the observation."""
        assert problem.marginal is not None, "check() refuses jumps on this problem"
        return self.init(problem, problem.marginal.lift(u1, rng))

    def step(self, problem: Fibre, state: ConstrainedState, rng: torch.Generator) -> tuple[ConstrainedState, Info]:
        shape = state.position.shape[:-1]
        flat = self._rows(problem, shape[0])
        u, here = state.position.reshape(-1, problem.dim), state.linearisation
        tolerance = self.relative_tolerance(u.dtype)
        n_steps, step_size, fraction = self.draw_schedule(self.longest_step(problem), u.new_empty(shape), rng)
        momentum = here.jacobian.tangent(draw_momentum(u, rng))
        end = geodesic(
            flat,
            u,
            momentum,
            here,
            step_size.reshape(-1),
            self.constant_steps or n_steps.reshape(-1),
            self.sub_steps(problem),
            partial(self._project, tolerance, self.solvers(problem)),
            tolerance**0.5,
            flow=CIRCULAR if self.splits(problem) else STRAIGHT,
        )
        h_old = here.energy + 0.5 * momentum.square().sum(-1)
        h_new = end.linearisation.energy + 0.5 * end.momentum.square().sum(-1)
        accepted, probability, status = accept(h_old, h_new, end.status, rng)
        keep = accepted.unsqueeze(-1)
        u_new = torch.where(keep, end.position, u)
        here = end.linearisation.where(accepted, here)
        full = (*shape, problem.dim)
        status = status.reshape(shape)
        info = Info(
            acceptance_rate=probability.reshape(shape),
            status=status,
            energy=torch.where(accepted, h_new, h_old).reshape(shape),
            stats={
                "n_steps": n_steps.to(torch.int32),
                "step_size": step_size,
                "constraint_error": here.constraint_error.reshape(shape),
                "projection_failed": status == Status.PROJECTION_FAILED,
                "reversal_failed": status == Status.REVERSAL_FAILED,
                "solver_iterations": end.iterations.reshape(shape),
            },
            tuning=Trial(
                step_size,
                TrajectoryEnd(state.position, end.position.reshape(full), end.momentum.reshape(full), fraction),
            ),
        )
        return ConstrainedState(u_new.reshape(full), here), info


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
