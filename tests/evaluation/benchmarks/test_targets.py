"""The comparison of methods on the field's known targets."""

import json

import pytest

import dgm_infer as dgm
from evaluation.benchmarks import targets
from evaluation.benchmarks.targets import targets_table


def test_every_method_is_compared_on_every_target(tmp_path):
    path = targets.bench(fast=True, chains=4, runs=2, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert list(record["targets"]) == ["funnel-10", "seeds"]
    funnel, seeds = record["targets"].values()
    assert list(funnel["methods"]) == ["AIS", "Gibbs tempering"]
    for run in funnel["methods"]["AIS"]:
        assert run["error"] == pytest.approx(run["log_z"] - funnel["log_z"])
        assert run["gradient_evaluations"] > 0
    # runs have seeds of their own
    first, second = funnel["methods"]["AIS"]
    assert first["log_z"] != second["log_z"]
    # exact draws, and so bounds, there are of the funnel alone
    assert set(funnel["bounds"]) >= {"lower", "upper", "combined"}
    assert "bounds" not in seeds
    assert seeds["methods"]["AIS"][0]["error"] is None
    assert (tmp_path / "targets.md").read_text() == targets.page(record)


def test_what_was_measured_with_the_same_settings_is_kept(tmp_path, monkeypatch):
    def bench(runs: int, chains: int = 2) -> dict:
        options = {"fast": True, "chains": chains, "output": str(tmp_path)}
        return json.loads(targets.bench(targets="seeds", runs=runs, **options).read_text())["targets"]["seeds"]

    first, whole, seeds = bench(1), targets._run, []

    def counted(known, base, method, chains, seed):
        seeds.append(seed)
        return whole(known, base, method, chains, seed)

    monkeypatch.setattr(targets, "_run", counted)
    assert bench(1)["methods"] == first["methods"]
    assert seeds == []
    more = bench(2)
    # of both methods the second run alone
    assert seeds == [1, 1]
    assert [runs[0] for runs in more["methods"].values()] == [runs[0] for runs in first["methods"].values()]
    bench(1, chains=3)
    assert seeds == [1, 1, 0, 0]


def test_a_method_that_fails_is_a_row_of_the_table(tmp_path, monkeypatch):
    def fails(*arguments, **options):
        raise dgm.errors.EvidenceError("no chain visited this")

    monkeypatch.setattr(targets.dgm, "log_evidence", fails)
    path = targets.bench(targets="seeds", fast=True, chains=2, runs=1, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert record["targets"]["seeds"]["methods"]["AIS"] == [{"seed": 0, "failed": "no chain visited this"}]
    assert "| failed |" in targets_table(record)
    assert "- AIS: no chain visited this" in (tmp_path / "targets.md").read_text()


def run(error: float, covered: bool, *warnings: str) -> dict:
    return {"error": error, "std_error": 0.1, "covered": covered, "warnings": list(warnings), "log_z": error}


def table_of(*runs: dict) -> str:
    entry = {"dim": 2, "log_z": 0.0, "methods": {"AIS": list(runs)}}
    return targets_table({"targets": {"one": entry}}).splitlines()[-1]


def test_a_cell_says_how_large_the_error_is_and_whether_it_was_claimed():
    assert table_of(run(0.3, True), run(-0.4, True)) == "| one | 2 | 0.00 | 0.35 (0.10) |"
    assert table_of(run(0.3, False), run(-0.4, False)) == "| one | 2 | 0.00 | **0.35 (0.10)** |"
    assert table_of(run(0.3, False), run(-0.4, True, "few")) == "| one | 2 | 0.00 | 0.35 (0.10)* |"


def test_bad_options_are_named(tmp_path):
    for options in ({"chains": 1}, {"runs": 0}, {"seed": -1}, {"targets": "funnel"}):
        with pytest.raises(dgm.errors.ConfigError, match=next(iter(options))):
            targets.bench(**options, output=str(tmp_path))
