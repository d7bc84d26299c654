"""Path sampling: the truth from parts of the path, its relation to tempering, and mistakes."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.tempering import continuous
from tests.findings import honest
from tests.known_evidence import known_bimodal, known_gaussian, known_linear_gaussian
from tests.oracles import FLOAT
from tests.quick import cases


def run(known, method, **settings):
    return dgm.log_evidence(known.target, known.base, method, **{"chains": 64, "seed": 1, "progress": False} | settings)


def off(estimate, known):
    return ((estimate.log_z - estimate.bias - known.log_z) / estimate.std_error).abs().max()


TARGETS = {
    "gaussian": lambda: known_gaussian(10, (3,)),
    "bimodal": lambda: known_bimodal((3,)),
    "linear Gaussian": known_linear_gaussian,
}


CASES = {f"{name}, 10": (name, 10) for name in TARGETS} | {f"gaussian, {n}": ("gaussian", n) for n in (2, 40)}


@pytest.mark.parametrize(("name", "parts"), cases(CASES, quick=()))
def test_any_number_of_parts_gives_the_truth(name, parts):
    known = TARGETS[name]()
    # the method's own error, without what a cross-check may add
    estimate = run(known, dgm.evidence.PathSampling(parts=parts), coverage=False)
    assert off(estimate, known) <= 3
    assert estimate.std_error.max() < 0.05
    assert estimate.status == "consistent"
    assert estimate.diagnostics["mean_difference"].shape == (parts, 3)


@pytest.mark.slow
def test_chains_in_the_joint_space_will_do():
    known = known_gaussian(10, (3,))
    assert off(run(known, dgm.evidence.PathSampling(dgm.ContinuousTempering())), known) <= 3


# A third of the gradients: enough for equalities, and for what is wrong by dozens of standard errors.
SHORT = {"draws": 100, "warmup": 50, "pilot_temperatures": 50}


@pytest.mark.slow
def test_one_part_is_the_estimate_of_tempering():
    known, method = known_gaussian(10, (3,)), dgm.GibbsTempering(**SHORT)
    whole, tempered = run(known, dgm.evidence.PathSampling(method, parts=1)), run(known, method)
    for value in ("log_z", "std_error", "bias"):
        torch.testing.assert_close(getattr(whole, value), getattr(tempered, value))
    parts = run(known, dgm.evidence.PathSampling(method))
    torch.testing.assert_close(parts.diagnostics["tempering_log_z"], tempered.log_z)
    assert not torch.allclose(parts.log_z, tempered.log_z)
    torch.testing.assert_close(parts.draws, tempered.draws)


@pytest.mark.slow
def test_the_mean_difference_falls_along_the_path_and_integrates_to_log_z():
    known = known_gaussian(10)
    estimate = run(known, dgm.evidence.PathSampling(parts=20))
    means = estimate.diagnostics["mean_difference"]
    # by the convexity of log Z(beta)
    assert means[0] > means[10] > means[-1]
    # what is left is the error of a quadrature of 20 parts
    assert abs(-means.mean() - known.log_z) < 0.1


def test_control_the_weights_of_the_whole_path_in_every_part_are_noticed(monkeypatch):
    right = continuous.log_weights_at_ends
    monkeypatch.setattr(continuous, "log_weights_at_ends", lambda delta: right(10 * delta))
    known = known_gaussian(10, (3,))
    assert off(run(known, dgm.evidence.PathSampling(dgm.GibbsTempering(log_zeta=-5.0, **SHORT))), known) > 5


def test_control_states_with_the_temperatures_of_others_are_noticed(monkeypatch):
    right = continuous._integral

    def mixed_up(record, parts):
        record.beta = record.beta.roll(50, 1)
        return right(record, parts)

    monkeypatch.setattr(continuous, "_integral", mixed_up)
    known = known_gaussian(10, (3,))
    # a guess that is off keeps chains at one end: a mean over states is then no mean over temperatures
    assert off(run(known, dgm.evidence.PathSampling(dgm.GibbsTempering(log_zeta=-6.0, **SHORT))), known) > 5


def test_parts_that_no_chain_visits_are_named():
    known = known_gaussian(2)
    method = dgm.evidence.PathSampling(dgm.GibbsTempering(draws=3, warmup=0, pilot_temperatures=5), 1000)
    with pytest.raises(dgm.errors.EvidenceError, match=r"parts=1000\): no chain visited temperatures between"):
        run(known, method, chains=2)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_problem_whose_chains_stay_at_one_end_leaves_those_of_the_others():
    """A guess of log Z that is off by 10 000 keeps those of the second problem at the target's end."""
    shift = torch.tensor([0.0, 1e4], dtype=FLOAT)
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1) - shift, 1, (2,))
    base = dgm.Gaussian(torch.zeros(2, 1, dtype=FLOAT), 1.2)
    gibbs = dgm.GibbsTempering(draws=20, warmup=5, pilot_temperatures=10, log_zeta=0.9)
    simulated = dgm.SimulatedTempering(draws=20, warmup=5, temperatures=4, pilot_temperatures=10, log_zeta=0.9)
    for method in (dgm.evidence.PathSampling(gibbs, 4), dgm.evidence.ImportanceTempering(simulated)):
        estimate = dgm.log_evidence(target, base, method, chains=8, seed=1, coverage=False, progress=False)
        assert estimate.std_error[0] < 0.5
        assert (estimate.log_z[0] - 0.5 * math.log(2 * math.pi)).abs() < 5 * estimate.std_error[0]
        assert estimate.std_error[1] == math.inf
        assert any(found.problems == (1,) and "standard error" in found.what for found in estimate.diagnose())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": 0}, r"PathSampling\(parts=0\): must be an integer >= 1"),
        ({"tempering": dgm.AIS()}, "must be a GibbsTempering or a ContinuousTempering"),
        ({"tempering": dgm.SimulatedTempering()}, "whose temperatures are continuous"),
        ({"tempering": "Gibbs"}, "tempering='Gibbs'"),
    ],
)
def test_bad_arguments_are_named(settings, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        dgm.evidence.PathSampling(**settings)


@honest
def test_values_that_are_not_visited_by_a_chain_make_no_error_of_zero():
    known = known_gaussian(2)
    short = dgm.evidence.PathSampling(dgm.GibbsTempering(draws=10, warmup=5, pilot_temperatures=10), parts=4)
    with pytest.warns(UserWarning, match="standard error of log Z is inf"):
        estimate = run(known, short, chains=2)
    assert estimate.std_error > 0
    assert estimate.log_z.dtype == FLOAT
