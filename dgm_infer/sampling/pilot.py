"""The kernel of a fibre that more than one kernel can sample, picked by a short pilot."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..kernels import ConstrainedHMC, Kernel, LiftedHMC
from ..kernels.hamiltonian import TRAJECTORY
from .starts import starting_points
from .step_size import reasonable_step_size
from .warmup import WarmUp

__all__ = ["Choice", "pick_kernel"]

# Problems and chains of the pilot, at most, and its transitions.
_PROBLEMS, _CHAINS = 4, 8
_WARMUP, _DRAWS = 45, 30
# How many times cheaper the constrained kernel must look: the pilot is short, and its costs are a model.
_MARGIN = 1.25
# What the pilot of the constrained kernel may cost, as a share of the whole run by the lifted one.
_SHARE = 0.2
_TOO_LONG = "a pilot of ConstrainedHMC would take more than a fifth of the run (kernel= chooses)"
# Steps of a transition of the lifted kernel that are assumed at most, before it has made any.
_LONGEST = 200
# Evaluations of the model that a gradient costs, backward pass included.
_GRADIENT = 3
# Solver iterations of a geodesic sub-step and its reversal.
_ITERATIONS = 8


class Choice(NamedTuple):
    """A kernel and, in one line, why it was picked."""

    kernel: Kernel
    reason: str


class _Measured(NamedTuple):
    cost: float
    """Evaluations of the model per effective draw."""
    transition: float
    """Evaluations of the model per transition."""
    position: Tensor
    """Where the chains are, ``[chains, *batch, D]``."""


def pick_kernel(
    fibre: Fibre, chains: int, *, transitions: int, target_acceptance: float | None, report: Callable[[str], None]
) -> Choice:
    """:class:`LiftedHMC` or :class:`ConstrainedHMC`, whichever takes fewer evaluations of the model per effective draw.

    A few problems and chains are warmed up by the lifted kernel and draw. From where they are, the constrained kernel
    is tried only as far as it may win: its step size first, as if every trajectory of length pi/2 gave an independent
    draw, and then its draws, all for at most a fifth of what the run costs by the lifted kernel: where that does not
    suffice it is the lifted kernel, for large networks and short runs without any pilot. Costs are counted, in
    evaluations of the model, not timed, and the pilot has random numbers of its own, always the same: what is picked
    depends on the problem and the numbers of chains and transitions alone, not on the seed or on how busy the machine
    is. Near a tie it is the lifted kernel.

    Args:
        fibre: a fibre with a :attr:`~Fibre.marginal`.
        chains: chains of the run; the pilot has at most that many.
        transitions: transitions of the run.
        target_acceptance: acceptance probability that step sizes are adapted to; None for those usual of the kernels.
        report: called with a line of progress.

    Raises:
        StartError: no starting points were found.
    """
    lifted, constrained = LiftedHMC(), ConstrainedHMC()
    step_cost = _constrained_step(constrained, fibre)
    # the least that a pilot of the constrained kernel costs
    pilot = step_cost * (_WARMUP + _DRAWS)
    if pilot > _SHARE * transitions * _LONGEST * _GRADIENT:
        return Choice(lifted, f"LiftedHMC picked: {_TOO_LONG}")
    rng = torch.Generator(fibre.values.device).manual_seed(0)
    size = fibre.batch_shape.numel()
    n = min(size, _PROBLEMS)
    problem = fibre.take(torch.arange(n, device=fibre.values.device) * size // n)
    report("pilot of LiftedHMC")
    start = starting_points(
        problem,
        lifted,
        min(chains, _CHAINS),
        rng,
        None,
        anneal=True,
        target_acceptance=target_acceptance,
        report=report,
    )
    mine = _measured(lifted, problem, start.position, rng, target_acceptance, _GRADIENT)
    assert mine is not None
    least = step_cost * math.ceil(TRAJECTORY.length / constrained.longest_step(problem))
    budget = _SHARE * transitions * mine.transition
    if _MARGIN * least < mine.cost and pilot < budget:
        report("pilot of ConstrainedHMC")
        state = constrained.init(problem, mine.position)
        step_size = reasonable_step_size(constrained, problem, state, rng).clamp_max(constrained.longest_step(problem))
        least = step_cost * (TRAJECTORY.length / step_size.quantile(0.25, dim=0)).ceil().max().item()
    if _MARGIN * least >= mine.cost:
        return _choice(lifted, "LiftedHMC", mine.cost, "ConstrainedHMC", f"at least {least:.3g}")
    other = _measured(constrained, problem, mine.position, rng, target_acceptance, step_cost, budget)
    if other is None:
        return Choice(
            lifted,
            f"LiftedHMC picked: {mine.cost:.3g} evaluations of the model per effective draw in a pilot; {_TOO_LONG}",
        )
    if _MARGIN * other.cost >= mine.cost:
        return _choice(lifted, "LiftedHMC", mine.cost, "ConstrainedHMC", f"{other.cost:.3g}")
    return _choice(constrained, "ConstrainedHMC", other.cost, "LiftedHMC", f"{mine.cost:.3g}")


def _choice(kernel: Kernel, name: str, cost: float, other: str, its_cost: str) -> Choice:
    return Choice(
        kernel,
        f"{name} picked: {cost:.3g} evaluations of the model per effective draw in a pilot, {its_cost} by {other} "
        "(kernel= chooses)",
    )


def _measured(
    kernel: Any,
    problem: Fibre,
    position: Tensor,
    rng: torch.Generator,
    target: float | None,
    step: float,
    most: float = math.inf,
) -> _Measured | None:
    """Draws of a warmed-up kernel whose steps cost ``step`` evaluations of the model; None if all cost more than
    ``most``."""
    if step * (_WARMUP + _DRAWS) > most:
        return None
    state = kernel.init(problem, position)
    warm = WarmUp(kernel, problem, state, rng, iterations=_WARMUP, target_acceptance=target, typical=True)
    spent = 0.0
    for _ in range(_WARMUP):
        state, info = warm.kernel.step(problem, state, rng)
        warm.update(info, state)
        spent += step * _longest(info)
        if spent > most:
            return None
    frozen = warm.frozen()
    u1, costs = [], []
    for _ in range(_DRAWS):
        state, info = frozen.step(problem, state, rng)
        u1.append(problem.model.split(state.position)[0])
        costs.append(step * _longest(info))
        if spent + sum(costs) > most:
            return None
    transition = sum(costs) / len(costs)
    return _Measured(transition / _effective(torch.stack(u1, 1)), transition, state.position)


def _effective(u1: Tensor) -> float:
    """Effective draws per transition of inputs ``[chains, draws, *batch, L]``.

    ``(1 - r)/(1 + r)`` of the correlation r of successive draws, pooled over chains, of the worst input of every
    problem; the harmonic mean over problems, which all wait for the worst.
    """
    variance = u1.flatten(0, 1).var(0)
    step = (u1[:, 1:] - u1[:, :-1]).square().flatten(0, 1).mean(0)
    # antithetic draws count as independent ones
    rate = (step / (4 * variance - step).clamp_min(1e-300)).nan_to_num(0.0).clamp(1e-6, 1)
    return 1 / rate.amin(-1).reciprocal().mean().item()


def _longest(info) -> float:
    """Steps of a transition that all chains wait for."""
    return float(info.stats["n_steps"].max())


def _constrained_step(kernel: ConstrainedHMC, problem: Fibre) -> float:
    """Evaluations of the model by a step of the constrained kernel.

    The Jacobian has as many rows as there are global inputs and inputs per unit, or values, and is differentiated again
    once per step.
    """
    units = problem.units
    rows = min(problem.values.shape[-1], problem.dim) if units is None else units.n_global + units.inputs
    iterations = _ITERATIONS * (1 if kernel.solvers(problem)[0] == "quasi_newton" else 1 + rows)
    return kernel.sub_steps(problem) * (rows + iterations) + 2 * rows
