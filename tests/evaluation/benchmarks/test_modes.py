"""The comparison of methods on targets with many modes."""

import json

import pytest

import dgm_infer as dgm
from evaluation.benchmarks import modes

SHORT = {
    "simulated tempering": (dgm.SimulatedTempering(draws=10, warmup=2, pilot_temperatures=10), 4),
    "parallel tempering": (dgm.ParallelTempering(draws=8, temperatures=3, pilot_temperatures=10), 4),
}


def quick(machine):
    return {"full fit": dgm.Gaussian.fit(machine, kind="full", steps=20, dtype=dgm.modes(machine).positions.dtype)}


def test_every_method_is_compared_from_every_base(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "_METHODS", SHORT)
    monkeypatch.setattr(modes, "_bases", quick)
    path = modes.bench(systems=2, units=4, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert list(record["rows"]) == ["simulated tempering; full fit", "parallel tempering; full fit"]
    for row in record["rows"].values():
        errors = [run["error"] for run in row["runs"]]
        assert row["rmse"] == pytest.approx((sum(e * e for e in errors) / 2) ** 0.5)
        assert row["largest"] == max(map(abs, errors))
    assert (tmp_path / "modes.md").read_text() == modes.page(record)


def test_bad_options_are_named(tmp_path):
    for options in ({"systems": 1}, {"units": 1}, {"seed": -1}):
        with pytest.raises(dgm.ConfigError, match=next(iter(options))):
            modes.bench(**options, output=str(tmp_path))
