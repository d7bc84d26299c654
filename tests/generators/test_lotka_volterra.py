"""The Lotka-Volterra simulator against a plain loop, and the summaries of its series against NumPy."""

import numpy as np
import pytest
import torch
from scipy import stats

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError
from generators import LotkaVolterra
from generators.lotka_volterra import summaries
from tests.generators.oracles import reference_data
from tests.oracles import FLOAT

NAMES = ["z1", "z2", "z3", "z4"]


def draws(model, *shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return model.input_density.sample(shape, generator=rng, dtype=FLOAT)


def calm(model, *shape):
    """Inputs of parameters near the published ones, under which nothing explodes."""
    u = draws(model, *shape)
    centre = torch.log(torch.tensor([0.4, 0.005, 0.05, 0.001], dtype=FLOAT)) + 2
    return torch.cat([centre + 0.1 * u[..., :4], u[..., 4:]], -1)


# ------------------------------------------------------------------------------------------------------------ simulator


def test_the_published_series_is_that_of_the_reference_data():
    published = reference_data("lotka_volterra/observed.npz")
    x, z = LotkaVolterra.published_observations()
    torch.testing.assert_close(x.unflatten(-1, (50, 2)), published["x"], rtol=0, atol=1e-11)
    assert torch.equal(z, published["z_true"])


def test_the_simulator_is_a_loop_over_steps_of_two_populations():
    model = LotkaVolterra(6, dt=0.25, noise=3.0, initial=(50.0, 80.0))
    u = calm(model)
    z1, z2, z3, z4 = np.exp(u[:4].numpy() - 2)
    r, f = 50.0, 80.0
    series = []
    for n_r, n_f in u[4:].unflatten(-1, (6, 2)).tolist():
        # noise of white noise with standard deviation 3 over a quarter of the time unit
        r, f = (
            r + 0.25 * (z1 * r - z2 * r * f) + 1.5 * n_r,
            f + 0.25 * (z4 * r * f - z3 * f) + 1.5 * n_f,
        )
        series += [r, f]
    torch.testing.assert_close(model(u), torch.tensor(series, dtype=FLOAT))


def test_each_state_follows_from_the_one_before():
    model = LotkaVolterra(20)
    u = calm(model, 3, 2)
    x = model(u)
    assert x.shape == (3, 2, 40)
    torch.testing.assert_close(model.one_step_ahead(u, x), x)


@pytest.mark.parametrize("leading", [(), (5,), (2, 3)], ids=str)
def test_any_leading_dimensions_are_taken_and_independent(leading):
    model = LotkaVolterra(8)
    u = calm(model, *leading)
    x = model(u)
    assert x.shape == (*leading, 16)
    assert {name: tuple(value.shape) for name, value in model.latents(u).items()} == dict.fromkeys(NAMES, leading)
    rows = torch.stack([model(row) for row in u.reshape(-1, 20)])
    torch.testing.assert_close(x, rows.reshape(*leading, 16))


def test_latents_have_their_log_normal_prior():
    z = LotkaVolterra(1).latents(draws(LotkaVolterra(1), 20_000))

    def least(prior):
        return min(stats.kstest(z[name].numpy(), prior.cdf).pvalue for name in NAMES)

    assert least(stats.lognorm(s=1, scale=np.exp(-2))) > 1e-3
    # control
    assert least(stats.lognorm(s=1, scale=np.exp(-2.1))) < 1e-3


def test_a_fully_observed_series_is_conditioned_on_number_by_number():
    x, _ = LotkaVolterra.published_observations()
    fibre = dgm.condition(LotkaVolterra(), torch.stack([x, x]))
    assert fibre.units is not None
    assert fibre.units.is_scalar
    assert fibre.batch_shape == (2,)
    assert fibre.dim == 104


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_steps": 0}, r"n_steps=0\): must be an integer >= 1"),
        ({"n_steps": 5.0}, r"n_steps=5\.0\): must be an integer >= 1"),
        ({"dt": 0.0}, r"dt=0\.0\): must be a positive number"),
        ({"noise": -1.0}, r"noise=-1\.0\): must be a positive number"),
        ({"initial": (1.0, float("nan"))}, r"initial=nan\): not finite"),
        ({"initial": (1.0,)}, r"initial=\(1\.0,\)\): must be two numbers, prey and predators"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_impossible_arguments_are_named(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        LotkaVolterra(**arguments)


# ------------------------------------------------------------------------------------------------------------ summaries


def test_summaries_are_those_of_numpy():
    x, _ = LotkaVolterra.published_observations()
    r, f = x.unflatten(-1, (50, 2)).numpy().T

    def autocorrelation(series, lag):
        d = series - series.mean()
        return (d[:-lag] * d[lag:]).sum() / (d**2).sum()

    expected = [
        r.mean(),
        f.mean(),
        np.log(r.var(ddof=1)),
        np.log(f.var(ddof=1)),
        autocorrelation(r, 1),
        autocorrelation(f, 1),
        autocorrelation(r, 2),
        autocorrelation(f, 2),
        np.corrcoef(r, f)[0, 1],
    ]
    torch.testing.assert_close(summaries(x), torch.tensor(expected, dtype=FLOAT))


def test_summaries_take_any_leading_dimensions():
    model = LotkaVolterra(8)
    x = model(calm(model, 2, 3))
    s = summaries(x)
    assert s.shape == (2, 3, 9)
    torch.testing.assert_close(s[1, 2], summaries(x[1, 2]))


def test_summaries_are_an_observation_operator():
    model = LotkaVolterra()
    x, _ = LotkaVolterra.published_observations()
    fibre = dgm.condition(model, summaries(x), observe=summaries)
    assert fibre.values.shape == (9,)
    assert fibre.units is None
    # from the series itself: its noise is what the published recipe drew
    u = torch.cat([torch.log(torch.tensor([0.4, 0.005, 0.05, 0.001], dtype=FLOAT)) + 2, published_noise()])
    assert fibre.constraint_error(u) < 1e-10
    kernel = dgm.ConstrainedHMC(0.05, 2, n_geodesic=1)
    starts = u.expand(4, 104)
    draws = dgm.sample(fibre, kernel, chains=4, warmup=0, draws=5, seed=1, initial=starts, progress=False)
    assert draws.stats["acceptance_rate"].mean() > 0.5
    series = draws.generate()
    assert not torch.allclose(series[:, -1], x.expand(4, 100), atol=0.1)
    torch.testing.assert_close(summaries(series), summaries(x).expand(4, 5, 9), rtol=0, atol=1e-5)


def published_noise() -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(1234).normal(size=100))
