"""HMC on targets whose moments are known."""

import pytest
import torch

import dgm_infer as dgm
from tests.oracles import FLOAT, assert_agrees, assert_refuted, correlated_gaussian, funnel

SCALES = (0.1, 1.0, 10.0)


def run(oracle, kernel=None, *, chains=100, warmup=150, draws=60):
    kernel = kernel or dgm.HMC(n_steps=(3, 10))
    return dgm.sample(oracle.problem, kernel, chains=chains, warmup=warmup, draws=draws, seed=1, progress=False)


def test_gaussians_of_three_scales_at_once_have_their_means_and_covariances():
    oracle = correlated_gaussian(SCALES)
    draws = run(oracle)
    assert_agrees(oracle, draws)
    # every problem has the step size of its own scale
    steps = draws.kernel.step_size / torch.tensor(SCALES, dtype=FLOAT)
    assert draws.kernel.step_size.shape == (3,)
    assert steps.max() / steps.min() < 2


def test_control_gaussians_that_are_a_tenth_too_wide_are_noticed():
    oracle = correlated_gaussian(SCALES)
    assert_refuted(correlated_gaussian(SCALES, wrong=1.1), run(oracle))


def test_the_non_centred_funnel_has_its_moments():
    oracle = funnel()
    assert_agrees(oracle, run(oracle))


def test_control_the_funnel_without_its_change_of_variables_is_noticed():
    oracle = funnel(jacobian=False)
    assert_refuted(oracle, run(oracle))


def test_a_plain_function_is_a_target():
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    draws = dgm.sample(target, chains=3, warmup=10, draws=5, seed=0, progress=False)
    assert isinstance(draws.kernel, dgm.HMC)
    assert draws.latents["x"].shape == (3, 5, 2)


def test_any_object_with_an_energy_is_a_target():
    class Foreign:
        dim, batch_shape = 2, (3,)

        def energy(self, x):
            return 0.5 * x.square().sum(-1)

    draws = dgm.sample(Foreign(), chains=2, warmup=10, draws=5, seed=0, progress=False)
    assert draws.inputs.shape == (2, 5, 3, 2)


@pytest.mark.slow
def test_the_default_kernel_with_its_warm_up_samples_the_gaussian_and_the_funnel():
    for oracle in (correlated_gaussian(SCALES), funnel()):
        assert_agrees(oracle, dgm.sample(oracle.problem, chains=50, seed=3, progress=False))
