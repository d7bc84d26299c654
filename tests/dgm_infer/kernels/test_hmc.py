"""HMC on targets whose moments are known."""

from typing import Any

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from dgm_infer.sampling.adaptation import DualAveraging
from tests.oracles import FLOAT, assert_agrees, assert_refuted, correlated_gaussian, funnel

SCALES = (0.1, 1.0, 10.0)


def run(oracle, kernel=None, *, chains=100, warmup=150, draws=60):
    kernel = kernel or dgm.HMC(n_steps=(3, 10), metric="identity")
    return dgm.sample(oracle.problem, kernel, chains=chains, warmup=warmup, draws=draws, seed=1, progress=False)


def test_gaussians_of_three_scales_at_once_have_their_means_and_covariances():
    oracle = correlated_gaussian(SCALES)
    draws = run(oracle)
    assert_agrees(oracle, draws)
    # every problem has the step size of its own scale
    kernel: Any = draws.kernel
    steps = kernel.step_size / torch.tensor(SCALES, dtype=FLOAT)
    assert kernel.step_size.shape == (3,)
    assert steps.max() / steps.min() < 2


def test_control_gaussians_that_are_a_tenth_too_wide_are_noticed():
    oracle = correlated_gaussian(SCALES)
    assert_refuted(correlated_gaussian(SCALES, wrong=1.1), run(oracle))


@pytest.mark.slow
def test_the_non_centred_funnel_has_its_moments():
    oracle = funnel()
    assert_agrees(oracle, run(oracle))


@pytest.mark.slow
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


class ByClassAttributes(dgm.Target):
    dim = 2
    batch_shape = (3,)

    def energy(self, x):
        return 0.5 * x.square().sum(-1)


class Duck:
    """No subclass: only what a target needs, and names of its own."""

    dim, batch_shape = 2, ()

    def energy(self, x):
        return 0.5 * x.square().sum(-1)

    def latents(self, x):
        return {"mine": x}


class HalfPlane(dgm.Target):
    """No density where the coordinates sum to less than 1."""

    dim = 2

    def energy(self, x):
        return x.square().sum(-1) - (x.sum(-1) - 1).log()


def test_a_target_can_be_defined_by_class_attributes():
    draws = dgm.sample(ByClassAttributes(), chains=2, warmup=5, draws=5, seed=0, progress=False)
    assert draws.inputs.shape == (2, 5, 3, 2)


def test_anything_with_an_energy_can_be_sampled_and_keeps_its_names():
    draws = dgm.sample(Duck(), chains=2, warmup=5, draws=5, seed=0, progress=False)
    assert draws.latents["mine"].shape == (2, 5, 2)


def test_starts_without_a_density_are_drawn_again():
    target = HalfPlane()
    assert target.energy(torch.randn(64, 2, generator=torch.Generator().manual_seed(0))).isnan().any()
    assert target.energy(target.start(64, torch.Generator().manual_seed(0))).isfinite().all()


def test_whole_numbers_of_numpy_are_whole_numbers():
    kernel = dgm.HMC(n_steps=np.int64(3))
    assert dgm.sample(Duck(), kernel, chains=np.int32(2), warmup=0, draws=2, seed=0, progress=False).shape == (2, 2)


def test_a_problem_that_never_accepts_stops_no_other():
    adapted = DualAveraging(torch.tensor([0.1, 0.1]), 0.8)
    for _ in range(5000):
        adapted.update(torch.tensor([0.0, 0.8]))
    assert (adapted.final > 0).all()
    assert adapted.final[1] == pytest.approx(0.2, rel=0.5)
