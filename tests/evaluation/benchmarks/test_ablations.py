"""What heuristics bring: switches that are off inside their context alone, and the table of runs with and without."""

import json
import math

import pytest
import torch

import dgm_infer as dgm
from evaluation.benchmarks import ablations, switches


def test_problems_are_run_with_everything_on_and_with_one_switch_off(tmp_path):
    path = ablations.bench("jumps", "folded", "1,2", chains=4, draws=20, output=str(tmp_path))
    record = json.loads(path.read_text())
    named = [(row["switch"], row["seed"]) for row in record["rows"]]
    assert named == [(name, seed) for seed in (1, 2) for name in (ablations._ON, "jumps")]
    assert all(row["rate"] > 0 and row["seconds"] > 0 and 0 <= row["error"] < 1 for row in record["rows"])
    assert (tmp_path / "ablations.md").read_text() == ablations.page(record)


def test_a_run_that_takes_too_long_or_fails_is_a_row(monkeypatch):
    def hangs(seed, chains, draws):
        while True:
            torch.ones(1000).sum()

    def fails(seed, chains, draws):
        raise dgm.errors.StartError("no starting points: look elsewhere")

    for measure, text in ((hangs, "no result in 0.1 s"), (fails, "no starting points")):
        row = ablations._run(ablations.Problem("sampling", "", measure), ablations.nullcontext(), 0, 2, 2, 0.1)
        assert row["failed"]
        assert row["findings"] == [text]
    # in a table beside others
    rows = [{"problem": "folded", "switch": ablations._ON, "seed": 1, **row}]
    rows.append({**rows[0], "switch": "jumps", "rate": 2.0, "r_hat": math.nan, "failed": False, "findings": []})
    assert "| 1 | no starting points |" in ablations._table(rows)


def test_switches_are_off_in_their_contexts_alone():
    run = ablations.PROBLEMS["folded"].measure
    before = run(1, 4, 20)
    for each in switches.SWITCHES.values():
        with each.off():
            pass
    after = run(1, 4, 20)
    # the same draws as before
    assert {**before, "seconds": 0, "rate": 0} == {**after, "seconds": 0, "rate": 0}


def test_bad_options_are_named(tmp_path):
    for options in ({"switches": "x"}, {"problems": "x"}, {"seeds": "one"}, {"chains": 1}, {"seconds": 0.0}):
        with pytest.raises(dgm.errors.ConfigError, match=next(iter(options))):
            ablations.bench(**options, output=str(tmp_path))
