"""Pyro programs as targets: densities with their Jacobians, evidences in closed form and by quadrature, variables."""

import copy
import math
import subprocess
import sys
import warnings

import pytest
import torch
from scipy import integrate, stats

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    from pyro import distributions as dist

FLOAT = torch.float64
Y = torch.tensor([0.3, 1.2, 0.7], dtype=FLOAT)


def number(value):
    return torch.tensor(value, dtype=FLOAT)


def normal_normal(y=None, n=3):
    mean = pyro.sample("mean", dist.Normal(number(1.0), number(2.0)))
    with pyro.plate("data", n):
        return pyro.sample("y", dist.Normal(mean, number(0.5)), obs=y)


def half_cauchy_scale(y):
    scale = pyro.sample("scale", dist.HalfCauchy(number(2.5)))
    pyro.sample("y", dist.Normal(torch.zeros(3, dtype=FLOAT), scale).to_event(1), obs=y)


def hierarchical(y, centred=True):
    """Group means around a common mean: ``y_j ~ N(theta_j, 1)``, ``theta_j ~ N(mu, tau)``."""
    mu = pyro.sample("mu", dist.Normal(number(0.0), number(3.0)))
    tau = pyro.sample("tau", dist.HalfCauchy(number(1.0)))
    with pyro.plate("groups", 3):
        if centred:
            theta = pyro.sample("theta", dist.Normal(mu, tau))
        else:
            theta = pyro.deterministic("theta", mu + tau * pyro.sample("raw", dist.Normal(number(0.0), number(1.0))))
        pyro.sample("y", dist.Normal(theta, number(1.0)), obs=y)


def support_that_depends(y):
    scale = pyro.sample("scale", dist.Gamma(number(3.0), number(1.0)))
    mean = pyro.sample("mean", dist.Uniform(-scale, scale))
    pyro.sample("y", dist.Normal(mean, torch.ones(3, dtype=FLOAT)).to_event(1), obs=y)


def mixture(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2, dtype=FLOAT)))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(torch.tensor([-1.0, 2.0], dtype=FLOAT)[k], number(0.7)), obs=y)


def log_integral(target, low=-30.0, high=30.0, n=60001):
    """Log evidence of a target on the line by the trapezoidal rule, exact to rounding."""
    x = torch.linspace(low, high, n, dtype=FLOAT).unsqueeze(-1)
    return (-target.energy(x)).logsumexp(0).item() + math.log((high - low) / (n - 1))


def test_the_evidence_of_a_normal_mean_is_in_closed_form():
    covariance = 4 * torch.ones(3, 3, dtype=FLOAT) + 0.25 * torch.eye(3, dtype=FLOAT)
    exact = dist.MultivariateNormal(torch.ones(3, dtype=FLOAT), covariance).log_prob(Y).item()
    assert log_integral(dgm.target_from_pyro(normal_normal, Y)) == pytest.approx(exact, abs=1e-10)
    assert log_integral(dgm.target_from_pyro(normal_normal, observed={"y": Y})) == pytest.approx(exact, abs=1e-10)


def scale_evidence():
    def joint(s):
        return stats.halfcauchy.pdf(s, scale=2.5) * math.prod(stats.norm.pdf(Y.numpy(), 0, s))

    return math.log(sum(integrate.quad(joint, *ends, epsabs=1e-14)[0] for ends in ((0, 1), (1, math.inf))))


def test_the_evidence_of_a_scale_has_its_jacobian():
    assert log_integral(dgm.target_from_pyro(half_cauchy_scale, Y)) == pytest.approx(scale_evidence(), abs=1e-8)


def test_control_without_the_jacobian_the_evidence_is_another():
    target = dgm.target_from_pyro(half_cauchy_scale, Y)
    # the support's bijection is exp, whose log-derivative is x
    bare = dgm.Target(lambda x: target.energy(x) + x[..., 0], 1)
    assert abs(log_integral(bare) - scale_evidence()) > 1e-3


@pytest.mark.parametrize("centred", [True, False])
def test_the_density_of_a_hierarchical_program_is_that_of_its_formula(centred):
    y = torch.tensor([0.5, -1.0, 2.0], dtype=FLOAT)
    target = dgm.target_from_pyro(hierarchical, y, centred=centred)
    assert target.dim == 5
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 5, generator=rng, dtype=FLOAT)
    mu, log_tau, last = x[..., 0], x[..., 1], x[..., 2:]
    tau = log_tau.exp()
    theta = last if centred else mu.unsqueeze(-1) + tau.unsqueeze(-1) * last
    prior = dist.Normal(mu.unsqueeze(-1), tau.unsqueeze(-1)).log_prob(last) if centred else _log_normal(last)
    expected = (
        _log_normal(mu / 3)
        - math.log(3)
        + math.log(2 / math.pi)
        - torch.log1p(tau**2)
        + log_tau
        + prior.sum(-1)
        + _log_normal(y - theta).sum(-1)
    )
    torch.testing.assert_close(target.energy(x), -expected)
    latents = target.latents(x)
    torch.testing.assert_close(latents["tau"], tau)
    torch.testing.assert_close(latents["theta"], theta)


def _log_normal(x):
    return -0.5 * x**2 - 0.5 * math.log(2 * math.pi)


def hierarchical_evidence(y):
    """Both means integrated in closed form, ``y ~ N(0, (1 + tau^2) I + 9 11^T)``, the scale by quadrature."""

    def joint(tau):
        covariance = (1 + tau**2) * torch.eye(3, dtype=FLOAT) + 9
        density = dist.MultivariateNormal(torch.zeros(3, dtype=FLOAT), covariance).log_prob(y).exp().item()
        return density * stats.halfcauchy.pdf(tau)

    return math.log(sum(integrate.quad(joint, *ends, epsabs=1e-12)[0] for ends in ((0, 1), (1, math.inf))))


def importance(target, mean, scale, n=200_000):
    """Log evidence and its standard error with draws of a wide normal, heavy-tailed in one coordinate's scale."""
    rng = torch.Generator().manual_seed(5)
    x = mean + scale * torch.randn(n, target.dim, generator=rng, dtype=FLOAT)
    log_weights = -target.energy(x) - dist.Normal(mean, scale).log_prob(x).sum(-1)
    weights = (log_weights - log_weights.max()).exp()
    estimate = log_weights.max() + weights.mean().log()
    return estimate.item(), (weights.std() / weights.mean() / n**0.5).item()


def test_the_evidence_of_a_hierarchical_program_is_that_of_quadrature():
    y = torch.tensor([0.5, -1.0, 2.0], dtype=FLOAT)
    exact = hierarchical_evidence(y)
    target = dgm.target_from_pyro(hierarchical, y, centred=False)
    estimate, error = importance(
        target, torch.tensor([0.5, 0.0, 0.2, -0.5, 0.6]), torch.tensor([1.6, 1.6, 1.1, 1.1, 1.1])
    )
    assert error < 0.02
    assert abs(estimate - exact) < 5 * error


@pytest.mark.slow
def test_tempering_finds_the_evidence_of_a_hierarchical_program():
    y = torch.tensor([0.5, -1.0, 2.0], dtype=FLOAT)
    target = dgm.target_from_pyro(hierarchical, y, centred=False)
    base = dgm.Gaussian.fit(target, steps=200, start=dgm.Gaussian.standard(target, FLOAT))
    method = dgm.GibbsTempering(draws=60, warmup=10, n_steps=4, pilot_temperatures=20)
    found = dgm.log_evidence(target, base, method, chains=64, seed=0, progress=False)
    assert found.log_z.shape == ()
    assert found.std_error < 0.1
    assert abs(found.log_z - hierarchical_evidence(y)) < 5 * found.std_error
    assert abs(found.log_z - hierarchical_evidence(2 * y)) > 5 * found.std_error


def test_control_of_other_data_the_evidence_is_another():
    y = torch.tensor([0.5, -1.0, 2.0], dtype=FLOAT)
    target = dgm.target_from_pyro(hierarchical, y + 0.5, centred=False)
    estimate, error = importance(
        target, torch.tensor([0.9, 0.0, 0.2, -0.5, 0.6]), torch.tensor([1.6, 1.6, 1.1, 1.1, 1.1])
    )
    assert abs(estimate - hierarchical_evidence(y)) > 5 * error


def test_a_support_that_depends_on_a_variable_is_the_present_one():
    """A bijection kept from the program's first run would give another integral."""

    y, n = Y.numpy(), len(Y)
    # the mean's integral in closed form: at its best the likelihood, times a normal of sd 1/sqrt(n) within +- scale
    best = math.prod(stats.norm.pdf(y, y.mean(), 1)) * math.sqrt(2 * math.pi / n)

    def joint(scale):
        inside = stats.norm(y.mean(), n**-0.5).cdf([-scale, scale])
        return stats.gamma.pdf(scale, 3) / (2 * scale) * best * (inside[1] - inside[0])

    exact = math.log(integrate.quad(joint, 0, math.inf)[0])
    target = dgm.target_from_pyro(support_that_depends, Y)
    grid = torch.linspace(-16, 16, 800, dtype=FLOAT)
    energy = target.energy(torch.cartesian_prod(grid, grid))
    assert (-energy).logsumexp(0).item() + 2 * math.log(grid[1] - grid[0]) == pytest.approx(exact, abs=1e-4)


def test_discrete_variables_are_summed_out():
    y = torch.tensor([-0.7, 1.8, 2.5], dtype=FLOAT)

    def joint(w):
        return math.prod(w * stats.norm.pdf(y.numpy(), -1, 0.7) + (1 - w) * stats.norm.pdf(y.numpy(), 2, 0.7))

    target = dgm.target_from_pyro(mixture, y)
    assert target.dim == 1
    assert target.vectorised
    exact = math.log(integrate.quad(joint, 0, 1)[0])
    assert log_integral(target, -20, 20, 401) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("program", [normal_normal, half_cauchy_scale, hierarchical, support_that_depends])
def test_many_points_at_once_are_each_alone(program):
    target = dgm.target_from_pyro(program, Y)
    assert target.vectorised
    assert target.batch_shape == ()
    x = torch.randn(2, 3, target.dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    energy, gradient = target.energy_and_gradient(x)
    assert energy.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = target.energy_and_gradient(x[i, j])
            torch.testing.assert_close((energy[i, j], gradient[i, j]), one)
            for name, value in target.latents(x).items():
                torch.testing.assert_close(value[i, j], target.latents(x[i, j])[name])


def test_variables_lie_in_their_supports():
    target = dgm.target_from_pyro(support_that_depends, Y)
    latents = target.latents(3 * torch.randn(50, 2, generator=torch.Generator().manual_seed(2), dtype=FLOAT))
    assert set(latents) == {"scale", "mean"}
    assert (latents["scale"] > 0).all()
    assert (latents["mean"].abs() <= latents["scale"]).all()


def test_gradients_are_those_of_finite_differences():
    target = dgm.target_from_pyro(hierarchical, Y)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(3), dtype=FLOAT, requires_grad=True)
    assert torch.autograd.gradcheck(target.energy, x)


def branching():
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    sd = 1.0 if mean.item() > 0 else 2.0
    pyro.sample("y", dist.Normal(mean, sd), obs=torch.tensor(0.5))


def test_a_program_that_cannot_be_vectorised_says_so_and_is_right():
    with pytest.warns(UserWarning, match=r"branching cannot be vectorised.*\.item\(\)"):
        target = dgm.target_from_pyro(branching)
    assert not target.vectorised
    x = torch.tensor([[-1.0], [1.0]])
    expected = [
        -(_log_normal(m) + dist.Normal(m, sd).log_prob(torch.tensor(0.5)))
        for m, sd in zip(x[:, 0], (2.0, 1.0), strict=True)
    ]
    torch.testing.assert_close(target.energy(x), torch.stack(expected))
    assert target.latents(x.expand(4, 2, 1))["mean"].shape == (4, 2)


def test_a_program_is_sampled_like_any_target():
    target = dgm.target_from_pyro(normal_normal, Y)
    draws = dgm.sample(target, chains=64, warmup=50, draws=100, seed=0, progress=False)
    mean = draws.latents["mean"].mean(1)
    assert mean.dtype == FLOAT
    exact = (1 / 4 + Y.sum() / 0.25) / (1 / 4 + 3 / 0.25)
    error = mean.std() / 8
    assert error < 0.02
    assert abs(mean.mean() - exact) < 5 * error
    # not the mean of the data
    assert abs(mean.mean() - 1.0) > 5 * error


def refuses(error, words, program, *arguments, **options):
    with pytest.raises(error, match=words) as caught:
        dgm.target_from_pyro(program, *arguments, **options)
    assert "\n" not in str(caught.value)


def poisson():
    pyro.sample("rate", dist.Gamma(1.0, 1.0))
    pyro.sample("n", dist.Poisson(3.0))


def mini_batches(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=2) as index:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[index])


def chosen_rows(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample=torch.tensor([0, 1])) as index:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[index])


def unrepeatable():
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mean + torch.randn(()), 1.0), obs=torch.tensor(0.5))


def support_of_a_discrete_one():
    k = pyro.sample("k", dist.Categorical(torch.ones(2)))
    x = pyro.sample("x", dist.Uniform(0.0, torch.tensor([1.0, 3.0])[k]))
    pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.5))


def branch_on_a_discrete_one():
    k = pyro.sample("k", dist.Bernoulli(0.3))
    x = pyro.sample("x", dist.Normal(0.0, 2.0 if k == 1 else 0.05))
    pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.5))


def test_what_has_no_evidence_is_named():
    refuses(ArgumentError, "expected a Pyro program", 3)
    refuses(ArgumentError, "'z' is not a sample statement", normal_normal, observed={"z": Y})
    refuses(ModelError, "nothing is left to integrate", normal_normal, observed={"y": Y, "mean": number(1.0)})
    refuses(ModelError, "half_cauchy_scale fails: .*missing 1 required", half_cauchy_scale)
    refuses(ModelError, "'n' .* is discrete .*Poisson", poisson)
    refuses(ModelError, "'data' .* takes 2 of 3 data", mini_batches, Y)
    refuses(ModelError, "'data' .* takes 2 of 3 data", chosen_rows, Y)
    refuses(ModelError, r"random numbers with torch, at line \d+ .*mean \+ torch.randn.*pyro.sample", unrepeatable)
    refuses(ModelError, "support of site 'x' .* depends on a discrete latent variable", support_of_a_discrete_one)
    refuses(ModelError, "summed over, as vectors .*torch.where", branch_on_a_discrete_one)


def changing_outside(state=[0]):  # noqa: B006
    state[0] += 1
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mean, 1.0 + state[0]), obs=torch.tensor(0.5))


def test_a_density_that_changes_from_run_to_run_is_refused():
    refuses(ModelError, "different densities", changing_outside)


def indicator():
    on = pyro.sample("on", dist.Bernoulli(0.3))
    b = pyro.sample("b", dist.Normal(0.0, torch.where(on == 1, 2.0, 0.05)))
    pyro.deterministic("size", b.abs())
    pyro.deterministic("scale", 1 + on)
    pyro.sample("y", dist.Normal(b, 0.5), obs=torch.tensor(1.0))


def test_continuous_variables_may_depend_on_an_indicator():
    """The closed form: of each component, ``y ~ N(0, s^2 + .25)`` and ``E b = s^2 / (s^2 + .25)``."""
    target = dgm.target_from_pyro(indicator)
    assert target.vectorised
    x = torch.linspace(-20, 20, 40001, dtype=FLOAT).unsqueeze(-1)
    log_joint = -target.energy(x)
    assert log_joint.logsumexp(0).item() + math.log(1e-3) == pytest.approx(-2.0532, abs=1e-4)
    latents = target.latents(x)
    # what depends on the summed variable has no value
    assert set(latents) == {"b", "size"}
    assert (log_joint.softmax(0) @ latents["b"]).item() == pytest.approx(0.3844, abs=1e-4)


def impossible(y):
    z = pyro.sample("z", dist.Bernoulli(0.4))
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    pyro.sample("y", dist.Binomial(3, z * p), obs=y)


def test_sums_over_impossible_values_have_finite_derivatives():
    target = dgm.target_from_pyro(impossible, torch.tensor(2.0))
    x = torch.tensor([[-40.0], [0.0], [40.0]], dtype=FLOAT)
    energy, gradient = target.energy_and_gradient(x)
    p = torch.sigmoid(x[:, 0])
    expected = torch.log(0.4 * 6 * p * (1 - p)) + torch.log(3 * p**2 * (1 - p)) + torch.log(p * (1 - p))
    torch.testing.assert_close(energy[1], -expected[1])
    assert gradient.isfinite().all()


def multinomial(counts):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    pyro.sample("counts", dist.Multinomial(4, p), obs=counts)


def sequential(y):
    with pyro.plate("components", 2):
        mean = pyro.sample("mean", dist.Normal(torch.tensor([-1.0, 2.0]), 1.0))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "sequential"})
        pyro.sample("y", dist.Normal(mean[k.long()], 0.7), obs=y)


def cut_points(ratings):
    base = dist.Normal(torch.tensor([-1.0, 0.0, 1.0]), 1.0).to_event(1)
    cuts = pyro.sample("cuts", dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()]))
    with pyro.plate("data", len(ratings)):
        pyro.sample("ratings", dist.OrderedLogistic(torch.zeros(len(ratings)), cuts), obs=ratings)


@pytest.mark.parametrize(
    ("program", "data"),
    [
        (mixture, Y),
        (indicator, None),
        (sequential, Y),
        (multinomial, torch.tensor([1.0, 0.0, 3.0])),
        (cut_points, torch.tensor([0, 1, 3])),
        (hierarchical, Y),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_program_is_run_when_it_is_converted_and_not_at_every_energy(program, data, monkeypatch):
    target = dgm.target_from_pyro(program, *([] if data is None else [data]))
    x = torch.randn(4, target.dim, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    # the control: without the calls that were noted the program runs
    target._rows.forget()
    expected = target.energy_and_gradient(x)
    again = dgm.target_from_pyro(program, *([] if data is None else [data]))

    def not_again(*args, **kwargs):
        raise AssertionError("the program runs")

    monkeypatch.setattr(pyro, "sample", not_again)
    torch.testing.assert_close(again.energy_and_gradient(x), expected)
    with pytest.raises(AssertionError, match="the program runs"):
        target.energy(x)


def test_the_callers_random_numbers_and_validation_are_left_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state(), torch.distributions.Distribution._validate_args
    target = dgm.target_from_pyro(normal_normal, Y)
    target.energy(torch.zeros(4, 1, dtype=FLOAT))
    target.latents(torch.zeros(4, 1, dtype=FLOAT))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert torch.distributions.Distribution._validate_args == before[1]


@pytest.mark.slow
def test_the_core_loads_pyro_only_when_it_is_used():
    code = (
        "import sys, dgm_infer; a = 'pyro' in sys.modules; dgm_infer.target_from_pyro; print(a, 'pyro' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]


def hidden_states(words):
    stay = pyro.sample("stay", dist.Beta(number(4.0), number(2.0)))
    transition = torch.stack([torch.stack([stay, 1 - stay]), torch.stack([1 - stay, stay])])
    emission = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=FLOAT)
    states = dist.DiscreteHMM(torch.zeros(2, dtype=FLOAT), transition.log(), dist.Categorical(emission))
    pyro.sample("words", states, obs=words)


def test_a_copy_of_a_target_is_vectorised_too():
    """Pyro's hidden Markov model has derivatives of its own, which vmap does not take: only its torch calls are."""
    words = [0, 1, 1]
    target = dgm.target_from_pyro(hidden_states, torch.tensor(words))
    x = torch.linspace(-3, 3, 7, dtype=FLOAT).unsqueeze(-1)
    stay = torch.sigmoid(x)
    transition = torch.stack([torch.cat([stay, 1 - stay], -1), torch.cat([1 - stay, stay], -1)], -2)
    emission = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=FLOAT)
    # Pyro moves before it emits, and normalises the initial weights
    state = torch.full((7, 2), 0.5, dtype=FLOAT)
    for word in words:
        state = (state.unsqueeze(-2) @ transition).squeeze(-2) * emission[:, word]
    prior = dist.Beta(number(4.0), number(2.0)).log_prob(stay[:, 0]) + torch.log(stay * (1 - stay))[:, 0]
    for each in (target, copy.deepcopy(target)):
        torch.testing.assert_close(-each.energy(x), state.sum(-1).log() + prior)
        assert each._rows.has_code(x)


@pytest.mark.parametrize("convert", [dgm.from_pyro, dgm.target_from_pyro])
def test_an_improper_prior_is_refused_with_proper_ones(convert):
    def program(prior):
        mean = pyro.sample("mean", prior)
        pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.tensor(0.3))

    improper = dist.ImproperUniform(dist.constraints.real, (), ())
    with pytest.raises(ModelError, match=r"does not support sampling: an improper prior.* such as Normal\(0, 100\)"):
        convert(program, improper)
    # the control
    convert(program, dist.Normal(0.0, 100.0))
