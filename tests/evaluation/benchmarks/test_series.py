"""A noisy series sampled by several programs: its problems, and what is recorded of each."""

import json
from typing import Any

import pytest
import torch

from dgm_infer.errors import ConfigError
from evaluation.benchmarks import series
from evaluation.benchmarks.series_problems import SERIES, SeriesTask, run


@pytest.mark.parametrize("name", SERIES)
def test_the_generating_inputs_explain_the_data(name):
    problem = SERIES[name]
    u = problem.generating_inputs()
    misfit = (problem.observations() - problem.model().observed(u)) / problem.sd
    # chi squared with 100 degrees of freedom
    assert 60 < misfit.square().sum() < 150
    latents = problem.model().latents(u)
    torch.testing.assert_close(
        torch.stack([latents[f"z{i}"] for i in range(1, 5)]), torch.tensor(problem.parameters).double()
    )
    near = problem.starts(3, 0)
    torch.testing.assert_close(near, problem.starts(3, 0))
    assert 0.005 < (near - u).std() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["default", "nuts"])
def test_our_chains_begin_at_the_shared_starts_and_stay_at_typical_energies(kernel):
    made = run(SeriesTask("mild", kernel, 20.0, 2, 100, 1, 0), lambda line: None)
    assert made["z"].shape[::2] == (2, 4)
    assert made["last"].shape == (2, 104)
    # half of the squares of 104 inputs and 100 misfits, of which 104 are used up
    energy = SERIES["mild"].target().energy(torch.from_numpy(made["last"]))
    prior = SERIES["mild"].target().energy(SERIES["mild"].starts(2, 5))
    assert (energy - prior).abs().max() < 60


def test_a_peer_that_is_not_installed_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(series, "find_spec", lambda name: None)
    path = series.bench(
        problems="mild", methods="blackjax,numpyro", dtypes="float32,float64", cores=1, output=str(tmp_path)
    )
    rows = json.loads(path.read_text())["problems"]["mild"]["methods"]
    assert list(rows) == ["BlackJAX NUTS, float32", "BlackJAX NUTS", "NumPyro NUTS, float32", "NumPyro NUTS"]
    assert rows["NumPyro NUTS"]["left_out"] == "jax and numpyro not installed: pip install 'dgm-infer[bench]'"
    assert "- NumPyro NUTS: jax and numpyro not installed" in capsys.readouterr().out


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
