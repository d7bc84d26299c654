"""Priors with extreme parameters keep all of their mass in the coordinates of programs and simulators."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import distributions as td
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli

import dgm_infer as dgm
from dgm_infer.interop.charts import chart_of
from dgm_infer.interop.log_densities import log_density
from dgm_infer.interop.reparametrisation import reparametrise
from dgm_infer.models import Logistic, StandardNormal

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    import pyro.distributions

# Pyro's distributions are torch's with more methods, which their types do not have
dist: Any = pyro.distributions

FLOAT = torch.float64


def of(make, *parameters):
    return make(*[torch.tensor(p, dtype=FLOAT) for p in parameters])


def transformed(base, *transforms):
    return td.TransformedDistribution(base, list(transforms))


def mixture(components):
    return td.MixtureSameFamily(of(td.Categorical, [0.7, 0.3]), components)


PRIORS = {
    "Beta(.01, .01)": of(td.Beta, 0.01, 0.01),
    "Beta(.1, .1)": of(td.Beta, 0.1, 0.1),
    "Beta(.001, 1)": of(td.Beta, 0.001, 1.0),
    "Beta(50, .05)": of(td.Beta, 50.0, 0.05),
    "Beta(1e4, 1e4)": of(td.Beta, 1e4, 1e4),
    "Gamma(.001)": of(td.Gamma, 0.001, 1.0),
    "Gamma(.01, 1e6)": of(td.Gamma, 0.01, 1e6),
    "Gamma(1e4)": of(td.Gamma, 1e4, 1.0),
    "Chi2(.02)": of(td.Chi2, 0.02),
    "InverseGamma(.01)": of(td.InverseGamma, 0.01, 2.0),
    "InverseGamma(100)": of(td.InverseGamma, 100.0, 2.0),
    "Pyro's InverseGamma(.01)": of(dist.InverseGamma, 0.01, 2.0),
    "Kumaraswamy(.1, .1)": of(td.Kumaraswamy, 0.1, 0.1),
    "Kumaraswamy(.01, 5)": of(td.Kumaraswamy, 0.01, 5.0),
    "Kumaraswamy(20, 30)": of(td.Kumaraswamy, 20.0, 30.0),
    "RelaxedBernoulli(.1)": td.RelaxedBernoulli(torch.tensor(0.1, dtype=FLOAT), torch.tensor(0.3, dtype=FLOAT)),
    "RelaxedBernoulli(10)": td.RelaxedBernoulli(torch.tensor(10.0, dtype=FLOAT), torch.tensor(0.3, dtype=FLOAT)),
    "LogitRelaxedBernoulli(.1)": LogitRelaxedBernoulli(torch.tensor(0.1, dtype=FLOAT), torch.tensor(0.3, dtype=FLOAT)),
    "Weibull(.01)": of(td.Weibull, 2.0, 0.01),
    "Weibull(20)": of(td.Weibull, 2.0, 20.0),
    "FisherSnedecor(.01, .02)": of(td.FisherSnedecor, 0.01, 0.02),
    "FisherSnedecor(100, 50)": of(td.FisherSnedecor, 100.0, 50.0),
    "Pareto(.01)": of(td.Pareto, 2.0, 0.01),
    "Pareto(50)": of(td.Pareto, 2.0, 50.0),
    "LogNormal(.01)": of(td.LogNormal, 0.0, 0.01),
    "LogNormal(100)": of(td.LogNormal, 0.0, 100.0),
    "HalfCauchy(1e-6)": of(td.HalfCauchy, 1e-6),
    "HalfCauchy(1e6)": of(td.HalfCauchy, 1e6),
    "HalfNormal(1000)": of(td.HalfNormal, 1e3),
    "Exponential(.001)": of(td.Exponential, 1e-3),
    "Uniform": of(td.Uniform, -3.0, 5.0),
    "Cauchy": of(td.Cauchy, 0.0, 10.0),
    "StudentT(.1)": of(td.StudentT, 0.1),
    "Laplace": of(td.Laplace, 0.0, 0.01),
    "Gumbel": of(td.Gumbel, 0.0, 3.0),
    "Normal": of(td.Normal, 3.0, 0.01),
    "ContinuousBernoulli(.01)": of(td.ContinuousBernoulli, 0.01),
    "ContinuousBernoulli(.99999)": of(td.ContinuousBernoulli, 0.99999),
    "AffineBeta(.05, .05)": of(dist.AffineBeta, 0.05, 0.05, -1.0, 4.0),
    "AsymmetricLaplace": of(dist.AsymmetricLaplace, 0.0, 1.0, 5.0),
    "SoftLaplace": of(dist.SoftLaplace, 0.0, 0.1),
    "Logistic": of(dist.Logistic, 0.0, 0.1),
    "SkewLogistic": of(dist.SkewLogistic, 0.0, 1.0, 0.1),
    "a folded Cauchy": dist.FoldedDistribution(of(dist.Cauchy, 0.5, 0.1)),
    "a wide logit-normal": transformed(of(td.Normal, 0.0, 100.0), td.SigmoidTransform()),
    "a wide softplus-normal": transformed(of(td.Normal, 0.0, 100.0), td.SoftplusTransform()),
    "a wide tanh-normal": transformed(of(td.Normal, 0.0, 100.0), td.TanhTransform()),
    "the log of Gamma(.01)": transformed(of(td.Gamma, 0.01, 1.0), td.ExpTransform().inv),
    "1 + 3 Gamma(.01)": transformed(of(td.Gamma, 0.01, 1.0), td.AffineTransform(1.0, 3.0)),
    "1 - 3 Beta(.01, 1)": transformed(of(td.Beta, 0.01, 1.0), td.AffineTransform(1.0, -3.0)),
    "a masked Beta(.01, .01)": dist.Beta(torch.tensor(0.01, dtype=FLOAT), torch.tensor(0.01, dtype=FLOAT)).mask(True),
    "a mixture of normals": mixture(of(td.Normal, [0.0, 0.0], [0.05, 2.0])),
    "a mixture of Betas": mixture(of(td.Beta, [0.01, 2.0], [0.02, 2.0])),
    "a mixture of Gammas": mixture(of(td.Gamma, [0.01, 9.0], [1.0, 3.0])),
}
if hasattr(td, "GeneralizedPareto"):
    PRIORS |= {f"GeneralizedPareto({c})": of(td.GeneralizedPareto, 1.0, 2.0, c) for c in (-5.0, -0.5, 5.0)}


def integral(log_density, reach=1e300):
    """Of a density on the line up to ``reach``, on a grid around its highest point that grows with the distance."""
    t = torch.linspace(-1, 1, 40001, dtype=FLOAT)
    centre = torch.tensor(0.0, dtype=FLOAT)
    for top in (1e5, 1e3, 1.0, 1e-2, reach):
        width = math.asinh(top / 1e-4)
        x = centre + 1e-4 * torch.sinh(width * t)
        density = log_density(x).nan_to_num(-math.inf, -math.inf, -math.inf)
        centre = x[density.argmax()]
    weights = 1e-4 * width * torch.cosh(width * t) * (t[1] - t[0])
    return (density + weights.log()).logsumexp(0).exp().item()


VON_MISES = of(td.VonMises, 0.5, 2.0)
ANGLES = {
    "an angle": (VON_MISES, -math.pi, math.pi),
    "twice an angle, and one": (transformed(VON_MISES, td.AffineTransform(1.0, 2.0)), 1 - 2 * math.pi, 1 + 2 * math.pi),
    "three times the exponential of an angle": (
        transformed(VON_MISES, td.ExpTransform(), td.AffineTransform(0.0, 3.0)),
        3 * math.exp(-math.pi),
        3 * math.exp(math.pi),
    ),
    "a masked angle": (dist.VonMises(VON_MISES.loc, VON_MISES.concentration).mask(True), -math.pi, math.pi),
    "a mixture of angles": (mixture(of(td.VonMises, [0.0, 2.5], [4.0, 2.0])), -math.pi, math.pi),
}


@pytest.mark.parametrize(("prior", "low", "high"), ANGLES.values(), ids=ANGLES)
def test_functions_of_angles_stay_within_one_turn_and_integrate_to_one(prior, low, high):
    chart = chart_of(prior)
    turn = torch.linspace(-math.pi, math.pi, 2001, dtype=FLOAT)[:-1]
    x = 1.5 * torch.stack([turn.cos(), turn.sin()], -1)
    z = chart.value(x)
    assert low - 1e-9 <= z.min()
    assert z.max() <= high + 1e-9
    # x = r (cos a, sin a) is normal given its angle
    density = (log_density(prior, chart, x) + 0.5 * 1.5**2).exp()
    assert density.sum().item() * 2 * math.pi / len(turn) == pytest.approx(1, abs=1e-6)


def test_mixtures_of_functions_of_angles_have_no_chart():
    turned = transformed(of(td.VonMises, [0.0, 1.0], [2.0, 2.0]), td.AffineTransform(0.0, 2.0))
    with pytest.raises(dgm.errors.ModelError, match="no bijection"):
        chart_of(mixture(turned))


def by_input(form):
    """The log density of a form's input, ``[n] -> [n]``."""
    base = StandardNormal(1) if form.kind == "normal" else Logistic(1)

    def log_prob(v):
        own = base.coordinate_log_prob(v)
        if form.log_factor is None:
            return own
        return own + torch.func.vmap(lambda each: form.log_factor(each, form.value(each)))(v)

    return log_prob


@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_integrates_to_one_in_its_coordinate(name):
    prior = PRIORS[name]
    chart = chart_of(prior)
    with pyro.validation_enabled(False):
        assert integral(lambda x: log_density(prior, chart, x)) == pytest.approx(1, abs=2e-4)


# Student's input has a third of its mass beyond 1e5, where the square that the factor takes back rounds
@pytest.mark.parametrize("name", [name for name in PRIORS if name != "StudentT(.1)"])
def test_a_prior_integrates_to_one_in_the_input_of_a_model(name):
    with pyro.validation_enabled(False):
        assert integral(by_input(reparametrise(PRIORS[name])), reach=1e5) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("name", ["Beta(.01, .01)", "Gamma(.001)", "Kumaraswamy(.1, .1)"])
def test_control_densities_at_rounded_values_lose_mass(name):
    prior = PRIORS[name]
    bijection = td.biject_to(prior.support)

    def at_the_value(x):
        z = bijection(x)
        return prior.log_prob(z) + bijection.log_abs_det_jacobian(x, z)

    with pyro.validation_enabled(False):
        assert integral(at_the_value) < 0.99


@pytest.mark.parametrize("shape", [0.02, 3.0])
def test_simplices_and_correlations_keep_their_mass(shape):
    """Of two dimensions each, against one bounded coordinate that is integrated in closed form."""
    dirichlet, beta = of(td.Dirichlet, [shape, 2.0]), of(td.Beta, shape, 2.0)
    x = torch.linspace(-60, 20, 9, dtype=FLOAT)
    chart = chart_of(dirichlet)
    torch.testing.assert_close(
        log_density(dirichlet, chart, x.unsqueeze(-1)), log_density(beta, chart_of(beta), x), rtol=1e-10, atol=1e-10
    )
    relaxed = td.RelaxedOneHotCategorical(torch.tensor(shape, dtype=FLOAT), torch.tensor([0.3, 0.7], dtype=FLOAT))
    assert integral(lambda x: log_density(relaxed, chart_of(relaxed), x.unsqueeze(-1))) == pytest.approx(1, abs=2e-4)
    lkj = td.LKJCholesky(2, torch.tensor(shape, dtype=FLOAT))
    assert integral(lambda x: log_density(lkj, chart_of(lkj), x.unsqueeze(-1))) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("name", ["Dirichlet", "RelaxedOneHotCategorical", "LKJCholesky", "LogisticNormal"])
def test_densities_in_coordinates_are_those_of_torch_where_nothing_rounds(name):
    prior = {
        "Dirichlet": of(td.Dirichlet, [0.5, 2.0, 3.0]),
        "RelaxedOneHotCategorical": td.RelaxedOneHotCategorical(
            torch.tensor(0.7, dtype=FLOAT), torch.tensor([0.2, 0.5, 0.3], dtype=FLOAT)
        ),
        "LKJCholesky": td.LKJCholesky(4, torch.tensor(0.7, dtype=FLOAT)),
        "LogisticNormal": of(td.LogisticNormal, [0.5, -1.0], [1.0, 2.0]),
    }[name]
    chart, bijection = chart_of(prior), td.biject_to(prior.support)
    x = torch.randn(5, *chart.shape, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    z = bijection(x)
    torch.testing.assert_close(chart.value(x), z)
    with pyro.validation_enabled(False):
        expected = prior.log_prob(z) + bijection.log_abs_det_jacobian(x, z)
        torch.testing.assert_close(log_density(prior, chart, x), expected)


def successes(n):
    share = pyro.sample("share", dist.Beta(0.01, 0.01))
    pyro.sample("n", dist.Binomial(n, share), obs=torch.tensor(float(n)))


def test_the_evidence_of_successes_alone_counts_the_mass_beside_one():
    """100 successes of 100 under Beta(.01, .01): ``B(100.01, .01) / B(.01, .01)``."""
    target = dgm.target_from_pyro(successes, 100)
    exact = math.lgamma(100.01) - math.lgamma(100.02) - math.lgamma(0.01) + math.lgamma(0.02)
    assert exact == pytest.approx(-0.7447, abs=1e-4)
    assert math.log(integral(lambda x: -target.energy(x.unsqueeze(-1)))) == pytest.approx(exact, abs=1e-3)


def test_programs_compute_in_64_bits_unless_asked():
    target = dgm.target_from_pyro(successes, 3)
    assert target.energy(torch.zeros(1, dtype=FLOAT)).dtype == FLOAT
    narrow = dgm.target_from_pyro(successes, 3, dtype=torch.float32)
    x = torch.tensor([[0.3], [2.0]])
    assert narrow.energy(x).dtype == torch.float32
    torch.testing.assert_close(narrow.energy(x).double(), target.energy(x.double()), rtol=1e-5, atol=1e-5)
    with pytest.raises(dgm.errors.ArgumentError, match="dtype"):
        dgm.target_from_pyro(successes, 3, dtype=torch.int64)


class OwnBeta(dist.TorchDistribution):
    """A density of somebody's own, which can be evaluated at a value only."""

    arg_constraints: dict = {}
    support = td.constraints.unit_interval  # type: ignore[attr-defined]

    def __init__(self, shape):
        self.beta = of(td.Beta, shape, shape)
        super().__init__(validate_args=False)

    def log_prob(self, value):
        return self.beta.log_prob(value)

    def sample(self, sample_shape=()):
        return self.beta.sample(sample_shape)


def own_prior(shape):
    share = pyro.sample("share", OwnBeta(shape))
    pyro.sample("y", dist.Normal(share, 0.5), obs=torch.tensor(0.3))


def test_mass_that_no_coordinate_reaches_is_named_with_its_share():
    lost = 0.5 * (2.0**-52) ** 0.01
    with pytest.warns(UserWarning, match=r"own_prior: 3[3-7] % of the prior of site 'share' rounds to an edge"):
        model = dgm.from_pyro(own_prior, 0.01)
    assert model.lost_mass["site 'share'"] == pytest.approx(lost, abs=0.03)
    report = dgm.check(model)
    assert "prior_mass" in report.codes
    with pytest.warns(UserWarning, match=r"3[3-7] % of the prior of share rounds"):
        target = dgm.target_from_pyro(own_prior, 0.01)
    assert target.lost_mass["share"] == pytest.approx(lost, abs=0.03)


@pytest.mark.filterwarnings("error:.*of the prior of")
def test_control_nothing_is_said_of_priors_that_lose_nothing():
    assert not dgm.from_pyro(own_prior, 2.0).lost_mass
    assert not dgm.target_from_pyro(own_prior, 2.0).lost_mass
    assert not dgm.target_from_pyro(successes, 3).lost_mass


@pytest.mark.slow
def test_a_program_that_splits_what_it_draws_is_compiled_and_nothing_is_logged(capfd):
    prior = {"weights": of(td.Dirichlet, [1.0, 2.0, 0.5]), "rate": of(td.Gamma, 3.0, 2.0)}

    def simulate(z):
        return torch.stack([z["weights"][0], z["rate"] * z["weights"][1]]) + 0.2 * torch.randn(2, dtype=FLOAT)

    fibre = dgm.condition(dgm.from_simulator(simulate, prior), torch.tensor([0.9, 0.8], dtype=FLOAT))
    draws = dgm.sample(fibre, dgm.kernels.LiftedHMC(compile=True), chains=2, warmup=5, draws=5, seed=1, progress=False)
    assert draws.inputs.isfinite().all()
    assert capfd.readouterr().err == ""
