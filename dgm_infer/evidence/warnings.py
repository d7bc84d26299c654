"""Estimates that are of no use, or little, and how they show."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments.values import of_problems
from ..diagnosis import Finding, Severity, finding
from ..probe import COARSE, FINER
from ..probe import SETTINGS as PROBE
from .method import EstimateStatus


@dataclass(frozen=True)
class WarningLevels:
    """Where numbers begin to mislead."""

    share: float = 0.999
    """Share of the weights on one draw that leaves nothing but this draw."""
    large_share: float = 0.5
    """The same, that leaves an estimate imprecise."""
    moves: float = 1e-3
    """Acceptance of moves below which none are made."""
    nats: float = 10.0
    """Standard error of log Z that says nothing."""
    wide: float = 1.0
    """The same, that leaves Z known to a factor of e."""
    effective: float = 1.5
    """Effective chains below which the estimate rests on one or two of many."""
    chains: int = 8
    """How many are many."""
    few: float = 4.0
    """Effective chains below which the spread of nearly normal log weights is underestimated."""
    restarts: float = 14
    """Independent arrivals at the target per chain, below which parallel tempering of several modes is too short: the
    first of them reflect where its chains began."""
    any_restarts: float = 2
    """The same whatever the target is."""
    flat: float = 0.5
    """Share of prior draws on plateaus of the likelihood from which moves between them are blind."""
    switches: float = 0.05
    """Share of inputs without a gradient that change the likelihood when they are redrawn."""
    trips: int = 4
    """Round trips per chain below which such inputs leave log Z in doubt: with 15 of them it was 9 and 4 errors too low
    at 2.8 and 2.4, and within 2.2 at 5 to 13 and, of 5 and 10 inputs, at all (12 runs)."""
    tail: float = 100.0
    """Nats by which the target exceeds the base in the tails, beside most draws, above which SMC claims too small an
    error: below, 93 to 98 % of intervals cover (docs/evidence.md)."""

    leg: float = 0.1
    """Nats by which a leg that is cut off must find log Z larger: legs that agree for all uses may differ by more than
    chance (0.01 in 4 of 31 runs)."""


LEVELS = WarningLevels()


class _Findings(list[Finding]):
    """Findings, each made only where some problem has it."""

    def look(
        self, severity: Severity, which: Tensor, what: str, remedy: str, values: Tensor | None = None, *, least=False
    ) -> None:
        """Add a finding of the problems ``which [*batch]``; ``{of}`` names them, ``{x}`` is the worst value."""
        if which.any():
            shown: dict[str, object] = {"of": of_problems(which)}
            if values is not None:
                shown["x"] = (values[which].min() if least else values[which].max()).item()
            self.append(finding(severity, what.format(**shown), remedy.format(**shown), which))


def run_warnings(
    diagnostics: Mapping[str, Tensor], std_error: Tensor, status: EstimateStatus, chains: int
) -> list[Finding]:
    """Problems whose estimate or standard error misleads, whatever their status promises: a run warns of them.

    Args:
        diagnostics: of an outcome, each ``[..., *batch]``.
        std_error: of log Z, ``[*batch]``.
        status: that of the method; bounds may rest on few draws and are bounds still.
        chains: chains per problem; of one alone nothing is said.
    """
    found, none = _Findings(), torch.zeros_like(std_error, dtype=torch.bool)
    if chains == 1 or status not in ("unbiased", "consistent"):
        return found
    share = diagnostics.get("max_weight_share", torch.zeros_like(std_error))
    found.look(
        "useless",
        share > LEVELS.share,
        "all weight is on one draw{of}",
        "the estimate is far too low, and its standard error means nothing: use a base near the target, or more "
        "temperatures",
    )
    coarse = diagnostics.get("energy_spacing", torch.zeros_like(std_error))
    found.look("misleading", coarse > PROBE.spacing, COARSE, f"{FINER}, that of the base", coarse)
    found.look(
        "misleading",
        _few_chains(diagnostics, std_error, chains),
        f"the estimate rests on one or two of {chains} chains{{of}} (effectively {{x:.2g}})",
        "its standard error is too small; use more chains, or a base nearer the target",
        diagnostics.get("effective_chains"),
        least=True,
    )
    shift, rare, wide, neck = (
        diagnostics.get(name, torch.zeros_like(std_error))
        for name in ("unseen_shift", "rare_shift", "wide_shift", "neck_shift")
    )
    found.look(
        "misleading",
        shift > 0,
        "a search found modes that no draw has visited{of}",
        "log Z may be too low by about {x:.2g} nats, which std_error now includes; for less, refine=True, "
        "method=dgm.ParallelTempering(), or a base that covers them, such as dgm.Gaussian.broad(target)",
        shift,
    )
    found.look(
        "misleading",
        # both are of the same mass: a smaller one adds nothing
        (rare > 0) & (rare > shift),
        "the draws visit some modes too rarely{of}",
        "a short parallel tempering finds log Z larger by about {x:.2g} nats, which std_error now includes; for less, "
        "method=dgm.ParallelTempering(), which takes twelve times the gradients of GibbsTempering",
        rare,
    )
    found.look(
        "misleading",
        (neck > 0) & (neck >= torch.maximum(shift, torch.maximum(rare, wide))),
        "the density narrows to a neck, where moves hardly come{of}",
        "independent points along it find log Z larger by about {x:.2g} nats, which std_error now includes; for less, "
        "write what narrows in units of its scale (a hierarchy not centred), or the program as from_pyro(program)",
        neck,
    )
    found.look(
        "misleading",
        (wide > 0) & (wide > torch.maximum(neck, torch.maximum(shift, rare))),
        "the draws miss mass around them{of}",
        "independent points from wide densities find log Z larger by about {x:.2g} nats, which std_error now includes; "
        "for less, use more draws, or a wide base with method=dgm.evidence.ImportanceSampling(100_000)",
        wide,
    )
    flat = diagnostics.get("plateaus", torch.zeros_like(std_error))
    found.look(
        "misleading",
        flat > LEVELS.flat,
        "the likelihood is flat at {x:.0%} of the prior draws, and far below what it is at the posterior's{of}",
        "moves find what is narrow between plateaus by chance, and log Z may be too low by more than std_error says; "
        "compare with base=dgm.Gaussian.broad(target), method=dgm.evidence.ImportanceSampling(10_000), which makes no "
        "moves",
        flat,
    )
    switches = diagnostics.get("switches", torch.zeros_like(std_error))
    trips = diagnostics.get("round_trips", torch.zeros_like(std_error))
    found.look(
        "misleading",
        (switches > LEVELS.switches) & few_round_trips(diagnostics, std_error, LEVELS.trips * chains),
        f"inputs without a gradient change the likelihood, as those of where(u < 0.3, ...), and {chains} chains made "
        "{x:.0f} round trips between base and target{of}",
        "moves find the right side of thresholds by chance, and log Z may be too low by more than std_error says; sum "
        "over such choices in the model (a mixture's density), or see whether more draws agree",
        trips,
        least=True,
    )
    drift = diagnostics.get("drift", torch.zeros_like(std_error)).abs()
    found.look(
        "misleading",
        drift > 0,
        "log Z changes by {x:.2g} nats from the first half of the run to the second{of}",
        "chains have not settled, and log Z may be wrong by as much, which std_error now includes; use more draws",
        drift,
    )
    leg = diagnostics.get("leg_shift", torch.zeros_like(std_error))
    found.look(
        "misleading",
        leg > LEVELS.leg,
        "replicas from the base find log Z larger by {x:.2g} nats than those from the broad reference, which alone "
        "count{of}",
        "the broad reference misses mass, and log Z may be too low by more, which std_error now includes in part; use "
        "broad= a wider Gaussian, or method=dgm.GibbsTempering()",
        leg,
    )
    restarts, short, seldom = diagnostics.get("restarts"), none, none
    if restarts is not None:
        several = diagnostics.get("minima", torch.zeros_like(restarts)) > 1
        short, seldom = (restarts < LEVELS.restarts) & several, (restarts < LEVELS.any_restarts) & ~several
    found.look(
        "misleading",
        short,
        "the target has several modes, and only {x:.2g} restarts per chain reached it{of}",
        "log Z may be too low, by more than std_error says; use more draws",
        restarts,
        least=True,
    )
    found.look(
        "misleading",
        seldom,
        "only {x:.2g} restarts per chain reached the target{of}",
        "log Z and std_error are unreliable; use more draws and temperatures",
        restarts,
        least=True,
    )
    for remedy, own in _refined(diagnostics, std_error):
        found.look(
            "misleading",
            own & few_round_trips(diagnostics, std_error, 1) & ~short & ~seldom,
            "no chain went from the base to the target and back{of}",
            f"log Z and std_error are unreliable; use {remedy}, or more draws",
        )
    found.look(
        "useless",
        diagnostics.get("acceptance", torch.ones_like(std_error)) < LEVELS.moves,
        "no chain moved{of}",
        "use a base near the target, more temperatures, or a smaller step_size",
    )
    found.look(
        "useless",
        std_error > LEVELS.nats,
        "the standard error of log Z{of} is {x:.2g} nats",
        "the estimate says nothing: use a base near the target, more temperatures, or more draws",
        std_error,
    )
    return found


def _refined(diagnostics: Mapping[str, Tensor], std_error: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What helps chains to travel, and the problems that it is not too late for: those of refined bases, the others."""
    refined = diagnostics.get("refinements", torch.zeros_like(std_error)) > 0
    yield "refine=True, a base nearer the target", ~refined
    yield "method=dgm.ParallelTempering() or dgm.SMC(), a base nearer the target", refined


def further_findings(
    diagnostics: Mapping[str, Tensor], std_error: Tensor, status: EstimateStatus, chains: int
) -> list[Finding]:
    """What is wrong by less than a run warns of, where :func:`run_warnings` says nothing; arguments as there."""
    found, known = _Findings(), ~std_error.isnan()
    if chains == 1:
        found.look("misleading", ~known, "there is one chain, and no standard error", "run 4 or more (chains=)")
    if chains == 1 or status not in ("unbiased", "consistent"):
        return found
    few_trips = few_round_trips(diagnostics, std_error, chains)
    for remedy, own in _refined(diagnostics, std_error):
        found.look(
            "misleading",
            own & few_trips & ~few_round_trips(diagnostics, std_error, 1),
            f"only {{x:.0f}} round trips between base and target for {chains} chains{{of}}",
            f"std_error assumes that every chain makes one: use {remedy}, or more draws",
            diagnostics.get("round_trips"),
            least=True,
        )
    if "base_moments_agree" in diagnostics:
        found.look(
            "misleading",
            ~diagnostics["base_moments_agree"] & known & ~few_trips,
            "base moments are not recovered at beta = 0{of}"
            + (" (off by {x:.2g})" if "base_moment_error" in diagnostics else ""),
            "chains mix poorly, and errors are too small: use more draws or a better base",
            diagnostics.get("base_moment_error"),
        )
    share = diagnostics.get("max_weight_share", torch.zeros_like(std_error))
    few, effective = _few_chains(diagnostics, std_error, chains), diagnostics.get("effective_chains")
    excess = diagnostics.get("tail_excess", torch.zeros_like(std_error))
    found.look(
        "misleading",
        excess > LEVELS.tail,
        "the target has heavier tails than the base{of}: log of their ratio is larger by up to {x:.2g} there",
        "few particles arrive in them, and std_error may be half of the error: use a wider base, or "
        "method=dgm.ParallelTempering()",
        excess,
    )
    # weights of tempering are averages over chains, of which a few may count
    if status == "unbiased":
        if effective is not None and chains >= LEVELS.chains:
            found.look(
                "misleading",
                (effective < LEVELS.few) & ~few & (share <= LEVELS.large_share),
                f"the estimate rests on effectively {{x:.2g}} of {chains} chains{{of}}",
                "it is probably too low, and errors are underestimated: use more temperatures or chains",
                effective,
                least=True,
            )
        found.look(
            "misleading",
            (share > LEVELS.large_share) & (share <= LEVELS.share) & ~few,
            "one draw has {x:.0f} % of the weight{of}",
            "errors are underestimated: use more temperatures or chains",
            100 * share,
        )
    found.look(
        "imprecise",
        (std_error > LEVELS.wide) & (std_error <= LEVELS.nats),
        "the standard error of log Z{of} is {x:.2g} nats",
        "Z is known to a factor of e at best: use a base nearer the target, more temperatures, or more draws",
        std_error,
    )
    return found


def _few_chains(diagnostics: Mapping[str, Tensor], like: Tensor, chains: int) -> Tensor:
    """Whether an estimate rests on one or two of many chains, ``[*batch]``, where not on one draw."""
    effective, share = diagnostics.get("effective_chains"), diagnostics.get("max_weight_share")
    if effective is None or chains < LEVELS.chains:
        return torch.zeros_like(like, dtype=torch.bool)
    few = effective < LEVELS.effective
    return few if share is None else few & (share <= LEVELS.share)


def few_round_trips(diagnostics: Mapping[str, Tensor], like: Tensor, least: int) -> Tensor:
    """Problems with fewer round trips between base and target, of all chains, than ``least``: ``[*batch]``.

    An error from the spread over chains assumes that each of them travels. False where no chain is meant to.
    """
    trips = diagnostics.get("round_trips")
    return torch.zeros_like(like, dtype=torch.bool) if trips is None else trips < least
