"""Annealed importance sampling (Neal 2001), from the base and back from draws of the target (math 7.1, math 7.2)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..arguments import positive
from ..autodiff.randomness import normal
from ..progress import Progress
from .estimators import Estimate, finite_or_zero, largest_share, log_mean, weight_ess
from .method import EstimateStatus, Outcome, of_whole_base
from .path import AnnealedPath, Move, PathPoint
from .plan import Plan, Planned


class Annealed(NamedTuple):
    """Result of one annealing pass."""

    log_weights: Tensor
    """``[chains, *batch]``, float64."""
    point: PathPoint
    acceptance: Tensor
    """Mean over temperatures, ``[chains, *batch]``."""

    def outcome(self, path: AnnealedPath, pilot_evaluations: int) -> Outcome:
        """The log of the mean weight, with the final states as draws."""
        diagnostics = {
            "ess": weight_ess(self.log_weights),
            "max_weight_share": largest_share(self.log_weights),
            "lost_chains": self.log_weights.isneginf().sum(0),
            "acceptance": self.acceptance.mean(0),
        }
        draws, log_weights = path.base.unwhiten(self.point.v).unsqueeze(1), self.log_weights.unsqueeze(1)
        return Outcome(log_mean(self.log_weights), draws, log_weights, diagnostics, pilot_evaluations)


class Moves(Protocol):
    """Transitions of annealed chains, which may keep a momentum from one to the next."""

    @property
    def n_steps(self) -> int:
        """Gradients that one takes."""
        ...

    def first_momentum(self, path: AnnealedPath, chains: int, rng: torch.Generator) -> Tensor:
        """``[chains, *batch, D]``, or ``[chains, *batch, 0]`` where none is kept."""
        ...

    def forward(
        self, path: AnnealedPath, point: PathPoint, momentum: Tensor, beta: Tensor, step_size: Tensor, rng: Any
    ) -> tuple[Move, Tensor]:
        """A transition that leaves the density at ``beta [*batch]`` invariant, and the momentum after it."""
        ...

    def backward(
        self, path: AnnealedPath, point: PathPoint, momentum: Tensor, beta: Tensor, step_size: Tensor, rng: Any
    ) -> tuple[Move, Tensor]:
        """The reversal of :meth:`forward`."""
        ...


class AnnealedChains(NamedTuple):
    """Chains on their way along the temperatures."""

    k: Tensor
    """Number of the temperature that they are at."""
    point: PathPoint
    momentum: Tensor
    log_weights: Tensor
    """``[chains, *batch]``, float64."""
    acceptance: Tensor
    """Sum over the transitions, ``[chains, *batch]``."""


def anneal(
    path: AnnealedPath,
    plan: Plan,
    v: Tensor,
    moves: Moves,
    rng: torch.Generator,
    progress: Progress,
    *,
    back: bool = False,
    watch: Callable[[Tensor, PathPoint], None] | None = None,
) -> Annealed:
    """From base draws ``v = x_0``: ``log w = sum_k (beta_{k+1} - beta_k) (psi - phi)(x_k)``.

    ``x_k`` is the state before the move at ``beta_{k+1}``; the last move, at 1, does not change the weight.

    Args:
        back: from target draws ``v = x_{K-1}`` instead: for k = K-1 to 0 the negative of the same term is added, then
            the state moves at ``beta_k`` by the reversal of the forward transition. ``E[w] = 1/Z``.
        watch: is given the log weights and the states at every temperature, which they weigh properly, from the first.
    """
    last = len(plan.betas) - 1
    # from exact draws, what comes to the base has no move there
    transitions = last - 1 if back else last
    at = SimpleNamespace(made=0, chains=_first(path, moves, v, last if back else 0, rng))
    sign, words, move = (-1, "annealing back", moves.backward) if back else (1, "annealing", moves.forward)
    progress.expect(transitions)

    def estimate() -> Estimate:
        found = log_mean(finite_or_zero(at.chains.log_weights))
        return found._replace(log_z=sign * found.log_z)

    function, n_steps = partial(_next, path, move, sign), moves.n_steps
    for _ in progress.steps(words, transitions, (at, path, rng), estimate, lambda: at.made):
        if watch is not None:
            watch(at.chains.log_weights, at.chains.point)
        most = transitions - at.made if watch is None else 1
        at.chains, more = path.several(words, function, n_steps, tuple(plan), at.chains, rng, most)
        at.made += more
    log_weights = at.chains.log_weights
    if back:
        log_weights = log_weights + _increment(path, plan.betas, at.chains, -1)
    if watch is not None:
        watch(log_weights, at.chains.point)
    return Annealed(finite_or_zero(log_weights), at.chains.point, at.chains.acceptance / max(transitions, 1))


def _first(path: AnnealedPath, moves: Moves, v: Tensor, k: int, rng: torch.Generator) -> AnnealedChains:
    point = path.at(v)
    zero = torch.zeros_like(point.energy)
    place = torch.tensor(k, device=v.device)
    return AnnealedChains(place, point, moves.first_momentum(path, len(v), rng), zero.double(), zero.clone())


def _next(
    path: AnnealedPath,
    move: Callable[..., tuple[Move, Tensor]],
    sign: int,
    arguments: tuple[tuple[Tensor, Tensor], AnnealedChains],
    rng: torch.Generator,
) -> AnnealedChains:
    """The chains at the next temperature, or on the way back at the one before."""
    (betas, step_sizes), chains = arguments
    k = chains.k + sign
    log_weights = chains.log_weights + _increment(path, betas, chains, sign)
    given = _at(betas, k), _at(step_sizes, k)
    (point, acceptance), momentum = move(path, chains.point, chains.momentum, *given, rng)
    return AnnealedChains(k, point, momentum, log_weights, chains.acceptance + acceptance)


def _increment(path: AnnealedPath, betas: Tensor, chains: AnnealedChains, sign: int) -> Tensor:
    """What the log weights change by on the way to the next temperature."""
    width = _at(betas, chains.k + sign) - _at(betas, chains.k)
    # a step of zero length adds nothing, even if the difference is infinite
    return -torch.where(width != 0, width * path.difference(chains.point), 0.0)


def _at(table: Tensor, k: Tensor) -> Tensor:
    """The row of this number."""
    return table.index_select(0, k.reshape(1)).squeeze(0)


@dataclass(frozen=True, eq=False)
class Annealing(Planned):
    """Base of the annealing methods: a frozen plan, moves, and one weight per chain."""

    @property
    def status(self) -> EstimateStatus:
        return "unbiased"

    @property
    def moves(self) -> Moves:
        raise NotImplementedError

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        path.restrict(rng)
        plan = self.plan(path, chains, rng, progress)
        spent = path.evaluations
        start = path.draws(chains, rng)
        outcome = anneal(path, plan, start, self.moves, rng, progress).outcome(path, spent)
        return of_whole_base(outcome, path.inside)


@dataclass(frozen=True, eq=False)
class AIS(Annealing):
    """Annealed importance sampling with Hamiltonian moves, ``E[mean w] = Z`` (unbiased) for a frozen plan.

    A pilot run tunes what is not given; its chains are discarded and the weights come from fresh ones. The draws are
    the final states, one per chain.

    The defaults take 2 537 gradients per chain and problem, including 536 for the pilot.

    Args:
        temperatures: K, transitions from the base to the target.
        schedule: ``"barrier"`` (neighbours overlap equally, by the pilot's estimate of the communication barrier, math
            6.11), ``"sigmoid"`` and ``"linear"``, which need no pilot, a function of K, or the K + 1 values themselves,
            which then set K.
        n_steps: leapfrog steps per temperature.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per temperature and
            problem on a pilot.
        target_acceptance: mean acceptance probability that step sizes are adapted to.
        pilot_temperatures: temperatures of the pilot.
    """

    temperatures: int = 400
    schedule: str | Tensor | Callable[[int], Tensor] = "barrier"

    @property
    def moves(self):
        return _FreshMoves(self.n_steps)


class _FreshMoves(NamedTuple):
    """Trajectories with fresh momenta, each its own reversal."""

    n_steps: int

    def first_momentum(self, path, chains, rng):
        return path.base.mean.new_empty(chains, *path.batch_shape, 0)

    def forward(self, path, point, momentum, beta, step_size, rng):
        return path.moved(point, beta, step_size, self.n_steps, rng), momentum

    backward = forward


@dataclass(frozen=True, eq=False)
class HamiltonianAIS(Annealing):
    """Annealed importance sampling with one leapfrog step per temperature, ``E[mean w] = Z`` (unbiased) if frozen.

    The momentum persists between temperatures, so that chains do not walk at random. A step is accepted, or the
    momentum negated; then ``p' = sqrt(a) p + sqrt(1 - a) n`` with ``a = 2^(-t/half_life)`` after a step of length t,
    and n standard normal. The annealed density is that of position and momentum together; the weights are those of
    :class:`AIS`.

    The defaults take 2 537 gradients per chain and problem, including 536 for the pilot.

    Args:
        temperatures: K, steps from the base to the target.
        schedule, step_size, pilot_temperatures: as in :class:`AIS`.
        half_life: time after which half of the momentum's variance is replaced.
        n_steps: leapfrog steps per temperature of the pilot, which draws a fresh momentum at every temperature.
        target_acceptance: mean acceptance probability of the pilot's trajectories. Single steps are accepted more
            often, as they must be: every rejection reverses a chain.
    """

    temperatures: int = 2000
    schedule: str | Tensor | Callable[[int], Tensor] = "barrier"
    half_life: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        positive("HamiltonianAIS", "half_life", self.half_life)

    @property
    def moves(self):
        return _PersistentMoves(self.half_life)


class _PersistentMoves(NamedTuple):
    """Steps with one persistent momentum per chain.

    A transition is a step, with the momentum negated if rejected, then a refreshment. Its reversal is the refreshment,
    then a step with the momentum negated; a backward pass keeps the momentum negated throughout, so that there the
    reversal is a refreshment and a step.
    """

    half_life: float

    @property
    def n_steps(self):
        return 1

    def first_momentum(self, path, chains, rng):
        return path.normal(chains, rng)

    def forward(self, path, point, momentum, beta, step_size, rng):
        step = path.random_step(point, step_size, rng)
        move, momentum = path.moved_on(point, momentum, beta, step, rng)
        return move, self._refreshed(momentum, step, rng)

    def backward(self, path, point, momentum, beta, step_size, rng):
        step = path.random_step(point, step_size, rng)
        return path.moved_on(point, self._refreshed(momentum, step, rng), beta, step, rng)

    def _refreshed(self, momentum: Tensor, step: Tensor, rng: torch.Generator) -> Tensor:
        kept = torch.exp2(-step / self.half_life).unsqueeze(-1)
        return kept.sqrt() * momentum + (1 - kept).sqrt() * normal(momentum.shape, momentum, rng)
