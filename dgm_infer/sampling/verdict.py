"""What a run says at its end if its draws are of no use, or not those of one distribution: one line per fault."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..arguments.shown import of_problems
from ..conditioning.fibre import Fibre
from ..conditioning.kinks import JUMP, find_jump
from ..kernels.hamiltonian import MAX_STEPS
from .draws import Draws

__all__ = ["verdict"]

# Transitions per chain below which a run is too short to judge: a chain that has not moved may be unlucky.
_TRANSITIONS = 50
# Share of the transitions at their longest from which trajectories are too short.
_LONGEST = 0.5
# Steps below this share of the widest spread of the draws have collapsed.
_COLLAPSED = 1e-6
# Constraint error of chains that are evaluated alone, in tolerances: rounding depends on the number of rows.
_ALONE = 100
# Share of failing transitions from which jumps of the Jacobian are looked for, and draws between which.
_FAILING = 0.1
_LINES = 8
_FAILURES = {
    "diverging": ("the energy is not finite, or its error exceeds 1000", "check the density there, or start elsewhere"),
    "projection_failed": ("projections fail", "raise tolerance=, or give the model more noise"),
    "reversal_failed": ("reversals fail", "use smaller steps (step_size=) or more sub-steps (n_geodesic=)"),
}


@torch.no_grad()
def verdict(draws: Draws, problem: Any, stayed: Tensor, transitions: int, adapted: bool) -> Iterator[str]:
    """Lines that name what makes draws useless or incomparable, and for which problems.

    Args:
        draws: a finished run.
        problem: what was sampled.
        stayed: whether a chain was where it started at every draw, ``[chains, *batch]``.
        transitions: transitions per chain.
        adapted: whether warm-up chose the step size.
    """
    stats = draws.stats
    if transitions >= _TRANSITIONS and stayed.any():
        yield from _stuck(stats, stayed)
    if transitions >= _TRANSITIONS and "n_steps" in stats and (most := _most_steps(draws.kernel)) is not None:
        # of chains that are stuck that is all there is to say
        share = (stats["n_steps"] >= most).double().mean((0, 1)) * ~stayed.all(0)
        if (share > _LONGEST).any():
            yield (
                f"trajectories are at their longest, {most} steps, in {_percent(share.max())} of the transitions"
                f"{of_problems(share > _LONGEST)}: steps are far smaller than the posterior: see metric=, or rescale"
            )
    if adapted and draws.inputs is not None:
        inputs = draws.inputs.flatten(0, 1)
        # of medians: standard deviations of inputs with heavy tails say nothing of their scale
        spread = (inputs - inputs.median(0).values).abs().median(0).values.amax(-1)
        collapsed = stats["step_size"].amax((0, 1)) < _COLLAPSED * spread
        if collapsed.any():
            smallest = stats["step_size"].min().item()
            where = of_problems(collapsed)
            yield f"the step size collapsed to {smallest:.1g}{where}: no step is accepted, however small"
    tolerance = getattr(draws.kernel, "relative_tolerance", None)
    if isinstance(problem, Fibre) and tolerance is not None and "constraint_error" in stats:
        error = stats["constraint_error"]
        yield from _off_fibre(error, draws.inputs, problem, tolerance(error.dtype) * problem.scale)
        if transitions >= _TRANSITIONS and draws.inputs is not None and len(draws.inputs) > 1:
            yield from _jumps(stats, draws.inputs, problem)
    if transitions >= _TRANSITIONS:
        yield from _groups(draws.components)


def _most_steps(kernel: Any) -> int | None:
    """The steps at which a kernel ends a trajectory that would go on; None if it is as long as was asked for."""
    return MAX_STEPS if getattr(kernel, "n_steps", 0) is None else getattr(kernel, "max_steps", None)


def _stuck(stats: dict[str, Tensor], stayed: Tensor) -> Iterator[str]:
    failures = {name: stats[name].double().mean(1)[stayed].mean().item() for name in _FAILURES if name in stats}
    line = f"{int(stayed.sum())} of {stayed.numel()} chains never moved{of_problems(stayed.any(0))}"
    worst = max(failures, key=lambda name: failures[name], default=None)
    if worst is not None and failures[worst] > 0.5:
        what, remedy = _FAILURES[worst]
        yield f"{line}: in {_percent(failures[worst])} of their transitions {what}: {remedy}"
    else:
        yield f"{line}: all their proposals are rejected: use smaller steps, or start elsewhere (initial=)"


def _off_fibre(error: Tensor, inputs: Tensor | None, problem: Fibre, tolerance: Tensor) -> Iterator[str]:
    worst = error.amax((0, 1))
    off = ~(worst <= tolerance)
    if off.any():
        yield (
            f"draws miss the observation by {worst[off].max().item():.2g}, more than the tolerance "
            f"{tolerance[off].max().item():.2g}{of_problems(off)}: the starting points were not on the fibre, or the "
            "model computes a row from the other rows of its batch"
        )
        return
    if inputs is None:
        return
    # the last draw of one chain after the other, in a batch of its own
    alone = torch.stack([problem.constraint_error(chain[-1:])[0] for chain in inputs[:2]]).amax(0)
    if (lost := alone.isnan()).any():
        yield f"the model's outputs are NaN at draws, where they were not before{of_problems(lost)}: check the model"
        return
    off = alone > _ALONE * tolerance
    if off.any():
        yield (
            f"draws that are evaluated without the other chains miss the observation by {alone[off].max().item():.2g}"
            f"{of_problems(off)}: the model or the operator computes a row from the other rows of its batch, or draws "
            "random numbers"
        )


def _jumps(stats: dict[str, Tensor], inputs: Tensor, problem: Fibre) -> Iterator[str]:
    # a kernel of one's own may report neither
    kinds = [stats[name] for name in ("projection_failed", "reversal_failed") if name in stats]
    if not kinds:
        return
    failed = torch.stack(kinds).any(0).double().mean((0, 1)).flatten()
    worst = int(failed.argmax())
    if failed[worst] < _FAILING:
        return

    def constraint(u: Tensor) -> Tensor:
        return problem.take(torch.full(u.shape[:1], worst, device=u.device)).constraint(u)

    last = inputs[:_LINES, -1].reshape(min(len(inputs), _LINES), -1, problem.dim)[:, worst]
    if (jump := find_jump(constraint, last, last.roll(1, 0))) is not None:
        yield (
            f"projections or reversals fail in {_percent(failed[worst])} of the transitions"
            f"{of_problems(failed.reshape(problem.batch_shape) >= _FAILING)}, and the model's Jacobian jumps, by "
            f"{_percent(jump)} {JUMP}"
        )


def _groups(components: Tensor) -> Iterator[str]:
    several = components.amax(0) > 0
    if several.any():
        # of the first such problem, which the line names
        first = components[:, several][:, 0].tolist()
        sizes = [str(first.count(group)) for group in range(max(first) + 1)]
        told = f"{', '.join(sizes[:-1])} and {sizes[-1]} chains"
        if -1 in first:
            told += f", {first.count(-1)} mix too slowly to tell"
        yield (
            f"chains{of_problems(several)} form {len(sizes)} groups that never overlap ({told}): their numbers come "
            "from the starting points and are not posterior weights (see draws.components)"
        )


def _percent(share: Tensor | float) -> str:
    return f"{100 * float(share):.0f} %"
