"""What a run says at its end if its draws are of no use, or not those of one distribution."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..arguments.values import of_problems
from ..conditioning.agreement import check_agreement
from ..conditioning.derivatives import find_jump, jump_words, kinked_operations
from ..conditioning.fibre import Fibre
from ..conditioning.subject import LIMITS
from ..diagnosis import Finding, finding
from ..errors import ModelError
from ..kernels.hmc import TRAJECTORY
from ..kernels.mode_jumps import Jumps, ModeJumps, innermost
from ..models import GenerativeModel
from ..probe import COARSE, FINER, dependence, spacing
from ..probe import SETTINGS as PROBE
from ..target import Target


@dataclass(frozen=True)
class VerdictSettings:
    """From where a run is of no use."""

    transitions: int = 50
    """Transitions per chain below which a run is too short to judge: a chain that has not moved may be unlucky."""
    longest: float = 0.5
    """Share of the transitions at their longest from which trajectories are too short."""
    collapsed: float = 1e-6
    """Steps below this share of the widest spread of the draws have collapsed."""
    draws: int = 500
    """Draws of a chain, evenly spaced, by which the spread of the draws is told."""
    alone: float = 100
    """Constraint error of chains that are evaluated alone, in tolerances: rounding depends on the number of rows."""
    together: int = 32
    """Draws whose energies are computed at once."""
    apart: int = 4
    """And those of these that are computed alone, too."""
    failing: float = 0.15
    """Share of failing transitions from which jumps of the Jacobian are looked for: step sizes leave 0.1 of rejections,
    which may all be failures."""
    lines: int = 8
    """Draws between which they are."""
    each: int = 4
    """Draws per coordinate from which their covariance tells how large a part they are of."""
    missed: float = 0.05
    """Share of the mass in modes without a draw that shifts means as much as 400 effective draws leave uncertain."""


VERDICT = VerdictSettings()
_SMALLER = "use smaller steps (target_acceptance=0.95), or start elsewhere (initial=)"
FAILURES = {
    "diverging": ("the energy is not finite, or its error exceeds 1000", _SMALLER),
    "projection_failed": ("projections fail", "raise tolerance=, or give the model more noise"),
    "reversal_failed": ("reversals fail", "use smaller steps (step_size=) or more sub-steps (n_geodesic=)"),
}


class Run(Protocol):
    """What is looked at of :class:`Draws`."""

    inputs: Tensor | None
    stats: dict[str, Tensor]
    kernel: Any
    problem: Any
    interrupted: bool
    ancestors: Tensor | None
    modes: Jumps | None

    @property
    def shape(self) -> torch.Size: ...

    @property
    def longest_stay(self) -> Tensor: ...

    chain_groups: cached_property[Tensor]


@torch.no_grad()
def verdict(draws: Run, problem: Any, stayed: Tensor, transitions: int, adapted: bool) -> Iterator[Finding]:
    """What makes draws useless or incomparable, and for which problems.

    Args:
        draws: a finished run.
        problem: what was sampled.
        stayed: whether a chain was where it started at every draw, ``[chains, *batch]``.
        transitions: transitions per chain.
        adapted: whether warm-up chose the step size.
    """
    stats = draws.stats
    if transitions >= VERDICT.transitions and stayed.any():
        yield _stuck(stats, stayed)
    if transitions >= VERDICT.transitions and "n_steps" in stats and (most := _most_steps(draws.kernel)) is not None:
        # of chains that are stuck that is all there is to say
        share = (stats["n_steps"] >= most).double().mean((0, 1)) * ~stayed.all(0)
        if (share > VERDICT.longest).any():
            yield finding(
                "imprecise",
                f"trajectories are at their longest, {most} steps, in {percent(share.max())} of the transitions"
                f"{of_problems(share > VERDICT.longest)}",
                "steps are far smaller than the posterior: see metric=, or rescale",
                share > VERDICT.longest,
            )
    if adapted and draws.inputs is not None and "step_size" in stats:
        # some draws of every chain tell as much
        inputs = draws.inputs[:, :: max(1, draws.inputs.shape[1] // VERDICT.draws)].flatten(0, 1)
        # of medians: standard deviations of inputs with heavy tails say nothing of their scale
        spread = (inputs - inputs.median(0).values).abs().median(0).values.amax(-1)
        collapsed = stats["step_size"].amax((0, 1)) < VERDICT.collapsed * spread
        if collapsed.any():
            smallest = stats["step_size"].min().item()
            where = of_problems(collapsed)
            yield finding(
                "useless",
                f"the step size collapsed to {smallest:.1g}{where}",
                "no step is accepted, however small: check the density, or start elsewhere (initial=)",
                collapsed,
            )
    tolerance = getattr(innermost(draws.kernel), "relative_tolerance", None)
    if isinstance(problem, Fibre) and tolerance is not None and "constraint_error" in stats:
        error = stats["constraint_error"]
        yield from _off_fibre(error, draws.inputs, problem, tolerance(error.dtype) * problem.scale)
        if draws.inputs is not None and not stayed.all():
            yield from _elsewhere(draws.inputs, problem)
        if transitions >= VERDICT.transitions and draws.inputs is not None and len(draws.inputs) > 1:
            yield from _jumps(stats, draws.inputs, problem)
    # of kernels without trajectories a call may be a simulation, whose calls are counted
    if isinstance(problem, Target) and draws.inputs is not None and hasattr(innermost(draws.kernel), "n_steps"):
        yield from _of_the_batch(draws.inputs, problem)
    if transitions >= VERDICT.transitions:
        # points that were given were not shared out
        shared = isinstance(problem, Fibre) and problem.marginal is not None and draws.ancestors is not None
        jumps = isinstance(draws.kernel, ModeJumps) or (isinstance(problem, Fibre) and problem.marginal is None)
        yield from _groups(draws.chain_groups, weighed=shared, jumps=jumps)
        if draws.modes is not None and draws.inputs is not None:
            yield from _missed(draws.modes, draws.inputs, problem, jumps=isinstance(draws.kernel, ModeJumps))


def _most_steps(kernel: Any) -> int | None:
    """The steps at which a kernel ends a trajectory that would go on; None if it is as long as was asked for."""
    kernel = innermost(kernel)
    return TRAJECTORY.most_steps if getattr(kernel, "n_steps", 0) is None else getattr(kernel, "max_steps", None)


def _stuck(stats: dict[str, Tensor], stayed: Tensor) -> Finding:
    failures = {name: stats[name].double().mean(1)[stayed].mean().item() for name in FAILURES if name in stats}
    line = f"{int(stayed.sum())} of {stayed.numel()} chains never moved{of_problems(stayed.any(0))}"
    worst = max(failures, key=lambda name: failures[name], default=None)
    if worst is not None and failures[worst] > 0.5:
        why, remedy = FAILURES[worst]
        line += f": in {percent(failures[worst])} of their transitions {why}"
    else:
        line += ": all their proposals are rejected"
        remedy = _SMALLER
    return finding("useless", line, remedy, stayed.any(0))


def _off_fibre(error: Tensor, inputs: Tensor | None, problem: Fibre, tolerance: Tensor) -> Iterator[Finding]:
    worst = error.amax((0, 1))
    off = ~(worst <= tolerance)
    if off.any():
        yield finding(
            "useless",
            f"draws miss the observation by {worst[off].max().item():.2g}, more than the tolerance "
            f"{tolerance[off].max().item():.2g}{of_problems(off)}",
            "the starting points were not on the fibre, or the model computes a row from the other rows of its batch",
            off,
        )
        return
    if inputs is None:
        return
    # the last draw of one chain after the other, in a batch of its own
    alone = torch.stack([problem.constraint_error(chain[-1:])[0] for chain in inputs[:2]]).amax(0)
    if (lost := alone.isnan()).any():
        what = f"the model's outputs are NaN at draws, where they were not before{of_problems(lost)}"
        yield finding("useless", what, "check the model", lost)
        return
    off = alone > VERDICT.alone * tolerance
    if off.any():
        yield finding(
            "useless",
            f"draws that are evaluated without the other chains miss the observation by {alone[off].max().item():.2g}"
            f"{of_problems(off)}",
            "the model or the operator computes a row from the other rows of its batch, or draws random numbers",
            off,
        )


def _spread(inputs: Tensor, n: int) -> Tensor:
    """About ``n`` draws of ``[chains, draws, *batch, D]``, evenly spaced, and those at both ends of about as many
    coordinates."""
    every = inputs.flatten(0, 1)
    flat = every.flatten(1)
    some = flat[:, :: max(1, flat.shape[1] // n)]
    return torch.cat([every[:: max(1, len(every) // n)], every[some.argmax(0)], every[some.argmin(0)]])


def check_derivatives(fibre: Fibre, position: Tensor) -> None:
    """Raise ModelError unless derivatives of the constraint are those of its values where chains start, and of the
    structure that is declared.

    ``condition()`` compares them at prior draws; data may be where a model computes another way. The first problem
    stands for all.

    Args:
        fibre: what is sampled.
        position: points on it, ``[chains, *batch, D]``.
    """
    model = fibre.model
    while isinstance(inner := getattr(model, "model", None), GenerativeModel):
        # noise wraps the user's model
        model = inner
    one = fibre.take(torch.zeros(1, dtype=torch.int64, device=position.device))
    points = position.reshape(len(position), -1, fibre.dim)[:, 0]
    name = f"{type(model).__name__} at the data"
    try:
        one.observed.check_declaration(one.observed.inputs(points.unsqueeze(-2)).squeeze(-2))
    except ModelError as error:
        raise ModelError(f"at the data {error}") from error
    check_agreement(lambda u: one.constraint(u.unsqueeze(-2)).squeeze(-2), points, name)


def _elsewhere(inputs: Tensor, problem: Fibre) -> Iterator[Finding]:
    """Whether the derivatives, right at the starting points, are those of the model where the chains have gone."""
    try:
        check_derivatives(problem, _spread(inputs, LIMITS.derivatives))
    except ModelError as error:
        what, _, remedy = str(error).partition(": ")
        yield finding("useless", what, remedy, torch.ones(problem.batch_shape, dtype=torch.bool))


def _of_the_batch(inputs: Tensor, problem: Target) -> Iterator[Finding]:
    """Whether an energy depends on the other points where the chains have gone, as a branch may be taken there alone;
    and whether it has digits for differences."""
    if inputs.shape[2:-1] != problem.batch_shape:
        return
    some = _spread(inputs, VERDICT.together)
    apart = dependence(problem, some, VERDICT.apart)
    coarse = spacing(problem, some)
    if (lost := coarse > PROBE.spacing).any():
        words = COARSE.format(x=coarse[lost].max().item(), of=of_problems(lost))
        yield finding("useless", words, f"{FINER} (initial= of it)", lost)
    if apart > 0:
        yield finding(
            "useless",
            f"the energy of a draw changes when the other draws of its batch change, by {apart:.3g}",
            "compute every point by itself, without branches on all points, such as any(), all() and max()",
            torch.ones(problem.batch_shape, dtype=torch.bool),
        )


def _jumps(stats: dict[str, Tensor], inputs: Tensor, problem: Fibre) -> Iterator[Finding]:
    # a kernel of one's own may report neither
    kinds = [stats[name] for name in ("projection_failed", "reversal_failed") if name in stats]
    if not kinds:
        return
    failed = torch.stack(kinds).any(0).double().mean((0, 1)).flatten()
    worst = int(failed.argmax())
    if failed[worst] < VERDICT.failing:
        return

    def constraint(u: Tensor) -> Tensor:
        return problem.take(torch.full(u.shape[:1], worst, device=u.device)).constraint(u)

    last = inputs[: VERDICT.lines, -1].reshape(min(len(inputs), VERDICT.lines), -1, problem.dim)[:, worst]
    if (jump := find_jump(constraint, last, last.roll(1, 0))) is not None:
        failing = failed.reshape(problem.batch_shape) >= VERDICT.failing
        fault, remedy = jump_words(jump, kinked_operations(constraint, last[:1]))
        yield finding(
            "misleading",
            f"projections or reversals fail in {percent(failed[worst])} of the transitions{of_problems(failing)}, and "
            f"the model's {fault}",
            remedy,
            failing,
        )


def _groups(groups: Tensor, *, weighed: bool, jumps: bool) -> Iterator[Finding]:
    several = groups.amax(0) > 0
    if several.any():
        # of the first such problem, which the line names
        first = groups[:, several][:, 0].tolist()
        sizes = [str(first.count(group)) for group in range(max(first) + 1)]
        told = f"{', '.join(sizes[:-1])} and {sizes[-1]} chains"
        if -1 in first:
            told += f", {first.count(-1)} mix too slowly to tell"
        source = "their numbers come from the starting points and are not posterior weights (see draws.chain_groups)"
        if weighed:
            source = (
                "their numbers come from the starting points, at best in proportion to Laplace's masses of the modes, "
                "which dgm.modes(fibre) has (see draws.chain_groups)"
            )
        if not jumps:
            source += ": ModeJumps(kernel) jumps between modes in proportion to their masses"
        what = f"chains{of_problems(several)} form {len(sizes)} groups that never overlap ({told})"
        yield finding("misleading", what, source, several)


def _missed(modes: Jumps, inputs: Tensor, problem: Any, *, jumps: bool) -> Iterator[Finding]:
    """Modes that the start has found and no draw is in."""
    x = inputs[:, :: max(1, inputs.shape[1] // VERDICT.draws), ..., : modes.centres.shape[-1]].flatten(0, 1)
    modes = modes.to(x)
    share = (modes.log_weights.exp() * ~modes.visited(x)).sum(0)
    if isinstance(problem, Target) and modes.centres.shape[1:] == (*problem.batch_shape, problem.dim):
        beside = ~modes.reached(x).any(0)
        if beside.any():
            share = torch.where(beside, _share_of_modes(modes, x, problem).to(share), share)
            if (missed := beside & (share > VERDICT.missed)).any():
                yield finding(
                    "misleading",
                    f"no draw is in modes that hold {percent(share[missed].max())} of the posterior or more, by "
                    f"Laplace's masses{of_problems(missed)}",
                    "log_evidence(target, Gaussian(mean, sd)), with those of these draws, has weighted draws of both "
                    "(see draws.modes)",
                    missed,
                )
            share = torch.where(beside, 0.0, share)
    if (missed := share > VERDICT.missed).any():
        remedy = "use more chains, or ModeJumps(kernel), whose chains jump between modes"
        if jumps:
            remedy = "jumps there were refused: draw longer, or compare these masses with log_evidence's"
        yield finding(
            "misleading",
            f"no draw is in modes that hold {percent(share.max())} of the posterior by Laplace's masses"
            f"{of_problems(missed)}",
            f"{remedy} (see draws.modes)",
            missed,
        )


def _share_of_modes(modes: Jumps, x: Tensor, target: Target) -> Tensor:
    """At least this share of the mass is in the modes, and not where the draws ``x [N, *batch, D]`` are: ``[*batch]``.

    ``log Z = E[-phi] + entropy`` of the mass there, whose entropy is at most that of a normal law of its covariance. 0
    where there are too few draws for one.
    """
    n, dim = len(x), x.shape[-1]
    nothing = torch.zeros(x.shape[1:-1], dtype=torch.float64, device=x.device)
    if n < VERDICT.each * dim:
        return nothing
    apart = (x - x.mean(0)).double()
    covariance = torch.einsum("n...i,n...j->...ij", apart, apart) / (n - 1)
    energy = torch.cat([target.energy(part) for part in x.split(VERDICT.together)]).double()
    entropy = 0.5 * (dim * (1 + math.log(2 * math.pi)) + torch.linalg.slogdet(covariance).logabsdet)
    return (modes.log_masses(target).logsumexp(0) + energy.mean(0) - entropy).sigmoid().nan_to_num(0.0)


def percent(share: Tensor | float) -> str:
    """A share as a whole number of percent."""
    return f"{100 * float(share):.0f} %"
