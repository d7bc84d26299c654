"""The comparison of samplers of simulators within a tolerance."""

import json

import pytest

import dgm_infer as dgm
from evaluation.benchmarks import samplers

SHORT = {name: samplers._SAMPLERS[name] for name in ("RandomWalk", "HMC")}


def test_every_sampler_is_run_where_it_applies(tmp_path, monkeypatch):
    monkeypatch.setattr(samplers, "_SAMPLERS", SHORT)
    monkeypatch.setattr(samplers, "_problems", lambda: [(2, 0.3, "gaussian"), (4, 0.3, "uniform")])
    path = samplers.bench(chains=2, warmup=2, draws=20, output=str(tmp_path))
    record = json.loads(path.read_text())
    named = [(row["sampler"], row["inputs"]) for row in record["rows"]]
    assert named == [("RandomWalk", 2), ("HMC", 2), ("RandomWalk", 4)]
    for row in record["rows"]:
        # one evaluation for every transition of every walk, and some before
        assert row["points"] >= 2 * 22 * (10 if row["sampler"] == "RandomWalk" else 1)
        assert row["ess_per_thousand"] == pytest.approx(1000 * row["ess"] / row["points"])
    assert (tmp_path / "samplers.md").read_text() == samplers.page(record)


def test_tolerances_inputs_and_smoothness_vary_one_at_a_time():
    assert len(set(samplers._problems())) == 10
    assert all((n == 2) or (tolerance, kernel) == (0.1, "gaussian") for n, tolerance, kernel in samplers._problems())


def test_the_best_of_a_column_is_that_of_the_chains_that_mixed():
    def row(sampler, rate, r_hat):
        rates = {"ess_per_second": rate, "ess_per_thousand": rate}
        return {"sampler": sampler, "inputs": 2, "tolerance": 0.1, "kernel": "gaussian", "max_r_hat": r_hat, **rates}

    rows = [row("a", 1.0, 1.01), row("b", 2.0, 1.02), row("c", 9.0, 1.2), row("d", None, None)]
    text = samplers.tables({"rows": rows})
    for line in ("| a | 1 |", "| b | **2** |", "| c | (9) |", "| d | - |"):
        assert line in text


def test_bad_options_are_named(tmp_path):
    for options in ({"chains": 1}, {"warmup": 0}, {"draws": 19}, {"seed": -1}):
        with pytest.raises(dgm.errors.ConfigError, match=next(iter(options))):
            samplers.bench(**options, output=str(tmp_path))
