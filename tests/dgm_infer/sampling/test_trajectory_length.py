"""Warm-up finds the trajectory length of every problem."""

import math
from typing import Any

import arviz as az
import pytest
import torch

import dgm_infer as dgm
from dgm_infer.kernels.kernel import TrajectoryEnd
from dgm_infer.sampling.adaptation import ChEES
from tests.models import Bent
from tests.oracles import FLOAT, correlated_gaussian, linear_gaussian
from tests.quick import some

SCALES = torch.tensor([1.0, 10.0], dtype=FLOAT)


# ---------------------------------------------------------------------------------------------------------------- ChEES


def best_length():
    """Of a standard normal: ``E (|x'|^2 - |x|^2)^2`` after a time t is 4 D sin^2 t, and t is ``U T``."""
    length, u = torch.linspace(0.2, 6, 5801, dtype=FLOAT), torch.linspace(0.5, 1.5, 1001, dtype=FLOAT)
    return length[(length.unsqueeze(-1) * u).sin().square().mean(-1).argmax()].item()


def exact_trajectories(length, scale, rng, *, chains=64, dim=8):
    """Of ``N(3, scale^2)`` in every coordinate: circles of ``(x - 3)/scale`` and p."""
    fraction = 0.5 + torch.rand(scale.shape, generator=rng, dtype=FLOAT)
    angle = (fraction * length / scale).unsqueeze(-1)
    x, p = torch.randn(2, chains, *scale.shape, dim, generator=rng, dtype=FLOAT)
    there, momentum = x * angle.cos() + p * angle.sin(), p * angle.cos() - x * angle.sin()
    return TrajectoryEnd(3 + scale.unsqueeze(-1) * x, 3 + scale.unsqueeze(-1) * there, momentum, fraction)


def learn(start, scale, *, iterations=400, change=lambda end: end):
    chees, rng = ChEES(start * scale), torch.Generator().manual_seed(120)
    for _ in range(iterations):
        end = exact_trajectories(chees.current, scale, rng)
        chees.update(change(end), torch.ones(64, *scale.shape, dtype=FLOAT))
    return chees.final / chees.stretch / scale


# the criterion has lesser maxima at more than twice the best length, and is flat on the way there
@pytest.mark.parametrize("start", some((0.3, 1.0, 2.0), quick=(2.0,)))
def test_the_length_is_the_best_one_of_a_normal_density_for_every_problem_of_a_batch(start):
    found = learn(start, torch.tensor([0.1, 1.0, 10.0], dtype=FLOAT))
    assert (found / best_length() - 1).abs().max() < 0.1
    # the control: that is not where it began
    assert abs(start / best_length() - 1) > 0.1


def test_control_ends_that_have_nothing_to_do_with_their_starts_do_not_lead_there():
    found = learn(0.3, SCALES, change=lambda end: end._replace(start=end.start.flip(0)))
    assert (found / best_length() - 1).abs().min() > 0.1


def test_trajectories_that_are_rejected_or_left_for_infinity_teach_nothing():
    scale, rng = torch.ones(2, dtype=FLOAT), torch.Generator().manual_seed(121)
    plain, poisoned = ChEES(scale), ChEES(scale)
    end = exact_trajectories(scale, scale, rng)
    bad = torch.arange(64) % 3 == 0
    broken = end._replace(
        position=end.position.masked_fill(bad[:, None, None], math.inf),
        momentum=end.momentum.masked_fill(bad[:, None, None], math.nan),
    )
    acceptance = torch.ones(64, 2, dtype=FLOAT).masked_fill(bad[:, None], 0.0)
    plain.update(end, acceptance)
    poisoned.update(broken, acceptance)
    assert poisoned.current.isfinite().all()
    assert torch.equal(plain.current, poisoned.current)


def sample(problem, kernel=None, **changes):
    arguments = {"chains": 32, "warmup": 300, "draws": 100, "seed": 1, "progress": False} | changes
    return dgm.sample(problem, kernel, **arguments)


@pytest.fixture(scope="module")
def gaussians():
    """Draws of isotropic normals of two scales, 20 dimensions, whose lengths are in units of no metric."""
    return sample(isotropic(), dgm.HMC(metric="identity"))


def isotropic():
    scale = SCALES.unsqueeze(-1)
    return dgm.Target(lambda x: 0.5 * (x / scale).square().sum(-1), 20, (2,))


def test_problems_of_one_batch_have_lengths_of_their_own(gaussians):
    relative = gaussians.kernel.trajectory_length / SCALES
    assert gaussians.kernel.trajectory_length.shape == (2,)
    assert (relative / (ChEES.stretch * best_length()) - 1).abs().max() < 0.25


def worth(draws):
    """Effective draws of the worst mean or square, per integrator step: ``[2]``."""
    relative = draws.inputs[..., :4] / SCALES.unsqueeze(-1)
    ess = torch.tensor(
        [
            min(float(az.ess(f(relative[:, :, b, i]).numpy(), method="mean")) for i in range(4) for f in (abs, _itself))
            for b in range(2)
        ]
    )
    return ess / draws.stats["n_steps"].double().mean((0, 1))


def _itself(x):
    return x


def test_shorter_and_longer_trajectories_are_worth_less(gaussians):
    found, initial = worth(gaussians), gaussians.inputs[:, -1]
    for factor in (0.25, 4.0):
        kernel = gaussians.kernel.replace(trajectory_length=factor * gaussians.kernel.trajectory_length)
        other = sample(isotropic(), kernel, warmup=0, initial=initial)
        assert (worth(other) < 0.8 * found).all()


@pytest.mark.slow
def test_lengths_are_in_proportion_to_the_scales_however_small_or_large():
    scales = (1e-3, 0.1, 1.0, 10.0, 1e3)
    draws = sample(correlated_gaussian(scales).problem, dgm.HMC(metric="identity"), draws=5)
    kernel: Any = draws.kernel
    relative = kernel.trajectory_length / torch.tensor(scales, dtype=FLOAT)
    assert relative.max() / relative.min() < 1.5


@pytest.fixture(scope="module")
def linear():
    """Draws of three linear fibres."""
    return sample(linear_gaussian(problems=(3,)).problem, dgm.ConstrainedHMC(), draws=5)


@pytest.mark.slow
def test_on_a_linear_fibre_the_length_is_that_of_a_standard_normal(linear):
    kernel: Any = linear.kernel
    assert (kernel.trajectory_length / (ChEES.stretch * best_length()) - 1).abs().max() < 0.25


KERNELS = [
    dgm.HMC(metric="identity"),
    dgm.HMC(step_size=0.3),
    dgm.HMC(trajectory_length=1.0),
    dgm.HMC(n_steps=(2, 5)),
    dgm.ConstrainedHMC(),
    dgm.ConstrainedHMC(step_size=0.3),
    dgm.ConstrainedHMC(trajectory_length=1.0),
    dgm.ConstrainedHMC(n_steps=(2, 5)),
    dgm.ConstrainedHMC(n_geodesic=3),
    dgm.ConstrainedHMC(step_size=0.3, trajectory_length=1.0, n_geodesic=3, split=False, solver="newton"),
]


def problem_for(kernel):
    if isinstance(kernel, dgm.HMC):
        return correlated_gaussian((1.0, 2.0)).problem
    return dgm.condition(Bent(), torch.linspace(-0.8, 0.8, 10).reshape(2, 5))


# nothing is adapted without a warm-up, and what depends on the problem is tested by fewer
QUICK = [k for k in KERNELS if isinstance(k, dgm.HMC)] + [dgm.ConstrainedHMC(step_size=0.3)]


@pytest.mark.parametrize("kernel", some(KERNELS, QUICK))
@pytest.mark.parametrize("warmup", [0, 8])
def test_what_is_left_open_is_filled_in_and_what_is_given_is_kept(kernel, warmup):
    problem = problem_for(kernel)
    initial = problem.start(4, torch.Generator().manual_seed(123))
    frozen = sample(problem, kernel, chains=4, warmup=warmup, draws=2, initial=initial).kernel
    for name in ("step_size", "trajectory_length", "n_steps", "n_geodesic", "split", "solver"):
        given, now = getattr(kernel, name, None), getattr(frozen, name, None)
        if given is not None:
            assert now == given
        elif name in ("split", "solver", "n_geodesic", "n_steps") or (name == "trajectory_length" and kernel.n_steps):
            assert now is None
        else:
            assert now.shape == (2,)
            assert (now > 0).all()


@pytest.mark.parametrize(
    "kernel", some((dgm.HMC(metric="identity"), dgm.ConstrainedHMC(), dgm.HMC(n_steps=4)), quick=(dgm.HMC(),))
)
def test_a_frozen_kernel_is_not_adapted_again(kernel):
    problem = problem_for(kernel)
    initial = problem.start(4, torch.Generator().manual_seed(123))
    frozen = sample(problem, kernel, chains=4, warmup=30, draws=2, initial=initial).kernel
    again = sample(problem, frozen, chains=4, warmup=30, draws=2, initial=initial)
    assert again.kernel is frozen
