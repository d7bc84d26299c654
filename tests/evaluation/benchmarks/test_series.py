"""A noisy series sampled by several programs: its problems, and what is recorded of each."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dgm_infer.errors import ConfigError
from evaluation.benchmarks import image_sampling, series, series_problems
from evaluation.benchmarks.series_problems import SERIES, NoisySeries, SeriesTask, run
from evaluation.benchmarks.workers import WorkerResult


@pytest.mark.parametrize("name", SERIES)
def test_the_generating_inputs_explain_the_data(name):
    problem = SERIES[name]
    u = problem.generating_inputs()
    misfit = (problem.observations() - problem.model().observed(u)) / problem.sd
    # chi squared, at five standard deviations
    n = problem.observations().numel()
    assert abs(misfit.square().sum() - n) < 5 * (2 * n) ** 0.5
    if isinstance(problem, NoisySeries):
        latents = problem.model().latents(u)
        torch.testing.assert_close(
            torch.stack([latents[f"z{i}"] for i in range(1, 5)]), torch.tensor(problem.parameters).double()
        )
    near = problem.starts(3, 0)
    torch.testing.assert_close(near, problem.starts(3, 0))
    assert 0.0005 < (near - u).std() < 0.002


@pytest.mark.slow
def test_our_chains_begin_at_the_shared_starts_and_stay_at_typical_energies(monkeypatch):
    # a clock that counts how often it is read: a busy core makes no fewer draws
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(image_sampling, "time", clock)
    monkeypatch.setattr(series_problems, "time", clock)
    made = run(SeriesTask("mild", "default", 12.0, 2, 12, 1, 0), lambda line: None)
    assert made["z"].shape[::2] == (2, 4)
    assert made["last"].shape == (2, 104)
    # half of the squares of 104 inputs and 100 misfits, of which 104 are used up
    energy = SERIES["mild"].target().energy(torch.from_numpy(made["last"]))
    prior = SERIES["mild"].target().energy(SERIES["mild"].starts(2, 5))
    assert (energy - prior).abs().max() < 60


def test_a_peer_that_is_not_installed_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^jax and blackjax and optax and numpyro not installed: .* or give --methods"
    ):
        series.bench(cores=1, output=str(tmp_path / "results"))
    assert not list(tmp_path.iterdir())


def test_every_form_of_a_method_is_recorded_and_kept(tmp_path, monkeypatch):
    made = {"z": np.random.default_rng(0).normal(size=(4, 300, 4)), "steps": 3.0, "constraint_error": float("nan")}
    made |= {"seconds": 2.0, "warmup_seconds": 1.0, "kernel": "name", "last": SERIES["mild"].starts(4, 0).numpy()}
    tasks = []

    def workers(function, given, **_):
        tasks.append((function.split(":")[0].rpartition(".")[2], *given))
        return [WorkerResult(made)]

    monkeypatch.setattr(series, "find_spec", lambda name: "found")
    monkeypatch.setattr(series, "run_workers", workers)
    options: dict[str, Any] = {"problems": "mild", "cores": 1, "seconds": 5.0, "output": str(tmp_path)}
    series.bench(methods="blackjax", dtypes="float32,float64", starts="shared,own", **options)
    path = series.bench(methods="default,blackjax", starts="own", **options)
    entry = json.loads(path.read_text())["problems"]["mild"]
    peers = [
        "BlackJAX NUTS, float32",
        "BlackJAX NUTS",
        "BlackJAX NUTS, own starts, float32",
        "BlackJAX NUTS, own starts",
    ]
    assert list(entry["methods"]) == [*peers, "default, own starts"]
    assert [module for module, _ in tasks] == ["blackjax_peer"] * 4 + ["series_problems"]
    assert [(task.start, task.dtype, task.warmup) for _, task in tasks[:2]] == [
        ("shared", "float32", 500),
        ("shared", "float64", 500),
    ]
    assert tasks[-1][1].warmup is None
    row = entry["methods"]["default, own starts"]
    assert row["min_ess_per_second"] == pytest.approx(4 * 300 / 5, rel=0.3)
    target = SERIES["mild"].target()
    assert row["energy"] == [pytest.approx(float(target.energy(SERIES["mild"].starts(4, 0)).mean()))]
    assert "| BlackJAX NUTS, own starts, float32 |" in (tmp_path / "series.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"problems": "mild,wild"}, "problems: 'wild' is not one of mild, published"),
        ({"methods": "stan"}, "methods: 'stan' is not one of default"),
        ({"starts": "truth"}, "starts: 'truth' is not one of shared, own"),
        ({"dtypes": "bfloat16"}, "dtypes: 'bfloat16'"),
        ({"chains": 1}, "chains"),
        ({"warmup": 0}, "warmup"),
        ({"seconds": 0.0}, "seconds"),
    ],
)
def test_options_that_measure_nothing(arguments: dict[str, Any], words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        series.bench(**({"output": "results"} | arguments))
    assert not list(tmp_path.iterdir())
