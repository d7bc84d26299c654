"""Input densities are normalised, of unit variance, and drawn from."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError
from tests.oracles import FLOAT

CDFS = {
    dgm.StandardNormal: stats.norm.cdf,
    dgm.Logistic: stats.logistic(scale=math.sqrt(3) / math.pi).cdf,
}


@pytest.fixture(params=CDFS, ids=lambda density: density.__name__)
def density(request):
    return request.param


def moment(density, power):
    def integrand(v):
        return v**power * density(1).log_prob(torch.tensor([v], dtype=FLOAT)).exp().item()

    return integrate.quad(integrand, -40, 40, points=[0.0], limit=200)[0]


def test_the_density_integrates_to_one_with_mean_zero_and_unit_variance(density):
    assert moment(density, 0) == pytest.approx(1, abs=1e-8)
    assert moment(density, 1) == pytest.approx(0, abs=1e-8)
    assert moment(density, 2) == pytest.approx(1, abs=1e-7)


def test_the_density_is_the_derivative_of_its_distribution_function(density):
    v = torch.linspace(-6, 6, 25, dtype=FLOAT)
    cdf = CDFS[density]
    slope = (cdf(v.numpy() + 1e-5) - cdf(v.numpy() - 1e-5)) / 2e-5
    np.testing.assert_allclose(density(1).log_prob(v.unsqueeze(-1)).exp().numpy(), slope, rtol=1e-4, atol=1e-9)


# the two-sided probability of 5 standard errors
SMALL = 2 * stats.norm.sf(5)


def test_draws_have_the_distribution_of_the_density(density):
    u = density(4).sample((20000,), generator=torch.Generator().manual_seed(60), dtype=FLOAT)
    assert u.shape == (20000, 4)
    assert stats.kstest(u.flatten().numpy(), CDFS[density]).pvalue > SMALL
    # coordinates are independent
    assert np.abs(np.corrcoef(u.numpy().T)[np.triu_indices(4, 1)]).max() * math.sqrt(20000) < 5
    # the control: the other density of the same mean and variance
    (other,) = CDFS.keys() - {density}
    assert stats.kstest(u.flatten().numpy(), CDFS[other]).pvalue < SMALL


def test_tails_are_finite_and_differentiable(density):
    u = torch.tensor([-1e3, -30.0, 0.0, 30.0, 1e3], requires_grad=True)
    value = density(5).coordinate_log_prob(u)
    assert value.isfinite().all()
    (slope,) = torch.autograd.grad(value.sum(), u)
    assert slope.isfinite().all()
    assert slope[0] > 0 > slope[-1]
    torch.testing.assert_close(slope, -slope.flip(0))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_log_prob_sums_over_coordinates_of_any_leading_shape(density, lead):
    u = density(4).sample(lead, generator=torch.Generator().manual_seed(61), dtype=FLOAT)
    assert u.shape == (*lead, 4)
    torch.testing.assert_close(density(4).log_prob(u), density(4).coordinate_log_prob(u).sum(-1))
    assert density(4).log_prob(u).shape == lead


def test_draws_follow_the_generator_and_dtype_asked_for(density):
    first, second = (
        density(4).sample((5,), generator=torch.Generator().manual_seed(62), dtype=torch.float32) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert first.dtype == torch.float32


def test_a_product_concatenates_its_factors():
    product = dgm.Product(dgm.StandardNormal(2), dgm.Logistic(3), dgm.StandardNormal(1))
    assert product.dim == 6
    u = product.sample((7,), generator=torch.Generator().manual_seed(63), dtype=FLOAT)
    expected = torch.cat(
        [
            dgm.StandardNormal(2).coordinate_log_prob(u[:, :2]),
            dgm.Logistic(3).coordinate_log_prob(u[:, 2:5]),
            dgm.StandardNormal(1).coordinate_log_prob(u[:, 5:]),
        ],
        -1,
    )
    assert torch.equal(product.coordinate_log_prob(u), expected)
    torch.testing.assert_close(product.log_prob(u), expected.sum(-1))


def test_draws_of_a_product_have_the_distributions_of_its_factors():
    product = dgm.Product(dgm.StandardNormal(1), dgm.Logistic(1))
    u = product.sample((80000,), generator=torch.Generator().manual_seed(64), dtype=FLOAT).numpy()
    assert stats.kstest(u[:, 0], CDFS[dgm.StandardNormal]).pvalue > SMALL
    assert stats.kstest(u[:, 1], CDFS[dgm.Logistic]).pvalue > SMALL
    # the control: exchanged
    assert stats.kstest(u[:, 0], CDFS[dgm.Logistic]).pvalue < SMALL
    assert stats.kstest(u[:, 1], CDFS[dgm.StandardNormal]).pvalue < SMALL


def test_a_density_is_standard_normal_where_all_of_its_factors_are():
    normal, other = dgm.StandardNormal(2), dgm.Logistic(1)
    assert normal.is_standard_normal
    assert dgm.Product(normal, dgm.Product(normal)).is_standard_normal
    assert not other.is_standard_normal
    assert not dgm.Product(normal, other).is_standard_normal


def test_impossible_densities_are_refused():
    with pytest.raises(ArgumentError, match=r"StandardNormal\(dim=-1\)"):
        dgm.StandardNormal(-1)
    with pytest.raises(ArgumentError, match="Product"):
        dgm.Product()


class Own(dgm.models.InputDensity):
    """Of one's own: where it is uniform, and what is added to its logarithm."""

    dim = 2

    def __init__(self, low=0.0, high=1.0, added=0.0, wider=1.0):
        self.low, self.high, self.added, self.wider = low, high, added, wider

    def coordinate_log_prob(self, u):
        inside = (u >= self.low) & (u <= self.high)
        return torch.where(inside, self.added - math.log(self.high - self.low), -torch.inf).to(u)

    def sample(self, shape=(), *, generator=None, dtype=None, device=None):
        uniform = torch.rand(*shape, self.dim, generator=generator, dtype=dtype, device=device)
        middle = 0.5 * (self.low + self.high)
        return middle + self.wider * (self.high - self.low) * (uniform - 0.5)


class Sum(dgm.GenerativeModel):
    output_shape = (1,)

    def __init__(self, density):
        super().__init__()
        self.input_density = density

    def observed(self, u):
        return 2 * u[..., :1] + u[..., 1:]


# of an edge that gradients do not show
@pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")
@pytest.mark.parametrize(("noise", "step", "kernel"), [(None, 0.2, dgm.ConstrainedHMC), (0.05, 0.03, dgm.LiftedHMC)])
def test_a_density_without_a_slope_has_the_gradient_zero(noise, step, kernel):
    fibre = dgm.condition(Sum(Own()), [1.5], noise=noise)
    kernel = kernel(step, n_steps=(5, 10))
    draws = dgm.sample(fibre, kernel, chains=64, warmup=20, draws=100, seed=1, progress=False)
    # u_0 is uniform between 1/4 and 3/4
    assert abs(draws.inputs[..., 0].mean() - 0.5) < 0.02
    assert abs(draws.inputs[..., 0].std() - 0.5 / 12**0.5) < 0.02


def test_a_density_that_is_not_normalised_is_refused():
    assert dgm.condition(Sum(Own(-1.0, 3.0)), [1.5]).dim == 2
    for wrong in (Own(added=1.0), Own(wider=0.6)):
        for density in (wrong, dgm.Product(wrong)):
            with pytest.raises(dgm.errors.ModelError, match=r"input_density: coordinate_log_prob gives a mass of"):
                dgm.condition(Sum(density), [1.5])


def test_what_is_no_density_is_named():
    with pytest.raises(dgm.errors.ModelError, match=r"Sum.input_density is of type Uniform: .*ndtr"):
        dgm.condition(Sum(dgm.kernels.Uniform(2)), [1.5])
