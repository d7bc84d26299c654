"""Pyro programs as models: densities against Pyro's own, posteriors against closed forms, quadrature and NUTS."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch.distributions import biject_to

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError
from dgm_infer.models.densities import STANDARD_LOGISTIC
from tests.recorded import assert_code_is_the_program

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    import pyro.distributions
    import pyro.infer
    from pyro import poutine

# Pyro's distributions are torch's with more methods, which their types do not have
dist: Any = pyro.distributions

FLOAT = torch.float64
Y = torch.tensor([0.3, 1.2, 0.7, -0.4])
COUNTS = torch.tensor([2.0, 0.0, 3.0])


def total():
    a = pyro.sample("a", dist.Exponential(1.0))
    b = pyro.sample("b", dist.Exponential(1.0))
    pyro.deterministic("total", a + b)


def hierarchical(y=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    with pyro.plate("groups", 4):
        group = pyro.sample("group", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(group, 0.5), obs=y)


def nested(y=None):
    mean = pyro.sample("mean", dist.Laplace(0.0, 1.0))
    with pyro.plate("columns", 2):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)


def correlation(y=None):
    factor = pyro.sample("factor", dist.LKJCholesky(3, 1.5))
    scales = pyro.sample("scales", dist.HalfCauchy(torch.ones(3)).to_event(1))
    with pyro.plate("data", 2):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), scale_tril=scales.unsqueeze(-1) * factor), obs=y)


def positive_latents(y=None):
    rate = pyro.sample("rate", dist.Gamma(2.5, 1.5))
    share = pyro.sample("share", dist.Beta(2.0, 3.0))
    pyro.sample("y", dist.Exponential(rate * share).expand([4]).to_event(1), obs=y)


def regression(x, counts):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.InverseGamma(3.0, 2.0))
    with pyro.plate("data", len(x)):
        noise = pyro.sample("noise", dist.StudentT(4.0, 0.0, scale))
        pyro.sample("counts", dist.Poisson((slope * x + noise).exp()), obs=counts)
    pyro.sample("sign", dist.Bernoulli(logits=slope), obs=torch.tensor(1.0))
    pyro.deterministic("sum", noise.sum())


def transformed(y=None):
    loc = pyro.sample("loc", dist.Uniform(-1.0, 2.0))
    base = dist.Normal(loc, 1.0).expand([3]).to_event(1)
    pyro.sample("y", dist.TransformedDistribution(base, [dist.transforms.SoftplusTransform()]), obs=y)


def simplex(y=None):
    weights = pyro.sample("weights", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    pyro.sample("y", dist.Normal(weights, 0.1).to_event(1), obs=y)


def support_that_depends(y=None):
    width = pyro.sample("width", dist.Gamma(3.0, 1.0))
    mean = pyro.sample("mean", dist.Uniform(-width, width))
    pyro.sample("y", dist.Normal(mean, torch.ones(4)).to_event(1), obs=y)
    pyro.factor("penalty", -0.3 * mean.square())


def without_form(y=None):
    loc = pyro.sample("loc", dist.SoftLaplace(0.0, 0.5))
    pyro.sample("y", dist.Gamma(2.0 + loc.cos(), 1.0).expand([2]).to_event(1), obs=y)


# programs, their arguments, and what is observed exactly
PROGRAMS = {
    "a sum": (total, (), {"total": 3.0}),
    "hierarchical": (hierarchical, (Y,), None),
    "nested plates": (nested, (Y[:3, None] * torch.ones(2),), None),
    "LKJ": (correlation, (torch.ones(2, 3),), None),
    "Gamma and Beta": (positive_latents, (Y.exp(),), None),
    "mixed": (regression, (torch.ones(3), COUNTS), {"sum": 0.5}),
    "transformed": (transformed, (Y[:3].exp(),), None),
    "simplex": (simplex, (), {"y": torch.tensor([0.2, 0.3, 0.5])}),
    "dependent support": (support_that_depends, (Y,), None),
    "without a form": (without_form, (), {"y": torch.tensor([1.0, 2.0])}),
    "a latent variable observed": (hierarchical, (Y,), {"mean": 0.5}),
    "two observed": (nested, (Y[:3, None] * torch.ones(2),), {"scale": torch.ones(2), "mean": 0.3}),
}


def log_density(model, u):
    return model.input_density.log_prob(u) + model.log_factor(u)


def densities(model, program, args, u):
    """``log p(u)`` of a model at one input, and by Pyro: ``log p(x, y) + log|d(x, y)/du|``, x on the real line."""

    def variables(u):
        _, outcome, _ = model.replay(u[torch.argsort(model.order)])
        values = dict(outcome.latents)
        start = 0
        flat = outcome.output.reshape(-1)
        for name in model.hard:
            size = shapes[name].numel()
            values[name] = flat[start : start + size].reshape(shapes[name])
            start += size
        return values

    with pyro.validation_enabled(False), torch.random.fork_rng():
        plain = poutine.trace(program).get_trace(*args)
        shapes = {name: node["value"].shape for name, node in plain.nodes.items() if node["type"] == "sample"}
        # hard observations are made free again, to be given the values of this input
        free = poutine.uncondition(program) if args and model.hard == ("y",) else program

        def on_the_line(u, full=False):
            values = variables(u)
            given = {name: v for name, v in values.items() if not _deterministic(plain.nodes.get(name))}
            trace = poutine.trace(poutine.condition(free, data=given)).get_trace(*args)
            x, log_jacobian = [], 0.0
            for name, value in given.items():
                site: Any = trace.nodes[name]
                transform = biject_to(site["fn"].support)
                x.append(transform.inv(value))
                log_jacobian = log_jacobian + transform.log_abs_det_jacobian(x[-1], value).sum()
            x = torch.cat([each.reshape(-1) for each in x])
            return (x, trace.log_prob_sum() + log_jacobian) if full else x

        _, log_joint = on_the_line(u, full=True)
        jacobian = torch.autograd.functional.jacobian(on_the_line, u)
    return log_density(model, u), log_joint + torch.linalg.slogdet(jacobian)[1]


def _deterministic(node):
    return node is None or bool(node["infer"].get("_deterministic"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_density_of_the_inputs_is_that_of_the_program(name):
    program, args, observed = PROGRAMS[name]
    model = dgm.from_pyro(program, *args, observed=observed)
    u = 0.7 * torch.randn(model.input_density.dim, generator=torch.Generator().manual_seed(2), dtype=FLOAT)
    ours, pyros = densities(model, program, args, u)
    torch.testing.assert_close(ours, pyros, rtol=1e-5, atol=1e-5)
    # the control: with the density of the inputs alone a program with a factor has another
    if model.has_log_factor:
        assert (model.input_density.log_prob(u) - pyros).abs() > 1e-2


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_of_evaluation_mode_is_the_program(name):
    program, args, observed = PROGRAMS[name]
    assert_code_is_the_program(dgm.from_pyro(program, *args, observed=observed))


def test_rows_are_those_of_single_runs():
    model = dgm.from_pyro(regression, torch.ones(3), COUNTS, observed={"sum": 0.5})
    u = torch.randn(2, 3, model.input_density.dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    assert model.observed(u).shape == (2, 3, 1)
    torch.testing.assert_close(model.observed(u)[1, 2], model.observed(u[1, 2]))
    torch.testing.assert_close(model.log_factor(u)[1, 2], model.log_factor(u[1, 2]))
    latents = model.latents(u)
    assert {name: value.shape[2:] for name, value in latents.items()} == {
        "slope": (),
        "scale": (),
        "noise": (3,),
        "sum": (),
    }


def test_structure_of_programs_is_found():
    model = dgm.from_pyro(correlation, torch.ones(2, 3))
    assert "2 independent units of 3 outputs and 3 local inputs each, 6 global inputs" in repr(model)
    assert model.data.shape == model.output_shape == (2, 3)
    grouped = dgm.from_pyro(nested, observed={"y": torch.ones(3, 2)})
    assert "6 independent units of 1 output and 1 local input each, 3 global inputs" in repr(grouped)
    assert "dense, as asked for" in repr(dgm.from_pyro(nested, observed={"y": torch.ones(3, 2)}, structure="dense"))


def test_soft_and_hard_observations_have_the_same_posterior_density():
    # y observed exactly: its noise v = (y - group)/0.5 is a function of the others; softly: a factor
    hard = dgm.from_pyro(hierarchical, observed={"y": Y, "mean": 0.1})
    soft = dgm.from_pyro(hierarchical, soft={"y": Y}, observed={"mean": 0.1})
    assert not hard.has_log_factor
    assert soft.input_density.dim == hard.input_density.dim - 4
    rng = torch.Generator().manual_seed(1)
    u = torch.randn(5, 6, generator=rng, dtype=FLOAT)
    group = soft.latents(u[..., soft.order])["group"]
    # in the program's order the noise of y comes last
    full = torch.cat([u, (Y - group) / 0.5], -1)
    difference = log_density(hard, full[..., hard.order]) - log_density(soft, u[..., soft.order])
    torch.testing.assert_close(difference, torch.full_like(difference, 4 * math.log(0.5)), rtol=1e-6, atol=1e-6)


def discrete_latent():
    k = pyro.sample("k", dist.Categorical(torch.ones(2)))
    pyro.sample("y", dist.Normal(k.float(), 1.0), obs=torch.tensor(0.0))


def only_likelihood():
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    pyro.sample("n", dist.Poisson(rate), obs=torch.tensor(2.0))


def mini_batches(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 4, subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


def chosen_rows(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 4, subsample=torch.tensor([0, 1])) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


def scaled(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.poutine.scale(scale=2.0):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def branching():
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = a * 2 if a > 0 else a
    pyro.deterministic("b", b)


def changing():
    n = 2 if pyro.sample("a", dist.Normal(0.0, 1.0)).item() > 0 else 3
    pyro.deterministic("b", pyro.sample("c", dist.Normal(torch.zeros(n), 1.0).to_event(1)).sum())


@pytest.mark.parametrize(
    ("program", "args", "observed", "message"),
    [
        (discrete_latent, (), None, "site 'k' of discrete_latent is discrete .Categorical."),
        (only_likelihood, (), None, "nothing in only_likelihood is observed exactly"),
        (mini_batches, (Y,), None, "plate 'data' of mini_batches takes 2 of 4"),
        (chosen_rows, (Y,), None, "plate 'data' of chosen_rows takes 2 of 4"),
        (scaled, (Y[0],), {"y": Y[0]}, "site 'y' of scaled is scaled"),
        (
            branching,
            (),
            {"b": 1.0},
            r"line \d+ of test_programs.py, `b = a \* 2 if a > 0 else a`: it branches on a random value",
        ),
        (changing, (), {"b": 1.0}, r"other random numbers from run to run, first at site 'c'|Python number"),
        (only_likelihood, (), {"z": 1.0}, r"'z' is not a statement of only_likelihood \(it has \['rate', 'n'\]\)"),
        (hierarchical, (), {"y": torch.ones(3)}, r"observed\['y'\] has shape \(3,\): hierarchical gives \(4,\)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_faults_of_programs_are_named(program, args, observed, message):
    with pytest.raises((ModelError, ArgumentError), match=message):
        dgm.from_pyro(program, *args, observed=observed)


def test_what_is_not_a_program_is_refused():
    with pytest.raises(ArgumentError, match="expected a Pyro program"):
        dgm.from_pyro(3, observed={"y": 1.0})
    with pytest.raises(ArgumentError, match="structure"):
        dgm.from_pyro(total, observed={"total": 1.0}, structure="markov")


def test_on_the_fibre_of_a_sum_of_exponentials_the_parts_are_uniform():
    model = dgm.from_pyro(total, observed={"total": 3.0})
    fibre = dgm.condition(model, model.data)
    a = torch.linspace(0.05, 2.95, 59, dtype=FLOAT, requires_grad=True)
    u = torch.stack([torch.log(torch.expm1(part)) / STANDARD_LOGISTIC for part in (a, 3 - a)], -1)
    slope = torch.stack([torch.autograd.grad(u[:, i].sum(), a, retain_graph=True)[0] for i in range(2)], -1)
    u = u.detach()
    assert (fibre.rows(len(a)).constraint(u).abs() < 1e-12).all()
    # the density of a: that on the fibre times the length of curve per a
    log_density = -fibre.rows(len(a)).linearise(u).energy + slope.norm(dim=-1).log()
    torch.testing.assert_close(log_density, log_density[0].expand_as(log_density))
    # the control: without the Gram term it is not uniform
    bare = model.input_density.log_prob(u) + slope.norm(dim=-1).log()
    assert bare.std() > 0.02


def sample_of_exponentials(n):
    rate = pyro.sample("rate", dist.Exponential(1.0))
    with pyro.plate("sample", n):
        pyro.sample("x", dist.Exponential(rate))


def sampled(fibre, seed, warmup=12, draws=12):
    """Many short chains with a fixed kernel, whose means are independent."""
    kernel = dgm.ConstrainedHMC(step_size=0.4, n_steps=(2, 4), n_geodesic=1)
    return dgm.sample(fibre, kernel, chains=96, warmup=warmup, draws=draws, seed=seed, progress=False)


def errors(values, exact):
    """Standard errors between the mean of ``[chains, draws]`` and an exact value."""
    means = values.mean(1)
    return (means.mean() - exact) / (means.std() / len(means) ** 0.5)


@pytest.mark.slow
def test_the_maximum_likelihood_statistic_of_a_sample_is_observed():
    # rate | n / sum(x) = r is Gamma(1 + n, 1 + n/r)
    n, r = 6, 2.0
    functions = {"estimate": lambda values: n / values["x"].sum(-1)}
    model = dgm.from_pyro(sample_of_exponentials, n, observed={"estimate": r}, functions=functions)
    rate = sampled(dgm.condition(model, model.data), seed=1).latents["rate"]
    mean, variance = (1 + n) / (1 + n / r), (1 + n) / (1 + n / r) ** 2
    assert abs(errors(rate, mean)) < 5
    assert abs(errors(rate.square(), mean**2 + variance)) < 5
    # the control: the estimate itself
    assert abs(errors(rate, r)) > 5


@pytest.mark.slow
def test_the_output_of_a_network_in_a_program_is_observed():
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    rng = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        parameter.data = 0.7 * torch.randn(parameter.shape, generator=rng)

    def program():
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.deterministic("output", net(z).squeeze(-1))

    observed = 0.4
    # quadrature: a normal kernel around the observation, of a width that matters less than the Monte Carlo error
    axis = torch.linspace(-6, 6, 1201)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        miss = (net(grid).squeeze(-1) - observed) / 0.02
        weight = torch.exp(-0.5 * miss.square() - 0.5 * grid.square().sum(-1)).double()
    model = dgm.from_pyro(program, observed={"output": observed})
    z = sampled(dgm.condition(model, model.data), seed=2).latents["z"]
    for power in (1, 2):
        exact = (weight.unsqueeze(-1) * grid**power).sum(0) / weight.sum()
        for i in range(2):
            assert abs(errors(z[..., i] ** power, exact[i])) < 5
    # the control: the prior's moments
    assert max(abs(errors(z[..., i] ** p, p - 1.0)) for i in range(2) for p in (1, 2)) > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_posterior_of_a_program_with_hard_and_soft_observations_is_the_exact_one():
    x = torch.tensor([0.0, 1.0, 2.0])
    model = dgm.from_pyro(regression, x, COUNTS, observed={"sum": 0.5})
    assert model.has_log_factor
    ours = sampled(dgm.condition(model, model.data), seed=3).latents["slope"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # by hand, the sum eliminated: prior draws with the density of what is observed as their weights
        slope, scale = torch.randn(400_000, dtype=FLOAT), dist.InverseGamma(3.0, 2.0).sample((400_000,)).to(FLOAT)
        first = scale.unsqueeze(-1) * dist.StudentT(4.0).sample((400_000, 2)).to(FLOAT)
    noise = torch.cat([first, 0.5 - first.sum(-1, keepdim=True)], -1)
    log_weight = dist.StudentT(4.0, 0.0, scale).log_prob(noise[:, 2]) + torch.nn.functional.logsigmoid(slope)
    log_weight += dist.Poisson((slope.unsqueeze(-1) * x + noise).clamp_max(50).exp()).log_prob(COUNTS).sum(-1)
    weight = torch.softmax(log_weight, 0)
    assert 1 / weight.square().sum() > 20_000
    assert abs(errors(ours, (weight * slope).sum())) < 5
    # the control: the prior's mean
    assert errors(ours, 0.0) > 5
