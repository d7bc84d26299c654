"""Simulation-based calibration (Talts et al. 2018, arXiv:1804.06788): parameters drawn from the prior rank uniformly
among draws of their posteriors."""

import pytest
import torch

import dgm_infer as dgm
from generators import GeneralisedLambda
from tests.calibration import uniformity
from tests.oracles import FLOAT

PROBLEMS, CHAINS = 120, 9


@pytest.mark.slow
def test_posteriors_of_ten_observations_are_calibrated_and_under_another_prior_they_are_not():
    model = GeneralisedLambda(10)
    u = model.input_density.sample((2, PROBLEMS), generator=torch.Generator().manual_seed(50), dtype=FLOAT)
    # control: half of the data come from exponents one prior standard deviation larger
    u[1, :, 1:3] += 1
    truth = model.latents(u)
    problem = dgm.condition(model, model(u))
    # the last draw of every chain: independent of the others, and of the start if the chain has forgotten it
    draws = dgm.sample(
        problem,
        dgm.ConstrainedHMC(n_steps=(1, 4), n_geodesic=2, max_iterations=20),
        chains=CHAINS,
        warmup=60,
        draws=1,
        seed=1,
        # a few of the data are out of reach of most prior draws
        initial=problem.start(CHAINS, torch.Generator().manual_seed(51), attempts=100),
        progress=False,
    )
    p = {name: [uniformity(truth[name][i], draws.latents[name][:, -1, i]) for i in (0, 1)] for name in truth}
    assert min(right for right, _ in p.values()) > 1e-3, p
    assert max(p["z3"][1], p["z4"][1]) < 1e-6, p
