"""The published experiments on estimated densities: Gaussian latent variables and a Gaussian process classifier."""

import json

import pytest
import torch

from dgm_infer.errors import ConfigError
from evaluation.commands.reproduce import reproduce
from evaluation.experiments import gaussian_latent, gp_probit
from evaluation.experiments.pseudo_marginal import SAMPLERS, estimates_per_draw, pseudo_marginal_kernel, quietly_sampled
from evaluation.figures.pseudo_marginal import chain_rows
from evaluation.problems.gaussian_latent import GaussianLatent
from evaluation.reports.mixed_draws import longest_stay, mixing
from tests.files import reference_folder


class Counted(GaussianLatent):
    """Counts the points at which the density is estimated."""

    points = 0

    def _log_estimate(self, x, u):
        self.points += x[..., 0].numel()
        return super()._log_estimate(x, u)


@pytest.mark.parametrize("name", SAMPLERS)
def test_estimates_are_those_that_a_single_chain_takes(name):
    problem = Counted(torch.tensor([[0.5, -0.2], [1.0, 0.3]]))
    kernel = pseudo_marginal_kernel(name, 2.0 if name.endswith("+SS") else 0.5)

    def run(n):
        """Points in all, the start's too, and those that are reported."""
        problem.points = 0
        start = torch.zeros(1, problem.dim)
        draws = quietly_sampled(problem, kernel, chains=1, warmup=0, draws=n, seed=1, initial=start, progress=False)
        return problem.points, n * float(estimates_per_draw(draws))

    # what is found of a problem once
    run(1)
    (short, own), (long, all_own) = run(10), run(50)
    assert long - short == pytest.approx(all_own - own)


def test_stays_and_errors_are_counted():
    values = torch.randn(3, 200, 2, generator=torch.Generator().manual_seed(0))
    good = mixing(values, torch.zeros(2))
    assert good.longest_stay == 0
    assert good.error < 4
    assert good.r_hat < 1.05
    assert 300 < good.worst_ess < 1000
    assert mixing(values, torch.ones(2)).error > 10
    values[1, 50:90] = values[1, 50]
    # a coordinate that moves is enough
    values[2, :, 0] = 0
    assert longest_stay(values) == 39
    still = mixing(torch.zeros(3, 20, 2) + torch.arange(3.0)[:, None, None], torch.zeros(2))
    assert still.longest_stay == 19
    assert still.r_hat == float("inf")


def test_statements_compare_each_at_its_best():
    def row(sampler, scale, rate, samples=1):
        return {"sampler": sampler, "samples": samples, "scale": scale, "ess_per_1000_evaluations": rate}

    rows = [row("PM-MH", 0.1, 1.0), row("PM-MH", 0.2, 2.0), row("MI+MH", 0.4, 7.0), row("MI+MH", 0.4, 90.0, 8)]
    rows += [row("MI+SS", 1.0, 0.1), row("MI+SS", 2.0, 3.0), row("MI+SS", 10.0, 2.0), row("SS+SS", 2.0, 1.0)]
    assert gaussian_latent._statements(rows) == {
        "MI+MH over PM-MH": 3.5,
        "MI+SS, largest over smallest": 1.5,
        "SS+SS, largest over smallest": 1.0,
    }


def test_chains_of_one_value_are_drawn(tmp_path):
    chain_rows(tmp_path / "still.png", {"still": torch.zeros(2, 10).numpy()}, quantity="x", exact=(0.0, 1.0))
    assert (tmp_path / "still.png").stat().st_size > 0


def test_without_the_cases_one_line_names_the_option_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match="--data FOLDER"):
        gp_probit.run(tmp_path, fast=True, data=tmp_path, seed=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_fast_run_of_latent_variables_has_every_sampler_and_count(tmp_path):
    run = reproduce("gaussian_latent", fast=True, output=str(tmp_path))
    names = {"efficiency.png", "traces.png", "noise.png", "config.yaml", "results.json", "log.txt", "report.html"}
    assert {path.name for path in run.iterdir()} == names
    results = json.loads((run / "results.json").read_text())["results"]
    assert {(row["sampler"], row["samples"]) for row in results["rows"]} == {(s, n) for s in SAMPLERS for n in (1, 4)}
    by = {(row["sampler"], row["samples"], row["scale"]): row for row in results["rows"]}
    # a walk is accepted far more often if the noise stays
    assert by["MI+MH", 1, 0.4]["target_acceptance"] > 10 * by["PM-MH", 1, 0.4]["target_acceptance"]
    assert by["PM-MH", 1, 0.4]["longest_stay"] > 5 * by["MI+MH", 1, 0.4]["longest_stay"]
    assert by["MI+MH", 4, 0.4]["evaluations_per_draw"] == 8


@pytest.mark.slow
def test_auxiliary_updates_take_fewer_evaluations_and_have_the_exact_mean():
    y = gaussian_latent.published_observations()
    rows = []
    for name, estimates in (("PM-MH", 5000), ("MI+MH", 5000), ("MI+SS", 1500)):
        sizes = gaussian_latent.Sizes(20, (0.4,), (2.0, 10.0), {1: estimates})
        rows += [row for row, _ in gaussian_latent._sampled(y, name, 1, sizes, 1)]
    rows += [{"sampler": "SS+SS", "samples": 1, "scale": 2.0, "ess_per_1000_evaluations": 1.0}]
    statements = gaussian_latent._statements(rows)
    assert statements["MI+MH over PM-MH"] > 3
    assert statements["MI+SS, largest over smallest"] < 2
    for row in rows:
        if row["sampler"].startswith("MI"):
            assert row["r_hat"] < 1.5
            assert row["error"] < 5


@pytest.mark.slow
def test_a_fast_run_of_the_classifier_reuses_factorisations(tmp_path):
    run = reproduce("gp_probit", fast=True, data=str(reference_folder("breast_cancer")), output=str(tmp_path))
    names = {"efficiency.png", "traces.png", "r_hat.png", "config.yaml", "results.json", "log.txt", "report.html"}
    assert {path.name for path in run.iterdir()} == names
    results = json.loads((run / "results.json").read_text())["results"]
    assert results["cases"] == 60
    methods = results["methods"]
    assert list(methods) == ["PM-MH", "MI+MH", "SS+MH", "SS+SS"]
    # one approximation per draw, however the noise is updated
    for sampler in ("MI+MH", "SS+MH"):
        assert methods[sampler]["estimates_per_draw"] >= 2
        cubic = methods[sampler]["cubic_operations_per_draw"] / methods["PM-MH"]["cubic_operations_per_draw"]
        assert cubic == pytest.approx(1, abs=0.25)
    slices = methods["SS+SS"]
    assert slices["cubic_operations_per_draw"] < 1.25 * (slices["estimates_per_draw"] - 1) * 14
