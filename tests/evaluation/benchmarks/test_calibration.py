"""Posteriors that are known: the mixture's velocity and posterior, scores of exact draws, and of draws that are not."""

import json

import pytest
import torch
from torch.distributions import Normal

from dgm_infer import Target
from evaluation.benchmarks import calibration
from evaluation.benchmarks.calibration_levy import levy_row
from evaluation.benchmarks.calibration_peers import from_deepinv, retried_hmc
from evaluation.benchmarks.calibration_ranks import rank_rows, rank_table, uniformity
from evaluation.benchmarks.calibration_scores import highest
from evaluation.problems.gaussian_mixture_flow import ObservedMixture
from evaluation.problems.levy import LevySignal
from tests.devices import DEVICE, Device, Generator


@pytest.fixture(scope="module")
def problem():
    return ObservedMixture(4)


@pytest.fixture(scope="module")
def data(problem):
    rng = torch.Generator().manual_seed(0)
    x = problem.draws(150, rng)
    return x, problem.data(x, rng)


def test_the_velocity_carries_noise_to_the_mixture(problem):
    """The density of the flow's steps tends to the mixture's at the solver's order, and so to no other."""
    x = problem.draws(20, torch.Generator().manual_seed(1))
    log_prob = torch.stack(
        [Normal(mean, sd).log_prob(x).sum(-1) for mean, sd in zip(problem.means, problem.sds, strict=True)]
    )
    exact = (log_prob + problem.weights.log().unsqueeze(-1)).logsumexp(0)
    coarse, fine = ((problem.flow(steps).log_prob(x) - exact).abs().max() for steps in (32, 128))
    assert (coarse / fine).item() == pytest.approx(16, rel=0.3)


def test_exact_draws_are_those_of_the_posterior(problem, data):
    """Weighted draws of the prior give the same means of every component's share."""
    _, y = data
    rng = torch.Generator().manual_seed(2)
    x = problem.draws(200_000, rng)
    for k in range(3):
        weight = (-(x[:, problem.mask] - y[k]).square().sum(-1) / (2 * problem.noise**2)).softmax(0)
        shares = weight @ problem.shares(x)
        ess = 1 / weight.square().sum()
        assert ess > 500
        assert (shares - problem.posterior_weights(y)[k]).abs().max() < 5 * 0.5 / ess.sqrt()
        exact = problem.exact(y[k : k + 1], 20_000, rng).squeeze(1)
        spread = exact.std(0)
        assert ((weight @ x - exact.mean(0)).abs() < 5 * spread * (1 / ess + 1 / 20_000).sqrt()).all()


def test_exact_draws_score_as_exact(problem, data):
    x, y = data
    rng = torch.Generator().manual_seed(3)
    draws = [problem.exact(y, 400, rng) for _ in range(2)]
    found = calibration.scores(problem, y, x, draws[0].unflatten(0, (4, 100)), draws[1])
    assert abs(found["coverage"] - 0.9) < 4 * found["coverage_error"]
    assert abs(found["bias"]) < 5 * found["bias_error"]
    assert found["weights"] < 0.04
    assert found["distance"] == pytest.approx(1, abs=0.1)


def test_control_draws_that_are_too_narrow_or_of_one_mode_do_not(problem, data):
    x, y = data
    rng = torch.Generator().manual_seed(3)
    exact, other = (problem.exact(y, 400, rng) for _ in range(2))
    narrow = exact.mean(0) + 0.8 * (exact - exact.mean(0))
    found = calibration.scores(problem, y, x, narrow.unflatten(0, (4, 100)), other)
    assert found["distance"] > 2
    mode = problem.posterior_weights(y).argmax(-1)
    one = torch.where((problem.shares(exact).argmax(-1) == mode).unsqueeze(-1), exact, problem.means[mode])
    found = calibration.scores(problem, y, x, one.unflatten(0, (4, 100)), other)
    assert found["bias"] > 10 * found["bias_error"]
    assert found["weights"] > 0.1


def test_rejections_that_are_not_kept_change_the_law():
    """A funnel of two widths: long steps are rejected in the narrow part, which is then left out of the draws."""
    sds = torch.tensor([1.0, 0.1], dtype=torch.float64)

    def energy(x):
        return -(-x.square() / (2 * sds.square()) - sds.log()).logsumexp(-1)

    target = Target(lambda x: energy(x), 1)
    start = torch.randn(200, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, accepted = retried_hmc(target, start, 1.2, 3, 200, torch.Generator().manual_seed(1))
    assert accepted < 0.9
    x = torch.linspace(-0.2, 0.2, 2001, dtype=torch.float64).unsqueeze(-1)
    mass = torch.trapezoid((-energy(x)).exp(), x.squeeze(-1)) / (2 * (2 * torch.pi) ** 0.5)
    share = (found[50:].abs() < 0.2).double().mean((0, 2))
    assert abs(share.mean() - mass) > 5 * share.std() / 200**0.5
    # with steps that are hardly ever rejected the rule does not matter
    found, accepted = retried_hmc(target, start, 0.05, 20, 200, torch.Generator().manual_seed(1))
    share = (found[50:].abs() < 0.2).double().mean((0, 2))
    assert accepted > 0.97
    assert abs(share.mean() - mass) < 5 * share.std() / 200**0.5 + 0.01


@pytest.mark.parametrize("name", ["dps", "ddrm", "diffpir"])
def test_peers_take_the_problem(problem, data, name):
    pytest.importorskip("deepinv")
    _, y = data
    found, evaluations = from_deepinv(name, problem, y[:3], 5, 100, 0)
    assert found.shape == (5, 3, 4)
    assert found.isfinite().all()
    assert evaluations >= 99
    # observed entries follow the data: prior draws are 1 away
    assert (found[..., :2] - y[:3]).abs().mean() < 0.3


def test_the_page_has_a_line_per_sampler(tmp_path, capsys):
    sizes = {"problems": 3, "chains": 2, "draws": 5, "warmup": 5, "steps": 2}
    path = calibration.bench(dims="2", methods="exact,hmc", **sizes, output=str(tmp_path))
    path = calibration.bench(dims="2", methods="elliptical", **sizes, output=str(tmp_path))
    rows = json.loads(path.read_text())["mixtures"]["2"]
    # what was measured before is kept
    assert set(rows) == {"exact", "hmc", "elliptical"}
    assert rows["hmc"]["evaluations"] == 2 * 2 * 6
    page = (tmp_path / "calibration.md").read_text()
    assert "| HMC in noise space |" in page
    assert "results in" in capsys.readouterr().out


@pytest.mark.parametrize("increments", ["normal", "laplace", "student1", "student2", "student3"])
def test_the_gibbs_sampler_of_signals_is_calibrated(increments):
    signal = LevySignal(increments, "blur")
    x, y = signal.simulated(100, 1)
    draws = signal.gibbs(y, 50, 100, 0)
    inside = highest(signal.log_posterior(draws, y), signal.log_posterior(x.unsqueeze(0), y)[0])
    assert abs(inside.double().mean().item() - 0.9) < 4 * (0.09 / 100) ** 0.5
    if increments == "normal":
        sums = signal.matrix @ torch.ones(64, 64).double().tril()
        precision = sums.T @ sums / signal.noise**2 + 4 * torch.eye(64)
        mean = torch.linalg.solve(precision, (y @ sums / signal.noise**2).T).T.cumsum(-1)
        assert ((draws.mean(0) - mean) / draws.std(0)).abs().mean() < 0.15
    # the same draws, narrower, are not
    narrow = draws.mean(0) + 0.8 * (draws - draws.mean(0))
    inside = highest(signal.log_posterior(narrow, y), signal.log_posterior(x.unsqueeze(0), y)[0])
    assert inside.double().mean().item() < 0.6


@pytest.mark.slow
def test_sampled_signals_have_the_means_of_the_gibbs_sampler():
    settings = {"problems": 4, "chains": 4, "draws": 200, "gibbs": 1000, "seed": 1, "device": "cpu"}
    row = levy_row("laplace", "blur", settings)
    assert row["distance"] < 0.25
    assert abs(row["gap"]) < 0.3


def test_ranks_among_exact_draws_are_uniform_and_among_narrower_ones_are_not():
    rng = torch.Generator().manual_seed(0)
    truth, draws = torch.randn(1000, generator=rng), torch.randn(20, 1000, generator=rng)
    assert uniformity((draws < truth).sum(0), 20) > 1e-3
    assert uniformity((0.8 * draws < truth).sum(0), 20) < 1e-6


@pytest.mark.slow
def test_draws_given_images_of_a_generator_rank_their_inputs_and_a_planted_error_is_seen():
    # R-hat of few draws does not tell whether chains have mixed: below 1.05 for 43 % of the images by 60
    settings = {"problems": 120, "chains": 4, "draws": 200, "seed": 0, "device": "cpu"}
    exact, planted = rank_rows("digits_vae", settings).values()
    assert exact["mixed"] > 0.8
    assert exact["p"] > 1e-3
    assert abs(exact["outside"] - exact["outside_expected"]) < 4 * exact["outside_error"]
    assert planted["p"] < 1e-6
    header, lines = rank_table({"digits_vae": exact, "planted": planted})
    assert all(len(line) == len(header) for line in lines)


def test_samplers_run_on_a_device(monkeypatch):
    monkeypatch.setattr(torch, "Generator", Generator)
    settings = {"chains": 2, "draws": 1, "seed": 0, "steps": 1, "warmup": 1, "device": str(DEVICE)}
    problem = ObservedMixture(2)
    with Device():
        rng = torch.Generator().manual_seed(0)
        y = problem.data(problem.draws(2, rng), rng)
        found, _ = calibration._draws("hmc", problem, y, settings, rng)
        target = Target(lambda x: x.square().sum(-1) / 2, 1)
        retried, accepted = retried_hmc(target, torch.zeros(3, 1, device=DEVICE), 0.1, 2, 2, rng)
    assert found.shape == (2, 1, 2, 2)
    assert found.device.type == "cpu"
    assert retried.device == DEVICE
    assert accepted > 0.9
