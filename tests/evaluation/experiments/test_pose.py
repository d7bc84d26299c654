"""The pose experiment, as ``dgm-infer reproduce pose`` runs it."""

import json

import pytest

from dgm_infer.errors import ConfigError
from evaluation.experiments import pose
from tests.files import reference_folder


@pytest.mark.parametrize("given", [False, True])
def test_without_the_files_one_line_says_where_they_are_published(tmp_path, given):
    with pytest.raises(ConfigError) as caught:
        pose.run(tmp_path, fast=True, data=tmp_path if given else None, seed=1)
    assert "--data" in str(caught.value)
    assert "matt-graham/differentiable-generative-models" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_fast_run_writes_pictures_and_errors_against_time(tmp_path):
    results = pose.run(tmp_path, fast=True, data=reference_folder("pose"), seed=1)
    assert {path.name for path in tmp_path.iterdir()} == {"error.png", "monocular.png"}
    json.dumps(results)
    start = sum(results["binocular"].pop("start")) / 2
    for result in results["binocular"].values():
        assert result["seconds"] == sorted(result["seconds"])
        assert len(result["rmse"]) == len(result["seconds"])
    constrained = results["binocular"]["constrained HMC"]
    assert sum(constrained["rmse"][-1]) / 2 < start
