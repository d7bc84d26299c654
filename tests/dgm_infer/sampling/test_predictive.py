"""Posterior predictive values of Pyro programs: against closed forms, and against Pyro's own ``Predictive``."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError
from dgm_infer.sampling import predictive
from dgm_infer.sampling.predictive import CalledProgram, predicted
from tests.files import arviz_groups

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    import pyro.distributions
    import pyro.infer

# Pyro's distributions are torch's with more methods, which their types do not have
dist: Any = pyro.distributions

X = torch.tensor([-1.0, 0.0, 2.0])
Y = torch.tensor([0.3, 1.2, 0.7])
SD = 0.5


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    mean = pyro.deterministic("mean", slope * x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, SD), obs=y)


def counts(n=None):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    pyro.sample("size", dist.Normal(rate, 1.0), obs=torch.tensor(1.5))
    with pyro.plate("data", 4):
        pyro.sample("n", dist.Poisson(rate), obs=n)
    pyro.factor("penalty", -0.1 * rate)


def groups(x, y=None):
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    with pyro.plate("groups", len(x)):
        effect = pyro.sample("effect", dist.Normal(x, spread))
        pyro.sample("y", dist.Normal(effect, 0.1), obs=y)


def held(problem, latents):
    """Draws that hold these latents, ``[chains, draws, *shape]``."""
    shape = next(iter(latents.values())).shape[:2]
    return dgm.Draws(
        inputs=None,
        latents=latents,
        stats={"acceptance_rate": torch.ones(shape)},
        kernel=dgm.ConstrainedHMC(),
        seed=1,
        problem=problem,
    )


def conditioned(model):
    return dgm.condition(model, model.data)


def exact(chains=50, draws=200):
    """Independent draws from the posterior of the slope, whose precision is ``1 + |x|^2/sd^2``."""
    precision = 1 + X.square().sum() / SD**2
    mean = (X * Y).sum() / SD**2 / precision
    noise = torch.randn(chains, draws, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    slope = mean + noise / precision**0.5
    model = dgm.from_pyro(line, X, Y)
    latents = {"slope": slope, "mean": slope.unsqueeze(-1) * X}
    return held(conditioned(model), latents), mean, 1 / precision


def errors(values, mean, second):
    """Standard errors of the first two moments of independent values ``[n]`` from exact ones."""
    found = []
    for moments, value in ((values, mean), (values.square(), second)):
        found.append(((moments.mean() - value) / (moments.std() / len(moments) ** 0.5)).abs().item())
    return max(found)


def law(draws, mean, variance, x, **options):
    """The largest error of predictive moments at the covariates x: ``y ~ N(x mean, sd^2 + x^2 variance)``."""
    y = draws.predictive(*options.pop("call", ()), **options)["y"].double()
    assert y.shape == (*draws.shape, len(x))
    total = SD**2 + x.square() * variance
    return max(errors(y[..., i].flatten(), x[i] * mean, total[i] + (x[i] * mean) ** 2) for i in range(len(x)))


def test_the_values_have_the_law_of_new_data():
    draws, mean, variance = exact()
    assert law(draws, mean, variance, X) < 5
    new = torch.tensor([4.0, -3.0])
    assert law(draws, mean, variance, new, call=(None, new)) < 5
    assert law(draws, mean, variance, new, call=(line, new), seed=7) < 5


def test_values_of_sampled_draws_have_that_law_too():
    _, mean, variance = exact(1, 1)
    model = dgm.from_pyro(line, X, Y)
    kernel = dgm.ConstrainedHMC(step_size=0.4, n_steps=(3, 5), n_geodesic=1)
    draws = dgm.sample(conditioned(model), kernel, chains=400, warmup=15, draws=1, seed=2, progress=False)
    assert law(draws, mean, variance, X) < 5


def test_control_a_point_estimate_predicts_too_narrowly():
    draws, mean, variance = exact()
    assert law(held(draws.problem, {"slope": torch.full(draws.shape, float(mean))}), mean, variance, X) > 5
    # and draws of the prior too widely
    prior = torch.randn(draws.shape, generator=torch.Generator().manual_seed(4))
    assert law(held(draws.problem, {"slope": prior}), mean, variance, X) > 5


@pytest.mark.filterwarnings("ignore")
def test_the_values_have_the_law_of_those_of_pyro():
    slope = exact()[0].latents["slope"].flatten()[:400]
    with torch.random.fork_rng():
        pyro.set_rng_seed(5)
        theirs = pyro.infer.Predictive(line, {"slope": slope.float()})(X)
    draws = held(exact(2, 2)[0].problem, {"slope": slope.reshape(4, 100)})
    ours = draws.predictive(line, X)
    assert set(ours) == set(theirs) == {"mean", "y"}
    # Pyro takes deterministic values from the latents, where the program computes them
    torch.testing.assert_close(ours["mean"].flatten(0, 1), theirs["mean"].reshape(400, 3))
    # the latents are the same: only the noise differs
    noise = [(y.reshape(400, 3) - theirs["mean"].reshape(400, 3)) / SD for y in (ours["y"], theirs["y"])]
    for power in (1, 2):
        a, b = (each.flatten() ** power for each in noise)
        assert (a.mean() - b.mean()).abs() < 5 * ((a.var() + b.var()) / len(a)) ** 0.5
    assert (noise[0] != noise[1]).all()


LAWS = {
    "normal": lambda z: dist.Normal(z, 1.0),
    "the same for all": lambda z: dist.Normal(0.0, 1.0),
    "filled in place": lambda z: dist.Normal(torch.zeros(()).normal_(), 0.1),
    "exponential": lambda z: dist.Exponential(z.exp()),
    "half-Cauchy": lambda z: dist.HalfCauchy(z.exp()),
    "Student": lambda z: dist.StudentT(5.0, z, 1.0),
    "Gamma": lambda z: dist.Gamma(z.exp(), 1.0),
    "Poisson": lambda z: dist.Poisson(z.exp()),
    "Bernoulli": lambda z: dist.Bernoulli(logits=z),
    "categorical": lambda z: dist.Categorical(logits=torch.stack([z, -z])),
    # torch draws it by a function that it cannot vectorise
    "Beta": lambda z: dist.Beta(z.exp(), 1.0),
}


@pytest.mark.parametrize("name", LAWS)
def test_vectorised_runs_have_the_law_of_single_ones(name, monkeypatch):
    def program():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 2):
            pyro.sample("y", LAWS[name](z))

    z = 0.5 * torch.randn(20, 40, generator=torch.Generator().manual_seed(1))
    together = predicted({"z": z}, 2, CalledProgram(program, is_new=True), (), 1)["y"]
    calls: list[bool] = []
    monkeypatch.setattr(predictive, "_vectorised", lambda *arguments: calls.append(True))
    alone = predicted({"z": z}, 2, CalledProgram(program, is_new=True), (), 2)["y"]
    assert calls == [True]
    assert together.shape == alone.shape == (20, 40, 2)
    # bounded functions, whose means have errors also where the draws have no moments
    a, b = (torch.stack([torch.sigmoid(y), torch.sin(2 * y)]).double().flatten(1) for y in (together, alone))
    assert ((a.mean(-1) - b.mean(-1)).abs() < 5 * ((a.var(-1) + b.var(-1)) / 800) ** 0.5).all()
    # neither the draws nor the data of one draw share their numbers
    if name not in ("Poisson", "Bernoulli", "categorical"):
        assert together.flatten().unique().numel() > 1580
    else:
        assert 0 < (together[..., 0] != together[..., 1]).double().mean() < 1


def test_hard_soft_and_discrete_observations_are_predicted_and_kept_apart():
    seen = torch.tensor([1.0, 0.0, 2.0, 1.0])
    model = dgm.from_pyro(counts, seen)
    rate = torch.full((8, 300), 2.5)
    draws = held(conditioned(model), {"rate": rate})
    values = draws.predictive(seed=3)
    assert {name: tuple(value.shape) for name, value in values.items()} == {"size": (8, 300), "n": (8, 300, 4)}
    assert errors(values["n"].double().flatten(), 2.5, 2.5 + 2.5**2) < 5
    assert errors(values["size"].double().flatten(), 2.5, 1 + 2.5**2) < 5
    # data given as soft=, without the program's own
    soft = dgm.from_pyro(counts, soft={"n": seen})
    assert set(held(conditioned(soft), {"rate": rate}).predictive(n=1)) == {"size", "n"}


def test_values_are_those_of_their_seed_and_leave_the_global_state_alone():
    draws, _, _ = exact(3, 8)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = draws.predictive(seed=2)["y"]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, draws.predictive(seed=2)["y"])
    assert not torch.equal(first, draws.predictive(seed=3)["y"])
    # the run's own seed is the default
    assert torch.equal(draws.predictive()["y"], draws.predictive(seed=1)["y"])


def test_n_values_are_evenly_spaced_over_the_draws():
    draws, _, _ = exact(2, 8)
    mean = draws.predictive(line, X, n=4)["mean"]
    torch.testing.assert_close(mean, draws.latents["mean"][:, ::2].float())
    assert draws.predictive(n=20)["y"].shape == (2, 20, 3)


def walk(steps=None):
    start = pyro.sample("start", dist.Normal(0.0, 1.0))
    first = pyro.sample("first", dist.Normal(start, 1.0), obs=None if steps is None else steps[0])
    pyro.sample("second", dist.Normal(first, 0.01), obs=None if steps is None else steps[1])


def test_observed_statements_follow_the_new_values_of_others():
    model = dgm.from_pyro(walk, torch.tensor([9.0, 9.0]))
    values = held(conditioned(model), {"start": torch.full((4, 50), -5.0)}).predictive()
    assert errors(values["first"].double().flatten(), -5.0, 26.0) < 5
    assert (values["second"] - values["first"]).abs().max() < 0.1


def total():
    first = pyro.sample("first", dist.Exponential(1.0))
    second = pyro.sample("second", dist.Exponential(1.0))
    pyro.deterministic("total", first + second)


def measured():
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0))
    pyro.deterministic("reading", weight + 0.5 * torch.randn(3))


@pytest.mark.filterwarnings("ignore::UserWarning:pyro")
def test_a_deterministic_observation_repeats_itself_but_for_the_noise_of_torch():
    problem = conditioned(dgm.from_pyro(total, observed={"total": 3.0}))
    first = torch.linspace(0.1, 2.9, 10).reshape(2, 5)
    draws = held(problem, {"first": first, "second": 3 - first, "total": torch.full((2, 5), 3.0)})
    assert set(draws.predictive()) == {"total"}
    torch.testing.assert_close(draws.predictive()["total"], torch.full((2, 5), 3.0))
    samples = {name: draws.latents[name].flatten() for name in ("first", "second")}
    theirs = pyro.infer.Predictive(total, samples)()
    torch.testing.assert_close(theirs["total"].reshape(2, 5), draws.predictive()["total"])

    noisy = conditioned(dgm.from_pyro(measured, observed={"reading": torch.zeros(3)}))
    reading = held(noisy, {"weight": torch.full((10, 100), 2.0)}).predictive()["reading"]
    assert errors(reading.double().flatten(), 2.0, 4.25) < 5


def test_functions_of_values_are_predicted():
    functions = {"largest": lambda values: values["y"].amax(-1)}
    model = dgm.from_pyro(line, X, observed={"largest": 1.0}, functions=functions)
    draws = held(conditioned(model), {"slope": torch.zeros(2, 500), "y": torch.zeros(2, 500, 3)})
    values = draws.predictive(fresh="y")
    assert torch.equal(values["largest"], values["y"].amax(-1))


def test_latents_of_other_groups_are_drawn_again_only_if_asked_for():
    model = dgm.from_pyro(groups, X, Y)
    effect = torch.tensor([5.0, 6.0, 7.0]).expand(20, 50, 3)
    draws = held(conditioned(model), {"spread": torch.full((20, 50), 0.2), "effect": effect})
    # the data of the same groups follow their effects
    y = draws.predictive()["y"]
    assert (y - effect).abs().max() < 1
    new = torch.tensor([1.0, 2.0])
    with pytest.raises(ArgumentError, match=r"'effect' has shape \(3,\) in the draws and \(2,\) in groups.*fresh="):
        draws.predictive(groups, new)
    values = draws.predictive(groups, new, fresh="effect")
    assert set(values) == {"effect", "y"}
    for i in range(2):
        variance = 0.2**2 + 0.1**2
        assert errors(values["y"][..., i].double().flatten(), new[i], new[i] ** 2 + variance) < 5


def test_a_network_of_32_bits_predicts_with_draws_of_64():
    net = torch.nn.Linear(2, 3)

    def program():
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(net(z), 0.1).to_event(1), obs=torch.zeros(3))

    model = dgm.from_pyro(program)
    z = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = held(conditioned(model), {"z": z}).predictive()["y"]
    assert ((y - net(z.float())).abs() < 0.6).all()


def test_every_problem_of_a_batch_is_predicted():
    model = dgm.from_pyro(line, X, Y)
    problem = dgm.condition(model, torch.stack([Y, -Y]))
    slope = torch.tensor([3.0, -3.0]).expand(2, 5, 2)
    draws = held(problem, {"slope": slope, "mean": slope.unsqueeze(-1) * X})
    draws.stats["acceptance_rate"] = torch.ones(2, 5, 2)
    y = draws.predictive()["y"]
    assert y.shape == (2, 5, 2, 3)
    assert (y[..., 0, 2] > 3).all()
    assert (y[..., 1, 2] < -3).all()
    data: Any = draws.to_arviz(predictive=True)
    assert data.posterior_predictive["y"].dims == ("chain", "draw", "problem", "y_dim_0")
    np.testing.assert_allclose(data.observed_data["y"].values, torch.stack([Y, -Y]))


# --------------------------------------------------------------------------------------------------------------- ArviZ


def short(program=line, arguments=(X, Y), observe=None, **options):
    model = dgm.from_pyro(program, *arguments, **options)
    kernel = dgm.ConstrainedHMC(step_size=0.1, n_steps=1, n_geodesic=1)
    problem = dgm.condition(model, model.data, observe=observe)
    return dgm.sample(problem, kernel, chains=2, warmup=0, draws=4, seed=1, progress=False)


def test_arviz_gets_observations_and_predictive_values_under_the_names_of_the_program(tmp_path):
    draws = short()
    data: Any = draws.to_arviz()
    assert arviz_groups(data) == {"posterior", "observed_data", "sample_stats", "unconstrained_posterior"}
    assert set(data.posterior.data_vars) == {"slope", "mean"}
    np.testing.assert_allclose(data.observed_data["y"].values, Y)
    data = draws.to_arviz(predictive=draws.predictive(n=2))
    assert data.posterior_predictive["y"].dims == ("chain", "draw", "y_dim_0")
    assert data.posterior_predictive["y"].shape == (2, 2, 3)
    whole: Any = draws.to_arviz(predictive=True)
    np.testing.assert_array_equal(whole.posterior_predictive["y"].values, draws.predictive()["y"])

    draws.save(tmp_path / "line.nc")
    for loaded in (dgm.Draws.load(tmp_path / "line.nc"), dgm.Draws.load(tmp_path / "line.nc", draws.problem)):
        data = loaded.to_arviz()
        np.testing.assert_allclose(data.observed_data["y"].values, Y)
        torch.testing.assert_close(loaded.predictive(line, X)["mean"], draws.latents["mean"].float())
    assert torch.equal(loaded.predictive()["y"], draws.predictive()["y"])
    with pytest.raises(ArgumentError, match="loaded without their problem: give the program"):
        dgm.Draws.load(tmp_path / "line.nc").predictive()


def test_soft_and_partly_hidden_observations_are_observed_data():
    seen = torch.tensor([1.0, 0.0, 2.0, 1.0])
    data: Any = short(counts, (seen,)).to_arviz()
    assert set(data.observed_data.data_vars) == {"size", "n"}
    np.testing.assert_array_equal(data.observed_data["n"].values, seen)
    assert data.observed_data["size"].shape == ()
    data = short(observe=dgm.pixels(torch.tensor([True, False, True]))).to_arviz()
    np.testing.assert_allclose(data.observed_data["y"].values, torch.tensor([Y[0], torch.nan, Y[2]]))


@pytest.mark.parametrize("name", ["draw", "problem", "a/b", ".", ""])
def test_draws_are_not_lost_for_the_name_of_an_observation(name, tmp_path):
    def program():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample(name, dist.Poisson(a.exp()), obs=torch.tensor(1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=torch.tensor(0.5, dtype=torch.bfloat16))

    draws = short(program, ())
    draws.save(tmp_path / "draws.nc")
    data: Any = dgm.Draws.load(tmp_path / "draws.nc").to_arviz()
    assert set(data.observed_data.data_vars) == {"y"}
    assert data.observed_data["y"].shape == ()


def test_targets_of_programs_are_predicted_too():
    seen = torch.tensor([1.0, 0.0, 2.0, 1.0])
    for target in (dgm.target_from_pyro(counts, seen), dgm.target_from_pyro(counts, observed={"n": seen})):
        draws = dgm.sample(
            target, dgm.HMC(step_size=0.1, n_steps=1), chains=2, warmup=0, draws=3, seed=1, progress=False
        )
        assert set(draws.predictive()) == {"size", "n"}
        data: Any = draws.to_arviz()
        assert set(data.observed_data.data_vars) == {"size", "n"}
        np.testing.assert_array_equal(data.observed_data["n"].values, seen)


# -------------------------------------------------------------------------------------------------------------- faults


def mixture(y):
    k = pyro.sample("k", dist.Categorical(torch.ones(2)))
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mean + k, 1.0), obs=y)


@pytest.mark.filterwarnings("ignore:the Pyro program mixture cannot be vectorised")
def test_faults_are_named():
    draws, _, _ = exact(2, 2)
    with pytest.raises(ArgumentError, match=r"none of its statements, \['first', 'second', 'total'\], is a latent"):
        draws.predictive(total)
    with pytest.raises(ArgumentError, match=r"fresh='mean'\): is not a sample statement of line: \['slope', 'y'\]"):
        draws.predictive(fresh=["mean"])
    with pytest.raises(ArgumentError, match="must be a function"):
        draws.predictive(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"predictive\(n=0\)"):
        draws.predictive(n=0)
    with pytest.raises(ModelError, match=r"predictive\(\): line fails: .*len"):
        draws.predictive(line, 3.0)
    with pytest.raises(ArgumentError, match=r"predictive\['y'\] of shape \(4, 3\)\): must be \[chains, n"):
        draws.to_arviz(predictive={"y": torch.zeros(4, 3)})
    with pytest.raises(ArgumentError, match="must be a mapping"):
        draws.to_arviz(predictive=3)  # type: ignore[arg-type]
    target = dgm.target_from_pyro(mixture, torch.tensor(0.5))
    summed = held(target, {"mean": torch.zeros(2, 3)})
    with pytest.raises(ModelError, match=r"'k' of mixture was summed out.*fresh="):
        summed.predictive()
    assert set(summed.predictive(fresh="k")) == {"k", "y"}
    other = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    with pytest.raises(ArgumentError, match="are not those of a Pyro program"):
        held(other, {"x": torch.zeros(2, 3)}).predictive()
