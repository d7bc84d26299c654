"""Jumps between modes: proposals by the maps between their normal approximations, after any kernel (math 8.15)."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..arguments.values import plural, shown
from ..autodiff.randomness import normal, uniform
from ..conditioning.fibre import Fibre
from ..errors import ArgumentError
from ..settings import Settings
from ..target import Target
from .constrained import RiemannianHMC
from .hmc import HMC
from .kernel import Compilable, FibreKernel, Info, Kernel, Preconditioned, Trial, Tunable, Tuning
from .metrics import metric_in_use
from .metropolis import Point, metropolis

# Modes that are kept, at most, and numbers in their covariances, which files and checkpoints hold.
_MOST, _NUMBERS = 256, 2**21


def reach(dim: int) -> float:
    """The squared distance up to which a draw is in a mode: five standard deviations above the mean of chi-squared."""
    return dim + 5.0 * math.sqrt(2 * dim)


@dataclass(frozen=True, eq=False, repr=False)
class Jumps(Settings):
    """Modes to jump between: normal densities ``N(m_k, L_k L_k^T)`` with weights, for every problem of a batch.

    From x a mode i is drawn with probability ``r_i(x) ~ w_i N(x | m_i, L_i L_i^T)``, another one j with ``q(j | i) ~
    w_j^(1/2)``, and proposed is ``x' = m_j + L_j L_i^-1 (x - m_i)``. Accepting it with probability ``min(1, exp(phi(x)
    - phi(x')) r_j(x') q(i | j) |L_j| / (r_i(x) q(j | i) |L_i|))`` leaves the density as it is, however good the normal
    approximations are. (Tjelmeland and Hegstad 2001; Pompe et al. 2020)

    Args:
        centres: m, ``[M, *batch, D]``.
        factors: L, lower triangular, ``[M, *batch, D, D]``.
        log_weights: log w, ``[M, *batch]``; ``-inf`` where a problem has fewer modes.

    Attributes:
        inverses: ``L^-1``, ``[M, *batch, D, D]``.
        log_dets: ``log|L|``, ``[*batch, M]``.
        log_rests: logs of the sums of the roots of all other weights, ``[*batch, M]``.
    """

    centres: Tensor
    factors: Tensor
    log_weights: Tensor
    # what follows from them, computed once and not at every transition
    inverses: Tensor = field(init=False)
    log_dets: Tensor = field(init=False)
    log_rests: Tensor = field(init=False)

    def __post_init__(self):
        unit = torch.eye(self.factors.shape[-1]).to(self.factors)
        # of logs: a difference of sums would lose all but the largest weights
        roots = 0.5 * self.log_weights.movedim(0, -1)
        own = torch.eye(roots.shape[-1], dtype=torch.bool, device=roots.device)
        derived = {
            "inverses": torch.linalg.solve_triangular(self.factors, unit, upper=False),
            "log_dets": self.factors.diagonal(dim1=-2, dim2=-1).log().sum(-1).movedim(0, -1),
            "log_rests": torch.where(own, -torch.inf, roots.unsqueeze(-2)).logsumexp(-1),
        }
        for name, value in derived.items():
            # the class is frozen
            object.__setattr__(self, name, value)

    @classmethod
    def between(cls, positions: Tensor, covariances: Tensor, log_masses: Tensor) -> Self:
        """Jumps between the modes of the largest masses, 256 at most, that have a covariance: ``[M, *batch, ...]``."""
        unit = torch.eye(positions.shape[-1], dtype=positions.dtype, device=positions.device)
        there = covariances.flatten(-2).isfinite().all(-1) & log_masses.isfinite()
        factors, failed = torch.linalg.cholesky_ex(torch.where(there[..., None, None], covariances, unit))
        there &= failed == 0
        log_weights = torch.where(there, log_masses.to(positions), -torch.inf)
        most = min(_MOST, max(1, _NUMBERS // max(1, factors[:1].numel())))
        order = log_weights.argsort(0, descending=True)[: min(most, max(1, int(there.sum(0).max())))]
        there, log_weights = there.gather(0, order), log_weights.gather(0, order)
        # a problem without a mode has one that no chain leaves
        log_weights[0] = torch.where(there[0], log_weights[0], 0.0)
        row, square = order.unsqueeze(-1), order[..., None, None]
        return cls(
            torch.where(there.unsqueeze(-1), positions.gather(0, row.expand(*order.shape, len(unit))), 0.0),
            torch.where(there[..., None, None], factors.gather(0, square.expand(*order.shape, *unit.shape)), unit),
            log_weights.log_softmax(0),
        )

    @property
    def counts(self) -> Tensor:
        """Number of modes, ``[*batch]``."""
        return self.log_weights.isfinite().sum(0)

    def __repr__(self) -> str:
        # its numbers would fill pages
        counts = self.counts
        least, most = int(counts.min()), int(counts.max())
        number = plural(most, "mode") if least == most else f"{least} to {most} modes"
        return f"Jumps({number} of {self.centres.shape[-1]} coordinates)"

    def check(self, name: str, batch_shape: torch.Size, dim: int) -> None:
        """Raise ArgumentError unless the modes are those of such problems."""
        if self.centres.shape[1:] != (*batch_shape, dim):
            raise ArgumentError(
                f"{name}({self!r} of {tuple(self.centres.shape[1:-1])} problems): the problem has "
                f"{tuple(batch_shape)} problems of {dim} coordinates: give its own modes, dgm.modes(problem)"
            )

    def draws(self, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Centres and points of n draws from the mixture, each ``[n, *batch, D]``."""
        k = _drawn(self.log_weights.movedim(0, -1).expand(n, *self.centres.shape[1:-1], -1), rng)
        centre = _at(self.centres.movedim(0, -2), k, 1)
        noise = normal(centre.shape, centre, rng)
        return centre, centre + (_at(self.factors.movedim(0, -3), k, 2) @ noise.unsqueeze(-1)).squeeze(-1)

    def proposed(self, x: Tensor, rng: Any) -> tuple[Tensor, Tensor]:
        """A point of another mode for every one of ``x [chains, *batch, D]``, and the log of all but the densities.

        That is ``-inf``, and the point is x, for problems of one mode.
        """
        here = self._known(x)
        i = _drawn(here.log_r, rng)
        roots = 0.5 * self.log_weights.movedim(0, -1)
        j = _drawn(roots.expand_as(here.log_r).scatter(-1, i.unsqueeze(-1), -torch.inf), rng)
        factor, white = _at(self.factors.movedim(0, -3), j, 2), _at(here.white, i, 1)
        moved = _at(self.centres.movedim(0, -2), j, 1) + (factor @ white.unsqueeze(-1)).squeeze(-1)
        # log q(j | i) = roots_j - rests_i
        other = self.log_dets - roots - self.log_rests
        log_hastings = _at(self._known(moved).log_r + other, j) - _at(here.log_r + other, i)
        several = self.counts > 1
        moved = torch.where(several.unsqueeze(-1), moved, x)
        return moved, torch.where(several, log_hastings, -torch.inf)

    def to(self, like: Tensor) -> Self:
        """The same in the type and on the device of a tensor."""
        if self.centres.dtype == like.dtype and self.centres.device == like.device:
            return self
        return type(self)(self.centres.to(like), self.factors.to(like), self.log_weights.to(like))

    def decided(self, here: Point, there: Point, log_hastings: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which of the chains jump from here to there, as :meth:`proposed`: at most half of them.

        Returns:
            Whether each is there, and the acceptance probability of its jump, made or not, ``[chains, *batch]``.
        """
        decision = metropolis(here, there, log_hastings, rng)
        # of two modes that are much alike, a jump at every transition would always lead to the other
        half = uniform(here.energy.shape, here.position, rng) < 0.5
        return half & (decision.point.position != here.position).any(-1), decision.probability

    def visited(self, x: Tensor) -> Tensor:
        """Whether each mode is the most probable one of some point of ``x [N, *batch, D]``: ``[M, *batch]``."""
        index = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
        best = x.new_full(x.shape[:-1], -torch.inf)
        # one mode after the other: of many draws there are many more numbers than of chains
        for m, (centre, inverse, weight) in enumerate(zip(self.centres, self.inverses, self.log_weights, strict=True)):
            white = (inverse @ (x - centre).unsqueeze(-1)).squeeze(-1)
            score = weight - self.log_dets[..., m] - 0.5 * white.square().sum(-1)
            index, best = torch.where(score > best, m, index), torch.maximum(best, score)
        return torch.stack([(index == m).any(0) for m in range(len(self.centres))])

    def reached(self, x: Tensor) -> Tensor:
        """Whether some point of ``x [N, *batch, D]`` is within :func:`reach` of each mode, ``[M, *batch]``."""
        most = reach(x.shape[-1])
        whites = [
            (inverse @ (x - centre).unsqueeze(-1)).squeeze(-1)
            for centre, inverse in zip(self.centres, self.inverses, strict=True)
        ]
        return torch.stack([(white.square().sum(-1) < most).any(0) for white in whites])

    def log_masses(self, target: Target) -> Tensor:
        """Laplace's masses of the modes of a target, float64, ``[M, *batch]``; ``-inf`` where there are fewer."""
        energy = target.energy(self.centres).double()
        normal_mass = self.log_dets.movedim(-1, 0).double() + 0.5 * self.centres.shape[-1] * math.log(2 * math.pi)
        return torch.where(self.log_weights.isfinite(), normal_mass - energy, -torch.inf)

    def centred(self, x: Tensor) -> Tensor:
        """``x - m``, each of ``x [chains, *batch, D]`` about the mode that it is most probably of."""
        return x - _at(self.centres.movedim(0, -2), self._known(x).log_r.argmax(-1), 1)

    def _known(self, x: Tensor) -> "_Known":
        # chains as columns, so that no factor is repeated
        columns = (x.unsqueeze(-2) - self.centres.movedim(0, -2)).movedim(0, -1)
        white = (self.inverses.movedim(0, -3) @ columns).movedim(-1, 0)
        log_joint = self.log_weights.movedim(0, -1) - self.log_dets - 0.5 * white.square().sum(-1)
        return _Known(white, log_joint.log_softmax(-1))


class _Known(NamedTuple):
    """Where points are among the modes."""

    white: Tensor
    """``L_k^-1 (x - m_k)``, ``[chains, *batch, M, D]``."""
    log_r: Tensor
    """``log r_k(x)``, ``[chains, *batch, M]``."""


def _drawn(log_weights: Tensor, rng: Any) -> Tensor:
    """An index for every row of log weights ``[..., M]``, in proportion to the weights: ``[...]``."""
    ends = (log_weights - log_weights.amax(-1, keepdim=True)).exp().cumsum(-1)
    at = uniform(ends[..., :1].shape, ends, rng) * ends[..., -1:]
    return (ends[..., :-1] <= at).sum(-1)


def _at(values: Tensor, index: Tensor, inner: int = 0) -> Tensor:
    """``values [(chains,) *batch, M, *inner]`` at indices ``[chains, *batch]``: ``[chains, *batch, *inner]``."""
    values = values.expand(*index.shape, *values.shape[values.ndim - inner - 1 :])
    return values.take_along_dim(index.reshape(*index.shape, *[1] * (inner + 1)), -1 - inner).squeeze(-1 - inner)


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
