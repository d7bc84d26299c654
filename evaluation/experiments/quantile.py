"""Parameters of a generalised lambda distribution from 250 independent observations (J 10.1).

Constrained HMC, exact, from prior draws and with its default settings, against HMC in the input space on the ABC
posteriors with a Gaussian kernel of width 0.25 and 0.05. The baselines have the published numbers of leapfrog steps and
adapted step sizes. They start where short constrained chains ended, in their favour: from the starts of the constrained
chains, as published, some of theirs never move. Finding these starts is not counted in their time. The published
comparison has a fourth method, made for quantile distributions alone (McVinish 2012); it is left out.
"""

from pathlib import Path

import dgm_infer as dgm
import generators

from .samplers import Sampler, report, run_samplers, typical_inputs

__all__ = ["run"]


def run(folder: Path, *, fast: bool, data: Path | None, seed: int) -> dict:
    """Write ``posteriors.png`` (J fig. 6) and ``efficiency.png`` (J fig. 7) into ``folder``; ``data`` is not used."""
    model = generators.GeneralisedLambda(250)
    observed, z = model.published_observations()
    truth = {f"z{i + 1}": float(value) for i, value in enumerate(z)}
    chains = 8 if fast else 64
    # warm-up and draws of each method
    sizes = [(25, 25), (25, 25), (25, 25)] if fast else [(300, 300), (500, 1500), (500, 500)]

    exact = dgm.condition(model, observed)
    wide, narrow = (dgm.condition(model, observed, tolerance=eps) for eps in (0.25, 0.05))
    starts = typical_inputs(exact, chains=chains, warmup=25 if fast else 100, seed=seed)
    samplers = [
        Sampler("constrained HMC", exact, dgm.ConstrainedHMC(), *sizes[0]),
        Sampler("ABC-HMC, ε = 0.25", wide, dgm.HMC(n_steps=(20, 40)), *sizes[1], starts),
        Sampler("ABC-HMC, ε = 0.05", narrow, dgm.HMC(n_steps=(40, 80)), *sizes[2], starts),
    ]
    return report(folder, run_samplers(samplers, chains=chains, seed=seed), truth)
