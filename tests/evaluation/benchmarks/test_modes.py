"""The comparison of methods on targets with many modes."""

import json
import warnings

import pytest

import dgm_infer as dgm
from evaluation.benchmarks import modes
from evaluation.problems.boltzmann import BoltzmannRelaxation, published_system, random_system
from tests.files import reference_folder
from tests.findings import honest
from tests.oracles import FLOAT

SHORT = {
    "simulated tempering": (dgm.SimulatedTempering(draws=10, warmup=2, pilot_temperatures=10), 4),
    "parallel tempering": (dgm.ParallelTempering(draws=8, temperatures=3, pilot_temperatures=10), 4),
}


def quick(machine):
    start = dgm.Gaussian.standard(machine, FLOAT)
    return {"full fit": dgm.Gaussian.fit(machine, "full", start=start, steps=20)}


def test_every_method_is_compared_from_every_base(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "_METHODS", SHORT)
    monkeypatch.setattr(modes, "_bases", quick)
    path = modes.bench(systems=2, units=4, runs=2, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert list(record["rows"]) == ["simulated tempering; full fit", "parallel tempering; full fit"]
    for row in record["rows"].values():
        errors = [run["error"] for run in row["runs"]]
        assert [run["system"] for run in row["runs"]] == [0, 0, 1, 1]
        assert row["rmse"] == pytest.approx((sum(e * e for e in errors) / 4) ** 0.5)
        assert row["largest"] == max(map(abs, errors)) >= row["largest_unwarned"]
    assert (tmp_path / "modes.md").read_text() == modes.page(record)


def test_bad_options_are_named(tmp_path):
    for options in ({"systems": 1}, {"units": 1}, {"runs": 0}, {"seed": -1}):
        with pytest.raises(dgm.errors.ConfigError, match=next(iter(options))):
            modes.bench(**options, output=str(tmp_path))


# some modes are not visited at all, which is said too
@honest
@pytest.mark.slow
def test_modes_that_are_visited_too_rarely_are_named_and_widen_the_interval():
    machine = BoltzmannRelaxation(*random_system(16, 1))
    truth = machine.exact().log_z
    base = dgm.Gaussian.from_local_fits(machine, start=dgm.Gaussian.standard(machine, truth.dtype))
    method = dgm.SimulatedTempering()
    with pytest.warns(UserWarning, match=r"visit some modes too rarely.* method=dgm.ParallelTempering\(\)"):
        estimate = dgm.log_evidence(machine, base, method, chains=64, seed=1, progress=False)
    assert estimate.diagnostics["rare_shift"] > 0.5
    low, high = estimate.interval()
    assert low < truth < high
    # control: without the check the estimate is as wrong, and sure of itself
    unchecked = dgm.log_evidence(machine, base, method, chains=64, seed=1, coverage=False, progress=False)
    assert not unchecked.interval()[0] < truth < unchecked.interval()[1]
    # what log_evidence picks by itself is right, and has nothing to add
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default = dgm.log_evidence(machine, base, seed=1, progress=False)
    assert default.method == "ParallelTempering"
    assert (default.log_z - truth).abs() < 4 * default.std_error + 0.1


@pytest.mark.slow
def test_parallel_tempering_that_is_too_short_for_its_modes_says_so():
    machine, moments = published_system(reference_folder("boltzmann"), 0)
    base = dgm.Gaussian.from_local_fits(machine, start=dgm.Gaussian.standard(machine, moments.log_z.dtype))
    method = dgm.ParallelTempering(draws=32)
    with pytest.warns(UserWarning, match="restarts per chain reached it.* use more draws"):
        short = dgm.log_evidence(machine, base, method, seed=0, keep_draws=False, progress=False)
    assert moments.log_z - short.log_z > 3 * short.std_error
