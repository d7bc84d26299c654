"""Metropolis-Hastings kernels: random walks and independent proposals (math 8.9), and the decision on their points."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..arguments import fraction, optional_positive
from ..autodiff.randomness import uniform
from ..errors import ArgumentError, Status
from ..settings import Settings
from ..target import Density, Target, check_density
from .hmc import check_target, draw_momentum, given_step_size
from .kernel import Info, Trial, Tuning, either
from .metrics import Metric, check_metric, check_shape, metric_in_use, open_metric


class Point(NamedTuple):
    """Positions ``[chains, *batch, D]`` and their energies ``[chains, *batch]``."""

    position: Tensor
    energy: Tensor

    def where(self, condition: Tensor, other: "Point") -> "Point":
        """These where the condition ``[chains, *batch]`` holds, else the others."""
        return either(condition, self, other)


@torch.no_grad()
def point_at(problem: Target, position: Tensor) -> Point:
    """The state at a position."""
    return Point(position, problem.energy(position))


def broken(energy: Tensor) -> Tensor:
    """Where an energy is NaN or minus infinity; plus infinity is where the density is zero."""
    return energy.isnan() | energy.isneginf()


def status_of(failed: Tensor) -> Tensor:
    """Diverged where a proposal's energy was :func:`broken`."""
    return torch.where(failed, int(Status.DIVERGED), int(Status.OK)).to(torch.int8)


class Decision(NamedTuple):
    """The outcome of proposals, each ``[chains, *batch]``."""

    point: Point
    probability: Tensor
    status: Tensor


def metropolis(here: Point, there: Point, log_hastings: Tensor | float, rng: torch.Generator) -> Decision:
    """Accept with probability ``min(1, exp(phi(x) - phi(x')) q(x | x') / q(x' | x))`` (math 8.9).

    Args:
        here: present points x.
        there: proposed points x'.
        log_hastings: ``log q(x | x') - log q(x' | x)``, ``[chains, *batch]``; 0 for symmetric proposals.
    """
    failed = broken(there.energy)
    log_ratio = torch.where(failed, -torch.inf, here.energy - there.energy + log_hastings)
    probability = log_ratio.clamp_max(0).exp()
    return Decision(
        there.where(uniform(probability.shape, probability, rng) < probability, here), probability, status_of(failed)
    )


@dataclass(frozen=True, eq=False)
class RandomWalk(Settings):
    """Random-walk Metropolis: ``x' = x + d L n``, ``n ~ N(0, I)`` (math 8.9); the energy needs no gradient.

    Args:
        step_size: d, a positive number or tensor ``[*batch]``, fixed; None adapts it per problem in warm-up.
        metric: ``S = L L^T``, as in :class:`HMC`.
        target_acceptance: mean acceptance probability that the step size is adapted to, whatever ``sample()`` is
            given; 0.234 is best for many inputs, about 0.44 for one.
    """

    step_size: float | Tensor | None = None
    metric: str | Metric = "low_rank"
    target_acceptance: float = 0.234

    def __post_init__(self):
        name = type(self).__name__
        optional_positive(name, "step_size", self.step_size)
        check_metric(name, self.metric)
        fraction(name, "target_acceptance", self.target_acceptance)

    def check(self, problem) -> None:
        check_target("RandomWalk", problem)
        self._check_walk(problem, problem.dim)

    def _check_walk(self, problem: Target, dim: int) -> None:
        """Raise :class:`ArgumentError` unless step sizes and metric suit a walk of ``dim`` coordinates."""
        self.check_batch(problem.batch_shape, "step_size")
        check_shape(type(self).__name__, self.metric, problem.batch_shape, dim)

    def tuning(self, problem: Target) -> Tuning:
        return Tuning(
            step_size=self.step_size is None,
            metric=open_metric(self.metric),
            target_acceptance=self.target_acceptance,
        )

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        return self.replace(step_size=step_size)

    def init(self, problem: Target, position: Tensor) -> Point:
        return point_at(problem, position)

    def step(self, problem: Target, state: Point, rng: torch.Generator) -> tuple[Point, Info]:
        step_size = given_step_size(self.step_size, state.position[..., 0])
        there, log_hastings = self._propose(problem, state.position, step_size, rng)
        point, probability, status = metropolis(state, point_at(problem, there), log_hastings, rng)
        tuning = Trial(step_size, position=self._walking(problem, point.position))
        return point, Info(probability, status, point.energy, stats={"step_size": step_size}, tuning=tuning)

    def _propose(
        self, problem: Any, x: Tensor, step_size: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor | float]:
        """Proposals for positions, and ``log q(x | x') - log q(x' | x)``."""
        return x + step_size.unsqueeze(-1) * metric_in_use(self.metric).apply(draw_momentum(x, rng)), 0.0

    def _walking(self, problem: Any, x: Tensor) -> Tensor:
        """The coordinates of positions that walk."""
        return x


@dataclass(frozen=True, eq=False)
class Independence(Settings):
    """Metropolis-Hastings with proposals ``x' ~ q`` that do not depend on x (math 8.9).

    Chains mix well only if the weights ``exp(-phi(x))/q(x)`` are bounded, and not by much more than their mean.

    Args:
        proposal: q, a density with ``sample`` and ``log_prob``: an input density, or ``dgm.Gaussian`` for one per
            problem. None for the prior of the problem, for example that of the inputs under a tolerance.
    """

    # not Density: configurations name densities by class path, which a protocol with types does not take
    proposal: Any = None

    def __post_init__(self):
        if self.proposal is not None:
            check_density("Independence", "proposal", self.proposal)

    def check(self, problem) -> None:
        check_target("Independence", problem)
        if self.proposal is None and problem.prior is None:
            raise ArgumentError(
                f"Independence(proposal=None): a {type(problem).__name__} does not know its prior: give a density, "
                "such as proposal=dgm.Gaussian.laplace(target)"
            )
        proposal = self._proposal(problem)
        batch = getattr(proposal, "batch_shape", problem.batch_shape)
        if (proposal.dim, *batch) != (problem.dim, *problem.batch_shape):
            raise ArgumentError(
                f"Independence(proposal of {tuple(batch)} problems of {proposal.dim} coordinates): the target has "
                f"{tuple(problem.batch_shape)} of {problem.dim}"
            )

    def init(self, problem: Target, position: Tensor) -> Point:
        return point_at(problem, position)

    def step(self, problem: Target, state: Point, rng: torch.Generator) -> tuple[Point, Info]:
        x = state.position
        there = point_at(problem, drawn(self._proposal(problem), tuple(x.shape[:-1]), rng).to(x))
        point, probability, status = metropolis(state, there, self.log_hastings(problem, state, there), rng)
        return point, Info(probability, status, point.energy)

    def log_hastings(self, problem: Target, here: Point, there: Point) -> Tensor:
        """``log q(x) - log q(x')``, ``[chains, *batch]``."""
        proposal = self._proposal(problem)
        with torch.no_grad():
            return proposal.log_prob(here.position) - proposal.log_prob(there.position)

    def _proposal(self, problem: Target) -> Density:
        proposal = problem.prior if self.proposal is None else self.proposal
        assert proposal is not None
        return proposal


def drawn(density: Density, lead: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draws ``[*lead, D]``, with ``lead`` that of chains and problems; a density per problem draws for all of them."""
    own = getattr(density, "batch_shape", ())
    return density.sample(lead[: len(lead) - len(own)], generator=rng)
