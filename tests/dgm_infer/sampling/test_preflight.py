"""What a run looks at before it begins: whether torch's threads wait for others."""

import time
import warnings

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.run import started
from dgm_infer.sampling.preflight import compare_threads
from tests.models import Function


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def said(seconds):
    """Warnings where an evaluation takes so long by the number of threads, and whether that number stays."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compare_threads("sample", lambda: time.sleep(seconds[torch.get_num_threads()]))
    assert torch.get_num_threads() == 2
    return [str(each.message) for each in found]


def test_threads_that_wait_for_other_programs_are_named(two_threads):
    (line,) = said({1: 0.01, 2: 0.1})
    assert "with 2 threads an evaluation takes" in line
    assert "torch.set_num_threads(1)" in line
    # what is fast, or as fast, or takes too long to try, is not remarked on
    for seconds in ({1: 0.0, 2: 0.001}, {1: 0.02, 2: 0.02}, {1: 0.0, 2: 1.01}):
        assert said(seconds) == []


def test_a_run_is_compared_where_it_starts_and_draws_the_same(two_threads):
    def waits(x):
        time.sleep(0.02 if torch.get_num_threads() > 1 else 0.0)
        return 0.5 * x.square().sum(-1)

    def sampled(energy):
        target = dgm.Target(energy, 2)
        kernel = dgm.HMC(n_steps=1, step_size=0.5, compile=False)
        return dgm.sample(target, kernel, chains=2, warmup=0, draws=2, seed=0, progress=False)

    with pytest.warns(dgm.diagnosis.DiagnosisWarning, match="other programs use the processor"):
        slow = sampled(waits)
    assert torch.equal(slow.inputs, sampled(lambda x: 0.5 * x.square().sum(-1)).inputs)


def test_an_estimate_of_evidence_is_compared_before_its_base_is_looked_for(two_threads):
    def waits(x):
        time.sleep(0.02 if torch.get_num_threads() > 1 else 0.0)
        return 0.5 * x.square().sum(-1)

    with pytest.warns(dgm.diagnosis.DiagnosisWarning, match="log_evidence: with 2 threads .* other programs use the"):
        started("log_evidence", dgm.Target(waits, 2), None)
    with pytest.warns(dgm.diagnosis.DiagnosisWarning, match="log_evidence: with 2 threads"):
        started("log_evidence", dgm.Target(waits, 2), dgm.Gaussian(torch.zeros(2), 1.0))


@pytest.mark.parametrize(
    ("function", "value", "inside"),
    [
        (lambda u: u[..., :1].clamp(max=2.2), 2.2, 2.0),
        (lambda u: (u[..., :1] + u[..., 1:]).clamp(max=3.0), 3.0, 2.9),
        (lambda u: u.sum(-1, keepdim=True).sigmoid(), 1.0, 0.9),
    ],
    ids=["clamped beyond prior draws", "clamped sum", "saturated"],
)
def test_a_value_that_all_inputs_around_give_is_an_event(function, value, inside):
    short = {"chains": 4, "warmup": 2, "draws": 2, "seed": 1, "progress": False}
    model, value = Function(function, 2), torch.tensor([value], dtype=torch.float64)
    with pytest.raises(
        dgm.errors.ObservationError, match="at all inputs around, too: a clamped, censored or saturated"
    ):
        dgm.sample(dgm.condition(model, value), **short)
    # the controls: a value that a surface gives, and one with noise
    dgm.sample(dgm.condition(model, [inside]), **short)
    dgm.sample(dgm.condition(model, value, noise=0.1), **short)
