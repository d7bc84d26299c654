"""Pyro's guides as bases: their densities in the target's coordinates, evidences in closed form, what is refused."""

import math
import warnings
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, EvidenceError

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    import pyro.distributions
    import pyro.optim
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer import autoguide as ag

# Pyro's distributions are torch's with more methods, which their types do not have
dist: Any = pyro.distributions

FLOAT = torch.float64
GUIDES: dict[str, Any] = {
    "diagonal": ag.AutoDiagonalNormal,
    "by site": ag.AutoNormal,
    "full": ag.AutoMultivariateNormal,
    "low rank": lambda program: ag.AutoLowRankMultivariateNormal(program, rank=2),
    "Laplace": ag.AutoLaplaceApproximation,
}


def number(value):
    return torch.tensor(value, dtype=FLOAT)


def normal_mean(y):
    mean = pyro.sample("mean", dist.Normal(number(1.0), number(2.0)))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(mean, number(0.5)), obs=y)


def share(counts, n):
    p = pyro.sample("p", dist.Beta(number(2.0), number(3.0)))
    with pyro.plate("data", len(counts)):
        pyro.sample("counts", dist.Binomial(n, p), obs=counts)


def line(x, y):
    intercept = pyro.sample("intercept", dist.Normal(number(0.0), number(2.0)))
    slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2, dtype=FLOAT), number(1.0)).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(intercept + slopes[0] * x + slopes[1] * x**2, number(0.5)), obs=y)


def line_in_other_order(x, y):
    slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2, dtype=FLOAT), number(1.0)).to_event(1))
    intercept = pyro.sample("intercept", dist.Normal(number(0.0), number(2.0)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(intercept + slopes[0] * x + slopes[1] * x**2, number(0.5)), obs=y)


Y = number([0.3, 1.2, 0.7])
COUNTS = number([3.0, 7.0, 4.0, 5.0])
X = torch.linspace(-1, 1, 8, dtype=FLOAT)
LINE = 0.5 + 1.5 * X + 0.3 * torch.sin(5 * X)
FEATURES = torch.stack([torch.ones_like(X), X, X**2], -1)
PRIOR = torch.diag(number([4.0, 1.0, 1.0]))


def log_beta(a, b):
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def evidence_of_share(counts, n):
    ways = sum(math.log(math.comb(n, int(k))) for k in counts)
    successes = float(counts.sum())
    return ways + log_beta(2 + successes, 3 + n * len(counts) - successes) - log_beta(2, 3)


def normal_evidence(loc, covariance, y):
    return torch.distributions.MultivariateNormal(loc.expand_as(y), covariance).log_prob(y).item()


# programs, their arguments, and their evidence in closed form
PROGRAMS: dict[str, Any] = {
    "normal mean": (
        normal_mean,
        (Y,),
        normal_evidence(number(1.0), 4 * torch.ones(3, 3, dtype=FLOAT) + 0.25 * torch.eye(3, dtype=FLOAT), Y),
    ),
    "share": (share, (COUNTS, 10), evidence_of_share(COUNTS, 10)),
    "line": (
        line,
        (X, LINE),
        normal_evidence(number(0.0), FEATURES @ PRIOR @ FEATURES.T + 0.25 * torch.eye(8, dtype=FLOAT), LINE),
    ),
}


def line_posterior():
    covariance = torch.linalg.inv(FEATURES.T @ FEATURES / 0.25 + torch.linalg.inv(PRIOR))
    return covariance @ FEATURES.T @ LINE / 0.25, covariance


def estimated(target, base):
    method = dgm.AIS(temperatures=64, n_steps=3, pilot_temperatures=16)
    return dgm.log_evidence(target, base, method, chains=96, seed=0, coverage=False, progress=False)


def agree(found, exact):
    # rounding, where the base is the posterior and all weights are equal
    return abs(found.log_z.item() - exact) <= 5 * found.std_error.item() + 1e-6


# every guide with the program of three variables, and every program
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "guide"), [*(("line", guide) for guide in GUIDES), ("normal mean", "diagonal"), ("share", "diagonal")]
)
def test_from_every_guide_the_evidence_is_that_in_closed_form(name, guide):
    program, args, exact = PROGRAMS[name]
    target = dgm.target_from_pyro(program, *args)
    base = dgm.interop.base_from_guide(target, GUIDES[guide], steps=200, samples=4)
    found = estimated(target, base)
    assert found.std_error < 0.1
    assert found.diagnostics["effective_chains"] > 30
    assert agree(found, exact)
    # the bound is one
    assert base.elbo is not None
    assert base.elbo < exact + 0.05


@pytest.mark.slow
def test_control_of_another_prior_or_without_the_jacobian_the_evidence_is_another():
    exact = PROGRAMS["share"][2]

    def flat_prior(counts, n):
        p = pyro.sample("p", dist.Beta(number(1.0), number(1.0)))
        with pyro.plate("data", len(counts)):
            pyro.sample("counts", dist.Binomial(n, p), obs=counts)

    target = dgm.target_from_pyro(share, COUNTS, 10)
    # of the logistic map: log p + log(1 - p)
    bare = dgm.Target(lambda x: target.energy(x) + torch.nn.functional.logsigmoid(torch.cat([x, -x], -1)).sum(-1), 1)
    for other in (dgm.target_from_pyro(flat_prior, COUNTS, 10), bare):
        base = dgm.interop.base_from_guide(target, ag.AutoMultivariateNormal, steps=200, samples=4)
        assert not agree(estimated(other, base), exact)


def test_the_fit_of_a_normal_posterior_is_the_posterior():
    mean, covariance = line_posterior()
    target = dgm.target_from_pyro(line, X, LINE)
    base = dgm.interop.base_from_guide(target, ag.AutoLaplaceApproximation, steps=400, samples=1)
    torch.testing.assert_close(base.covariance, covariance, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(base.mean, mean, rtol=0, atol=0.02)
    exact = PROGRAMS["line"][2]
    assert base.elbo is not None
    assert abs(base.elbo.item() - exact) < 0.01
    # the control: a guide without correlations has a lower bound
    loose = dgm.interop.base_from_guide(target, ag.AutoNormal, steps=150, samples=4).elbo
    assert loose is not None
    assert loose < exact - 0.1


def fitted_guide(make, program, *args, steps=3):
    """A guide as users fit it, to their program."""
    with torch.random.fork_rng(), pyro.get_param_store().scope():
        pyro.set_rng_seed(1)
        guide = make(program)
        svi = SVI(program, guide, pyro.optim.ClippedAdam({"lr": 0.1}), Trace_ELBO())
        for _ in range(steps):
            svi.step(*args)
    return guide


@pytest.mark.parametrize("kind", ["diagonal", "by site", "full", "low rank"])
@pytest.mark.parametrize("program", [line, line_in_other_order])
@pytest.mark.filterwarnings("ignore::UserWarning:pyro")
def test_a_fitted_guide_is_taken_over_in_the_targets_order(kind, program):
    guide = fitted_guide(GUIDES[kind], program, X, LINE)
    base = dgm.interop.base_from_guide(dgm.target_from_pyro(line, X, LINE), guide)
    x = base.sample((5,), torch.Generator().manual_seed(2))
    # the target has the intercept first
    order = [0, 1, 2] if program is line else [1, 2, 0]
    if kind == "by site":
        parts = [guide._get_loc_and_scale(name) for name in ("intercept", "slopes")]
        mean, sd = (torch.cat([part[i].reshape(-1) for part in parts]).detach() for i in range(2))
        expected = torch.distributions.Normal(mean, sd).log_prob(x).sum(-1)
    else:
        expected = guide.get_posterior().log_prob(x[:, order])
    torch.testing.assert_close(base.log_prob(x), expected.detach().to(x.dtype), rtol=1e-5, atol=1e-5)
    # the control: in another order it is another density
    assert (base.log_prob(x.flip(-1)) - expected).abs().max() > 1e-3


def test_discrete_variables_are_summed_out_while_a_guide_is_fitted():
    def mixture(y):
        p = pyro.sample("p", dist.Beta(number(1.0), number(1.0)))
        with pyro.plate("data", 3):
            k = pyro.sample("k", dist.Bernoulli(p))
            pyro.sample("y", dist.Normal(3 * k, number(1.0)), obs=y)

    target = dgm.target_from_pyro(mixture, number([3.0, 2.5, 3.5]))
    base = dgm.interop.base_from_guide(target, ag.AutoNormal, steps=12, samples=2, rate=0.3)
    assert target.latents(base.mean)["p"] > 0.6


def test_any_target_without_a_batch_is_fitted():
    covariance = number([[1.0, 0.8], [0.8, 1.0]])
    target = dgm.Target(lambda x: 0.5 * (x @ torch.linalg.inv(covariance).to(x) * x).sum(-1), 2)
    base = dgm.interop.base_from_guide(target, ag.AutoLaplaceApproximation, steps=60, samples=1)
    torch.testing.assert_close(base.covariance.to(FLOAT), covariance, rtol=1e-4, atol=1e-4)


def test_a_seed_fixes_the_fit_and_the_callers_state_is_left_alone():
    target = dgm.target_from_pyro(normal_mean, Y)
    pyro.clear_param_store()
    pyro.param("AutoDiagonalNormal.loc", torch.ones(7))
    before = torch.get_rng_state()
    a, b, c = (dgm.interop.base_from_guide(target, ag.AutoDiagonalNormal, steps=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.mean, b.mean)
    assert not torch.equal(a.mean, c.mean)
    assert torch.equal(before, torch.get_rng_state())
    assert list(pyro.get_param_store().keys()) == ["AutoDiagonalNormal.loc"]
    assert pyro.param("AutoDiagonalNormal.loc").shape == (7,)
    pyro.clear_param_store()


def dependent_support(y):
    width = pyro.sample("width", dist.Gamma(number(3.0), number(1.0)))
    mean = pyro.sample("mean", dist.Uniform(-width, width))
    pyro.sample("y", dist.Normal(mean, torch.ones(3, dtype=FLOAT)).to_event(1), obs=y)


def refused(words, target, guide, error: type[Exception] = ArgumentError, **options):
    with pytest.raises(error, match=words) as caught:
        dgm.interop.base_from_guide(target, guide, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning:pyro")
def test_what_is_not_a_base_is_refused_in_one_line():
    target = dgm.target_from_pyro(normal_mean, Y)
    two = dgm.target_from_pyro(dependent_support, Y)
    refused("AutoIAFNormal.*not Gaussian on R.D, take AutoDiagonalNormal", two, ag.AutoIAFNormal)
    refused("AutoDelta.*not Gaussian", target, ag.AutoDelta)
    refused("expected a guide of Pyro, such as", target, 3)
    refused("makes a int, not a guide", target, lambda program: 3)
    refused("it fails for this target", target, lambda: 3)
    refused("not been fitted, give the class", target, ag.AutoNormal(normal_mean))
    refused("give guide.laplace_approximation", target, fitted_guide(ag.AutoLaplaceApproximation, normal_mean, Y))
    refused(
        r"sites \{mean: 1\} are not the target's \{width: 1, mean: 1\}",
        two,
        fitted_guide(ag.AutoNormal, normal_mean, Y),
    )
    refused("steps", target, ag.AutoNormal, steps=0)
    refused("rate", target, ag.AutoNormal, rate=-1.0)
    batch = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2, (3,))
    refused(r"batch shape \(3,\).*Gaussian.fit", batch, ag.AutoNormal)
    plain = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 1)
    refused("needs what target_from_pyro returns", plain, fitted_guide(ag.AutoNormal, normal_mean, Y))
    refused("expected a Target, not a int", 3, ag.AutoNormal)
    refused("energy", dgm.Target(lambda x: x.sum(-1) * float("nan"), 2), ag.AutoNormal, EvidenceError)
    flat = dgm.Target(lambda x: 0.5 * x[..., 0] ** 2 - 0.1 * x[..., 1] ** 2 + 0.01 * x[..., 1] ** 4, 2)
    refused("not positive definite", flat, ag.AutoLaplaceApproximation, EvidenceError, steps=1, rate=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning:pyro")
def test_a_guide_in_other_coordinates_is_refused_and_its_class_fitted():
    # Pyro's guides keep the bijection of the first run, where the support depends on another variable
    target = dgm.target_from_pyro(dependent_support, Y)
    refused("its bijection of 'mean' is not the target's", target, fitted_guide(ag.AutoNormal, dependent_support, Y))
    base = dgm.interop.base_from_guide(target, ag.AutoNormal, steps=20)
    assert base.mean.dtype == FLOAT


def test_the_way_to_the_evidence_is_in_the_messages():
    with pytest.raises(ArgumentError, match="'total' is a deterministic statement, which has no likelihood"):
        dgm.target_from_pyro(total, observed={"total": 3.0})
    model = dgm.from_pyro(total, observed={"total": 3.0})
    fibre = dgm.condition(model, model.data)
    with pytest.raises(ArgumentError, match="an exact observation leaves a surface without a density"):
        dgm.log_evidence(fibre, dgm.Gaussian(torch.zeros(2), 1.0))
    with pytest.raises(dgm.errors.ModelError, match=r"for likelihoods alone sample\(target_from_pyro"):
        dgm.from_pyro(normal_mean, Y, soft={"y": Y})


def total():
    a = pyro.sample("a", dist.Exponential(1.0))
    b = pyro.sample("b", dist.Exponential(1.0))
    pyro.deterministic("total", a + b)
