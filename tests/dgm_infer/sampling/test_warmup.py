"""Warm-up finds one step size per problem, and returns a frozen kernel."""

import functools
import math
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.sampling.adaptation import DualAveraging
from tests.models import Bent
from tests.oracles import FLOAT, Ellipse, correlated_gaussian, linear_gaussian, linear_gaussian_model
from tests.quick import some

SCALES = (0.1, 1.0, 10.0)
BAND = 0.1


def gaussians():
    return correlated_gaussian(SCALES).problem, dgm.HMC(metric="identity")


def fibres():
    # observations of different plausibility: the stiffness of the fibre differs
    problem = dgm.condition(Bent(), [[0.1] * 5, [0.5, -0.5, 1.5, 0.0, 0.2]])
    return problem, dgm.ConstrainedHMC(n_steps=(1, 3), n_geodesic=1, max_iterations=20, split=False)


@functools.cache
def adapt(case, target=0.8):
    problem, kernel = case()
    return dgm.sample(
        problem, kernel, chains=32, warmup=200, draws=40, seed=1, target_acceptance=target, progress=False
    )


def misses(draws, target):
    """How far the acceptance of every problem is from the target, ``[*batch]``."""
    return (draws.stats["acceptance_rate"].mean((0, 1)) - target).abs()


CASES = [pytest.param(gaussians, id="gaussians"), pytest.param(fibres, id="fibres", marks=pytest.mark.slow)]


# not below 0.8: the acceptance of a Gaussian falls from 0.65 to 0 within a tenth of the step size (its stability
# limit), and an average over steps on both sides of a cliff stays short of it
@pytest.mark.parametrize("target", some((0.8, 0.9), quick=(0.8,)))
@pytest.mark.parametrize("case", CASES)
def test_the_acceptance_of_every_problem_is_near_the_target(case, target):
    assert misses(adapt(case, target), target).max() < BAND


@pytest.mark.parametrize("case", CASES)
def test_without_a_target_the_acceptance_is_the_usual_one_of_the_kernel(case):
    def difference(target):
        sizes: Any = [adapt(case, t).kernel for t in (None, target)]
        return (sizes[0].step_size / sizes[1].step_size).log().abs().max()

    assert difference(0.9) < 0.1
    # the control: that of kernels whose trajectories have no length
    assert difference(0.8) > 0.1


@pytest.mark.parametrize("case", CASES)
def test_control_twice_the_adapted_step_size_misses_the_target(case):
    problem, _ = case()
    draws = adapt(case)
    kernel: Any = draws.kernel
    coarse = kernel.replace(step_size=2 * kernel.step_size)
    position = draws.inputs[:, -1]
    again = dgm.sample(problem, coarse, chains=32, warmup=0, draws=20, seed=2, initial=position, progress=False)
    assert misses(again, 0.8).max() > BAND


def test_step_sizes_are_in_proportion_to_the_scales_of_the_problems():
    kernel: Any = adapt(gaussians).kernel
    relative = kernel.step_size / torch.tensor(SCALES, dtype=FLOAT)
    assert relative.max() / relative.min() < 1.5
    # the control: one step size for all would be off by these factors
    assert kernel.step_size.max() / kernel.step_size.min() > 50


def test_the_frozen_kernel_is_used_for_every_kept_draw():
    problem, given = fibres()
    draws = dgm.sample(problem, given, chains=8, warmup=5, draws=10, seed=1, progress=False)
    kernel: Any = draws.kernel
    assert torch.equal(draws.stats["step_size"], kernel.step_size.expand(8, 10, 2))
    assert ((draws.stats["n_steps"] >= 1) & (draws.stats["n_steps"] <= 3)).all()


def test_trajectories_of_an_adapted_length_take_steps_no_longer_than_the_adapted_size():
    draws = adapt(gaussians)
    kernel: Any = draws.kernel
    steps, size = draws.stats["n_steps"], draws.stats["step_size"]
    assert (size <= kernel.step_size).all()
    assert ((steps == 1) | (size > 0.5 * kernel.step_size)).all()
    duration = steps * size / kernel.trajectory_length
    assert ((duration > 0.5) & (duration < 1.5)).all()


@pytest.mark.slow
def test_arcs_grow_to_a_quarter_of_a_circle_and_no_further():
    # on a linear fibre they are exact, whatever their length
    problem = linear_gaussian(problems=(3,)).problem
    draws = dgm.sample(problem, dgm.ConstrainedHMC(), chains=8, warmup=60, draws=20, seed=1, progress=False)
    kernel: Any = draws.kernel
    torch.testing.assert_close(kernel.step_size, torch.full((3,), math.pi / 2, dtype=FLOAT))
    assert draws.stats["acceptance_rate"].min() > 1 - 1e-6
    # the control: straight lines are not
    straight = dgm.ConstrainedHMC(split=False)
    draws = dgm.sample(problem, straight, chains=8, warmup=60, draws=20, seed=1, progress=False)
    assert 0.6 < draws.stats["acceptance_rate"].mean() < 0.95


def test_the_frozen_kernel_is_reusable_without_warm_up():
    problem, _ = gaussians()
    draws = adapt(gaussians)
    position = draws.inputs[:, -1]
    first, second = (
        dgm.sample(problem, draws.kernel, chains=32, warmup=0, draws=30, seed=5, initial=position, progress=False)
        for _ in range(2)
    )
    assert torch.equal(first.inputs, second.inputs)
    kernel: Any = first.kernel
    before: Any = draws.kernel
    assert torch.equal(kernel.step_size, before.step_size)
    assert misses(first, 0.8).max() < 1.5 * BAND


@pytest.mark.parametrize("size", [0.25, torch.tensor([0.2, 0.4, 0.3], dtype=FLOAT)], ids=["number", "tensor"])
def test_a_step_size_that_is_given_is_not_adapted(size):
    problem = linear_gaussian(problems=(3,)).problem
    kernel = dgm.ConstrainedHMC(step_size=size, n_steps=2, n_geodesic=1)
    draws = dgm.sample(problem, kernel, chains=4, warmup=20, draws=5, seed=1, progress=False)
    assert draws.kernel is kernel
    assert torch.equal(draws.stats["step_size"], torch.as_tensor(size, dtype=FLOAT).expand(4, 5, 3))


def test_without_warm_up_a_step_size_is_searched_for():
    problem, _ = gaussians()
    kernel: Any = dgm.sample(
        problem, dgm.HMC(metric="identity"), chains=32, warmup=0, draws=20, seed=1, progress=False
    ).kernel
    relative = kernel.step_size / torch.tensor(SCALES, dtype=FLOAT)
    assert ((relative > 0.05) & (relative < 5)).all()


def test_dual_averaging_finds_the_step_size_of_a_known_acceptance_curve():
    # acceptance exp(-step / scale): the target a is met at -scale log a
    scale = torch.tensor([0.01, 1.0, 100.0], dtype=FLOAT)
    averaging = DualAveraging(torch.full((3,), 0.1, dtype=FLOAT), 0.8)
    for _ in range(2000):
        averaging.update((-averaging.current / scale).exp())
    torch.testing.assert_close(averaging.final, -scale * math.log(0.8), rtol=0.05, atol=0)
    # the control: it is not where it began
    assert (averaging.final / 0.1 - 1).abs().min() > 0.5


@pytest.mark.parametrize("make", [Ellipse, lambda: linear_gaussian_model(sd=0.05)])
def test_without_a_warm_up_the_step_size_found_at_the_starts_moves_the_chains(make):
    model = make()
    fibre = dgm.condition(model, torch.ones(model.output_shape))
    draws = dgm.sample(fibre, chains=16, warmup=0, draws=10, seed=0, progress=False)
    assert draws.stats["acceptance_rate"].mean() > 0.3
