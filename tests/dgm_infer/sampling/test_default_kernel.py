"""The default kernel of a fibre with additive noise: the noise is integrated out, unless that leaves a narrow ridge."""

import pytest
import torch
from torch import distributions as td

import dgm_infer as dgm
from dgm_infer.sampling.plan import default_kernel
from generators import BernoulliDecoder, LatentPosterior, LotkaVolterra
from tests.oracles import Wave, circle, linear_gaussian


def curve(sd):
    """One of two inputs' wave is known but for noise: a curve."""
    return dgm.condition(dgm.WithNoise(Wave(), sd), [0.0])


class Corner(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return torch.stack([u.sum(-1), u[..., 0] - u[..., 1].square()], -1)


def test_noise_is_integrated_out_unless_the_posterior_is_a_narrow_ridge():
    assert isinstance(default_kernel(curve(1.0)), dgm.LiftedHMC)
    assert isinstance(default_kernel(curve(0.002)), dgm.ConstrainedHMC)
    # where rounding leaves no inverse of the precision
    for sd in (1e-9, 1e-5):
        assert isinstance(default_kernel(curve(sd)), dgm.ConstrainedHMC)
        fibre = dgm.condition(dgm.WithNoise(Wave(), sd), [0.0], dtype=torch.float32)
        assert isinstance(default_kernel(fibre), dgm.ConstrainedHMC)
    # as many values as inputs leave points, however narrow the noise
    assert isinstance(default_kernel(dgm.condition(dgm.WithNoise(Corner(), 0.002), [0.0, 0.0])), dgm.LiftedHMC)
    assert isinstance(default_kernel(linear_gaussian().problem), dgm.LiftedHMC)
    # one metric fits a ridge that is straight, however narrow
    straight = dgm.from_simulator(
        lambda z: z["x"].sum(-1, keepdim=True) + 0.002 * torch.randn(1), {"x": td.Normal(torch.zeros(6), 1.0)}
    )
    assert isinstance(default_kernel(dgm.condition(straight, [0.0])), dgm.LiftedHMC)
    # without additive noise there is nothing to integrate out
    assert isinstance(default_kernel(circle().problem), dgm.ConstrainedHMC)


def test_prior_draws_that_overflow_say_nothing():
    y, _ = LotkaVolterra.published_observations()
    assert isinstance(default_kernel(dgm.condition(LotkaVolterra(), y, noise=1.0)), dgm.LiftedHMC | dgm.ConstrainedHMC)


def test_the_draws_are_those_of_the_kernel_given():
    problem = linear_gaussian().problem
    settings = {"chains": 4, "warmup": 20, "draws": 5, "seed": 1, "progress": False}
    default, given = dgm.sample(problem, **settings), dgm.sample(problem, dgm.LiftedHMC(), **settings)
    assert default.kernel == given.kernel
    assert torch.equal(default.inputs, given.inputs)


MEAN, SD = torch.tensor([0.0, 100.0, 200.0, 300.0, 400.0]), torch.tensor([1.0, 0.01, 1.0, 100.0, 1.0])


def scaled():
    return dgm.Target(lambda x: 0.5 * ((x - MEAN.to(x)) / SD.to(x)).square().sum(-1), 5)


def correlated(dim=20, correlation=0.95):
    covariance = correlation + (1 - correlation) * torch.eye(dim, dtype=torch.float64)
    precision = torch.linalg.inv(covariance)
    return dgm.Target(lambda x: 0.5 * ((x @ precision.to(x)) * x).sum(-1), dim)


@pytest.mark.parametrize(
    "kernel",
    [None, pytest.param(dgm.HMC(), marks=pytest.mark.slow), pytest.param(dgm.NUTS(), marks=pytest.mark.slow)],
    ids=["default", "HMC", "NUTS"],
)
@pytest.mark.parametrize("make", [scaled, correlated])
def test_densities_of_any_scales_and_correlations_mix(make, kernel):
    draws = dgm.sample(make(), kernel, seed=1, progress=False)
    assert float(draws.summary()["r_hat"].max()) < 1.05


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [scaled, correlated])
def test_control_without_a_metric_they_do_not(make):
    draws = dgm.sample(make(), dgm.HMC(metric="identity"), seed=1, progress=False)
    assert float(draws.summary()["r_hat"].max()) > 1.2


def test_the_metric_is_that_of_the_problem_unless_a_length_is_given():
    image = LatentPosterior(BernoulliDecoder(2, (3,), [4]), torch.zeros(3), dgm.StandardNormal(2))
    approximate = dgm.condition(Corner(), [0.0, 0.0], tolerance=0.5)
    for kernel in (dgm.HMC, dgm.NUTS):
        assert kernel().tuning(scaled()).metric == "diagonal"
        assert kernel().tuning(image).metric == "dense"
        assert kernel().tuning(approximate).metric is None
        assert kernel(step_size=0.1).tuning(scaled()).metric is None
        assert kernel(metric="dense").tuning(scaled()).metric == "dense"
    assert dgm.HMC(trajectory_length=1.0).tuning(scaled()).metric is None
    assert all(isinstance(default_kernel(problem), dgm.HMC) for problem in (image, approximate, scaled()))
