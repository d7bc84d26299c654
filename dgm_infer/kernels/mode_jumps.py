"""A kernel whose transitions are followed by jumps between modes (math 8.15)."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..arguments.objects import shown
from ..conditioning.fibre import Fibre
from ..errors import ArgumentError
from ..settings import Settings
from ..target import Target
from .hamiltonian import check_target
from .hmc import HMC
from .jumps import Jumps, as_jumps, jump, within_modes
from .kernel import Info, Kernel, Trial
from .metrics import IDENTITY, metric_in_use
from .riemannian import RiemannianHMC
from .tuning import Compilable, Tunable, Tuning

__all__ = ["ModeJumps"]


@dataclass(frozen=True, eq=False)
class ModeJumps(Settings):
    """A transition of a kernel on R^D, then jumps of half of the chains to other modes of the target (math 8.15).

    From x a mode i of normal approximation ``N(m_i, L_i L_i^T)`` is drawn by its share of the density at x, then
    another mode j, and ``x' = m_j + L_j L_i^-1 (x - m_i)`` is proposed: draws hold the modes in the proportions of the
    target, whatever was assumed of their masses. A jump costs an energy, and is accepted the more often, the more
    modes resemble normal densities: ``Draws.stats["jump_acceptance"]``. Modes that are not among the given ones are
    left to the kernel. (Tjelmeland and Hegstad 2001; Pompe et al. 2020)

    Args:
        kernel: kernel of a target; None for :class:`HMC`. Its fields are those that warm-up adapts.
        modes: what :func:`modes` found of the same target; None has :func:`sample` find them, from 256 starts a round
            spread about the origin, and start its chains there, in proportion to their Laplace masses.
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
        object.__setattr__(self, "modes", as_jumps("ModeJumps", "modes", self.modes, (None,)))

    @property
    def seeks_modes(self) -> bool:
        return self.modes is None

    def jumping(self, jumps: Jumps) -> Self:
        return dataclasses.replace(self, modes=jumps)

    def within_modes(self, trial: Trial) -> Trial:
        metric = metric_in_use(getattr(self.kernel, "metric", IDENTITY))
        return trial if self.modes is None else within_modes(trial, self.modes, metric)

    def check(self, problem) -> None:
        if isinstance(problem, Fibre):
            raise ArgumentError(
                "ModeJumps samples a Target, not a Fibre: where noise is additive LiftedHMC and ConstrainedHMC jump by "
                "themselves"
            )
        check_target("ModeJumps", problem)
        self.kernel.check(problem)
        if isinstance(self.kernel, RiemannianHMC) or getattr(self.kernel, "reflect", False):
            raise ArgumentError(
                f"ModeJumps(kernel={type(self.kernel).__name__}): its chains can't jump: use HMC, NUTS, RandomWalk or "
                "slices that are not reflected"
            )
        if self.modes is None and not problem.has_gradient:
            raise ArgumentError(
                f"ModeJumps(modes=None): modes are found by gradients, which this {type(problem).__name__} does not "
                "have: give modes, or use the kernel alone"
            )
        if self.modes is not None:
            self.modes.check("ModeJumps", problem.batch_shape, problem.dim)

    @property
    def compile(self) -> bool | None:
        """That of the kernel."""
        return getattr(self.kernel, "compile", False)

    def is_program(self, problem: Target) -> bool:
        """Whether :meth:`step` can be captured as one program."""
        return isinstance(self.kernel, Compilable) and self.kernel.is_program(problem)

    def tuning(self, problem: Target) -> Tuning:
        return self.kernel.tuning(problem) if isinstance(self.kernel, Tunable) else Tuning()

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, of its own or of its kernel."""
        own = {name: changes.pop(name) for name in ("kernel", "modes") if name in changes}
        other = super().replace(**own)
        return dataclasses.replace(other, kernel=other.kernel.replace(**changes)) if changes else other

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        return dataclasses.replace(self, kernel=self.kernel.probe(step_size, n_steps))

    def init(self, problem: Target, position: Tensor) -> Any:
        if self.modes is None:
            raise ArgumentError("ModeJumps(modes=None): only sample() finds modes: give modes=dgm.modes(target)")
        state = self.kernel.init(problem, position)
        if not hasattr(state, "where"):
            raise ArgumentError(
                f"ModeJumps(kernel={type(self.kernel).__name__}): its state has no where(condition, other), by which "
                "single chains jump: use HMC, NUTS, RandomWalk or a slice sampler"
            )
        return state

    def step(self, problem: Target, state: Any, rng: torch.Generator) -> tuple[Any, Info]:
        after, info = self.kernel.step(problem, state, rng)
        return jump(problem, self.kernel, self.modes, after, info, rng)
