"""Peers in JAX: their posteriors are ours, their descents reach modes, their draws are those of a known posterior."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import generators
from dgm_infer.errors import ModelError
from evaluation.benchmarks.comparison import diagnose
from evaluation.benchmarks.image_problems import PROBLEMS, plain_network
from evaluation.benchmarks.image_sampling import Conditioned, ImageTask
from evaluation.benchmarks.series_problems import SERIES
from evaluation.benchmarks.workers import Clock

jax = pytest.importorskip("jax")
jax_images = pytest.importorskip("evaluation.benchmarks.jax_images")
jnp = jax.numpy


@pytest.fixture
def blackjax_peer():
    pytest.importorskip("blackjax")
    return pytest.importorskip("evaluation.benchmarks.blackjax_peer")


@pytest.fixture
def numpyro_peer():
    pytest.importorskip("numpyro")
    return pytest.importorskip("evaluation.benchmarks.numpyro_peer")


@pytest.mark.parametrize("name", ["digits_vae", "mnist_vae", "mnist_conv_vae"])
def test_a_network_in_jax_makes_the_same_images(name):
    net = plain_network(generators.load(name))
    z = torch.randn(3, net.get_submodule("network.0").in_features, generator=torch.Generator().manual_seed(0))
    with jax_images.precision("float64"):
        made = jax_images.network(net)(jnp.asarray(z.double().numpy()))
    np.testing.assert_allclose(made, net.double()(z.double()).flatten(1).numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("output_padding", [0, 1])
def test_transposed_convolutions_of_any_stride_and_padding(output_padding):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (2, 3, 4)), nn.ConvTranspose2d(2, 3, (3, 4), 2, (0, 1), output_padding)
    ).double()
    z = torch.randn(2, 24, dtype=torch.float64)
    with jax_images.precision("float64"):
        np.testing.assert_allclose(
            jax_images.network(net)(jnp.asarray(z.numpy())), net(z).flatten(1).detach(), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), nn.ConvTranspose2d(2, 2, 3, dilation=2), nn.ConvTranspose2d(2, 2, 3, groups=2)]
)
def test_a_layer_without_a_counterpart_is_named(layer):
    with pytest.raises(ModelError, match=f"a layer {type(layer).__name__} has no counterpart"):
        jax_images.network(nn.Sequential(layer))


def test_energies_and_gradients_are_compared_with_ours():
    given = PROBLEMS["digits"].conditioned(2)
    found = jax_images.disagreement(given, jax_images.images_posterior(given), 0)
    assert max(found.values()) < 1e-12
    # another sd is noticed, and the network is as it was
    other = jax_images.images_posterior(replace(given, sd=given.sd * (1 + 1e-5)))
    with pytest.raises(ModelError, match="energy is another function"):
        jax_images.disagreement(given, other, 0)
    assert next(given.net.parameters()).dtype == torch.float32


def test_descents_reach_a_minimum_and_the_best_of_two():
    # two wells, of depths 0 and 2, about -2 and 2
    def energies(z):
        near, far = ((z + side) ** 2 for side in (2.0, -2.0))
        return jnp.minimum(near, far + 2.0).sum(-1)

    best = jax_images.best_of_descents(energies, (3, 1), jax.random.key(0))
    np.testing.assert_allclose(best, -2.0, atol=1e-3)


def linear() -> tuple[Conditioned, torch.Tensor, torch.Tensor]:
    """A posterior that is normal, two images, with its means ``[2, 3]`` and standard deviations ``[3]``."""
    torch.manual_seed(0)
    net = nn.Linear(3, 4).requires_grad_(False)
    given = Conditioned(net, (3,), 0.5, torch.randn(2, 2, 2), torch.ones(2, 2) > 0)
    precision = torch.eye(3) + net.weight.mT @ net.weight / 0.25
    mean = torch.linalg.solve(precision, net.weight.mT @ (given.images.flatten(1) - net.bias).mT / 0.25).mT
    return given, mean, torch.linalg.inv(precision).diagonal().sqrt()


def agrees(draws: np.ndarray, mean: torch.Tensor, sd: torch.Tensor, bias: float) -> bool:
    """Whether means and spreads of ``[chains, draws, 2 * 3]`` are within 5 standard errors and a bias."""
    wrong = 0
    for column, m, s in zip(np.moveaxis(draws, -1, 0), mean.flatten().tolist(), [*sd.tolist()] * 2, strict=True):
        found: dict[str, Any] = diagnose(np.ascontiguousarray(column, np.float64), 1.0)
        assert found["ess_bulk"] > 400
        wrong += abs(found["mean"] - m) > 5 * found["mcse_mean"] + bias * s
        wrong += abs(found["sd"] - s) > 5 * found["mcse_sd"] + bias * s
    return not wrong


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "start"), [("float32", "descents"), ("float64", "prior")])
@pytest.mark.parametrize("kernel", ["nuts", "mclmc", "chees", "numpyro"])
def test_draws_are_those_of_the_posterior(kernel, dtype, start, blackjax_peer, numpyro_peer, tmp_path, monkeypatch):
    monkeypatch.setattr(jax_images, "_FEWEST", 2000)
    given, mean, sd = linear()
    given.save(tmp_path / "given.pt")
    task = ImageTask(str(tmp_path / "given.pt"), kernel, 1.0, 4, 300, 1, 0, dtype=dtype, start=start)
    lines: list[str] = []
    made = (numpyro_peer if kernel == "numpyro" else blackjax_peer).run(task, lines.append)
    assert made["z"].shape[::2] == (4, 6)
    assert made["z"].shape[1] >= 2000
    assert made["z"].dtype == dtype
    assert made["seconds"] >= made["warmup_seconds"] > 0
    assert made["steps"] >= 1
    assert max(made["agreed"].values()) < 1e-12
    assert any("warmed up" in line for line in lines)
    # that of MCLMC, which rejects nothing, is its step size's
    assert agrees(made["z"], mean, sd, 0.05 if kernel == "mclmc" else 0.0)
    # control: another posterior is told apart
    assert not agrees(made["z"], mean + 0.3 * sd, sd, 0.05)
    assert not agrees(made["z"], mean, 1.3 * sd, 0.05)


def test_a_sampler_that_is_late_stops_with_the_fewest_draws():
    calls = []

    def draw(key, state):
        calls.append(state)
        return state + 1, np.zeros((10, 2, 3)), 4

    sampler = jax_images.Sampler(lambda key, start: 0, draw, "name")
    made = jax_images.drawn_until(Clock(1e-9), sampler, jax.random.key(0), np.zeros((2, 3)), lambda line: None)
    assert calls == [0, 1]
    assert made["draws"].shape == (2, 20, 3)
    assert (made["steps"], made["kernel"]) == (4.0, "name")


def small_iwae(n: int) -> tuple[generators.IWAE, torch.Tensor]:
    torch.manual_seed(0)
    model = generators.IWAE(3, (4, 4), (6,)).eval().requires_grad_(False)
    return model, torch.bernoulli(torch.full((n, 4, 4), 0.5))


def test_the_plain_loop_estimates_the_evidence_that_quadrature_gives(tmp_path, monkeypatch):
    pytest.importorskip("evaluation.benchmarks.jax_annealing_peer")
    from evaluation.benchmarks import evidence_in_jax, jax_annealing_peer

    def here(module, task, cores):
        return jax_annealing_peer.run(task, lambda line: None)

    monkeypatch.setattr(evidence_in_jax, "_run", here)
    model, images = small_iwae(2)
    found = evidence_in_jax.plain_annealing(model, images, 64, 20, 3, 1, 0, 4, 0.3)
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    z = torch.from_numpy(np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij"), -1).reshape(-1, 3))
    w = torch.from_numpy(np.prod(np.meshgrid(weights, weights, weights, indexing="ij"), 0).ravel() / (2 * np.pi) ** 1.5)
    log_likelihood = model.double().decoder(z[:, None]).log_prob(images.double().flatten(1))
    truth = (log_likelihood.exp() * w[:, None]).sum(0).log().numpy()
    assert max(found["agreed"].values()) < 1e-6
    assert 0.5 < found["acceptance"] <= 1
    errors = found["log_z"] - truth
    assert found["std_error"].max() < 0.05
    assert np.abs(errors / found["std_error"]).max() < 5
    # control: of other images it is not the evidence
    assert np.abs(found["log_z"] - truth[::-1]).max() > 0.5
    assert (found["gradients"], len(found["seconds"])) == (64 * 81, 3)


@pytest.mark.slow
def test_blackjax_estimates_the_evidence_of_a_regression(monkeypatch):
    pytest.importorskip("blackjax")
    from evaluation.benchmarks import blackjax_evidence_peer, evidence_in_jax

    def here(module, task, cores):
        return blackjax_evidence_peer.run(task, lambda line: None)

    monkeypatch.setattr(evidence_in_jax, "_run", here)
    monkeypatch.setattr(evidence_in_jax, "_METHODS", {})
    found = evidence_in_jax.regressions(1, 0)
    peer = found["methods"]["BlackJAX adaptive tempered SMC"]
    assert max(peer["agreed"].values()) < 1e-9
    assert found["std_error"] < 0.01
    assert peer["rmse"] < 0.2
    assert peer["to_rmse"] == pytest.approx(peer["seconds"] * peer["rmse"] ** 2 / 0.05**2)


@pytest.mark.parametrize("name", ["mild", "published"])
def test_a_series_in_jax_is_that_of_the_model(name):
    jax_series = pytest.importorskip("evaluation.benchmarks.jax_series")
    series = SERIES[name]
    posterior = jax_series.series_posterior(series)
    u = series.starts(3, 0, 0.1)
    with jax_images.precision("float64"):
        made = jax.jit(jax.vmap(posterior.predict))(jnp.asarray(u.numpy()))
    np.testing.assert_allclose(made, series.model().observed(u), rtol=1e-9)
    assert max(jax_series._disagreement(series, posterior, 0).values()) < 1e-9
    other = posterior._replace(sd=series.sd * 1.01)
    with pytest.raises(ModelError, match="energy is another function"):
        jax_series._disagreement(series, other, 0)


def test_a_program_starts_though_prior_draws_overflow(numpyro_peer):
    """As series of the published setting do."""
    jax_series = pytest.importorskip("evaluation.benchmarks.jax_series")
    posterior = jax_series.series_posterior(SERIES["published"])
    sampler = numpyro_peer.nuts(numpyro_peer.series_program(posterior), "u", (posterior.dim,), 0)
    with jax_images.precision("float64"):
        start = jnp.asarray(SERIES["published"].starts(2, 0).numpy())
        state = sampler.warm_up(jax.random.key(0), start)
        np.testing.assert_allclose(state.z["u"], start)
        energy = jax.vmap(posterior.energy)(start)
        np.testing.assert_allclose(np.diff(state.potential_energy), np.diff(energy), rtol=1e-9)
