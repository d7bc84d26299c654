"""What ``dgm-infer bench ablations`` can switch off, one at a time; the package itself has no such switches."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dgm_infer.autodiff import jacobian_products, layers
from dgm_infer.conditioning import Fibre, observed, projection, start_points
from dgm_infer.evidence import checks, estimate, plan, smc
from dgm_infer.evidence.tempering import legs
from dgm_infer.kernels import LiftedHMC, hmc
from dgm_infer.sampling import allocation, annealed_starts, run, starts, warmup
from dgm_infer.sampling.annealed_starts import Start
from dgm_infer.sampling.warmup import Settling

__all__ = ["SWITCHES", "Switch", "replaced", "switch"]


@dataclass(frozen=True)
class Switch:
    """Something that a run does without being asked, and how to run without it.

    Args:
        name: as ``--switches`` has it.
        room: whose problems it is measured on, ``"sampling"``, ``"conditioning"`` or ``"evidence"``.
        words: what it is, in a line.
        off: a context in which it is off.
    """

    name: str
    room: str
    words: str
    off: Callable[[], AbstractContextManager[None]]


SWITCHES: dict[str, Switch] = {}
"""By name, in the order of the table."""


def switch(name: str, words: str, room: str = "sampling") -> Callable[[Callable[[], Iterator[None]]], None]:
    """Register a generator that switches something off, yields, and switches it on again."""

    def register(off: Callable[[], Iterator[None]]) -> None:
        SWITCHES[name] = Switch(name, room, words, contextmanager(off))

    return register


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Other values for attributes of a module or class, which must have them."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@switch("annealing", "additive noise is annealed from wide to its own width before descents find the modes")
def _annealing():
    anneal = starts.anneal_noise

    def descended(problem: Any, kernel: Any, chains: int, rng: torch.Generator, **options: Any) -> Start:
        marginal = problem.marginal
        if marginal is None:
            return anneal(problem, kernel, chains, rng, **options)
        n = max(chains, annealed_starts.AnnealingSettings().population)
        points = marginal.start(n, rng)
        found = allocation.allocate_chains(marginal, points, chains, rng)
        u1 = points[:chains] if found.position is None else found.position
        if found.position is None:
            u1 = points.gather(0, found.chosen.unsqueeze(-1).expand(*found.chosen.shape, marginal.dim))
        return Start(marginal.lift(u1, rng), found.chosen, jumps=found.jumps)

    with replaced(starts, anneal_noise=descended):
        yield


@switch("likelihood annealing", "posteriors of latents are annealed from the prior, and chains shared out over modes")
def _likelihood_annealing():
    def near_prior(problem: Any, kernel: Any, chains: int, rng: torch.Generator, **options: Any) -> Start:
        return Start(problem.start(chains, rng))

    with replaced(starts, anneal_likelihood=near_prior):
        yield


@switch("first metric", "HMC on posteriors of latents begins with the metric of their curvature")
def _first_metric():
    with replaced(hmc, first_metric=lambda metric, problem, position: None):
        yield


@switch("masses", "chains are shared out over modes by their Laplace masses, found by descents")
def _masses():
    def own(marginal: Any, position: torch.Tensor, chains: int, *_: Any) -> allocation.Allocation:
        return allocation.Allocation(allocation.places(position[..., 0])[:chains])

    with replaced(annealed_starts, allocate_chains=own):
        yield


@switch("prior descents", "descents to the modes begin at prior draws too, and not at annealed points alone")
def _prior_descents():
    with replaced(allocation, _SETTINGS=allocation.AllocationSettings(searches=0)):
        yield


@switch("jumps", "kernels on fibres of additive noise jump between the modes that were found")
def _jumps():
    found = run.starting_points

    def without(*arguments: Any, **options: Any) -> Start:
        return found(*arguments, **options)._replace(jumps=None)

    with replaced(run, starting_points=without):
        yield


@switch("low points", "chains on fibres of no noise begin at low points of the prior's energy")
def _low_points():
    def near_prior(
        problem: Any, chains: int, rng: torch.Generator, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position = problem.start(chains, rng, **options)
        own = torch.arange(chains, device=position.device).view(-1, *[1] * (position.ndim - 2))
        return position, own.expand(position.shape[:-1])

    with replaced(starts, low_points=near_prior):
        yield


@switch("strays", "starting points that end far above the lowest of their problem begin again, or elsewhere")
def _strays():
    with replaced(starts, _STRAYS=starts.StraySettings(astray=float("inf"))):
        yield


@switch("open warm-up", "a warm-up of no given length ends as soon as it has settled, and not after 500 iterations")
def _open_warmup():
    with replaced(Settling, reached=property(lambda self: False)):
        yield


@switch("trajectory length", "warm-up adapts the length of trajectories; without it they last pi/2 or one step")
def _trajectory_length():
    with replaced(warmup.ChEES, update=lambda self, end, acceptance: None):
        yield


@switch("plateau", "steps stop shrinking where acceptance does not respond to them")
def _plateau():
    def update(self: Any, step_size: torch.Tensor, acceptance: torch.Tensor) -> None:
        self.floor = torch.zeros_like(step_size)

    with replaced(warmup.AcceptancePlateau, update=update):
        yield


@switch("start-up phase", "a warm-up begins with steps of every chain's own size, one or two a transition")
def _startup_phase():
    begin = warmup.WarmUp.__init__

    def without(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **{**options, "typical": True})

    with replaced(warmup.WarmUp, __init__=without):
        yield


@switch("curvature metric", "a dense metric of LiftedHMC begins with the curvature of the noise")
def _curvature_metric():
    with replaced(LiftedHMC, metric_at=lambda self, problem, position: None):
        yield


@switch("unseen modes", "searches after a run look for modes that no draw has visited", "evidence")
def _unseen_modes():
    def none(path: Any, outcome: Any, rng: torch.Generator) -> checks.Unseen:
        return checks.Unseen.none(outcome.estimate.log_z)

    with replaced(checks, look_for_unseen=none):
        yield


@switch("cross-check", "a short parallel tempering checks other methods where there are several modes", "evidence")
def _cross_check():
    def none(path: Any, outcome: Any, rng: torch.Generator) -> checks.CrossCheck:
        nothing = torch.zeros_like(outcome.estimate.log_z)
        return checks.CrossCheck(nothing, nothing)

    with replaced(checks, cross_check=none):
        yield


@switch("count of minima", "one problem with several minima is a case for parallel tempering", "evidence")
def _count_of_minima():
    with replaced(estimate, _chosen=lambda run: run.method):
        yield


@switch("refine", "runs whose draws contradict the base run again from a better one", "evidence")
def _refine():
    with replaced(estimate, run_and_refine=lambda path, once: once(path)[0]):
        yield


@switch("base fit", "parallel tempering fits its base to its draws between rounds of tuning", "evidence")
def _base_fit():
    with replaced(legs.Legs, can_refit=False):
        yield


@switch("barrier schedule", "annealing's temperatures are as its pilot says, and not dense at both ends", "evidence")
def _barrier_schedule():
    with (
        replaced(plan, SCHEDULES=plan.SCHEDULES | {plan.TUNED: plan.sigmoid}),
        replaced(plan.Planned, _is_tuned=False),
    ):
        yield


@switch("short SMC steps", "an adaptive step of SMC is a tenth of what remains at most, but for the last", "evidence")
def _short_steps():
    with replaced(smc, SETTINGS=smc.SETTINGS.replace(share_of_rest=1.0)):
        yield


@switch("SMC steps of a third", "the same, and not a third of it", "evidence")
def _steps_of_a_third():
    with replaced(smc, SETTINGS=smc.SETTINGS.replace(share_of_rest=1 / 3)):
        yield


@switch("last SMC step", "what remains for the last step of SMC is 0.03, and not 0.3", "evidence")
def _last_step():
    with replaced(smc, SETTINGS=smc.SETTINGS.replace(last=0.3)):
        yield


@switch("fixed convolutions", "convolutions are differentiated as the linear functions that they are", "conditioning")
def _fixed_convolutions():
    with replaced(jacobian_products, SETTINGS=jacobian_products.ProductSettings(fixed_convolutions=False)):
        yield


@switch("affine normalisations", "batch normalisations are differentiated as affine functions", "conditioning")
def _affine_normalisations():
    with replaced(layers, _normalised=lambda *arguments: None):
        yield


@switch("reverse twice", "of few rows J v is made by reverse mode twice, and not by forward mode", "conditioning")
def _reverse_twice():
    with replaced(jacobian_products, SETTINGS=jacobian_products.ProductSettings(reverse=0)):
        yield


@switch("traced derivatives", "Jacobians of few rows run as operations that were traced once", "conditioning")
def _traced_derivatives():
    with replaced(Fibre, traces=False):
        yield


@switch("float32 derivatives", "Jacobians of networks with convolutions are those in float32", "conditioning")
def _float32_derivatives():
    with replaced(Fibre, prefers_float32=False):
        yield


@switch("Broyden", "solvers correct their factorisation by the steps that they make", "conditioning")
def _broyden():
    with replaced(projection, SOLVERS={**projection.SOLVERS, "broyden": projection.quasi_newton}):
        yield


@switch("near roots", "reverse checks end once a solver contracts towards where the trajectory began", "conditioning")
def _near_roots():
    def reached(self: Any, u: torch.Tensor, residual: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return residual < self.tolerance

    with replaced(projection.Stop, reached=reached):
        yield


@switch("moves to prior draws", "starts move along the fibre to where they are nearest to prior draws", "conditioning")
def _moves():
    with replaced(start_points, SETTINGS=start_points.SearchSettings(moves=0)):
        yield


@switch("noiseless", "with additive noise derivatives leave the noise itself out")
def _noiseless():
    with replaced(observed._Noiseless, suits=staticmethod(lambda model: False)):
        yield
