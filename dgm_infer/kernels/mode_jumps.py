"""A kernel whose transitions are followed by jumps between modes (math 8.15)."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..arguments.objects import shown
from ..conditioning.fibre import Fibre
from ..errors import ArgumentError
from ..settings import Settings
from ..target import Target
from .hmc import HMC
from .jumps import Jumps
from .kernel import Compilable, FibreKernel, Info, Kernel, Preconditioned, Trial, Tunable, Tuning
from .metrics import metric_in_use
from .metropolis import Point
from .riemannian import RiemannianHMC


@runtime_checkable
class _OverInputs(FibreKernel, Protocol):
    """A kernel on a fibre with additive noise whose chains can go on at other global inputs u1."""

    def inputs_of(self, problem: Fibre, state: Any, /) -> Point:
        """The global inputs of a state, and their energy under the marginal density."""
        ...

    def at_inputs(self, problem: Fibre, u1: Tensor, rng: torch.Generator, /) -> Any:
        """A state at global inputs ``[chains, *batch, L]``, with noise that gives the observation."""
        ...


@dataclass(frozen=True, eq=False)
class ModeJumps(Settings):
    """A transition of a kernel, then jumps of half of the chains to other modes (math 8.15).

    From x a mode i of normal approximation ``N(m_i, L_i L_i^T)`` is drawn by its share of the density at x, then
    another mode j, and ``x' = m_j + L_j L_i^-1 (x - m_i)`` is proposed: draws hold the modes in the proportions of the
    target, whatever was assumed of their masses. A jump costs an energy, and is accepted the more often, the more
    modes resemble normal densities: ``Draws.stats["jump_acceptance"]``. Modes that are not among the given ones are
    left to the kernel. (Tjelmeland and Hegstad 2001; Pompe et al. 2020)

    On a :class:`Fibre` with additive normal noise the jumps are those of the global inputs under their marginal
    density, lifted to the fibre.

    Args:
        kernel: kernel of a target, or :class:`LiftedHMC` or :class:`ConstrainedHMC`; None for :class:`HMC`. Its fields
            are those that warm-up adapts.
        modes: what :func:`modes` found of the same problem. None has :func:`sample` find them and start its chains
            there, in proportion to their Laplace masses: of a target from 256 starts a round spread about the origin,
            of a fibre, which takes a warm-up, by descents from the prior; where a fibre has one mode the kernel runs
            alone.
    """

    # not Kernel: configurations name kernels by class path, which a protocol with types does not take
    kernel: Any = None
    modes: Any = None

    def __post_init__(self):
        # the class is frozen
        if self.kernel is None:
            object.__setattr__(self, "kernel", HMC())
        if isinstance(self.kernel, type) or not isinstance(self.kernel, Kernel):
            raise ArgumentError(f"ModeJumps(kernel={shown(self.kernel)}): must be a kernel, such as HMC()")
        if self.modes is not None and not isinstance(self.modes, Jumps):
            parts = [getattr(self.modes, part, None) for part in ("positions", "covariances", "log_masses")]
            tensors = [part for part in parts if isinstance(part, Tensor)]
            if len(tensors) < len(parts):
                raise ArgumentError(f"ModeJumps(modes={shown(self.modes)}): must be modes, dgm.modes(problem), or None")
            object.__setattr__(self, "modes", Jumps.between(*tensors))

    def check(self, problem) -> None:
        name = type(self.kernel).__name__
        if isinstance(problem, Fibre):
            if problem.marginal is None or not isinstance(self.kernel, _OverInputs):
                raise ArgumentError(
                    f"ModeJumps(kernel={name}): on a Fibre only LiftedHMC and ConstrainedHMC jump, and only where the "
                    "model's noise is additive and normal: use the kernel alone, or WithNoise(model, sd=...)"
                )
            dim = problem.marginal.dim
        elif isinstance(problem, Target):
            dim = problem.dim
        else:
            raise ArgumentError(f"ModeJumps samples a Target or a Fibre, not a {type(problem).__name__}")
        self.kernel.check(problem)
        if isinstance(self.kernel, RiemannianHMC) or getattr(self.kernel, "reflect", False):
            raise ArgumentError(
                f"ModeJumps(kernel={name}): its chains can't jump: use HMC, NUTS, RandomWalk or slices that are not "
                "reflected"
            )
        if self.modes is not None:
            self.modes.check("ModeJumps", problem.batch_shape, dim)
        elif isinstance(problem, Target) and not problem.has_gradient:
            raise ArgumentError(
                f"ModeJumps(modes=None): modes are found by gradients, which this {type(problem).__name__} does not "
                "have: give modes, or use the kernel alone"
            )

    @property
    def compile(self) -> bool | None:
        """That of the kernel."""
        return getattr(self.kernel, "compile", False)

    def is_program(self, problem: Fibre | Target) -> bool:
        """Whether :meth:`step` can be captured as one program."""
        if not isinstance(self.kernel, Compilable) or not self.kernel.is_program(problem):
            return False
        # else it takes the model to know whether a jump stays on the fibre
        return isinstance(problem, Target) or (problem.marginal is not None and problem.marginal.holds_everywhere)

    def tuning(self, problem: Fibre | Target) -> Tuning:
        return self.kernel.tuning(problem) if isinstance(self.kernel, Tunable) else Tuning()

    def metric_at(self, problem: Fibre | Target, position: Tensor) -> Any:
        return self.kernel.metric_at(problem, position) if isinstance(self.kernel, Preconditioned) else None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, of its own or of its kernel."""
        own = {name: changes.pop(name) for name in ("kernel", "modes") if name in changes}
        other = super().replace(**own)
        return dataclasses.replace(other, kernel=other.kernel.replace(**changes)) if changes else other

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        return dataclasses.replace(self, kernel=self.kernel.probe(step_size, n_steps))

    def init(self, problem: Fibre | Target, position: Tensor) -> Any:
        if self.modes is None:
            raise ArgumentError("ModeJumps(modes=None): only sample() finds modes: give modes=dgm.modes(problem)")
        state = self.kernel.init(problem, position)
        if not hasattr(state, "where"):
            raise ArgumentError(
                f"ModeJumps(kernel={type(self.kernel).__name__}): its state has no where(condition, other), by which "
                "single chains jump: use HMC, NUTS, RandomWalk or a slice sampler"
            )
        return state

    def step(self, problem: Fibre | Target, state: Any, rng: torch.Generator) -> tuple[Any, Info]:
        after, info = self.kernel.step(problem, state, rng)
        here = self._point(problem, after)
        modes = self.modes.to(here.position)
        position, log_hastings = modes.proposed(here.position, rng)
        if isinstance(problem, Fibre):
            there = self.kernel.at_inputs(problem, position, rng)
        else:
            there = self.kernel.init(problem, position)
        moved, probability = modes.decided(here, self._point(problem, there), log_hastings, rng)
        landed = there.where(moved, after)
        stats = {**info.stats, "jump_acceptance": probability}
        if isinstance(problem, Fibre):
            stats["constraint_error"] = landed.constraint_error
        # with the momentum's part, which a jump leaves as it is
        return landed, dataclasses.replace(info, energy=info.energy + (landed.energy - after.energy), stats=stats)

    def _point(self, problem: Fibre | Target, state: Any) -> Point:
        """What jumps: the global inputs of a fibre, where noise that gives the observation exists, or the position."""
        if not isinstance(problem, Fibre):
            return Point(state.position, state.energy)
        point = self.kernel.inputs_of(problem, state)
        tolerance = self.kernel.relative_tolerance(state.position.dtype)
        on_fibre = state.constraint_error < tolerance * problem.scale
        return Point(point.position, torch.where(on_fibre, point.energy, torch.inf))

    def within_modes(self, trial: Trial) -> Trial:
        """What warm-up learns from, with positions about the centres of their modes: distances between modes, which
        jumps see to, affect neither metrics nor trajectories.

        The first coordinates of positions that have more than the modes; those of a block are as they were.
        """
        jumps = self.modes
        if jumps is None:
            return trial
        dim, metric = jumps.centres.shape[-1], metric_in_use(getattr(self.kernel, "metric", "identity"))

        def centre(x: Tensor) -> Tensor:
            return torch.cat([x[..., :dim] - jumps.to(x).centred(x[..., :dim]), torch.zeros_like(x[..., dim:])], -1)

        if trial.position is not None and trial.position.shape[-1] >= dim:
            trial = trial._replace(position=trial.position - centre(trial.position))
        if trial.end is not None and trial.end.start.shape[-1] >= dim:
            moved = metric.solve(centre(metric.apply(trial.end.start)))
            end = trial.end._replace(start=trial.end.start - moved, position=trial.end.position - moved)
            trial = trial._replace(end=end)
        return trial


def innermost(kernel: Any) -> Any:
    """The kernel that jumps follow; another kernel as it is."""
    return kernel.kernel if isinstance(kernel, ModeJumps) else kernel
