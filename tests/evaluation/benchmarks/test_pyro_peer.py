"""Pyro's estimates of log evidence: against closed forms of a linear Gaussian decoder, and ours on the same data."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Laplace, MultivariateNormal, Normal

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ModelError
from evaluation.benchmarks import pyro_peer as baselines
from tests.models import layer

import pyro  # isort: skip (after the baselines, which silence what Pyro warns of when it is imported)

FLOAT = torch.float64
SD = 0.6


class LinearDecoder(nn.Linear):
    """``x ~ N(W z, sd^2 I)``: posterior and evidence are Gaussian."""

    def forward(self, z):
        mean = super().forward(z)
        return Independent(Normal(mean, torch.full_like(mean, SD)), 1)


def decoder():
    torch.manual_seed(3)
    return LinearDecoder(3, 5, bias=False).to(FLOAT).requires_grad_(False)


@pytest.fixture(scope="module")
def problem():
    """Guides are the best of independent coordinates, a little too wide."""
    likelihood = decoder()
    torch.manual_seed(4)
    images = torch.randn(2, 5, dtype=FLOAT)
    mean, _, precision = posterior(likelihood.weight, images)
    sd = 1.2 * precision.diagonal().rsqrt().expand_as(mean)
    return baselines.PyroDecoder(likelihood, images, dgm.Gaussian(mean, sd))


def posterior(weight, images):
    precision = weight.mT @ weight / SD**2 + torch.eye(3, dtype=FLOAT)
    mean = torch.linalg.solve(precision, weight.mT @ images.mT / SD**2).mT
    covariance = weight @ weight.mT + SD**2 * torch.eye(5, dtype=FLOAT)
    evidence = MultivariateNormal(torch.zeros(5, dtype=FLOAT), covariance).log_prob(images)
    return mean, evidence, precision


def exact(problem):
    return posterior(problem.decoder.weight, problem.images)[1]


def divergence(problem, sd):
    """``KL(N(mean, diag sd^2) | posterior)`` of a guide whose mean is the posterior's, the same at every image."""
    precision = posterior(problem.decoder.weight, problem.images)[2]
    return 0.5 * ((precision.diagonal() * sd**2).sum() - 3 - 2 * sd.log().sum() - torch.logdet(precision))


def z_scores(estimates, expected):
    assert estimates.std_error.max() < 0.1, "errors too large to test with"
    return (estimates.log_z - expected) / estimates.std_error


def test_the_encoders_bound_is_that_of_its_divergence(problem):
    estimates = baselines.svi_encoder(problem, seed=1)
    expected = exact(problem) - divergence(problem, problem.base.covariance_diagonal[0].sqrt())
    assert estimates.status == "lower"
    assert z_scores(estimates, expected).abs().max() < 5
    # a bound that is not tight: the evidence itself is refuted
    assert z_scores(estimates, exact(problem)).abs().min() > 5


@pytest.mark.slow
def test_a_fitted_guide_reaches_the_best_bound_of_independent_coordinates(problem):
    estimates = baselines.svi_autoguide(problem, steps=600, rate=0.02, seed=1)
    precision = posterior(problem.decoder.weight, problem.images)[2]
    best = exact(problem) - divergence(problem, precision.diagonal().rsqrt())
    # what stochastic steps of finite length leave
    assert ((estimates.log_z - best).abs() < 0.05).all()
    assert (exact(problem) - estimates.log_z > 0.1).all()
    assert estimates.gradient_evaluations == 600 * 8


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (baselines.renyi_elbo, {"particles": 2000}),
        pytest.param(baselines.importance, {"samples": 300, "repeats": 2}, marks=pytest.mark.slow),
        pytest.param(
            baselines.annealed_importance,
            {"temperatures": 15, "n_steps": 4, "chains": 20, "step_size": 0.4},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_estimates_of_the_evidence_agree_with_it(problem, method, options):
    estimates = method(problem, seed=2, **options)
    assert z_scores(estimates, exact(problem)).abs().max() < 5
    # for another image it is refuted
    assert z_scores(estimates, exact(problem).flip(0)).abs().min() > 5


@pytest.mark.slow
def test_control_annealing_that_forgets_the_guides_constant_is_refuted(problem, monkeypatch):
    monkeypatch.setattr(dgm.Gaussian, "energy", lambda self, x: 0.5 * self.whiten(x).square().sum(-1))
    estimates = baselines.annealed_importance(problem, temperatures=15, n_steps=4, chains=40, step_size=0.4, seed=2)
    assert z_scores(estimates, exact(problem)).abs().min() > 5


def test_annealing_counts_the_gradients_of_an_image(problem):
    estimates = baselines.annealed_importance(problem, temperatures=6, n_steps=3, chains=2)
    # per temperature three steps and the gradient at the start; one when the kernel is set up, one when the
    # potential is
    assert estimates.gradient_evaluations == pytest.approx(2 * 6 * 4, abs=2 * 3)
    assert estimates.notes["acceptance"] > 0.5


def test_pyro_and_this_project_agree_on_a_binary_decoder():
    torch.manual_seed(0)
    model = generators.IWAE(3, (4, 4), (12,))
    with torch.no_grad():
        layer(model.decoder.network, -1).weight.mul_(6)
    images = model.generate(3, seed=1).images.flatten(1)
    base = dgm.Gaussian(torch.zeros(3, 3), torch.ones(3, 3))
    target = generators.LatentPosterior(model.decoder, images, dgm.StandardNormal(3))
    problem = baselines.PyroDecoder(target.decoder, target.images, base)
    method = dgm.evidence.ImportanceSampling(1000)
    ours = dgm.log_evidence(target, base, method, chains=16, seed=0, progress=False)
    theirs = baselines.renyi_elbo(problem, particles=1000)
    error = (ours.std_error**2 + theirs.std_error**2).sqrt()
    assert error.max() < 0.1
    assert ((ours.log_z - theirs.log_z).abs() < 5 * error).all()
    bound = dgm.log_evidence(target, base, dgm.Elbo(), chains=16, seed=0, progress=False)
    elbo = baselines.svi_encoder(problem)
    error = (bound.std_error**2 + elbo.std_error**2).sqrt()
    assert ((bound.log_z - elbo.log_z).abs() < 5 * error).all()
    assert (ours.log_z - elbo.log_z > 5 * error).all()


def test_a_batch_is_its_images_one_by_one(problem):
    both = baselines.svi_encoder(problem, repeats=2, particles=4000)
    alone = baselines.svi_encoder(problem.take(1), repeats=2, particles=4000)
    assert (both.log_z[1] - alone.log_z[0]).abs() < 0.1
    assert (both.log_z[0] - alone.log_z[0]).abs() > 0.2


def test_random_numbers_parameters_and_validation_of_the_caller_are_left_alone(problem):
    pyro.get_param_store().clear()
    pyro.param("mine", torch.ones(2))
    torch.manual_seed(0)
    state, validation = torch.random.get_rng_state(), torch.distributions.Distribution._validate_args
    first = baselines.svi_autoguide(problem, steps=3)
    baselines.annealed_importance(problem, temperatures=2, n_steps=2, chains=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(pyro.get_param_store().keys()) == ["mine"]
    assert torch.distributions.Distribution._validate_args == validation
    pyro.get_param_store().clear()
    # and the seed decides
    torch.manual_seed(1)
    assert torch.equal(baselines.svi_autoguide(problem, steps=3).log_z, first.log_z)


def test_what_does_not_fit_is_named(problem):
    with pytest.raises(ArgumentError, match=r"\(5,\)"):
        baselines.PyroDecoder(problem.decoder, problem.images[0], problem.base)
    full = dgm.Gaussian(problem.base.mean, cholesky=torch.eye(3, dtype=FLOAT).expand(2, 3, 3))
    with pytest.raises(ArgumentError, match="full"):
        baselines.PyroDecoder(problem.decoder, problem.images, full)

    class Heavy(nn.Module):
        def forward(self, z):
            return Independent(Laplace(z.sum(-1, keepdim=True).expand(*z.shape[:-1], 5), 1.0), 1)

    other = baselines.PyroDecoder(Heavy(), problem.images, problem.base)
    with pytest.raises(ModelError, match="know Independent Bernoulli and Normal"):
        baselines.svi_encoder(other)


def test_one_chain_of_annealing_has_no_error(problem):
    estimates = baselines.annealed_importance(problem, temperatures=2, n_steps=2, chains=1)
    assert all(math.isnan(value) for value in estimates.std_error.tolist())
