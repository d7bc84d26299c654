"""Parameters of a predator-prey simulator from its series, and from nine summaries of it (J 10.2).

Constrained HMC with its default settings, on the full series (100 outputs, a Markov chain) and on the nine summaries
(dense), against ABC in the input space on the full series (J fig. 10): elliptical slices of the inputs of the
parameters and of the noise in turn, under uniform kernels of width 100 and 10 and a Gaussian one of width 10, and HMC
under the Gaussian one with the published number of leapfrog steps and an adapted step size. As published, ABC is not
run on the summaries: a width of 10 says nothing about an autocorrelation. The published slices made
60 000 transitions per chain, these make hundreds, of more chains at once: where R-hat says that chains have not mixed,
their effective draws mean little.

ABC in parameter space fails on the full series: a line for each attempt says how near it came. Rejection accepts next
to no prior draws even at a tolerance of 1000. Pseudo-marginal Markov chains, whose every proposal has new noise, get
starts here that they would not find by themselves: at 100 they then move, at 10 they do not.

Only the first method starts from prior draws. From nearly all of them the simulator explodes, which leaves the
summaries no start and ABC no way; the others start where short constrained chains on the full series ended, since
inputs that generate the series generate its summaries too. Finding these starts is not counted in their time.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import dgm_infer as dgm
import generators
from dgm_infer import Draws
from generators.lotka_volterra import summaries

from ..figures.series import series
from ..reports.kept import NOT_KEPT, Parts
from . import parameter_space
from .samplers import Sampler, report, run_samplers, typical_inputs

__all__ = ["run"]


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``posteriors.png`` (J fig. 10), ``efficiency.png`` (J fig. 11) and ``series.png``; ``data`` is not used."""
    model = generators.LotkaVolterra()
    observed, z = model.published_observations()
    truth = {f"z{i + 1}": float(value) for i, value in enumerate(z)}
    chains = 8 if fast else 64
    # warm-up and draws of each method
    sizes = [(20, 25), (8, 8), (4, 8), (15, 15)] if fast else [(300, 300), (200, 200), (300, 500), (500, 700)]

    full = dgm.condition(model, observed)
    reduced = dgm.condition(model, summaries(observed), observe=summaries)
    wide, narrow = (dgm.condition(model, observed, tolerance=eps, kernel="uniform") for eps in (100.0, 10.0))
    smooth = dgm.condition(model, observed, tolerance=10.0)
    slices = dgm.kernels.Alternating(dgm.kernels.EllipticalSlice(), dgm.kernels.EllipticalSlice(), ("global", "local"))
    starts = typical_inputs(full, chains=chains, warmup=25 if fast else 100, seed=seed, parts=parts)
    samplers = [
        Sampler("constrained HMC, full series", full, dgm.ConstrainedHMC(), *sizes[0]),
        Sampler("constrained HMC, 9 summaries", reduced, dgm.ConstrainedHMC(), *sizes[1], starts),
        Sampler("ABC slices, uniform, ε = 100", wide, slices, *sizes[2], starts),
        Sampler("ABC slices, uniform, ε = 10", narrow, slices, *sizes[2], starts),
        Sampler("ABC slices, Gaussian, ε = 10", smooth, slices, *sizes[2], starts),
        Sampler("ABC-HMC, Gaussian, ε = 10", smooth, dgm.HMC(n_steps=(10, 20)), *sizes[3], starts),
    ]
    runs = run_samplers(samplers, chains=chains, seed=seed, parts=parts)
    simulations = {run.label: _predictive(run.draws, seed) for run in runs}
    series(folder / "series.png", _populations(observed), simulations, ("prey", "predators"))
    tries = [
        partial(parameter_space.rejection, tolerance=1000.0, simulations=10_000 if fast else 1_000_000),
        *(
            partial(parameter_space.chains, tolerance=eps, starts=starts, step=step, updates=100 if fast else 1600)
            for eps, step in ((100.0, 0.01), (10.0, 0.001))
        ),
    ]
    attempts = [parts.value(partial(attempt, model, observed, seed=seed))[0] for attempt in tries]
    results = report(folder, runs, truth)
    return {
        **results,
        "summary": f"{results['summary']}\n\n{parameter_space.describe(attempts)}",
        "parameter_space": parameter_space.as_results(attempts),
    }


def _predictive(draws: Draws, seed: int, n: int = 2000) -> np.ndarray:
    """Series simulated again, with fresh noise, at up to ``n`` parameters of the posterior: ``[n, steps, 2]``."""
    model, inputs = draws.problem.model, draws.inputs
    assert inputs is not None
    inputs = inputs.flatten(0, 1)
    u1, _ = model.split(inputs[torch.linspace(0, len(inputs) - 1, min(n, len(inputs))).long()])
    rng = torch.Generator().manual_seed(seed + 1)
    u2 = model.local_density.sample((len(u1),), generator=rng, dtype=u1.dtype)
    return _populations(model.observed(torch.cat([u1, u2], -1)))


def _populations(x: Tensor) -> np.ndarray:
    """Prey and predators in turn to one column each: ``[..., 2 S] -> [..., S, 2]``."""
    return x.unflatten(-1, (-1, 2)).numpy()
