"""``Draws.diagnose()``: what a run says at its end, and how well its chains have mixed (math 8.6)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments.values import of_problems, plural
from ..conditioning.abc_kernels import InputPosterior
from ..conditioning.faults import off_scale
from ..conditioning.fibre import Fibre
from ..conditioning.observed import made_by
from ..conditioning.projection import solver_tolerance
from ..conditioning.subject import LIMITS, prior_draws
from ..diagnosis import Diagnosis, Finding, Severity, diagnosis, finding
from ..kernels.mode_jumps import innermost
from ..models import beneath_noise
from .chain_groups import labels, side_by_side
from .inference_data import effective_draws, r_hat
from .verdict import VERDICT, Run, percent, verdict


@dataclass(frozen=True)
class DiagnosisSettings:
    """From where there is something to say."""

    apart: float = 1.05
    """R-hat above which chains have not mixed."""
    mixed: float = 1.01
    """R-hat up to which they have."""
    chance: float = 0.01
    """In between, the probability over all latents that chains which have mixed show a larger one."""
    enough: int = 400
    """Effective draws for means with an error of a twentieth of the sd."""
    fewest: int = 4
    """Fewest draws per chain that R-hat can be had from."""
    diverging: float = 1e-3
    """Share of diverging transitions."""
    unstable: float = 20.0
    """Nats by which the energy of a trajectory errs that diverges: of 70 000 on digits, MNIST and other posteriors that
    are sampled well none erred by 14."""
    often: float = 3e-3
    """Share of those that is a fault: of a hierarchy whose neck chains bounce off it is 0.3 to 9 %, of a small decoder
    that is sampled well it has been 0.2 %."""
    fewer: float = 0.7
    """Share of the rejections to which another acceptance is to bring them, for it to be advice."""
    bfmi: float = 0.3
    """E-BFMI below which momenta change the energy too little (Betancourt 2016), the limit of Stan: a hierarchy whose
    scale near zero three runs visited a third of the times that it should, had 0.29 to 0.31."""
    solved: float = 10.0
    """Tolerances of a solver within which a number is one that an observation determines."""
    starts: int = 4
    """Starting points below which R-hat compares too few."""
    misfit: float = 2.0
    """Root mean square of standard normal noise above which the data are not those of the model."""


_SETTINGS = DiagnosisSettings()
_MEANS = "errors of means exceed a twentieth of the posterior's standard deviation"
_TAILS = "the ends of intervals are imprecise"


@torch.no_grad()
def diagnose(draws: Run, variables: dict[str, Tensor]) -> Diagnosis:
    """Findings on a run, by what its draws hold.

    Args:
        draws: the run.
        variables: what its chains have to mix in, each ``[chains, draws, *batch, ...]``.
    """
    n, batch = draws.shape[1], draws.shape[2:]
    every = torch.ones(batch, dtype=torch.bool)
    stayed = draws.longest_stay >= max(n - 1, 1)
    found = list(verdict(draws, draws.problem, stayed, n, adapted=True))
    told = torch.zeros(batch, dtype=torch.bool)
    for each in found:
        if each.severity != "imprecise":
            told.view(-1)[list(each.problems)] = True
    if draws.interrupted:
        what = f"the run was interrupted after {n} draws per chain"
        found.append(finding("imprecise", what, "sample again, unless these suffice", every))
    found += _starts(draws.ancestors)
    found += _misfit(draws)
    found += _hidden(draws)
    found += _transitions(draws, told)
    mixing, numbers = _mixing(draws, variables, told)
    return diagnosis([*found, *mixing], ", ".join([*numbers, *_numbers(draws)]))


def _starts(ancestors: Tensor | None) -> Iterator[Finding]:
    if ancestors is None:
        return
    ordered = ancestors.cpu().sort(0).values
    starts = 1 + (ordered[1:] != ordered[:-1]).sum(0)
    few = starts < min(_SETTINGS.starts, len(ancestors))
    if few.any():
        fewest = plural(int(starts[few].min()), "starting point")
        yield finding(
            "misleading",
            f"the {len(ancestors)} chains{of_problems(few)} descend from {fewest}",
            "R-hat compares no more than these, and what lies far from them does not show: use more chains, or start "
            "them apart (initial=)",
            few,
        )


def _misfit(draws: Run) -> Iterator[Finding]:
    """Whether the noise that explains the data is wider than noise of the model's width."""
    problem = draws.problem
    if not isinstance(problem, Fibre) or draws.inputs is None or problem.marginal is None:
        return
    noise = draws.inputs[..., problem.marginal.dim :]
    square = noise.square().mean((0, 1, -1)).cpu()
    # of n standard normal variables the mean square is 1, with a standard deviation of sqrt(2/n)
    far = square - 1 > max(_SETTINGS.misfit**2 - 1, 6 * math.sqrt(2 / noise.shape[-1]))
    if far.any():
        yield finding(
            "misleading",
            f"outputs without noise miss the data by {square[far].max().sqrt():.2g} standard deviations of the noise"
            f"{of_problems(far)}",
            "such data are unlikely under the model: check range, mask and operator, or allow for wider noise",
            far,
        )


def _hidden(draws: Run) -> Iterator[Finding]:
    """Whether noise of another scale hides what the model makes."""
    problem = draws.problem
    if not isinstance(problem, Fibre) or problem.marginal is None:
        return
    u = prior_draws(problem.model, LIMITS.draws, problem.values.dtype, problem.values.device)
    model, u, sd = beneath_noise(problem.model, u)
    if not sd:
        return
    made = made_by(problem.observed.operator, problem.values, model.observed(u))
    if (found := off_scale(type(model).__name__, problem.values, made, sd, None)) is not None:
        every = torch.ones(problem.batch_shape, dtype=torch.bool)
        yield finding("misleading", found.what, found.remedy, every)


def _transitions(draws: Run, told: Tensor) -> Iterator[Finding]:
    """What proposals run into, for problems without earlier findings."""
    stats = {name: value.double().cpu() for name, value in draws.stats.items()}
    made = draws.shape[0] * draws.shape[1]
    # a proposal outside the support is a rejection like others, of kernels without trajectories and where it is known
    if "n_steps" in stats and not _ends(draws.problem):
        share = _diverged(stats).mean((0, 1)) * ~told
        surely = stats["diverging"].mean((0, 1)) * ~told
        if (bad := (share > _SETTINGS.often) | (surely > _SETTINGS.diverging)).any():
            diverged = plural(round(float(share.max() * made)), "transition")
            yield finding(
                "misleading",
                f"{diverged} of {made} diverged ({100 * share.max():.2g} %){of_problems(bad)}",
                f"draws may be missing where the density is narrow: use {_smaller_steps(stats)}, or rescale the "
                "variables",
                bad,
            )
    finer = _smaller_steps(stats)
    if hasattr(innermost(draws.kernel), "n_geodesic"):
        finer += " or more sub-steps (n_geodesic=)"
    for name, what in (("projection_failed", "projections"), ("reversal_failed", "reversals")):
        if name in stats:
            share = stats[name].mean((0, 1)) * ~told
            if (bad := share > VERDICT.failing).any():
                yield finding(
                    "imprecise",
                    f"{what} fail in {percent(share.max())} of the transitions{of_problems(bad)}",
                    f"these are rejected, and chains mix more slowly: use {finer}",
                    bad,
                )
    if "n_steps" in stats and draws.shape[1] >= VERDICT.transitions:
        energy = stats["energy"]
        moved = energy.diff(dim=1).square().mean((0, 1))
        bfmi = moved / energy.var(1).mean(0)
        if (low := (bfmi < _SETTINGS.bfmi) & ~told).any():
            yield finding(
                "misleading",
                f"E-BFMI is {bfmi[low].min():.2g}, less than {_SETTINGS.bfmi}{of_problems(low)}",
                "momenta change the energy too little to reach the tails: draw longer, rescale heavy-tailed variables, "
                "or see metric=",
                low,
            )


def _smaller_steps(stats: dict[str, Tensor]) -> str:
    """What makes steps smaller than those of this run, whose acceptance is near what they were adapted to."""
    rate = stats["acceptance_rate"]
    reached = rate[rate > 0].mean().nan_to_num()
    higher = next((asked for asked in (0.95, 0.99) if 1 - asked < _SETTINGS.fewer * (1 - reached)), None)
    return f"smaller steps ({'step_size=' if higher is None else f'target_acceptance={higher}'})"


def _ends(problem: Any) -> bool:
    """Whether the density is zero beyond a tolerance."""
    return isinstance(problem, InputPosterior) and problem.is_bounded


def _diverged(stats: dict[str, Tensor]) -> Tensor:
    """1 for transitions whose trajectories have diverged, ``[chains, draws, *batch]``: they are all but certain to be
    rejected, and not because a projection failed."""
    failed = [stats[name].double() for name in ("projection_failed", "reversal_failed") if name in stats]
    unstable = (stats["acceptance_rate"] < math.exp(-_SETTINGS.unstable)).double()
    return torch.maximum(stats["diverging"].double(), unstable - sum(failed)).clamp_min(0.0)


def _mixing(draws: Run, variables: dict[str, Tensor], told: Tensor) -> tuple[list[Finding], list[str]]:
    """Findings by R-hat and effective draws, and their worst values in words."""
    shape = draws.shape
    (chains, n), batch = shape[:2], shape[2:]
    every = torch.ones(batch, dtype=torch.bool)
    if n < _SETTINGS.fewest:
        what = f"{plural(n, 'draw')} per chain"
        return [finding("misleading", what, "R-hat and effective draws need more (draws=)", every)], [what]
    values = side_by_side(variables, len(batch)).cpu()
    names = labels(variables, len(shape))
    found = []
    if (lost := ~values.isfinite().all(1).all(0).all(-1)).any():
        share = (~values.isfinite().all(-1)).double().mean((0, 1)).max()
        what = f"latents are NaN or infinite in {100 * share:.2g} % of the draws{of_problems(lost)}"
        found.append(finding("useless", what, "check the model's latents(u)", lost))
    varies = _varies(values, draws.problem)
    bulk, tail = (effective_draws(values, kind) for kind in ("bulk", "tail"))
    numbers = []
    looked = varies & ~(told | lost).unsqueeze(-1)
    if chains == 1:
        what = "there is one chain, and no R-hat"
        remedy = "what it has missed does not show: run 4 or more (chains=)"
        found.append(finding("misleading", what, remedy, every))
    elif varies.any():
        rates = r_hat(values)
        numbers.append(f"R-hat at most {rates[varies].max():.3f}")
        # chains that stand still at different points
        rates = rates.nan_to_num(torch.inf, torch.inf)
        unmixed = looked & (rates > _SETTINGS.apart)
        found += _apart(rates, unmixed, looked & (rates > _by_chance(bulk.minimum(tail), chains, looked.sum())), names)
        looked &= ~unmixed
    if varies.any():
        numbers.append(f"effective draws at least {bulk[varies].min():.0f} (bulk) and {tail[varies].min():.0f} (tail)")
    found += [*_few("bulk", bulk, looked, _MEANS, names), *_few("tail", tail, looked, _TAILS, names)]
    return found, numbers


def _varies(values: Tensor, problem: Any) -> Tensor:
    """Whether numbers ``[chains, draws, *batch, D]`` vary: one that an observation determines does so by the tolerance
    of solvers alone."""
    varies = (values != values[:1, :1]).any(1).any(0)
    if isinstance(problem, Fibre):
        spread, size = values.amax((0, 1)) - values.amin((0, 1)), values.abs().amax((0, 1))
        tolerance = _SETTINGS.solved * solver_tolerance(problem.values.dtype)
        varies &= (spread > tolerance * problem.scale.cpu().unsqueeze(-1)) | (spread > tolerance * size)
    return varies


def _apart(rates: Tensor, unmixed: Tensor, unlikely: Tensor, names: list[str]) -> Iterator[Finding]:
    """Findings by R-hat ``[*batch, D]``."""
    yield from _named(
        "misleading",
        "R-hat is {worst:.2f}",
        f", and above {_SETTINGS.apart}",
        "chains have not mixed or are too short to tell, and errors mislead: use a longer warm-up and more draws "
        "(warmup=, draws=), or another kernel or metric",
        rates,
        unmixed,
        names,
    )
    yield from _named(
        "imprecise",
        "R-hat is {worst:.3f}",
        f", and above {_SETTINGS.mixed}",
        "chains differ by more than chance: use more draws (draws=)",
        rates,
        unlikely & ~unmixed,
        names,
    )


def _few(kind: str, effective: Tensor, looked: Tensor, meaning: str, names: list[str]) -> Iterator[Finding]:
    """A finding by effective draws ``[*batch, D]``."""
    effective = effective.nan_to_num(1.0)
    few = looked & (effective < _SETTINGS.enough)
    if few.any():
        times = (_SETTINGS.enough / effective[few].min()).clamp_min(1.1)
        yield from _named(
            "imprecise",
            f"there are {{worst:.0f}} effective draws ({kind})",
            f", and fewer than {_SETTINGS.enough}",
            f"{meaning}: draw {times:.2g} times as many (draws=, chains=)",
            -effective,
            few,
            names,
        )


def _named(
    severity: Severity, what: str, beyond: str, remedy: str, values: Tensor, which: Tensor, names: list[str]
) -> Iterator[Finding]:
    """A finding on the latents of a mask ``[*batch, D]``, the worst of them by its name; none if it is empty."""
    if which.any():
        worst = values.masked_fill(~which, -torch.inf).argmax()
        problems = which.any(-1)
        counted = "latents" if which.ndim == 1 else "(latent, problem) pairs"
        of_worst = torch.zeros_like(which).view(-1).index_fill(0, worst.reshape(1), True).view_as(which).any(-1)
        yield finding(
            severity,
            f"{what.format(worst=values.reshape(-1)[worst].abs())} for {names[worst % len(names)]}"
            f"{of_problems(of_worst)}{beyond} for {which.sum()} of {which.numel()} {counted}{of_problems(problems)}",
            remedy,
            problems,
        )


def _by_chance(effective: Tensor, chains: int, tests: Tensor) -> Tensor:
    """R-hat that mixed chains of so many effective draws exceed rarely, between the two limits, ``[*batch, D]``.

    With M halves of chains, of e effective draws each, ``R-hat^2 - 1`` is at most about ``F/e``, where ``(M - 1) F`` is
    chi-squared of M - 1 degrees of freedom.
    """
    from scipy.special import chdtri

    halves = 2 * chains
    # by ranks, and by folded ranks
    largest = float(chdtri(halves - 1, _SETTINGS.chance / max(2 * int(tests), 1))) / (halves - 1)
    return (1 + largest * halves / effective.nan_to_num(1.0)).sqrt().clamp(_SETTINGS.mixed, _SETTINGS.apart)


def _numbers(draws: Run) -> Iterator[str]:
    stats = draws.stats
    diverged = _diverged(stats) if "n_steps" in stats else stats["diverging"].double()
    did = "left the tolerance" if _ends(draws.problem) else "diverged"
    yield f"{100 * diverged.mean():.2g} % of {diverged.numel()} transitions {did}"
    failed = [stats[name].double().mean() for name in ("projection_failed", "reversal_failed") if name in stats]
    if failed:
        yield f"{100 * float(sum(failed)):.2g} % of projections and reversals failed"
    if "constraint_error" in stats:
        yield f"constraint error at most {stats['constraint_error'].max():.1g}"
