"""Importance tempering beside simulated and parallel tempering on the same ladder."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.tempering import simulated
from dgm_infer.evidence.tempering.temperatures import ListedLadder
from tests.known_evidence import known_gaussian
from tests.oracles import FLOAT

LADDERS = {
    "listed": dgm.SimulatedTempering(temperatures=8, schedule="sigmoid", draws=100, warmup=20),
    "even": dgm.SimulatedTempering(temperatures=8, draws=100, warmup=20),
}


def run(method, problems=(4,), chains=64, seed=1):
    known = known_gaussian(3, problems)
    return known, dgm.log_evidence(
        known.target, known.base, method, chains=chains, seed=seed, coverage=False, progress=False
    )


def standard_errors_off(known, estimate):
    return ((estimate.log_z - known.log_z) / estimate.std_error).abs()


def test_a_ladder_knows_the_prior_weights_of_their_temperatures():
    h = torch.tensor([[0.0, 0.0], [1.0, -2.0], [4.0, 3.0]], dtype=FLOAT)
    beta = (torch.arange(9) / 8).reshape(3, 3, 1).expand(3, 3, 2)
    known = torch.stack(
        [h[0] + (h[1] - h[0]) * k / 3 if k < 3 else h[1] + (h[2] - h[1]) * (k - 3) / 5 for k in range(9)]
    )
    listed = ListedLadder(torch.arange(9, dtype=FLOAT) / 8, known)
    torch.testing.assert_close(listed.log_prior(beta), known.reshape(3, 3, 2))


@pytest.mark.parametrize("shares", ["ess", "equal"])
@pytest.mark.parametrize("ladder", sorted(LADDERS))
def test_log_z_and_moments_of_a_gaussian(ladder, shares):
    known, estimate = run(dgm.evidence.ImportanceTempering(LADDERS[ladder], shares))
    assert standard_errors_off(known, estimate).max() <= 5
    mean = estimate.expectation(lambda x: x)
    assert ((mean.value - known.target.parts[1][0]) / mean.std_error).abs().max() <= 5


def test_control_weights_without_the_temperatures_prior_are_noticed(monkeypatch):
    recorded = dgm.SimulatedTempering.recorded

    def without(self, path, chains, rng, progress):
        record, spent = recorded(self, path, chains, rng, progress)
        own = record.log_prior
        assert own is not None
        record.log_prior = lambda beta: torch.where(beta == 1, own(beta), 0.0)
        return record, spent

    _, right = run(dgm.evidence.ImportanceTempering(LADDERS["listed"], "equal"))
    monkeypatch.setattr(simulated.SimulatedTempering, "recorded", without)
    known, estimate = run(dgm.evidence.ImportanceTempering(LADDERS["listed"], "equal"))
    assert ((estimate.log_z - known.log_z) / right.std_error).abs().max() > 5
    # the average over the temperature, from the same states, tells of it
    assert standard_errors_off(known, estimate).max() <= 5


def test_an_average_over_the_temperature_has_the_smaller_error_and_parallel_tempering_agrees():
    ladder = LADDERS["listed"]
    known, drawn = run(dgm.evidence.ImportanceTempering(ladder), problems=(16,))
    # the same chains, averaged over the temperature
    _, averaged = run(ladder, problems=(16,))
    torch.testing.assert_close(drawn.diagnostics["tempering_log_z"], averaged.log_z)
    _, naive = run(dgm.evidence.ImportanceTempering(ladder, "equal"), problems=(16,))
    _, parallel = run(dgm.ParallelTempering(temperatures=8, draws=32, broad=False), problems=(16,), chains=16)
    errors = [estimate.std_error.square().mean().sqrt() for estimate in (averaged, drawn, naive)]
    assert errors[0] < errors[1]
    assert errors[0] < errors[2]
    for estimate in (drawn, averaged, naive, parallel):
        assert standard_errors_off(known, estimate).max() <= 5


def test_arguments_are_checked():
    with pytest.raises(dgm.errors.ArgumentError, match="shares='best'"):
        dgm.evidence.ImportanceTempering(shares="best")
    with pytest.raises(dgm.errors.ArgumentError, match="must be a SimulatedTempering"):
        dgm.evidence.ImportanceTempering(dgm.GibbsTempering())
    with pytest.raises(dgm.errors.ArgumentError, match="1000 temperatures"):
        dgm.evidence.ImportanceTempering(dgm.SimulatedTempering(temperatures=1000))
