"""Plain torch simulators as models: the same numbers and the right posteriors."""

import pytest
import torch
from torch import distributions as td
from torch import nn
from torch.nn import functional as F

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ModelError
from dgm_infer.interop.reparametrisation import reparametrise
from dgm_infer.models.densities import STANDARD_LOGISTIC
from tests.recorded import assert_code_is_the_program

FLOAT = torch.float64
NORMAL = td.Normal(0.0, 1.0)
NETWORK = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def with_loop_and_in_place_writes(z):
    path = torch.zeros(5)
    x = torch.tensor(0.0)
    for t in range(5):
        x = x + z + 0.3 * torch.randn(())
        path[t] = x
    return path


def with_multiplied_noise(z):
    return with_loop_and_in_place_writes(z).exp()


def with_network(z, net):
    return net(torch.stack([z, z.square()])) + 0.1 * torch.randn(3)


def filled(z):
    return z + torch.empty(2).normal_(1.0, 0.5) + torch.empty(2).uniform_(-1, 2) + torch.empty(2).exponential_(3.0)


def prior_in_torch():
    scale = td.HalfCauchy(1.0).rsample()
    return {"scale": scale, "mean": scale * torch.randn(())}


SCALES = {"scale": td.Exponential(1.0), "mean": td.Normal(1.0, 2.0)}
# each in the style of somebody's code; 20 of them
CLEAN = {
    "randn": (lambda z: z + torch.randn(3), NORMAL),
    "rand": (lambda z: z * torch.rand(2, 2), NORMAL),
    "randn_like": (lambda z: z + torch.randn_like(torch.ones(3)), NORMAL),
    "rand_like": (lambda z: z + torch.rand_like(z), td.Normal(torch.zeros(2), 1.0)),
    "normal": (lambda z: torch.normal(z, 0.5 * torch.ones(3)), NORMAL),
    "normal of numbers": (lambda z: z + torch.normal(0.0, 0.5, (3,)), NORMAL),
    "sample": (lambda z: td.Normal(z, 0.1).sample((3,)), NORMAL),
    "sample of a uniform": (lambda z: td.Uniform(z, z + 1).sample((3,)), NORMAL),
    "rsample": (lambda z: td.Laplace(z["mean"], z["scale"]).rsample((3,)), SCALES),
    "multivariate": (lambda z: td.MultivariateNormal(z * torch.ones(2), torch.eye(2)).rsample(), NORMAL),
    "log-normal": (lambda z: td.LogNormal(z, 0.3).sample((2,)), NORMAL),
    "gumbel": (lambda z: td.Gumbel(z, 0.5).rsample((2,)), NORMAL),
    "gamma": (lambda z: td.Gamma(z.exp() + 1, 2.0).rsample((2,)), NORMAL),
    "Student": (lambda z: td.StudentT(4.0, z).rsample((2,)), NORMAL),
    "in place": (filled, NORMAL),
    "loop": (with_loop_and_in_place_writes, NORMAL),
    "a prior of torch code": (lambda z: z["mean"] + z["scale"] * torch.randn(3), prior_in_torch),
    "a density as prior": (lambda z: z[0] + z[1] * torch.randn(3), dgm.Product(dgm.StandardNormal(1), dgm.Logistic(1))),
    "no prior": (lambda: torch.randn(2).cumsum(0), None),
    "a network outside": (lambda z: NETWORK(z.repeat(2)) + torch.randn(3), NORMAL),
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.filterwarnings("error")
def test_a_replayed_run_gives_the_numbers_of_the_plain_run(name):
    simulate, prior = CLEAN[name]
    model = dgm.from_simulator(simulate, prior)
    # in the type of the plain run: torch draws other numbers in another
    tape, _ = model.record(torch.float32, torch.device("cpu"), seed=7)
    u = tape.inputs.double()[model.order]
    with torch.no_grad():
        z = model.latents(u)
        z = {key: value.float() for key, value in z.items()}
        z = {"z": z} if isinstance(prior, dict) or prior is prior_in_torch else z
        state = torch.get_rng_state()
        torch.manual_seed(7)
        if prior is prior_in_torch:
            prior_in_torch()
        plain = simulate(*z.values()) if prior is not None else simulate()
        torch.set_rng_state(state)
        replayed = model.observed(u)
    torch.testing.assert_close(replayed.float(), plain.flatten(), rtol=1e-4, atol=1e-5)
    # the control: other numbers give another output
    other = model.observed(u + 0.1)
    assert (other - replayed).abs().max() > 1e-3


def independent_units(z, n):
    p = torch.rand(n)
    return z["mean"] + z["scale"] * (torch.log(p) - torch.log1p(-p)) + 0.1 * td.Normal(0.0, 1.0).sample((n,))


@pytest.mark.parametrize("name", CLEAN)
def test_the_code_of_evaluation_mode_is_the_simulator(name):
    assert_code_is_the_program(dgm.from_simulator(*CLEAN[name]))


def test_it_is_the_model_written_by_hand():
    model = dgm.from_simulator(independent_units, SCALES, 4)
    assert repr(model) == (
        "SimulatorModel(independent_units: 10 inputs, 4 outputs; structure: 4 independent units of 1 output and 2 "
        "local inputs each, 2 global inputs)"
    )
    u = model.input_density.sample((2, 3), generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    latents = model.latents(u)
    scale, mean = F.softplus(STANDARD_LOGISTIC * u[..., 0]), 1 + 2 * u[..., 1]
    torch.testing.assert_close(latents["scale"], scale)
    torch.testing.assert_close(latents["mean"], mean)
    by_unit = u[..., 2:].unflatten(-1, (4, 2))
    # the draws of a unit: one of rand, one of Normal; log p - log(1 - p) is the logistic input itself
    expected = mean[..., None] + scale[..., None] * STANDARD_LOGISTIC * by_unit[..., 0] + 0.1 * by_unit[..., 1]
    torch.testing.assert_close(model.observed(u), expected)
    normal = -0.5 * torch.cat([u[..., 1:2], by_unit[..., 1]], -1).square() - 0.5 * torch.log(torch.tensor(2 * torch.pi))
    logistic = dgm.Logistic(5).log_prob(torch.cat([u[..., :1], by_unit[..., 0]], -1))
    torch.testing.assert_close(model.input_density.log_prob(u), normal.sum(-1) + logistic)


def test_structure_is_found_stated_and_can_be_overridden():
    assert "dense (the outputs share" in repr(dgm.from_simulator(with_multiplied_noise, NORMAL))
    added = dgm.from_simulator(with_loop_and_in_place_writes, NORMAL)
    assert "noise of 5 local inputs that the outputs share is added, 1 global input" in repr(added)
    dense = dgm.from_simulator(independent_units, SCALES, 4, structure="dense")
    assert "dense, as asked for" in repr(dense)
    assert dense.structure == "dense"
    with pytest.raises(ModelError, match="share their noise"):
        dgm.from_simulator(with_loop_and_in_place_writes, NORMAL, structure="independent")
    with pytest.raises(ArgumentError, match=r"DirectedModel.*'dense' or 'independent'"):
        dgm.from_simulator(independent_units, SCALES, 4, structure="markov")


def test_the_published_simulator_as_its_author_would_write_it_is_the_one_by_hand():
    def generalised_lambda(z, n):
        p = torch.rand(n)
        return z["z1"] + ((p ** z["z3"] - 1) / z["z3"] - ((1 - p) ** z["z4"] - 1) / z["z4"]) / z["z2"]

    # in the order of the inputs of the class
    prior = {"z1": NORMAL, "z3": NORMAL, "z4": NORMAL, "z2": td.Exponential(1.0)}
    model, by_hand = dgm.from_simulator(generalised_lambda, prior, 5), generators.GeneralisedLambda(5)
    assert model.jacobian_structure == by_hand.jacobian_structure
    u = by_hand.input_density.sample((6,), generator=torch.Generator().manual_seed(3), dtype=FLOAT)
    torch.testing.assert_close(model.observed(u), by_hand.observed(u), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.input_density.log_prob(u), by_hand.input_density.log_prob(u))
    assert model.latents(u).keys() == by_hand.latents(u).keys()
    torch.testing.assert_close(model.latents(u), by_hand.latents(u), check_stride=False)


def test_hidden_outputs_are_left_out_and_completed():
    model = dgm.from_simulator(independent_units, SCALES, 4)
    mask = torch.tensor([True, False, True, True])
    data = torch.tensor([0.3, float("nan"), 1.0, 0.7])
    fibre = dgm.condition(model, data, observe=dgm.pixels(mask))
    # two global inputs, and two for each of three units
    assert fibre.dim == 8
    u = fibre.start(2, torch.Generator().manual_seed(1))
    outputs = fibre.complete(u, torch.Generator().manual_seed(2))
    assert (outputs[:, mask] == data[mask]).all()
    assert outputs.isfinite().all()


def groups(z):
    # the means of three groups come from the prior, and belong to single units
    return (z["all"] + z["group"].repeat_interleave(4)) + 0.5 * torch.randn(12)


def test_many_inputs_of_the_prior_that_belong_to_units_are_local():
    prior = {"all": NORMAL, "group": td.Normal(torch.zeros(3), 1.0)}
    few = dgm.from_simulator(groups, prior)
    assert few.jacobian_structure.units == (4, 1, 1)
    assert few.can_omit_local_inputs
    prior["group"] = td.Normal(torch.zeros(30), 1.0)
    many = dgm.from_simulator(lambda z: z["all"] + z["group"].repeat_interleave(2) + torch.randn(60), prior)
    assert many.jacobian_structure.units == (1, 3, 2)
    assert not many.can_omit_local_inputs
    many.jacobian_structure.check(many.double(), many.input_density.sample((4,), dtype=FLOAT))


MATRIX = torch.randn(4, 12, generator=torch.Generator().manual_seed(0), dtype=FLOAT)


def noise_of_its_own():
    return 0.5 * torch.randn(4, dtype=FLOAT)


def shared_noise():
    return 0.5 * torch.randn(4, dtype=FLOAT).cumsum(0)


@pytest.mark.parametrize(("noise", "root"), [(noise_of_its_own, torch.eye(4)), (shared_noise, torch.ones(4, 4).tril())])
def test_added_noise_integrates_out_also_if_outputs_share_it_or_are_fewer_than_the_latents(noise, root):
    prior = {"x": td.Normal(torch.zeros(12, dtype=FLOAT), 1.0)}
    data = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=FLOAT)
    fibre = dgm.condition(dgm.from_simulator(lambda z: MATRIX @ z["x"] + noise(), prior), data)
    assert fibre.marginal is not None
    assert fibre.marginal.dim == 12
    draws = dgm.sample(fibre, dgm.LiftedHMC(), chains=8, draws=500, seed=1, progress=False)
    gain = MATRIX.T @ torch.linalg.inv(MATRIX @ MATRIX.T + 0.25 * (root @ root.T).double())
    covariance = torch.eye(12, dtype=FLOAT) - gain @ MATRIX
    x = draws.latents["x"].flatten(0, 1)
    # in posterior standard deviations; 5 Monte Carlo errors of 1000 independent draws
    off = (x.mean(0) - gain @ data) / covariance.diagonal().sqrt()
    assert off.abs().max() < 5 / 1000**0.5
    torch.testing.assert_close(torch.cov(x.T), covariance, rtol=0, atol=0.15)


@pytest.mark.filterwarnings("ignore:SimulatorModel|.*finite outputs")
def test_shared_noise_whose_derivatives_overflow_stays():
    model = dgm.from_simulator(lambda z: (1e4 + z["x"] + shared_noise()).exp(), {"x": NORMAL})
    assert "dense" in repr(model)


def test_noise_that_is_not_added_or_depends_on_the_latents_stays():
    prior = {"x": td.Normal(torch.zeros(12, dtype=FLOAT), 1.0)}

    def marginal(simulate):
        return dgm.condition(dgm.from_simulator(simulate, prior), torch.ones(4, dtype=FLOAT)).marginal

    assert marginal(lambda z: MATRIX @ z["x"] + shared_noise() ** 3) is None
    assert marginal(lambda z: MATRIX @ z["x"] + noise_of_its_own() ** 3) is None
    assert marginal(lambda z: MATRIX @ z["x"] + z["x"][0] * shared_noise()) is None
    # of its own it may be scaled by a latent
    assert marginal(lambda z: MATRIX @ z["x"] + z["x"][0].exp() * noise_of_its_own()) is not None


def test_networks_and_tensors_among_the_arguments_are_parts_of_the_model():
    model = dgm.from_simulator(with_network, NORMAL, NETWORK)
    assert dict(model.named_parameters())
    assert dgm.condition(model, torch.zeros(3)).values.dtype == FLOAT
    assert NETWORK[0].weight.dtype == torch.float32
    assert NETWORK[0].weight.requires_grad
    scaled = dgm.from_simulator(lambda z, s: z * s + torch.randn(2), NORMAL, s=torch.ones(2))
    assert [name for name, _ in scaled.named_buffers() if name.startswith("argument")] == ["argument_s"]


def test_the_dtype_of_the_inputs_is_that_of_the_run():
    model = dgm.from_simulator(with_loop_and_in_place_writes, NORMAL)
    for dtype in (torch.float32, FLOAT):
        assert model.observed(torch.zeros(2, 6, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    "distribution",
    [
        td.Normal(1.0, 2.0),
        td.Uniform(-1.0, 3.0),
        td.Exponential(2.0),
        td.LogNormal(0.2, 0.5),
        td.Cauchy(1.0, 2.0),
        td.HalfCauchy(2.0),
        td.Laplace(1.0, 0.5),
        td.Gumbel(0.5, 2.0),
        td.Weibull(2.0, 1.5),
        td.Gamma(2.5, 3.0),
        td.Chi2(3.0),
        td.InverseGamma(3.0, 2.0),
        td.StudentT(5.0, 1.0, 2.0),
        td.HalfNormal(1.5),
        td.Beta(2.0, 3.0),
    ],
    ids=lambda d: type(d).__name__,
)
def test_the_density_of_the_inputs_is_that_of_the_variable(distribution):
    # p(v) dv = p(x) dx at any v
    form = reparametrise(distribution)
    v = torch.tensor([-2.5, -0.4, 0.3, 1.9], dtype=FLOAT)
    for point in v:
        v1 = point.clone().requires_grad_()
        x = form.value(v1)
        (slope,) = torch.autograd.grad(x, v1, retain_graph=True)
        kind = dgm.StandardNormal(1) if form.kind == "normal" else dgm.Logistic(1)
        log_p = kind.log_prob(v1.reshape(1))
        if form.log_factor is not None:
            log_p = log_p + form.log_factor(v1, x)
        expected = distribution.log_prob(x) + slope.abs().log()
        torch.testing.assert_close(log_p.detach(), expected.detach(), rtol=1e-5, atol=1e-5)
        if form.inverse is not None:
            torch.testing.assert_close(form.inverse(x), v1, rtol=1e-6, atol=1e-6)


def test_the_upper_tail_of_a_gumbel_variable_keeps_its_digits():
    """Where the probability is 1 to rounding, minus its logarithm is the rest."""
    form = reparametrise(td.Gumbel(torch.tensor(0.5, dtype=FLOAT), 2.0))
    v = torch.tensor([15.0, 18.0, 60.0], dtype=FLOAT)
    torch.testing.assert_close(form.value(v), 0.5 + 2 * STANDARD_LOGISTIC * v, rtol=1e-11, atol=0)
    # the control: by the quantile function of the uniform variable
    p = torch.sigmoid(STANDARD_LOGISTIC * v)
    assert (-p.log()).log()[1] != -STANDARD_LOGISTIC * v[1]
    assert (0.5 - 2 * (-p.log()).log() - form.value(v)).abs().max() > 1e-3


def test_a_conversion_leaves_the_random_state_as_it_was():
    before = torch.get_rng_state()
    model = dgm.from_simulator(independent_units, SCALES, 4)
    model.observed(torch.zeros(3, 10))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.overrides._get_current_function_mode_stack() == []
    # the control: a plain run moves it
    independent_units({"mean": 0.0, "scale": 1.0}, 4)
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("prior", [3, [NORMAL], {"z": 3}, nn.Linear(1, 1), td.Normal], ids=str)
def test_another_kind_of_prior_is_refused(prior):
    with pytest.raises(ArgumentError, match="from_simulator\\(prior"):
        dgm.from_simulator(lambda z: z + torch.randn(2), prior)


def shifted(z):
    z["mean"] += 1
    z["scale"] = z["scale"].log()
    del z["unused"]
    return z.pop("mean") + z["scale"].exp() * torch.randn(4)


def doubled(z):
    return z.mul_(2) + 0.5 * torch.randn(4)


@pytest.mark.parametrize(
    ("simulate", "prior", "same"),
    [
        (
            shifted,
            {"mean": NORMAL, "scale": td.LogNormal(0.0, 0.5), "unused": NORMAL},
            lambda z: z["mean"] + 1 + z["scale"] * torch.randn(4),
        ),
        (doubled, NORMAL, lambda z: 2 * z + 0.5 * torch.randn(4)),
    ],
    ids=["a dict", "a tensor"],
)
def test_a_simulator_that_changes_its_latents_changes_a_copy(simulate, prior, same):
    changing, plain = dgm.from_simulator(simulate, prior), dgm.from_simulator(same, prior)
    u = torch.randn(5, plain.input_density.dim, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(changing.latents(u), plain.latents(u))
    torch.testing.assert_close(changing.observed(u), plain.observed(u))


def test_the_evidence_of_a_simulator_with_normal_noise_is_exact():
    x, y = torch.linspace(-1, 1, 5, dtype=torch.float64), torch.tensor([0.3, 1.0, -0.4, 0.2, 0.9], dtype=torch.float64)

    def line(z, x):
        return z["a"] + z["b"] * x + 0.4 * torch.randn(5)

    model = dgm.from_simulator(line, {"a": NORMAL, "b": NORMAL}, x)
    a = torch.stack([torch.ones_like(x), x], -1)
    distribution = td.MultivariateNormal(0 * y, a @ a.mT + 0.16 * torch.eye(5))
    base = dgm.Gaussian(torch.tensor([0.4, 0.1], dtype=torch.float64), 0.3)
    estimates = []
    for values in (y, y + 1):
        found = dgm.log_evidence(
            dgm.condition(model, values), base, dgm.AIS(temperatures=40), chains=256, seed=1, progress=False
        )
        assert 0 < found.std_error < 0.25
        assert abs(found.log_z - distribution.log_prob(values)) < 4 * found.std_error
        estimates.append(found.log_z)
    # the control: the density of one is not that of the other
    assert abs(estimates[1] - distribution.log_prob(y)) > 0.8


def test_the_posterior_of_a_normal_mean_is_exact():
    # x_i = z + sqrt(0.5) n_i, z ~ N(0, 1): mean sum(x)/(N + 0.5), variance 0.5/(N + 0.5)
    model = dgm.from_simulator(lambda z: td.Normal(z, 0.5**0.5).sample((3,)), NORMAL)
    fibre = dgm.condition(model, torch.tensor([1.0, 2.0, 1.5]))
    kernel = dgm.ConstrainedHMC(step_size=0.5, n_steps=3, n_geodesic=1)
    draws = dgm.sample(fibre, kernel, chains=64, warmup=6, draws=6, seed=1, progress=False)
    means = draws.latents["z"].mean(1)
    error = means.std() / 8
    assert abs(means.mean() - 4.5 / 3.5) < 5 * error
    # the control: the prior's mean is another
    assert abs(means.mean()) > 5 * error
    assert (draws.stats["constraint_error"] < 1e-7).all()


def sorted_ends():
    ends = torch.sort(torch.randn(4)).values
    return torch.stack([ends[0], ends[-1]])


def coupled_far_out():
    a, b = torch.randn(2), torch.randn(2)
    return torch.stack([a[0] + a[1], b[0] + torch.exp(3 * torch.relu(a[0] - 2.8)) * b[1]])


def test_outputs_that_a_selection_couples_are_no_units():
    model = dgm.from_simulator(sorted_ends, None)
    assert model.structure == "dense"
    dgm.condition(model, torch.tensor([-1.0, 1.0]))


def test_units_that_the_data_contradict_are_refused_with_what_helps():
    model = dgm.from_simulator(coupled_far_out, None)
    with pytest.raises(ModelError, match=r'coupled_far_out has 2 independent units .*structure="dense"'):
        # a[0] is 4 +- 0.7 at the data: at least one chain starts past 2.8, whatever the processor rounds
        dgm.sample(dgm.condition(model, torch.tensor([8.0, 0.5])), draws=2, warmup=2, progress=False)
    dense = dgm.from_simulator(coupled_far_out, None, structure="dense")
    assert dgm.condition(dense, torch.tensor([8.0, 0.5])).units is None


@pytest.mark.parametrize("prior", [td.Normal(0.0, 1.0), td.LogNormal(0.0, 1.0)], ids=["linear", "bent"])
def test_paths_that_are_written_in_place_have_the_density_of_their_noise(prior):
    def walk(z):
        path, x = torch.zeros(3), z["a"]
        for i in range(3):
            x = x + 0.5 * torch.randn(())
            path[i] = x
        return path

    data = torch.tensor([0.5, 0.7, 1.2], dtype=FLOAT)
    fibre = dgm.condition(dgm.from_simulator(walk, {"a": prior}), data)
    assert fibre.marginal is not None
    u = torch.linspace(-2, 2, 5, dtype=FLOAT).unsqueeze(-1)
    energy, gradient = fibre.marginal.energy_and_gradient(u)
    steps = torch.tril(torch.full((3, 3), 0.5, dtype=FLOAT))

    def exact(u):
        a = u if isinstance(prior, td.Normal) else u.exp()
        noise = td.MultivariateNormal(a.expand(-1, 3), scale_tril=steps)
        return -noise.log_prob(data) - td.Normal(0.0, 1.0).log_prob(u[:, 0])

    v = u.clone().requires_grad_()
    (slope,) = torch.autograd.grad(exact(v).sum(), v)
    torch.testing.assert_close(energy, exact(u))
    torch.testing.assert_close(gradient, slope)
    draws = dgm.sample(fibre, chains=4, warmup=20, draws=20, seed=1, progress=False)
    assert draws.stats["constraint_error"].max() < 1e-8
