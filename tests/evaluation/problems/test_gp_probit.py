"""A Gaussian process classifier: its Laplace approximation, estimates of the likelihood, data."""

import math

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from evaluation.problems.gp_probit import Cases, CovariancePrior, ProbitEstimate, gp_probit, read_cases
from tests.files import reference_folder

FLOAT = torch.float64
X = torch.tensor([1.2, 0.3, 0.8], dtype=FLOAT)


@pytest.fixture(scope="module")
def small():
    """Four cases at three points."""
    features = torch.tensor([[0.0, 1.0], [2.0, 0.5], [1.0, 3.0], [2.0, 0.5]], dtype=FLOAT)
    return Cases.of(features, torch.tensor([True, False, True, False]))


@pytest.fixture(scope="module")
def larger():
    rng = torch.Generator().manual_seed(0)
    features = torch.randint(1, 6, (40, 2), generator=rng).double()
    return Cases.of(features, features.sum(-1) + torch.randn(40, generator=rng, dtype=FLOAT) > 6)


def likelihood(cases, x, nodes=70):
    """``p(y | x)`` of three points by Gauss-Hermite quadrature."""
    estimate = ProbitEstimate(cases)
    at, weight = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(nodes))
    v = torch.cartesian_prod(at, at, at)
    log_weight = torch.cartesian_prod(weight, weight, weight).log().sum(-1) - 1.5 * math.log(2 * math.pi)
    factor = torch.linalg.cholesky(estimate.covariance(x))
    return (estimate.log_likelihood(v @ factor.mT) + log_weight).logsumexp(0).exp()


def standard_errors_off(estimate, truth, n=1500):
    """How far the mean of estimates is from the likelihood, in standard errors."""
    u = torch.randn(n, estimate.noise_dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    values = estimate(X.expand(n, -1), u).exp()
    return float((values.mean() - truth).abs() / (values.std() / math.sqrt(n)))


def stationarity(estimate, z):
    """Largest entry of ``grad log p(y | z) - C^-1 z``."""
    gradient, _ = estimate.slope(z)
    return (gradient - torch.linalg.solve(estimate.covariance(X), z)).abs().max()


def test_the_mode_is_where_the_slope_of_the_posterior_is_zero(larger):
    estimate = ProbitEstimate(larger)
    fit = estimate.fit(X)
    mode = fit.factor @ fit.mode
    assert stationarity(estimate, mode) < 1e-5
    assert stationarity(estimate, 1.001 * mode) > 1e-4


def test_slopes_and_the_precision_are_derivatives(larger):
    estimate = ProbitEstimate(larger)
    fit = estimate.fit(X)
    z = fit.factor @ fit.mode
    gradient, w = estimate.slope(z)
    torch.testing.assert_close(gradient, torch.autograd.functional.jacobian(estimate.log_likelihood, z))
    hessian = torch.autograd.functional.hessian(estimate.log_likelihood, z)
    torch.testing.assert_close(torch.diag(-w), hessian, atol=1e-9, rtol=1e-9)
    a = torch.eye(len(z), dtype=FLOAT) - fit.factor.mT @ hessian @ fit.factor
    torch.testing.assert_close(fit.precision @ fit.precision.mT, a)


@pytest.mark.parametrize("samples", [1, 5])
def test_estimates_are_unbiased(small, samples):
    assert standard_errors_off(ProbitEstimate(small, samples), likelihood(small, X)) < 4


class _WithoutDeterminant(ProbitEstimate):
    """Weights that are not those of the density that its samples have."""

    def _estimate(self, fit, u):
        return super()._estimate(fit, u) + fit.precision.diagonal().log().sum()


def test_control_estimates_by_a_wrong_density_are_not(small):
    assert standard_errors_off(_WithoutDeterminant(small, 5), likelihood(small, X)) > 10


def test_new_noise_at_a_known_point_takes_no_cubic_operation(larger):
    estimate = ProbitEstimate(larger, samples=2, kept=2)
    rng = torch.Generator().manual_seed(0)
    x = torch.stack([X, X + 0.1])
    u = torch.randn(3, 2, estimate.noise_dim, generator=rng, dtype=FLOAT)
    first = estimate(x, u[0])
    once = estimate.cubic_operations
    second = estimate(x, u[1])
    assert estimate.cubic_operations == once > 8
    assert (first != second).all()
    torch.testing.assert_close(estimate(x.flip(0), u[0].flip(0)), first.flip(0))
    assert estimate.cubic_operations == once
    # two are kept
    estimate(x + 1, u[2])
    estimate(x, u[2])
    assert estimate.cubic_operations > 2 * once


def test_cases_at_one_point_are_counted_there(small):
    assert small.features.tolist() == [[0.0, 1.0], [1.0, 3.0], [2.0, 0.5]]
    assert small.positive.tolist() == [1, 1, 0]
    assert small.negative.tolist() == [0, 0, 2]
    z = torch.tensor([0.3, -1.0, 2.0], dtype=FLOAT)
    log_p = torch.special.log_ndtr
    expected = log_p(z[0]) + log_p(z[1]) + 2 * log_p(-z[2])
    torch.testing.assert_close(ProbitEstimate(small).log_likelihood(z), expected)


def test_the_covariance_is_that_of_the_formula(small):
    d, (s, *lengths) = small.features, X.exp()
    scaled = (d[:, None] - d) / torch.stack(lengths)
    expected = s * (-0.5 * scaled.square().sum(-1)).exp() + 1e-8 * torch.eye(3, dtype=FLOAT)
    torch.testing.assert_close(ProbitEstimate(small).covariance(X), expected)


def test_the_prior_is_normalised_and_its_draws_have_the_gamma_means():
    prior = CovariancePrior(1)
    axis = torch.linspace(-30, 8, 4001, dtype=FLOAT)
    for coordinate in (0, 1):
        x = torch.zeros(len(axis), 2, dtype=FLOAT)
        x[:, coordinate] = axis
        marginal = (prior.log_prob(x) - prior.log_prob(torch.zeros(2, dtype=FLOAT))).exp()
        mean = (marginal * axis.exp()).sum() / marginal.sum()
        assert mean == pytest.approx((11, 3)[coordinate], rel=1e-6)
    grid = torch.cartesian_prod(axis[::10], axis[::10])
    assert prior.log_prob(grid).exp().sum() * (axis[10] - axis[0]) ** 2 == pytest.approx(1, abs=1e-6)
    draws = prior.sample((20000,), generator=torch.Generator().manual_seed(0)).exp()
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - torch.tensor([11.0, 3.0])).abs() < 4 * error).all()


def test_a_covariance_that_cannot_be_factorised_has_no_density(small):
    estimate = ProbitEstimate(small, 1)
    x = torch.tensor([[800.0, 0.0, 0.0]], dtype=FLOAT)
    assert estimate(x, torch.zeros(1, 3, dtype=FLOAT)).isneginf().all()


def test_it_is_sampled_by_blocks(larger):
    problem = gp_probit(ProbitEstimate(larger, samples=2))
    kernel = dgm.kernels.Alternating(
        dgm.kernels.Independence(), dgm.kernels.RandomWalk(0.3, "identity"), ("noise", "target")
    )
    draws = dgm.sample(problem, kernel, chains=2, warmup=0, draws=5, seed=0, progress=False)
    assert draws.latents["x"].shape == (2, 5, 3)
    assert draws.latents["x"].dtype == FLOAT


def test_files_that_hold_no_cases_are_named(tmp_path):
    with pytest.raises(dgm.errors.CheckpointError, match=r"wisconsin_original\.csv does not exist"):
        read_cases(tmp_path)
    (tmp_path / "wisconsin_original.csv").write_text("id,a,class\n1,2,3\n")
    with pytest.raises(dgm.errors.CheckpointError, match="holds no cases: expected nine features"):
        read_cases(tmp_path)


def test_the_published_data_have_683_complete_cases():
    folder = reference_folder("breast_cancer")
    cases = read_cases(folder)
    assert cases.features.shape == (449, 9)
    assert (cases.positive.sum(), cases.negative.sum()) == (239, 444)
    assert read_cases(folder, 60).positive.sum() + read_cases(folder, 60).negative.sum() == 60
    with pytest.raises(dgm.errors.ArgumentError, match="count=700"):
        read_cases(folder, 700)
