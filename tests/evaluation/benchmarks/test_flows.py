"""Flows given part of an image: what is measured, and the page."""

import json

import pytest
import torch

from dgm_infer.errors import ConfigError
from evaluation.benchmarks import flows
from evaluation.benchmarks.flows import PROBLEMS, Problem, bench, cost
from trainers import DigitsData


def test_costs_rise_with_steps_and_pixels():
    few, many = cost("digits_flow", 1, 2, 2), cost("digits_flow", 8, 32, 2)
    assert 0 < few["gradient"] < many["gradient"]
    assert 0 < few["jacobian"] < many["jacobian"]


def test_problems_observe_what_they_say():
    counts = {name: int(problem.mask(problem.data.output_shape).sum()) for name, problem in PROBLEMS.items()}
    assert counts == {"digits": 32, "pixels": 64, "noise": 392, "latent": 392}


@pytest.mark.slow
def test_the_page_has_a_line_per_problem(monkeypatch, tmp_path, capsys):
    def one(shape):
        return torch.arange(64).reshape(shape) == 27

    monkeypatch.setattr(flows, "PROBLEMS", {"tiny": Problem("one pixel", "digits_flow", DigitsData, one)})
    monkeypatch.setattr(flows, "_COSTS", (("digits_flow", (1,), (2,)),))
    path = bench("tiny", image=0, chains=2, draws=8, warmup=5, output=str(tmp_path))
    row = json.loads(path.read_text())["problems"]["tiny"]
    assert row["constraint_error"] < 1e-8
    assert row["draws"] == 8
    assert row["seconds"] > 0
    text = (tmp_path / "flows.md").read_text()
    assert "| one pixel | ConstrainedHMC | 2 x 8 |" in text
    assert "| digits_flow, 1 steps, 2 pixels |" in text
    assert "results in" in capsys.readouterr().out


def test_a_problem_that_is_not_known_is_named(tmp_path):
    with pytest.raises(ConfigError, match="problems: 'face' is not one of digits, pixels"):
        bench("face", output=str(tmp_path))
