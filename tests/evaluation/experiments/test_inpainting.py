"""In-painting of MNIST digits, as ``dgm-infer reproduce inpainting`` runs it."""

import json

import pytest

from dgm_infer.errors import ConfigError
from evaluation.experiments import inpainting
from tests.files import reference_folder


@pytest.mark.parametrize("given", [False, True])
def test_without_the_digits_one_line_names_the_option_and_nothing_is_written(tmp_path, given):
    with pytest.raises(ConfigError) as caught:
        inpainting.run(tmp_path, fast=True, data=tmp_path if given else None, seed=1)
    assert "--data" in str(caught.value)
    assert "mnist_10k" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_fast_run_conditions_exactly_and_names_what_has_not_mixed(tmp_path):
    results = inpainting.run(tmp_path, fast=True, data=reference_folder("mnist_10k"), seed=1)
    assert {path.name for path in tmp_path.iterdir()} == {"completions.png", "traces.png"}
    assert results["constraint_error"] <= 1e-8
    assert len(results["r_hat"]) == 100
    unmixed = {label: value for label, value in results["r_hat"].items() if not value <= 1.05}
    worst = sorted(unmixed, key=lambda label: -unmixed[label])[:5]
    assert all(label in results["summary"] for label in worst)
    assert len(unmixed) <= 5 or f"and {len(unmixed) - 5} more" in results["summary"]
    assert results["share_mixed"] == pytest.approx(1 - len(unmixed) / 100)
    json.dumps(results)
