"""Annealed importance sampling (Neal 2001), from the base and back from exact draws (math 7.1, math 7.2)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..arguments import whole_number
from ..progress import Progress
from ..settings import Settings
from .estimators import finite_or_zero, log_mean, weight_ess
from .importance import largest_share
from .method import EstimateStatus, Outcome
from .path import AnnealedPath, Move, Point
from .plan import Plan, check_settings, frozen_plan

__all__ = ["AIS", "Annealed", "Annealing", "FreshMoves", "Moves", "anneal", "anneal_back", "weight_diagnostics"]


class Annealed(NamedTuple):
    """Result of one annealing pass."""

    log_weights: Tensor
    """``[chains, *batch]``, float64."""
    point: Point
    acceptance: Tensor
    """Mean over temperatures, ``[chains, *batch]``."""


class Moves(Protocol):
    """Transitions of annealed chains, and their reversals."""

    def forward(self, point: Point, beta: Tensor, step_size: Tensor) -> Move:
        """A transition that leaves the density at ``beta [*batch]`` invariant."""
        ...

    def backward(self, point: Point, beta: Tensor, step_size: Tensor) -> Move:
        """The reversal of :meth:`forward`."""
        ...


@dataclass(frozen=True, eq=False)
class Annealing(Settings):
    """Base of the annealing methods: a frozen plan, moves, and one weight per chain."""

    @property
    def status(self) -> EstimateStatus:
        return "unbiased"

    def plan(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Plan:
        """Schedule and step sizes, tuned on a pilot if needed."""
        raise NotImplementedError

    def moves(self, path: AnnealedPath, chains: int, rng: torch.Generator) -> Moves:
        """Transitions of chains that start now."""
        raise NotImplementedError

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        plan = self.plan(path, chains, rng, progress)
        spent = path.evaluations
        done = anneal(path, plan, path.draws(chains, rng), self.moves(path, chains, rng), progress)
        draws = path.base.unwhiten(done.point.v).unsqueeze(1)
        return Outcome(
            log_mean(done.log_weights), draws, done.log_weights.unsqueeze(1), weight_diagnostics(done), spent
        )


@dataclass(frozen=True, eq=False)
class AIS(Annealing):
    """Annealed importance sampling with Hamiltonian moves, ``E[mean w] = Z`` (unbiased) for a frozen plan.

    A pilot run tunes what is not given; its chains are discarded and the weights come from fresh ones. The draws are
    the final states, one per chain.

    The defaults take 2 537 gradients per chain and problem, including 536 for the pilot.

    Args:
        temperatures: K, transitions from the base to the target.
        schedule: ``"sigmoid"``, ``"linear"``, ``"equalised"`` (every step adds the same variance, as estimated by the
            pilot), ``"barrier"`` (neighbours overlap equally, by its estimate of the communication barrier,
            math 6.12), a function of K, or the K + 1 values themselves, which then set K.
        n_steps: leapfrog steps per temperature.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per temperature and
            problem on a pilot.
        target_acceptance: mean acceptance probability that step sizes are adapted to.
        pilot_temperatures: temperatures of the pilot.
    """

    temperatures: int = 400
    schedule: str | Tensor | Callable[[int], Tensor] = "sigmoid"
    n_steps: int = 5
    step_size: float | Tensor | None = None
    target_acceptance: float = 0.8
    pilot_temperatures: int = 100

    def __post_init__(self):
        check_settings(self)
        whole_number("AIS", "n_steps", self.n_steps)

    def plan(self, path, chains, rng, progress):
        return frozen_plan(self, path, chains, self.n_steps, rng, progress)

    def moves(self, path, chains, rng):
        return FreshMoves(path, self.n_steps, rng)


class FreshMoves:
    """Trajectories with fresh momenta, each its own reversal."""

    def __init__(self, path: AnnealedPath, n_steps: int, rng: torch.Generator):
        self.path, self.n_steps, self.rng = path, n_steps, rng

    def forward(self, point: Point, beta: Tensor, step_size: Tensor) -> Move:
        return self.path.move(point, beta, step_size, self.n_steps, self.rng)

    backward = forward


def weight_diagnostics(done: Annealed) -> dict[str, Tensor]:
    """Diagnostics of the weights and moves of a pass, each ``[*batch]``."""
    return {
        "ess": weight_ess(done.log_weights),
        "max_weight_share": largest_share(done.log_weights),
        "lost_chains": done.log_weights.isneginf().sum(0),
        "acceptance": done.acceptance.mean(0),
    }


def anneal(
    path: AnnealedPath,
    plan: Plan,
    v: Tensor,
    moves: Moves,
    progress: Progress,
    watch: Callable[[Tensor, Point], None] | None = None,
) -> Annealed:
    """From base draws ``v``: ``log w = sum_k (beta_{k+1} - beta_k) (psi - phi)(x_k)``.

    ``x_k`` is the state before the move at ``beta_{k+1}``; the last move, at 1, does not change the weight.
    ``watch`` is given the log weights and the states at every temperature, which they weigh properly, from 0 on.
    """
    betas, steps = plan
    point = path.at(v)
    log_weights = torch.zeros(point.energy.shape, dtype=torch.float64, device=v.device)
    acceptance = torch.zeros_like(point.energy)
    progress.expect(len(betas) - 1)
    if watch is not None:
        watch(log_weights, point)
    for k in range(len(betas) - 1):
        log_weights.sub_(_increment(betas, k, path.difference(point)))
        point, accepted = moves.forward(point, betas[k + 1], steps[k + 1])
        acceptance += accepted
        if watch is not None:
            watch(log_weights, point)
        progress.update("annealing", lambda: log_mean(finite_or_zero(log_weights)).log_z)
    return Annealed(finite_or_zero(log_weights), point, acceptance / (len(betas) - 1))


def anneal_back(path: AnnealedPath, plan: Plan, v: Tensor, moves: Moves, progress: Progress) -> Annealed:
    """From target draws ``v = x_{K-1}``, for k = K-1 to 0: add ``-(beta_{k+1} - beta_k) (psi - phi)(x_k)``, then move
    at ``beta_k`` by the reversal of the forward transition. ``E[w] = 1/Z``.
    """
    betas, steps = plan
    point = path.at(v)
    log_weights = torch.zeros(point.energy.shape, dtype=torch.float64, device=v.device)
    acceptance = torch.zeros_like(point.energy)
    progress.expect(len(betas) - 1)
    for k in range(len(betas) - 2, -1, -1):
        log_weights.add_(_increment(betas, k, path.difference(point)))
        if k > 0:
            point, accepted = moves.backward(point, betas[k], steps[k])
            acceptance += accepted
        progress.update("annealing back", lambda: -log_mean(finite_or_zero(log_weights)).log_z)
    return Annealed(finite_or_zero(log_weights), point, acceptance / max(len(betas) - 2, 1))


def _increment(betas: Tensor, k: int, difference: Tensor) -> Tensor:
    """``(beta_{k+1} - beta_k) (phi - psi)``; 0 for a step of zero length, even if the difference is infinite."""
    width = betas[k + 1] - betas[k]
    return torch.where(width > 0, width * difference, 0.0)
