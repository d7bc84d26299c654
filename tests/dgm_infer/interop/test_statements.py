"""Statements of programs that are neither plain latents nor plain data: angles, mixtures, simplices, points."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import distributions as td

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError, ObservationError
from dgm_infer.interop.charts import chart_of
from dgm_infer.interop.reparametrisation import reparametrise
from dgm_infer.probe import energy_doubt, energy_fault

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    import pyro.distributions
    from pyro.infer.reparam import LocScaleReparam

# Pyro's distributions are torch's with more methods, which their types do not have
dist: Any = pyro.distributions

FLOAT = torch.float64


def angle(y, concentration=2.0):
    a = pyro.sample("a", dist.VonMises(0.0, concentration))
    pyro.sample("y", dist.Normal(a.cos(), 0.5), obs=torch.tensor(y))


def angle_moments(y):
    """Evidence and the mean of cos a, by the trapezoidal rule over one turn."""
    a = torch.linspace(-math.pi, math.pi, 20001, dtype=FLOAT)
    prior = td.VonMises(torch.tensor(0.0, dtype=FLOAT), torch.tensor(2.0, dtype=FLOAT)).log_prob(a)
    joint = (prior + td.Normal(a.cos(), 0.5).log_prob(torch.tensor(y, dtype=FLOAT))).exp()
    z = torch.trapezoid(joint, a)
    return z.log().item(), (torch.trapezoid(joint * a.cos(), a) / z).item()


def test_the_evidence_with_an_angle_is_that_of_one_turn():
    target = dgm.target_from_pyro(angle, 0.3)
    line = torch.linspace(-7, 7, 281, dtype=FLOAT)
    found = (-target.energy(torch.cartesian_prod(line, line))).logsumexp(0) + 2 * (line[1] - line[0]).log()
    assert found.item() == pytest.approx(angle_moments(0.3)[0], abs=1e-3)


def test_a_target_with_an_angle_is_not_refused():
    target = dgm.target_from_pyro(angle, 0.3)
    x = 10 * torch.randn(1000, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    assert energy_fault(target, x) is None
    assert energy_doubt(target, x) is None
    assert target.latents(x)["a"].abs().max() <= math.pi


@pytest.mark.slow
def test_a_fibre_stays_within_one_turn_and_has_its_posterior():
    model = dgm.from_pyro(angle, 0.3)
    kernel = dgm.ConstrainedHMC(step_size=0.3, n_steps=4, n_geodesic=2)
    draws = dgm.sample(dgm.condition(model, model.data), kernel, chains=64, warmup=10, draws=40, seed=0, progress=False)
    a = draws.latents["a"]
    assert a.abs().max() <= math.pi
    means = a.cos().mean(1)
    error = means.std() / 64**0.5
    assert error < 0.05
    assert abs(means.mean() - angle_moments(0.3)[1]) < 5 * error


def test_the_fibre_of_an_angle_is_that_of_one_turn():
    """The input density on the fibre over one turn, against that of the program: the same function of the angle."""
    model = dgm.from_pyro(angle, 0.3)
    a = torch.linspace(-3.1, 3.1, 9, dtype=FLOAT)
    u = torch.stack([2 * a.cos(), 2 * a.sin(), (0.3 - a.cos()) / 0.5], -1)
    torch.testing.assert_close(model.observed(u), torch.full((9, 1), 0.3, dtype=FLOAT))
    torch.testing.assert_close(model.latents(u)["a"], a)
    ours = model.input_density.log_prob(u) + model.log_factor(u)
    prior = td.VonMises(torch.tensor(0.0, dtype=FLOAT), torch.tensor(2.0, dtype=FLOAT)).log_prob(a)
    expected = prior - 2.0 + td.Normal(0.0, 1.0).log_prob(u[:, 2])
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "prior",
    [
        dist.VonMises(torch.zeros(3), 2.0).to_event(1),
        dist.SineBivariateVonMises(0.0, 1.0, 2.0, 3.0, 0.5),
        dist.SineSkewed(dist.VonMises(torch.zeros(2), 2.0).to_event(1), torch.tensor([0.3, -0.2])),
    ],
    ids=["von Mises", "bivariate", "skewed"],
)
def test_every_distribution_of_angles_has_a_circle_of_each(prior):
    form = reparametrise(prior)
    assert form.shape == (*prior.event_shape, 2)
    v = torch.randn(*form.shape, generator=torch.Generator().manual_seed(0))
    turned = -v
    assert (form.value(v).abs() <= math.pi).all()
    # opposite directions are half a turn apart
    torch.testing.assert_close((form.value(v) - form.value(turned)).abs(), torch.full(prior.event_shape, math.pi))
    with pyro.validation_enabled(False):
        expected = prior.log_prob(form.value(v)) + prior.event_shape.numel() * math.log(2 * math.pi)
    assert form.log_factor is not None
    torch.testing.assert_close(form.log_factor(v, form.value(v)), expected, rtol=1e-4, atol=1e-4)


def mixed_prior():
    weights, scales = torch.tensor([0.7, 0.3]), torch.tensor([0.05, 2.0])
    b = pyro.sample("b", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(torch.zeros(2), scales)))
    pyro.sample("y", dist.Normal(b, 0.5), obs=torch.tensor(1.0))


def mixture_posterior():
    """Evidence and mean in closed form: of each component, ``y ~ N(0, s^2 + .25)`` and ``E b = s^2 / (s^2 + .25)``."""
    weights, scales = torch.tensor([0.7, 0.3], dtype=FLOAT), torch.tensor([0.05, 2.0], dtype=FLOAT)
    variance = scales**2 + 0.25
    joint = weights * td.Normal(0.0, variance.sqrt()).log_prob(torch.tensor(1.0, dtype=FLOAT)).exp()
    return joint.sum().log().item(), (joint @ (scales**2 / variance) / joint.sum()).item()


def test_a_mixture_is_a_latent_variable_of_a_target():
    target = dgm.target_from_pyro(mixed_prior)
    x = torch.linspace(-20, 20, 100001, dtype=FLOAT)
    log_joint = -target.energy(x.unsqueeze(-1))
    log_z, mean = mixture_posterior()
    assert (log_z, mean) == pytest.approx((-2.0532, 0.3844), abs=1e-4)
    assert log_joint.logsumexp(0).item() + math.log(x[1] - x[0]) == pytest.approx(log_z, abs=1e-6)
    assert (log_joint.softmax(0) @ x).item() == pytest.approx(mean, abs=1e-6)


def test_a_mixture_is_a_latent_variable_of_a_model():
    model = dgm.from_pyro(mixed_prior)
    # the density of b and of the noise, on the line of inputs where y = 1
    b = torch.linspace(-20, 20, 100001, dtype=FLOAT)
    inputs = torch.stack([b, torch.zeros_like(b)], -1)
    scale = (0.7 * 0.05**2 + 0.3 * 4) ** 0.5
    inputs[:, 0] = b / scale
    inputs[:, 1] = (1 - b) / 0.5
    log_joint = model.input_density.log_prob(inputs) + model.log_factor(inputs)
    torch.testing.assert_close(model.latents(inputs)["b"], b)
    torch.testing.assert_close(model.observed(inputs), torch.ones(len(b), 1, dtype=FLOAT))
    assert (log_joint.softmax(0) @ b).item() == pytest.approx(mixture_posterior()[1], abs=1e-6)


def test_discrete_mixtures_are_still_refused():
    def counts():
        rates = torch.tensor([1.0, 9.0])
        n = pyro.sample("n", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Poisson(rates)))
        pyro.sample("y", dist.Normal(n, 1.0), obs=torch.tensor(2.0))

    with pytest.raises(ModelError, match=r"'n' .* is discrete"):
        dgm.from_pyro(counts)
    with pytest.raises(ModelError, match=r"'n' .* is discrete"):
        dgm.target_from_pyro(counts)


SHARES = torch.tensor([0.2, 0.3, 0.5])


def shares():
    a = pyro.sample("a", dist.Exponential(1.0))
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    pyro.sample("shares", dist.Dirichlet(a * torch.ones(3)), obs=SHARES)
    pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.tensor(0.5))


def test_observations_on_a_surface_are_likelihoods():
    model = dgm.from_pyro(shares)
    assert model.hard == ("y",)
    assert dgm.from_pyro(shares, observed={"y": torch.tensor(0.5), "shares": SHARES}).hard == ("y",)
    a = torch.linspace(1e-6, 200, 400001, dtype=FLOAT)
    log_joint = td.Exponential(1.0).log_prob(a) + td.Dirichlet(a.unsqueeze(-1) * torch.ones(3)).log_prob(
        SHARES.double()
    )
    exact = (log_joint.softmax(0) @ a).item()
    kernel = dgm.LiftedHMC(step_size=0.5, n_steps=4)
    draws = dgm.sample(dgm.condition(model, model.data), kernel, chains=64, warmup=20, draws=40, seed=0, progress=False)
    means = draws.latents["a"].mean(1)
    error = means.std() / 64**0.5
    assert error < 0.1 * exact
    assert abs(means.mean() - exact) < 5 * error
    # the control: of the prior the mean is another
    assert abs(means.mean() - 1.0) > 5 * error


@pytest.mark.parametrize(
    ("data", "make"),
    [
        (torch.eye(2), lambda: dist.LKJCholesky(2, 1.0)),
        (torch.eye(2), lambda: dist.Wishart(torch.tensor(3.0), torch.eye(2))),
    ],
    ids=["LKJ", "Wishart"],
)
def test_matrices_of_fewer_dimensions_than_entries_are_likelihoods(data, make):
    def program():
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.sample("matrix", make(), obs=data)
        pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.tensor(0.5))

    assert dgm.from_pyro(program).hard == ("y",)


ROWS = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.6, 0.3]], dtype=FLOAT)
CORRELATION = torch.tensor([[1.0, 0.4, 0.1], [0.4, 1.0, -0.2], [0.1, -0.2, 1.0]], dtype=FLOAT)
SCATTERS = torch.tensor([[[3.0, 0.5], [0.5, 2.0]], [[1.0, -0.3], [-0.3, 4.0]]], dtype=FLOAT)


def log_dirichlet(a):
    rows = 2 * (torch.lgamma(3 * a) - 3 * torch.lgamma(a))
    return rows + (a - 1) * ROWS.log().sum()


def log_lkj(a, of_factor=False):
    """Of a correlation matrix of three variables, or of its factor with the Jacobian of its diagonal."""
    constant = sum(0.5 * k * math.log(math.pi) + torch.lgamma(a + (2 - k) / 2) - torch.lgamma(a + 1) for k in (1, 2))
    diagonal = torch.linalg.cholesky(CORRELATION).diagonal().log()
    jacobian = diagonal[1] if of_factor else 0.0
    return 2 * (a - 1) * diagonal.sum() + jacobian - constant


def log_wishart(a):
    det, trace = torch.logdet(SCATTERS).sum(), SCATTERS.diagonal(dim1=-2, dim2=-1).sum()
    gammas = 0.5 * math.log(math.pi) + math.lgamma(2.5) + math.lgamma(2.0)
    return (5 - 3) / 2 * det - 0.5 * trace / a - 2 * (5 * math.log(2) + 5 * a.log() + gammas)


def in_a_plate(make, data):
    def observed(a):
        with pyro.plate("rows", len(data)):
            pyro.sample("data", make(a), obs=data)

    return observed


ON_SURFACES = {
    "Dirichlet, in a plate": (in_a_plate(lambda a: dist.Dirichlet(a * torch.ones(3)), ROWS), log_dirichlet),
    "LKJ": (lambda a: pyro.sample("data", dist.LKJ(3, a), obs=CORRELATION), log_lkj),
    "LKJCholesky": (
        lambda a: pyro.sample("data", dist.LKJCholesky(3, a), obs=torch.linalg.cholesky(CORRELATION)),
        lambda a: log_lkj(a, of_factor=True),
    ),
    "Wishart, in a plate": (
        in_a_plate(lambda a: dist.Wishart(torch.tensor(5.0), a * torch.eye(2)), SCATTERS.float()),
        log_wishart,
    ),
}


@pytest.mark.parametrize(("observe", "log_likelihood"), ON_SURFACES.values(), ids=ON_SURFACES)
def test_the_evidence_and_the_mean_of_data_on_a_surface_are_those_of_quadrature(observe, log_likelihood):
    def program():
        observe(pyro.sample("a", dist.Gamma(2.0, 1.0)))

    a = torch.linspace(-14, 6, 20001, dtype=FLOAT).exp()
    # a Gamma(2, 1) prior, and a step of a thousandth in log a
    log_joint = a.log() - a + log_likelihood(a) + a.log() + math.log(1e-3)
    target = dgm.target_from_pyro(program)
    x = torch.linspace(-14, 10, 24001, dtype=FLOAT).unsqueeze(-1)
    found = -target.energy(x) + math.log(1e-3)
    # the program's own numbers have 32 bits
    assert found.logsumexp(0).item() == pytest.approx(log_joint.logsumexp(0).item(), abs=1e-4)
    mean = (found.softmax(0) @ target.latents(x)["a"]).item()
    assert mean == pytest.approx((log_joint.softmax(0) @ a).item(), rel=1e-4)
    with pytest.raises(ModelError, match=r"nothing .* is observed exactly.*sample\(target_from_pyro"):
        dgm.from_pyro(program)


def point():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    y = pyro.sample("y", dist.Normal(0.0, 2.0))
    pyro.sample("z", dist.Delta(x + y), obs=1.0)


def test_an_observed_delta_is_an_exact_observation():
    model = dgm.from_pyro(point)
    assert model.hard == ("z",)
    u = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    latents = model.latents(u)
    torch.testing.assert_close(model.observed(u)[:, 0], latents["x"] + latents["y"])
    kernel = dgm.ConstrainedHMC(step_size=0.8, n_steps=3, n_geodesic=1)
    draws = dgm.sample(dgm.condition(model, model.data), kernel, chains=64, warmup=5, draws=30, seed=0, progress=False)
    x = draws.latents["x"]
    torch.testing.assert_close(x + draws.latents["y"], torch.ones_like(x))
    error = x.mean(1).std() / 64**0.5
    assert error < 0.1
    # E x = 1/5: the shares of the variances
    assert abs(x.mean() - 0.2) < 5 * error


def test_a_delta_has_no_likelihood():
    with pytest.raises(ArgumentError, match=r"'z' is a deterministic statement.*condition\(from_pyro"):
        dgm.target_from_pyro(point)
    with pytest.raises(ModelError, match="'z' of point is a Delta, which has no likelihood"):
        dgm.from_pyro(point, observed={"x": torch.tensor(1.0)})


def test_the_weight_of_a_delta_is_part_of_the_density():
    def weighted():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Delta(x.exp(), log_density=-x))
        pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(0.5))

    model = dgm.from_pyro(weighted)
    u = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    torch.testing.assert_close(model.log_factor(u), -model.latents(u)["x"])
    target = dgm.target_from_pyro(weighted)
    x = torch.tensor([[0.3]], dtype=FLOAT)
    expected = td.Normal(0.0, 1.0).log_prob(x) - x + td.Normal(x.exp(), 1.0).log_prob(torch.tensor(0.5))
    torch.testing.assert_close(-target.energy(x), expected[:, 0])


def test_a_chart_of_a_variable_on_a_sphere_is_refused():
    with pytest.raises(ModelError, match="no bijection"):
        chart_of(dist.ProjectedNormal(torch.ones(3)))


def test_relaxed_variables_that_are_rounded_are_refused():
    """Their values are 0 or 1, and their density is of the numbers before rounding: log Z was -1.0019, for -1.0439."""

    def program():
        z = pyro.sample("z", dist.RelaxedBernoulliStraightThrough(torch.tensor(0.5), probs=torch.tensor(0.3)))
        pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(0.5))

    for convert in (dgm.from_pyro, dgm.target_from_pyro):
        with pytest.raises(ModelError, match="RelaxedBernoulliStraightThrough"):
            convert(program)
    with pytest.raises(ModelError, match="rounds its values: use RelaxedOneHotCategorical, or"):
        reparametrise(dist.RelaxedOneHotCategoricalStraightThrough(torch.tensor(0.5), probs=torch.ones(3) / 3))


CENSORED = torch.tensor([0.0, 0.6, 0.0, 1.1])


def clamped(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(mean, 0.5))
    pyro.deterministic("y", x.clamp_min(0.0))


def with_the_probability_of_the_event(y):
    """What the message about clamped values asks for: the others exactly, and the event softly."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample("seen", dist.Normal(mean, 0.5).expand([2]).to_event(1), obs=y[y > 0])
    pyro.sample("at_zero", dist.Binomial(2, dist.Normal(mean, 0.5).cdf(torch.zeros(()))), obs=torch.tensor(2.0))


def test_censored_values_are_events_with_a_probability():
    model = dgm.from_pyro(clamped, CENSORED, observed={"y": CENSORED})
    with pytest.raises(ObservationError, match=r"2 of 4 .* with positive probability.*soft observation of a program"):
        dgm.condition(model, model.data)
    mean = torch.linspace(-3, 3, 20001, dtype=FLOAT)
    noise = td.Normal(mean.unsqueeze(-1), 0.5)
    joint = td.Normal(0.0, 1.0).log_prob(mean) + noise.log_prob(CENSORED[CENSORED > 0].double()).sum(-1)
    joint = joint + 2 * noise.cdf(torch.zeros(1, dtype=FLOAT)).log()[:, 0]
    target = dgm.target_from_pyro(with_the_probability_of_the_event, CENSORED)
    torch.testing.assert_close(-target.energy(mean.unsqueeze(-1)), joint, rtol=1e-5, atol=1e-5)
    exact = joint.softmax(0) @ mean
    model = dgm.from_pyro(with_the_probability_of_the_event, CENSORED)
    assert model.hard == ("seen",)
    kernel = dgm.LiftedHMC(step_size=0.5, n_steps=4)
    draws = dgm.sample(dgm.condition(model, model.data), kernel, chains=64, warmup=20, draws=40, seed=0, progress=False)
    means = draws.latents["mean"].mean(1)
    error = means.std() / 8
    assert error < 0.03
    assert abs(means.mean() - exact) < 5 * error
    # the control: without the event
    assert abs(means.mean() - 0.85 * 8 / 9) > 5 * error


MISSING = torch.tensor([0.3, math.nan, 0.7])


def plain(y=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def masked(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 3), pyro.poutine.mask(mask=~y.isnan()):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y.nan_to_num(1))


def test_missing_values_are_named_with_what_leaves_them_out():
    # E mean: of two values with variance .25 and a prior of variance 1
    exact = (0.3 + 0.7) / 0.25 / (1 + 2 / 0.25)
    for soft in ({"observed": {"y": MISSING}}, {}):
        args = () if soft else (MISSING,)
        with pytest.raises(ModelError, match=r"'y' of plain have 1 missing values \(NaN\): leave .*poutine.mask"):
            dgm.target_from_pyro(plain, *args, **soft)
        model = dgm.from_pyro(plain, *args, **soft)
        with pytest.raises(ObservationError, match=r"not finite.*observe=pixels\(~observed.isnan"):
            dgm.condition(model, model.data)
    with pytest.raises(ModelError, match="missing values"):
        dgm.from_pyro(plain, soft={"y": MISSING}, observed={"mean": 0.1})
    target = dgm.target_from_pyro(masked, MISSING)
    x = torch.linspace(-6, 6, 20001, dtype=FLOAT).unsqueeze(-1)
    assert (-target.energy(x)).softmax(0) @ x[:, 0] == pytest.approx(exact, abs=1e-5)
    fibre = dgm.condition(model, model.data, observe=dgm.pixels(~MISSING.isnan()))
    mean = dgm.sample(fibre, chains=64, warmup=20, draws=40, seed=0, progress=False).latents["mean"].mean(1)
    assert abs(mean.mean() - exact) < 5 * mean.std() / 8


def observed_in_part():
    """Missing values as Pyro has them."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=MISSING.nan_to_num(0), obs_mask=~MISSING.isnan())
    pyro.sample("other", dist.Normal(mean, 1.0), obs=torch.tensor(0.2))


def test_data_observed_in_part_leave_no_coordinate_without_a_density():
    target = dgm.target_from_pyro(observed_in_part)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    seen = MISSING[[0, 2]].double()
    mean, drawn = x[:, :1], x[:, 1:]
    joint = td.Normal(0.0, 1.0).log_prob(mean) + td.Normal(mean, 1.0).log_prob(torch.tensor(0.2, dtype=FLOAT))
    joint = joint + td.Normal(mean, 0.5).log_prob(seen).sum(-1, keepdim=True)
    # what is drawn for data that are present integrates to 1
    joint = joint + td.Normal(mean, 0.5).log_prob(drawn).sum(-1, keepdim=True)
    torch.testing.assert_close(-target.energy(x), joint[:, 0], rtol=1e-6, atol=1e-6)
    values = target.latents(x)["y"]
    torch.testing.assert_close(values[:, 1], drawn[:, 1])
    torch.testing.assert_close(values[:, [0, 2]], seen.expand(5, 2))
    model = dgm.from_pyro(observed_in_part)
    assert model.hard == ("other",)
    u = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    mean = model.latents(u)["mean"].unsqueeze(-1)
    torch.testing.assert_close(model.log_factor(u), td.Normal(mean, 0.5).log_prob(seen).sum(-1))


def with_a_mask_and_a_factor(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.factor("penalty", -mean.abs())
    with pyro.plate("data", 2), pyro.poutine.mask(mask=torch.tensor([True, False])):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def test_factors_and_masked_observations_are_likelihoods():
    with pytest.raises(ModelError, match="nothing in with_a_mask_and_a_factor is observed exactly"):
        dgm.from_pyro(with_a_mask_and_a_factor, torch.ones(2))
    model = dgm.from_pyro(with_a_mask_and_a_factor, torch.ones(2), observed={"mean": 0.3})
    expected = -0.3 + td.Normal(0.3, 0.5).log_prob(torch.tensor(1.0, dtype=FLOAT))
    torch.testing.assert_close(model.log_factor(torch.tensor([[0.3]], dtype=FLOAT)), expected.reshape(1))
    with pytest.raises(ModelError, match=r"'y' .* is scaled or masked.* give it in soft"):
        dgm.from_pyro(with_a_mask_and_a_factor, observed={"y": torch.ones(2)}, y=None)


@pytest.mark.parametrize("call", [dgm.from_pyro, dgm.target_from_pyro])
def test_data_that_are_no_numbers_are_refused(call):
    with pytest.raises(ArgumentError, match=r"observed\['y'\]='a'.*must be a tensor"):
        call(plain, observed={"y": "a"})
    with pytest.raises(ArgumentError, match="observed"):
        call(plain, observed=[1.0])


def centred():
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("groups", 2):
        theta = pyro.sample("theta", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(theta, 0.5), obs=torch.tensor([0.4, -1.0]))


def test_a_program_that_is_reparametrised_is_the_same_program():
    """Pyro then observes each variable at its own value, a function of another; that is no data."""
    reparametrised = pyro.poutine.reparam(centred, config={"theta": LocScaleReparam(0.0)})
    model = dgm.from_pyro(reparametrised)
    assert model.hard == ("y",)
    assert set(dgm.from_pyro(centred).latents(torch.zeros(5, dtype=FLOAT))) == {"scale", "theta"}
    latents = model.latents(torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=FLOAT))
    torch.testing.assert_close(latents["theta"], latents["scale"].unsqueeze(-1) * latents["theta_decentered"])
    target, plain = dgm.target_from_pyro(reparametrised), dgm.target_from_pyro(centred)
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    latents = target.latents(x)
    at = torch.cat([x[:, :1], latents["theta"]], -1)
    # theta = scale z
    torch.testing.assert_close(target.energy(x), plain.energy(at) - 2 * latents["scale"].log())
