"""Quantile distributions: their functions, derivatives and priors, against formulas in other terms."""

import math

import pytest
import torch
from scipy import special, stats
from torch.autograd.functional import jacobian
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

import dgm_infer as dgm
from dgm_infer.autodiff.jacobian_products import push_forward
from dgm_infer.errors import ArgumentError
from generators import GAndK, GeneralisedLambda
from tests.generators.oracles import reference_data
from tests.oracles import FLOAT

MODELS = [GeneralisedLambda, GAndK]
NAMES = ["z1", "z2", "z3", "z4"]
SCALE = math.pi / math.sqrt(3)


def named(*values: float) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, torch.tensor(values, dtype=FLOAT), strict=True))


def draws(model, *shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return model.input_density.sample(shape, generator=rng, dtype=FLOAT)


# ------------------------------------------------------------------------------------------------------------ functions


def test_the_published_observations_are_those_of_the_reference_data():
    published = reference_data("generalised_lambda/observed.npz")
    x, z = GeneralisedLambda.published_observations()
    torch.testing.assert_close(x, published["x"], rtol=0, atol=1e-13)
    assert torch.equal(z, published["z_true"])


EXPONENTS = [(0.4, -0.1), (1.7, 2.2), (-0.8, -1.5), (0.0, 0.0), (0.3, 0.0), (0.0, -0.2), (1e-7, -1e-7), (-2e-5, 9e-5)]


@pytest.mark.parametrize("exponents", EXPONENTS, ids=str)
def test_outputs_are_the_quantiles_of_the_generalised_lambda_distribution(exponents):
    z3, z4 = exponents
    p = torch.linspace(0.001, 0.999, 50, dtype=FLOAT)
    x = GeneralisedLambda(50).simulate(named(5, 2, z3, z4), torch.logit(p) / SCALE)
    # SciPy's boxcox(p, z) is (p^z - 1)/z, and log p at z = 0
    expected = 5 + (special.boxcox(p.numpy(), z3) - special.boxcox(1 - p.numpy(), z4)) / 2
    torch.testing.assert_close(x, torch.from_numpy(expected), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("exponents", [*EXPONENTS, (-3.0, -3.0)], ids=str)
def test_quantiles_increase_as_far_out_as_inputs_ever_are(exponents):
    # a standard logistic is beyond 35 with probability 1e-15
    u = torch.linspace(-35 / SCALE, 35 / SCALE, 200, dtype=FLOAT)
    x = GeneralisedLambda(200).simulate(named(0, 1, *exponents), u)
    assert x.isfinite().all()
    assert (x.diff() >= 0).all()
    # a bounded tail is flat to rounding at its end
    assert (x.diff()[50:150] > 0).all()


def power(log_p: float, z: float, derivative: int = 0, terms: int = 80) -> float:
    """``(p^z - 1)/z = sum_k z^k (log p)^(k+1)/(k+1)!``, or one of its derivatives with respect to z."""
    return math.fsum(
        math.perm(k, derivative) * z ** (k - derivative) * log_p ** (k + 1) / math.factorial(k + 1)
        for k in range(derivative, terms)
    )


Z = [0.0, 1e-12, -1e-8, 4.99e-5, -4.99e-5, 5.01e-5, -5.01e-5, 1e-3, -0.1, 0.4]


def quartile(exponents: torch.Tensor) -> torch.Tensor:
    """The quantile of p = 1/4 under ``z1 = 0, z2 = 1`` and the exponents ``[2]``: ``[1]``."""
    zero = exponents.new_zeros(())
    latents = {"z1": zero, "z2": zero + 1, "z3": exponents[0], "z4": exponents[1]}
    return GeneralisedLambda(1).simulate(latents, exponents.new_tensor([math.log(1 / 3) / SCALE]))


def derivatives(function, exponents):
    """Value, first derivatives and their derivatives, as sampling takes them."""

    def first(e):
        return push_forward(function, e, torch.eye(2, dtype=FLOAT))[1].squeeze(-1)

    return function(exponents).item(), first(exponents), jacobian(first, exponents)


@pytest.mark.parametrize("z", Z)
def test_values_and_derivatives_hold_at_and_near_zero_exponents(z):
    low, high = math.log(0.25), math.log(0.75)
    value, first, second = derivatives(quartile, torch.tensor([z, -z], dtype=FLOAT))
    assert value == pytest.approx(power(low, z) - power(high, -z), rel=1e-14)
    expected = torch.tensor([[power(low, z, k), -power(high, -z, k)] for k in (1, 2)], dtype=FLOAT)
    torch.testing.assert_close(first, expected[0], rtol=1e-9, atol=0)
    # what rounding and the series leave is largest where one takes over from the other
    torch.testing.assert_close(second, torch.diag(expected[1]), rtol=2e-5, atol=0)


@pytest.mark.parametrize("z", [1e-12, -1e-8])
def test_control_the_plain_quotient_has_other_derivatives_near_zero(z):
    low, high = math.log(0.25), math.log(0.75)

    def quotients(e):
        return torch.expm1(e[:1] * low) / e[:1] - torch.expm1(e[1:] * high) / e[1:]

    second = derivatives(quotients, torch.tensor([z, -z], dtype=FLOAT))[2]
    assert second[0, 0].item() != pytest.approx(power(low, z, 2), rel=0.1)


def test_outputs_are_those_of_the_g_and_k_distribution():
    a, b, g, k = 3.0, 1.5, 2.0, 0.5
    r = torch.linspace(-4, 4, 50, dtype=FLOAT)
    x = GAndK(50).simulate(named(a, b, g, k), r)
    # as published
    skew = (1 - (-g * r).exp()) / (1 + (-g * r).exp())
    torch.testing.assert_close(x, a + b * (1 + 0.8 * skew) * (1 + r**2) ** k * r)
    # g = k = 0 is the normal distribution
    torch.testing.assert_close(GAndK(50).simulate(named(a, b, 0, 0), r), a + b * r)


def test_g_and_k_quantiles_increase_wherever_the_prior_reaches():
    model = GAndK(400)
    z = model.global_latents(draws(model, 500)[:, :4])
    x = model.simulate(z, torch.linspace(-8, 8, 400, dtype=FLOAT))
    assert (x.diff() > 0).all()


# --------------------------------------------------------------------------------------------------------------- priors


def p_values(model, prior: dict) -> list[float]:
    z = model.global_latents(draws(model, 20_000)[:, :4])
    return [stats.kstest(z[name].numpy(), prior[name].cdf).pvalue for name in NAMES]


def test_latents_of_the_generalised_lambda_model_have_their_prior():
    prior = dict.fromkeys(NAMES, stats.norm()) | {"z2": stats.expon()}
    assert min(p_values(GeneralisedLambda(1), prior)) > 1e-3
    # control
    assert p_values(GeneralisedLambda(1), prior | {"z2": stats.expon(scale=1.1)})[1] < 1e-3


def test_latents_of_the_g_and_k_model_are_uniform():
    assert min(p_values(GAndK(1), dict.fromkeys(NAMES, stats.uniform(0, 10)))) > 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_inputs_have_zero_mean_and_unit_variance(model):
    u = draws(model(3), 100_000)
    # a logistic input has a kurtosis of 4.2: five standard errors of a variance are 0.03
    assert u.mean(0).abs().max() < 0.016
    assert (u.var(0) - 1).abs().max() < 0.03


# ---------------------------------------------------------------------------------------------------------- as a model


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)], ids=str)
def test_any_leading_dimensions_are_taken_and_independent(model, leading):
    generator = model(7)
    u = draws(generator, *leading)
    x = generator(u)
    assert x.shape == (*leading, 7)
    assert {name: tuple(value.shape) for name, value in generator.latents(u).items()} == dict.fromkeys(NAMES, leading)
    rows = torch.stack([generator(row) for row in u.reshape(-1, 11)])
    torch.testing.assert_close(x, rows.reshape(*leading, 7))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_transforms_and_tracing_give_the_same_outputs(model):
    generator = model(7)
    u, other = draws(generator, 4), draws(generator, 4, seed=1)
    torch.testing.assert_close(vmap(generator)(u), generator(u))

    def jacobian(u):
        return push_forward(generator, u, torch.eye(11, dtype=FLOAT))[1]

    # traced at one point, right at another: nothing depended on the values
    torch.testing.assert_close(make_fx(jacobian)(u)(other), jacobian(other))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_models_give_the_same_outputs(model):
    generator = model(7)
    u = draws(generator, 4)
    # the graph is ours, its machine code torch's, which takes a minute to write it
    compiled = torch.compile(generator, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(u), generator(u))


@pytest.mark.parametrize("model", MODELS)
def test_single_precision_stays_single(model):
    generator = model(7)
    u = draws(generator, 3)
    x = generator(u.float())
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), generator(u), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_observations_are_conditioned_on_unit_by_unit(model):
    generator = model(12)
    fibre = dgm.condition(generator, generator(draws(generator, 3)))
    assert fibre.units is not None
    assert fibre.units.is_scalar
    assert fibre.batch_shape == (3,)
    assert fibre.dim == 16


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", [0, -1, 2.5, "3"])
def test_an_impossible_number_of_observations_is_named(model, n):
    with pytest.raises(ArgumentError, match=rf"{model.__name__}\(n={n!r}\): must be an integer >= 1"):
        model(n)
