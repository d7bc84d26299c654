"""The comparison of all methods of estimating evidence."""

import json

import pytest

import dgm_infer as dgm
from evaluation.benchmarks import methods
from tests.findings import honest

SHORT = {
    "ELBO": dgm.Elbo(samples=10),
    "AIS": dgm.AIS(temperatures=10, n_steps=1, pilot_temperatures=10),
    "Gibbs tempering": dgm.GibbsTempering(draws=10, warmup=2, n_steps=1, pilot_temperatures=10),
}


@honest
def test_every_method_is_compared_on_every_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(methods, "METHODS", SHORT)
    monkeypatch.delenv("DGM_INFER_REFERENCE_DATA", raising=False)
    path = methods.bench(chains=4, images=2, runs=2, seed=3, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert set(record["experiments"]) == {"digits", "boltzmann 0", "boltzmann 3"}
    for experiment in record["experiments"].values():
        assert set(experiment["methods"]) == set(SHORT)
    annealing = record["experiments"]["boltzmann 0"]["methods"]["AIS"]
    # what a run of more chains takes, by the error against the truth
    expected = annealing["gradient_evaluations"] * (annealing["deviation"] / 0.05) ** 2
    assert annealing["to_error"] == pytest.approx(expected)
    assert record["experiments"]["digits"]["methods"]["ELBO"]["to_error"] is None
    text = (tmp_path / "methods.md").read_text()
    assert "| ELBO | a bound | a bound | a bound |" in text
    assert record["command"] in text
    assert text == methods.table(record)
    assert "boltzmann 3: Gibbs tempering" in capsys.readouterr().out


def test_a_quarter_of_the_error_takes_sixteen_times_the_gradients():
    assert methods.evaluations_to_error(1000, 0.2) == pytest.approx(16_000)


def test_all_public_methods_are_compared():
    compared = {type(method) for method in methods.METHODS.values()}
    public = {getattr(dgm.evidence, name) for name in dgm.evidence.__all__}
    every = {kind for kind in public if isinstance(kind, type) and {"status", "run"} <= set(dir(kind))}
    # the protocol itself is public too
    assert every - {dgm.evidence.Method} <= compared


@pytest.mark.parametrize(
    ("options", "message"),
    [({"chains": 1}, "chains: 1"), ({"runs": 1}, "runs: 1"), ({"seed": -1}, "seed: -1"), ({"data": "/none"}, "data:")],
)
def test_bad_options_are_named(options, message, tmp_path):
    with pytest.raises(dgm.errors.ConfigError, match=message):
        methods.bench(**options, output=str(tmp_path))
