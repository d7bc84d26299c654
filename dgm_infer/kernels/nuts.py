"""The No-U-Turn sampler on R^D: trajectories that end at a U-turn, by balanced trees of leapfrog steps.

Hoffman and Gelman 2014; multinomial weights and the generalised criterion by Betancourt 2017 (appendix A). A tree grows
by doubling and visits its leaves one after another; it stores only the states at the starts of unfinished sub-trees,
one per depth (Phan et al. 2019). All chains of a batch are at the same leaf of the same depth and step together; chains
that have ended wait.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..arguments import counts, optional_positive
from ..errors import Status
from ..linear_maps import IDENTITY
from ..settings import Settings
from ..target import Target
from .hmc import TRAJECTORY, HMCState, check_target, draw_momentum, given_step_size
from .integrators import Evaluate, PhasePoint, leapfrog
from .kernel import Info, Trial, Tuning
from .metrics import Metric, check_metric, check_shape, chosen_metric, first_metric, metric_in_use, open_metric


class Tree(NamedTuple):
    """Result of a trajectory, each ``[...]``."""

    draw: PhasePoint
    """The next state, which may be the start."""
    acceptance: Tensor
    """Mean over the leaves of ``min(1, exp(H_0 - H))``."""
    n_steps: Tensor
    """Leapfrog steps, int32."""
    status: Tensor
    """DIVERGED if a leaf's energy was not finite or far too large, which ended the tree."""


def energy_of(target: Target) -> Evaluate:
    """A target's energy and gradient, in the form that integrators use."""
    return lambda x: (*target.energy_and_gradient(x), ())


def deepest(n_steps: int) -> int:
    """Doublings of a tree of at most ``n_steps`` leapfrog steps."""
    return (n_steps + 1).bit_length() - 1


def turns(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
    """Whether a trajectory has turned: its summed momentum points away from that of one of its ends, ``[...]``."""
    return ((first * total).sum(-1) <= 0) | ((last * total).sum(-1) <= 0)


def grow(
    start: PhasePoint,
    evaluate: Evaluate,
    step: Tensor,
    depth: int,
    rng: torch.Generator,
    metric: Metric = IDENTITY,
) -> Tree:
    """Grow a tree from every start by at most ``depth`` doublings, and draw one of its leaves.

    Doubling stops if the tree, either half with the first step of the other half, or any sub-tree of the last doubling
    has turned; a doubling that diverges, or has a sub-tree that has turned, is not drawn from.

    Args:
        start: initial point and momentum, finite.
        step: size of leapfrog steps, ``[...]``.
        metric: that of the leapfrog steps, in whose coordinates of the momentum a U-turn is one under any metric.
    """
    h0, shape = start.hamiltonian, step.shape
    left = right = draw = start
    total, log_weight = start.momentum, torch.zeros_like(h0)
    going = torch.ones(shape, dtype=torch.bool, device=step.device)
    taken, accepted = torch.zeros_like(h0), torch.zeros_like(h0)
    diverged = torch.zeros_like(going)
    for level in range(depth):
        choices = torch.rand((2, *shape), generator=rng, dtype=step.dtype, device=step.device)
        forward = choices[0] < 0.5
        sub = _SubTree(right.where(forward, left), h0, going, level, metric)
        for i in range(2**level):
            sub.extend(evaluate, torch.where(forward, step, -step), i, rng)
            if not sub.growing.any():
                break
        taken, accepted = taken + sub.taken, accepted + sub.accepted
        diverged = diverged | sub.diverged
        whole = sub.growing
        # biased towards the new half, which is further away
        drawn = whole & (choices[1] < (sub.log_weight - log_weight).exp())
        draw = sub.draw.where(drawn, draw)
        # in order of time, whether the old half or the new one comes first
        old_near, old_far = right.where(forward, left), left.where(forward, right)
        new_near, new_far = sub.first, sub.end.momentum
        turned = turns(old_far.momentum, new_far, total + sub.total)
        turned |= turns(old_far.momentum, new_near, total + new_near)
        turned |= turns(old_near.momentum, new_far, sub.total + old_near.momentum)
        right = sub.end.where(whole & forward, right)
        left = sub.end.where(whole & ~forward, left)
        total = torch.where(whole.unsqueeze(-1), total + sub.total, total)
        log_weight = torch.where(whole, torch.logaddexp(log_weight, sub.log_weight), log_weight)
        going = whole & ~turned
        if not going.any():
            break
    status = torch.where(diverged, int(Status.DIVERGED), int(Status.OK)).to(torch.int8)
    return Tree(draw, accepted / taken.clamp_min(1), taken.to(torch.int32), status)


class _SubTree:
    """The leaves of one doubling, beyond the end of a tree."""

    def __init__(self, end: PhasePoint, h0: Tensor, growing: Tensor, level: int, metric: Metric = IDENTITY):
        self.end, self.h0, self.growing, self.metric = end, h0, growing, metric
        self.draw = end
        self.total = torch.zeros_like(end.momentum)
        self.first = end.momentum
        self.log_weight = torch.full_like(h0, -torch.inf)
        self.taken, self.accepted = torch.zeros_like(h0), torch.zeros_like(h0)
        self.diverged = torch.zeros_like(growing)
        # for unfinished sub-trees, by number of halves: the momentum at the start, the sum before it, and the momentum
        # of the leaf before
        self.starts: list[tuple[Tensor, Tensor, Tensor]] = [()] * max(level, 1)  # type: ignore[list-item]

    def extend(self, evaluate: Evaluate, step: Tensor, i: int, rng: torch.Generator) -> None:
        """Add leaf i for the chains that still grow; the others stay at their last leaf."""
        growing, before = self.growing, self.end
        leaf = leapfrog(evaluate, before, torch.where(growing, step, 0.0), 1, self.metric)
        h = leaf.hamiltonian
        error = h - self.h0
        fine = h.isfinite() & (error < TRAJECTORY.divergence)
        self.taken = self.taken + growing
        probability = torch.where(fine, error.neg().clamp_max(0).exp(), 0.0)
        self.accepted = self.accepted + torch.where(growing, probability, 0.0)
        self.diverged = self.diverged | (growing & ~fine)
        growing = growing & fine
        self.end = leaf.where(growing, before)
        p = self.end.momentum
        log_weight = torch.where(growing, torch.logaddexp(self.log_weight, -error), self.log_weight)
        uniform = torch.rand(error.shape, generator=rng, dtype=error.dtype, device=error.device)
        self.draw = leaf.where(growing & (uniform < (-error - log_weight).exp()), self.draw)
        self.log_weight = log_weight
        sum_before, self.total = self.total, self.total + p
        if i == 0:
            self.first = p
        turned = self._turned(i, p, sum_before, before.momentum)
        self.growing = growing if turned is None else growing & ~turned

    def _turned(self, i: int, p: Tensor, sum_before: Tensor, p_before: Tensor) -> Tensor | None:
        """Whether a sub-tree that leaf i completes has turned, or its halves with the first step of the other."""
        # number of halves of unfinished sub-trees at an even leaf, or of the sub-trees that contain an odd one
        slot = (i >> 1).bit_count()
        if i % 2 == 0:
            self.starts[slot] = p, sum_before, p_before
            return None
        # an odd leaf completes as many sub-trees as its index has trailing ones in binary
        ones = (~i & (i + 1)).bit_length() - 1
        turned = None
        for k in range(slot, slot - ones, -1):
            first, sum_first, _ = self.starts[k]
            found = turns(first, p, self.total - sum_first)
            if k < slot:
                middle, sum_middle, before_middle = self.starts[k + 1]
                found |= turns(first, middle, sum_middle - sum_first + middle)
                found |= turns(before_middle, p, self.total - sum_middle + before_middle)
            turned = found if turned is None else turned | found
        return turned


@dataclass(frozen=True, eq=False)
class NUTS(Settings):
    """Hamiltonian Monte Carlo whose trajectories end at a U-turn.

    The next state is drawn from all states of the trajectory by their densities; a divergence ends a trajectory, whose
    earlier states still count. Chains step together, so a transition takes as long as its longest trajectory.

    Args:
        step_size: as in :class:`HMC`.
        n_steps: maximum leapfrog steps per transition: trees have at most ``2^depth - 1`` of them. Only the upper end
            of a range counts.
        metric: as in :class:`HMC`.
    """

    step_size: float | Tensor | None = None
    n_steps: int | tuple[int, int] = 1023
    metric: str | Metric | None = None

    def __post_init__(self):
        check_metric("NUTS", self.metric, (None,))
        optional_positive("NUTS", "step_size", self.step_size)
        counts("NUTS", "n_steps", self.n_steps)

    def check(self, problem) -> None:
        check_target("NUTS", problem)
        self.check_batch(problem.batch_shape, "step_size")
        check_shape("NUTS", self.metric, problem.batch_shape, problem.dim)

    @property
    def max_steps(self) -> int:
        """The leapfrog steps of the largest tree."""
        return 2 ** deepest(counts("NUTS", "n_steps", self.n_steps)[1]) - 1

    def _chosen_metric(self, problem: Target) -> str | Metric:
        return chosen_metric(self.metric, problem, self.step_size)

    def tuning(self, problem: Target) -> Tuning:
        return Tuning(step_size=self.step_size is None, metric=open_metric(self._chosen_metric(problem)))

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        return self.replace(step_size=step_size, n_steps=n_steps)

    def metric_at(self, problem: Target, position: Tensor) -> Metric | None:
        return first_metric(self._chosen_metric(problem), problem, position)

    def init(self, problem: Target, position: Tensor) -> HMCState:
        return HMCState(position, *problem.energy_and_gradient(position))

    def step(self, problem: Target, state: HMCState, rng: torch.Generator) -> tuple[HMCState, Info]:
        step_size = given_step_size(self.step_size, state.position[..., 0])
        _, most = counts("NUTS", "n_steps", self.n_steps)
        start = PhasePoint(state.position, draw_momentum(state.position, rng), state.energy, state.gradient)
        tree = grow(start, energy_of(problem), step_size, deepest(most), rng, metric_in_use(self.metric))
        draw = tree.draw
        info = Info(
            acceptance_rate=tree.acceptance,
            status=tree.status,
            energy=draw.hamiltonian,
            stats={"n_steps": tree.n_steps, "step_size": step_size},
            tuning=Trial(step_size, position=draw.position, gradient=draw.gradient),
        )
        return HMCState(draw.position, draw.energy, draw.gradient), info
