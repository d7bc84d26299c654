"""The published experiments: comparisons of methods, their pictures, and the command that runs them."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ConfigError
from dgm_infer.files import REFERENCE_DATA
from evaluation import experiments
from evaluation.commands.reproduce import reproduce
from evaluation.experiments.samplers import Sampler, report, run_samplers, typical_inputs
from evaluation.figures.posteriors import _shared_range
from evaluation.figures.series import series
from generators.lotka_volterra import summaries

TRUTH = {"z1": 5.0, "z2": 1.0, "z3": 0.4, "z4": -0.1}


@pytest.fixture(scope="module")
def runs():
    """Constrained HMC on ten observations, and HMC with a step so large that no chain ever moves."""
    model = generators.GeneralisedLambda(10)
    observed = generators.GeneralisedLambda.published_observations()[0][:10]
    exact, wide = dgm.condition(model, observed), dgm.condition(model, observed, tolerance=0.5)
    start = exact.start(4, torch.Generator().manual_seed(0))
    samplers = [
        Sampler("constrained HMC", exact, dgm.ConstrainedHMC(0.1, n_steps=3), 0, 20),
        Sampler("HMC, stuck", wide, dgm.HMC(step_size=1e6, n_steps=2), 0, 20, start),
    ]
    return run_samplers(samplers, chains=4, seed=1)


@pytest.mark.slow
def test_effective_sample_sizes_are_per_second_of_the_whole_run(runs):
    exact = runs[0]
    assert exact.seconds > 0
    table = exact.draws.summary()
    for name in TRUTH:
        assert exact.table[name]["ess_per_second"] == pytest.approx(table.loc[name, "ess_bulk"] / exact.seconds)


@pytest.mark.slow
def test_chains_that_never_move_are_counted(runs):
    exact, stuck = runs
    assert exact.stuck == 0
    assert stuck.stuck == 4
    assert stuck.failed == 1
    assert stuck.acceptance == 0


def test_a_report_has_pictures_tables_and_numbers(runs, tmp_path):
    results = report(tmp_path, runs, TRUTH)
    assert {path.name for path in tmp_path.iterdir()} == {"posteriors.png", "efficiency.png"}
    for path in tmp_path.iterdir():
        with Image.open(path) as picture:
            assert min(picture.size) > 300
    for label in ("constrained HMC", "HMC, stuck"):
        assert results["summary"].count(label) == 2
        assert set(results["methods"][label]["latents"]) == set(TRUTH)
    assert results["methods"]["constrained HMC"]["latents"]["z1"]["true"] == 5
    assert json.loads(json.dumps(results))["methods"]["HMC, stuck"]["stuck_chains"] == 4


def test_an_interrupt_ends_the_comparison(runs, monkeypatch):
    def interrupted(*arguments, **options):
        draws = runs[0].draws
        monkeypatch.setattr(draws, "interrupted", True)
        return draws

    monkeypatch.setattr(dgm, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_samplers([Sampler("again", None, dgm.HMC(), 0, 1)], chains=4, seed=1)


def test_a_method_far_off_does_not_flatten_the_others():
    rng = np.random.default_rng(0)
    narrow, wide = rng.normal(size=4000), 1000 * rng.normal(size=4000)
    low, high = _shared_range([narrow, wide], 0.0)
    assert low < -2.5
    assert high > 2.5
    assert high - low < 20
    low, high = _shared_range([narrow, narrow], 30.0)
    assert high > 30


def test_series_stay_in_sight_of_the_data_when_a_simulation_explodes(tmp_path):
    observed = np.stack([np.arange(9.0), np.arange(9.0)[::-1]], -1)
    simulated = np.broadcast_to(observed, (20, 9, 2)).copy()
    simulated[:10, 5:] = np.inf
    simulated[10:, 5:] = np.nan
    series(tmp_path / "series.png", observed, {"title": simulated}, ("prey", "predators"))
    assert (tmp_path / "series.png").stat().st_size > 0


@pytest.fixture
def experiment(monkeypatch):
    """An experiment that keeps what it was called with and returns what it is told to."""
    module = SimpleNamespace(calls=[], results={"summary": "a line\n", "r_hat": float("nan")})

    def run(folder, *, fast, data, seed, parts):
        module.calls.append((fast, data, seed))
        if module.results is None:
            raise ConfigError("data: none")
        (folder / "picture.png").write_bytes(b"")
        if module.results == "interrupted":
            raise KeyboardInterrupt
        return module.results

    module.run = run
    monkeypatch.setitem(experiments.EXPERIMENTS, "fake", "for the tests")
    monkeypatch.setitem(sys.modules, "evaluation.experiments.fake", module)
    monkeypatch.delenv(REFERENCE_DATA, raising=False)
    return module


def test_a_run_keeps_results_settings_and_command(experiment, tmp_path, capsys):
    folder = reproduce("fake", fast=True, data=str(tmp_path), seed=3, output=str(tmp_path / "runs"), command=["a", "b"])
    assert folder.parent == tmp_path / "runs" / "reproduce_fake"
    assert {path.name for path in folder.iterdir()} == {
        "picture.png",
        "config.yaml",
        "results.json",
        "log.txt",
        "report.html",
    }
    record = json.loads((folder / "results.json").read_text())
    assert record["settings"] == {"fast": True, "seed": 3, "data": str(tmp_path)}
    assert record["command"] == ["a", "b"]
    assert record["seconds"] >= 0
    assert record["versions"]["torch"] == torch.__version__
    # JSON has no NaN
    assert record["results"] == {"r_hat": None}
    assert (folder / "log.txt").read_text().startswith("a line\n")
    assert "a line" in capsys.readouterr().out
    assert experiment.calls == [(True, tmp_path, 3)]


def test_the_environment_names_the_reference_folder_where_no_option_does(experiment, tmp_path, monkeypatch):
    reproduce("fake", output=str(tmp_path))
    monkeypatch.setenv(REFERENCE_DATA, str(tmp_path))
    reproduce("fake", output=str(tmp_path))
    assert [data for _, data, _ in experiment.calls] == [None, tmp_path]


def test_a_failed_experiment_leaves_no_folder(experiment, tmp_path):
    experiment.results = None
    with pytest.raises(ConfigError, match="data"):
        reproduce("fake", output=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("results", ["interrupted", {"interrupted": True}], ids=["before its end", "with results"])
def test_an_interrupted_experiment_keeps_what_it_has_and_is_interrupted(results, experiment, tmp_path):
    experiment.results = results
    with pytest.raises(KeyboardInterrupt) as caught:
        reproduce("fake", output=str(tmp_path / "runs"))
    (folder,) = (tmp_path / "runs" / "reproduce_fake").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {"picture.png", "config.yaml"} | (
        set() if results == "interrupted" else {"results.json", "log.txt", "report.html"}
    )
    assert caught.value.__notes__[0].startswith(f"{folder} keeps what was finished")


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ConfigError, match="'quantiles'"):
        reproduce("quantiles", output=str(tmp_path))
    with pytest.raises(ArgumentError, match="seed=-1"):
        reproduce("quantile", seed=-1, output=str(tmp_path))
    with pytest.raises(ConfigError, match="absent"):
        reproduce("quantile", data="absent", output=str(tmp_path))


@pytest.mark.slow
def test_inputs_of_the_full_series_start_the_summaries():
    model = generators.LotkaVolterra()
    observed, _ = model.published_observations()
    fibre = dgm.condition(model, summaries(observed), observe=summaries)
    inputs = typical_inputs(dgm.condition(model, observed), chains=8, warmup=50, seed=1)
    assert fibre.constraint_error(inputs).max() < 1e-8 * fibre.scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pictures", "rows"),
    [
        ("quantile", {"posteriors.png", "efficiency.png"}, 5),
        ("lotka_volterra", {"posteriors.png", "efficiency.png", "series.png"}, 6),
    ],
)
def test_a_smoke_run_brackets_the_parameters_that_generated_the_data(name, pictures, rows, tmp_path):
    folder = reproduce(name, fast=True, output=str(tmp_path))
    assert {path.name for path in folder.iterdir()} == pictures | {
        "config.yaml",
        "results.json",
        "log.txt",
        "report.html",
    }
    results = json.loads((folder / "results.json").read_text())["results"]
    methods = results["methods"]
    assert len(methods) == rows
    assert all(np.isfinite(latent["r_hat"]) for row in methods.values() for latent in row["latents"].values())
    if name == "lotka_volterra":
        for attempt in results["parameter_space"].values():
            assert 0 < attempt["nearest"] < 1000
            assert attempt["label"] in (folder / "log.txt").read_text()
    exact = next(iter(methods.values()))
    assert exact["stuck_chains"] == 0
    # how often projections fail is seen in more transitions: generators/test_defaults
    for latent in exact["latents"].values():
        assert abs(latent["mean"] - latent["true"]) < 4 * latent["sd"]
