"""The published figure of the IWAE, as ``dgm-infer reproduce iwae`` draws it."""

import json

import pytest

from dgm_infer.errors import ConfigError
from evaluation.commands.reproduce import reproduce
from evaluation.experiments import EXPERIMENTS, iwae
from tests.files import reference_folder


def test_it_is_one_of_the_experiments():
    assert "iwae" in EXPERIMENTS


@pytest.mark.parametrize("given", [False, True])
def test_without_the_model_one_line_names_the_option_and_nothing_is_written(tmp_path, given):
    with pytest.raises(ConfigError) as caught:
        iwae.run(tmp_path, fast=True, data=tmp_path if given else None, seed=1)
    assert "--data" in str(caught.value)
    assert "iwae_mnist" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_fast_run_has_its_bounds_in_order_and_its_methods_between_them(tmp_path):
    run = reproduce("iwae", fast=True, data=str(reference_folder("iwae_mnist")), output=str(tmp_path))
    assert {path.name for path in run.iterdir()} == {
        "evidence.png",
        "config.yaml",
        "results.json",
        "log.txt",
        "report.html",
    }
    record = json.loads((run / "results.json").read_text())
    results = record["results"]
    both = results["bidirectional"]
    lower, upper = both["lower"], both["upper"]
    error = (lower["mean_error"] ** 2 + upper["mean_error"] ** 2) ** 0.5
    assert upper["mean"] > lower["mean"] - 5 * error
    assert results["bounds"]["ELBO"]["mean"] < results["bounds"]["IWAE-50"]["mean"] < both["Bennett"]["mean"]
    for method in results["methods"].values():
        last = method[-1]
        assert last["length"] == 100
        assert abs(last["mean"] - both["Bennett"]["mean"]) < 5 * (last["mean_error"] + both["Bennett"]["mean_error"])
    # which the bounds far from it do not
    elbo = results["bounds"]["ELBO"]
    assert abs(elbo["mean"] - both["Bennett"]["mean"]) > 5 * (elbo["mean_error"] + both["Bennett"]["mean_error"])
