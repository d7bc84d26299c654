"""The comparison of samplers on targets with many modes."""

import json
import warnings
from functools import partial

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.diagnosis import DiagnosisWarning
from evaluation.benchmarks import multimodal
from evaluation.problems.boltzmann import BoltzmannRelaxation, random_system


def test_every_sampler_is_compared_with_the_truth(tmp_path, monkeypatch):
    samplers = {
        "HMC": multimodal._by(dgm.HMC(), 60),
        "ModeJumps": multimodal._by(dgm.ModeJumps(), 60),
        "parallel tempering": multimodal._tempered(20),
    }
    monkeypatch.setattr(multimodal, "_SAMPLERS", samplers)
    monkeypatch.setattr(dgm, "sample", partial(dgm.sample, warmup=40))
    path = multimodal.bench(systems=2, units=5, runs=2, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert list(record["rows"]) == list(samplers)
    for row in record["rows"].values():
        errors = [run["mean"] for run in row["runs"]]
        assert [run["system"] for run in row["runs"]] == [0, 0, 1, 1]
        assert row["mean"] == pytest.approx((sum(e * e for e in errors) / 4) ** 0.5)
        assert row["largest"] == max(errors) >= row["largest_unwarned"]
    assert (tmp_path / "multimodal.md").read_text() == multimodal.page(record)


def test_bad_options_are_named(tmp_path):
    for options in ({"systems": 1}, {"units": 1}, {"runs": 0}, {"seed": -1}):
        with pytest.raises(dgm.errors.ConfigError, match=next(iter(options))):
            multimodal.bench(**options, output=str(tmp_path))


def test_chains_that_jump_have_the_moments_of_a_machine_of_many_modes():
    machine = BoltzmannRelaxation(*random_system(16, 0))
    truth = machine.exact()

    def run(kernel):
        draws = dgm.sample(machine, kernel, chains=16, warmup=100, draws=500, seed=1, progress=False)
        mean = draws.inputs.double().mean((0, 1))
        return draws, ((mean - truth.mean) / truth.covariance.diagonal().sqrt()).abs().max()

    assert run(dgm.ModeJumps())[1] < 0.1
    # control: most chains of HMC stay in the modes that they begin in, which is said
    with warnings.catch_warnings():
        # whether groups of them never overlap is chance
        warnings.simplefilter("ignore", DiagnosisWarning)
        draws, error = run(dgm.HMC())
    assert error > 0.12
    assert "R-hat" in str(draws.diagnose()) or "never overlap" in str(draws.diagnose())


def test_the_numbers_of_a_run_are_errors_of_what_it_found():
    machine = BoltzmannRelaxation(*random_system(4, 0))
    truth = machine.exact()
    sd = truth.covariance.diagonal().sqrt()

    def exact(_, seed):
        return multimodal.Found(truth.mean + seed * sd, (1 + seed) * truth.covariance, 1.2 if seed else None)

    right, wrong = (multimodal._run(machine, truth, exact, seed) for seed in (0, 1))
    assert (right["mean"], right["covariance"], right["warned"]) == (0.0, 0.0, False)
    assert wrong["mean"] == pytest.approx(1)
    assert wrong["covariance"] == pytest.approx(1)
    assert wrong["warned"]
    assert torch.isfinite(sd).all()
