"""Hamiltonian Monte Carlo on the global inputs of a fibre whose local inputs are additive normal noise."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..arguments import choice, fraction
from ..autodiff.loops import is_captured
from ..conditioning.fibre import Fibre
from ..conditioning.marginal import NoiseMarginal
from ..errors import ArgumentError, Status
from .hmc import HMC, HMCState, Scheduled
from .kernel import Info, Tuning, either
from .metrics import Metric, check_metric, check_shape, curvature_metric, first_metric
from .metropolis import Point
from .nuts import NUTS

_CURVATURE = "curvature"


class LiftedState(NamedTuple):
    position: Tensor
    """``[chains, *batch, D]``, on the fibre."""
    marginal: HMCState
    """The global inputs, with the energy of their marginal density."""
    constraint_error: Tensor
    """``max|c|``, ``[chains, *batch]``."""

    @property
    def energy(self) -> Tensor:
        """That of the global inputs, ``[chains, *batch]``."""
        return self.marginal.energy

    def where(self, condition: Tensor, other: "LiftedState") -> "LiftedState":
        """This state where the condition ``[chains, *batch]`` holds, else the other."""
        return either(condition, self, other)


@dataclass(frozen=True, eq=False)
class LiftedHMC(Scheduled):
    """HMC or NUTS on a fibre with the noise integrated out (math 8.8).

    For models ``y = f(u1) + d(u1) u2`` with standard normal ``u2``: the transition is one of the global inputs ``u1``
    under ``p(u1) N(y | f(u1), d d^T)``, whose draws are lifted to the fibre by the noise that gives the observation,
    ``u2 = (y - f(u1)) / d``. Where several noises act on one value, they are drawn from their conditional distribution.
    A gradient of the network replaces a Jacobian and its projections; the density has the scale of the noise, though,
    and where that is small and the observation leaves u1 free in part, :class:`ConstrainedHMC` is faster.

    Args:
        step_size, n_steps, trajectory_length: as in :class:`HMC`, of the global inputs; for ``"nuts"`` n_steps is the
            maximum, None for 1023, and there is no length.
        trajectory: ``"hmc"`` for trajectories of random length, ``"nuts"`` for such that end at a U-turn.
        metric: as in :class:`HMC`, or ``"curvature"``: after the start-up phase of the warm-up, or at once if the start
            was annealed, the inverse of ``I + K^T K``, averaged over at most 16 chains, with K the Jacobian of the
            noise that explains the observation (math 8.8). It takes one forward derivative of the model per global
            input and chain. ``"dense"`` begins with it, and refines it once, for at most 512 global inputs.
        tolerance: a position whose constraint differs from 0 by more than ``tolerance * max(1, |y|_max)``, because the
            model is not of this form there, is rejected; None for 1e-8 in float64 and 1e-4 in float32.
        float32_gradients: whether gradients are computed in float32 and energies, which decide on acceptance, in the
            type of the positions: the same law, and faster where a network's arithmetic takes the time, on a CPU 2 to
            4 times for convolutions. None does so for networks with convolutions, and for all networks in compiled
            transitions. Not for ``"nuts"``, which needs an energy with every gradient.
        compile: as in :class:`HMC`; not for ``"nuts"``.
    """

    trajectory: str = "hmc"
    metric: str | Metric = "dense"
    tolerance: float | None = None
    float32_gradients: bool | None = None
    compile: bool | None = None

    def __post_init__(self):
        choice("LiftedHMC", "compile", self.compile, (True, False, None))
        if self.compile and self.trajectory == "nuts":
            raise ArgumentError("LiftedHMC(trajectory='nuts', compile=True): trees are not compiled, omit one")
        choice("LiftedHMC", "float32_gradients", self.float32_gradients, (True, False, None))
        if self.float32_gradients and self.trajectory == "nuts":
            raise ArgumentError(
                "LiftedHMC(trajectory='nuts', float32_gradients=True): trees need the energy of every point, omit one"
            )
        choice("LiftedHMC", "trajectory", self.trajectory, ("hmc", "nuts"))
        if self.trajectory == "nuts" and self.trajectory_length is not None:
            raise ArgumentError(
                "LiftedHMC(trajectory='nuts', trajectory_length=...): U-turns end trajectories, omit it"
            )
        super().__post_init__()
        check_metric("LiftedHMC", self.metric, (_CURVATURE,))
        if self.tolerance is not None:
            fraction("LiftedHMC", "tolerance", self.tolerance)

    def is_program(self, problem: Fibre) -> bool:
        """Whether :meth:`step` can be captured as one program."""
        return self.trajectory == "hmc"

    @property
    def unlifted(self) -> HMC | NUTS:
        """The kernel of the global inputs."""
        metric = "identity" if self.metric == _CURVATURE else self.metric
        if self.trajectory == "nuts":
            return NUTS(self.step_size, 1023 if self.n_steps is None else self.n_steps, metric)
        return HMC.unchecked(
            step_size=self.step_size, n_steps=self.n_steps, trajectory_length=self.trajectory_length, metric=metric
        )

    def check(self, problem) -> None:
        if not isinstance(problem, Fibre):
            raise ArgumentError(f"LiftedHMC samples a Fibre, not a {type(problem).__name__}: use HMC or NUTS")
        if problem.marginal is None:
            raise ArgumentError(
                f"LiftedHMC samples a Fibre with additive normal noise, which this one of a "
                f"{type(problem.model).__name__} does not have: use ConstrainedHMC, or give the model noise, "
                "WithNoise(model, sd=...)"
            )
        self.check_batch(problem.batch_shape, "step_size", "trajectory_length")
        check_shape("LiftedHMC", self.metric, problem.batch_shape, problem.marginal.dim)

    def relative_tolerance(self, dtype: torch.dtype) -> float:
        """The tolerance for this dtype."""
        if self.tolerance is not None:
            return self.tolerance
        return 1e-8 if dtype == torch.float64 else 1e-4

    def annealing(self) -> Self:
        return self

    def tuning(self, problem: Fibre) -> Tuning:
        return self.unlifted.tuning(self.marginal(problem))

    def metric_at(self, problem: Fibre, position: Tensor) -> Metric | None:
        marginal = self.marginal(problem)
        u1 = position[..., : marginal.dim]
        return curvature_metric(marginal, u1) if self.metric == _CURVATURE else first_metric(self.metric, marginal, u1)

    def init(self, problem: Fibre, position: Tensor) -> LiftedState:
        marginal = self.marginal(problem)
        state = self.unlifted.init(marginal, position[..., : marginal.dim])
        return LiftedState(position, state, problem.constraint_error(position))

    def step(self, problem: Fibre, state: LiftedState, rng: torch.Generator) -> tuple[LiftedState, Info]:
        marginal, before = self.marginal(problem), state.marginal
        after, info = self.unlifted.step(marginal, before, rng)
        there = self._lifted(marginal, after, rng)
        position = there.position
        on_fibre = there.constraint_error < self.relative_tolerance(position.dtype) * problem.scale
        status = torch.where((info.status == Status.OK) & ~on_fibre, int(Status.PROJECTION_FAILED), info.status)
        # a transition that failed leaves everything as it was, noise that the observation does not determine included
        stayed = (after.position == before.position).all(-1)
        here = there.where(on_fibre & ~((status != Status.OK) & stayed), state)
        info = Info(
            acceptance_rate=torch.where(on_fibre, info.acceptance_rate, 0.0),
            status=status,
            energy=torch.where(on_fibre, info.energy, before.energy),
            stats={
                **info.stats,
                "constraint_error": here.constraint_error,
                "projection_failed": status == Status.PROJECTION_FAILED,
                "reversal_failed": status == Status.REVERSAL_FAILED,
            },
            tuning=info.tuning,
        )
        return here, info

    def inputs_of(self, problem: Fibre, state: LiftedState) -> Point:
        """The global inputs and their energy."""
        return Point(state.marginal.position, state.energy)

    def at_inputs(self, problem: Fibre, u1: Tensor, rng: torch.Generator) -> LiftedState:
        """State at global inputs ``[chains, *batch, L]``, with noise that gives the observation."""
        marginal = self.marginal(problem)
        return self._lifted(marginal, self.unlifted.init(marginal, u1), rng)

    @staticmethod
    def _lifted(marginal: NoiseMarginal, state: HMCState, rng: torch.Generator) -> LiftedState:
        position, error = marginal.explained(state.position, rng, *state.extra)
        return LiftedState(position, state, error)

    def marginal(self, problem: Fibre) -> NoiseMarginal:
        """The density of the global inputs, computed as this kernel has it."""
        coarse = self.float32_gradients
        if coarse is None:
            # a small network's arithmetic takes the time where nothing else is left to be done
            pays = problem.prefers_float32 or (is_captured() and problem.observed.is_network)
            coarse = self.trajectory == "hmc" and pays
        marginal = problem.computed(float32=coarse).marginal
        assert marginal is not None, "LiftedHMC.check() refuses this problem"
        return marginal
