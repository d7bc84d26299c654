"""Parameters of a generalised lambda distribution from 250 independent observations (J 10.1).

Constrained HMC, exact, from prior draws and with its default settings, against ABC: HMC in the input space with a
Gaussian kernel of width 0.25 and 0.05, and the method made for quantile distributions alone, a random walk on the
parameters under a kernel uniform on the cube of half-width 0.1 with all uniforms integrated out (McVinish 2012). To
these published rows one is added, elliptical slices in the input space under the wider Gaussian kernel, which shows
what the gradient is worth.

The HMC baselines have the published numbers of leapfrog steps, and all have adapted step sizes. They start where short
constrained chains ended, in their favour: from the starts of the constrained chains, as published, some of theirs never
move. Finding these starts is not counted in their time.
"""

from pathlib import Path

import dgm_infer as dgm
import generators

from ..problems.quantile_intervals import QuantileIntervals
from ..reports.kept import NOT_KEPT, Parts
from .samplers import Sampler, report, run_samplers, typical_inputs

__all__ = ["run"]


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``posteriors.png`` (J fig. 6) and ``efficiency.png`` (J fig. 7) into ``folder``; ``data`` is not used."""
    model = generators.GeneralisedLambda(250)
    observed, z = model.published_observations()
    truth = {f"z{i + 1}": float(value) for i, value in enumerate(z)}
    chains = 8 if fast else 64
    # warm-up and draws of each method
    sizes = [(25, 25), *[(10, 15)] * 4] if fast else [(300, 300), (500, 1500), (500, 500), (500, 2000), (500, 1500)]

    exact = dgm.condition(model, observed)
    wide, narrow = (dgm.condition(model, observed, tolerance=eps) for eps in (0.25, 0.05))
    cube = QuantileIntervals(model, observed, 0.1)
    slices = dgm.kernels.Alternating(dgm.kernels.EllipticalSlice(), dgm.kernels.EllipticalSlice(), ("global", "local"))
    starts = typical_inputs(exact, chains=chains, warmup=25 if fast else 100, seed=seed, parts=parts)
    samplers = [
        Sampler("constrained HMC", exact, dgm.ConstrainedHMC(), *sizes[0]),
        Sampler("ABC-HMC, ε = 0.25", wide, dgm.HMC(n_steps=(20, 40)), *sizes[1], starts),
        Sampler("ABC-HMC, ε = 0.05", narrow, dgm.HMC(n_steps=(40, 80)), *sizes[2], starts),
        Sampler("ABC-MCMC by intervals, ε = 0.1", cube, dgm.kernels.RandomWalk(), *sizes[3], model.split(starts)[0]),
        Sampler("ABC slices, ε = 0.25", wide, slices, *sizes[4], starts),
    ]
    return report(folder, run_samplers(samplers, chains=chains, seed=seed, parts=parts), truth)
