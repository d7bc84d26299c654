"""What a run looks at before it begins: whether torch's threads wait for others, digits of positions and energies."""

import time
import warnings

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.probe import energy_fault
from dgm_infer.sampling.preflight import fitting_threads
from tests.models import Function
from tests.oracles import FLOAT


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def said(seconds):
    """Warnings where an evaluation takes so long by the number of threads, and the number in the block."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with fitting_threads("sample", lambda: time.sleep(seconds[torch.get_num_threads()])):
            inside = torch.get_num_threads()
    assert torch.get_num_threads() == 2
    return [str(each.message) for each in found], inside


def test_a_block_takes_one_thread_where_two_wait_for_other_programs(two_threads):
    (line,), inside = said({1: 0.01, 2: 0.1})
    assert "with 2 threads an evaluation takes" in line
    assert "this run takes one; for the same digits at any time, OMP_NUM_THREADS=1" in line
    assert inside == 1
    # what is fast, or as fast, or takes too long to try, stays as it is
    for seconds in ({1: 0.0, 2: 0.001}, {1: 0.02, 2: 0.02}, {1: 0.0, 2: 1.01}):
        assert said(seconds) == ([], 2)
    # so does what fails, which the run names
    assert said({}) == ([], 2)
    seconds, warns = {1: 0.01, 2: 0.1}, pytest.warns(dgm.diagnosis.DiagnosisWarning)
    fewer = fitting_threads("sample", lambda: time.sleep(seconds[torch.get_num_threads()]))
    with warns, pytest.raises(KeyError), fewer:
        raise KeyError
    assert torch.get_num_threads() == 2


def waits(x):
    time.sleep(0.02 if torch.get_num_threads() > 1 else 0.0)
    return 0.5 * x.square().sum(-1)


def test_a_run_takes_one_thread_from_its_start_and_draws_the_same(two_threads, tmp_path):
    def sampled(energy, **options):
        target = dgm.Target(energy, 2)
        kernel = dgm.HMC(n_steps=1, step_size=0.5, compile=False)
        return dgm.sample(target, kernel, chains=2, warmup=0, draws=2, seed=0, progress=False, **options)

    in_use = []

    def seen(x):
        in_use.append(torch.get_num_threads())
        return waits(x)

    with pytest.warns(dgm.diagnosis.DiagnosisWarning, match="other programs use the processor: this run takes one"):
        slow = sampled(seen)
    assert in_use[-4:] == [1] * 4
    assert torch.equal(slow.inputs, sampled(lambda x: 0.5 * x.square().sum(-1)).inputs)
    with pytest.warns(dgm.diagnosis.DiagnosisWarning, match="other programs use the processor: this run takes one"):
        kept = sampled(waits, run=tmp_path / "run")
    assert torch.equal(slow.inputs, kept.inputs)


def test_an_estimate_of_evidence_takes_one_thread_before_its_base_is_looked_for(two_threads, monkeypatch):
    in_use = []
    laplace = dgm.Gaussian.laplace

    def seen(target):
        in_use.append(torch.get_num_threads())
        return laplace(target)

    monkeypatch.setattr(dgm.Gaussian, "laplace", seen)
    with pytest.warns(dgm.diagnosis.DiagnosisWarning, match="log_evidence: with 2 threads .* this run takes one"):
        dgm.log_evidence(
            dgm.Target(waits, 2), method=dgm.evidence.ImportanceSampling(), chains=8, seed=0, progress=False
        )
    assert in_use == [1]


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


@pytest.mark.parametrize(
    "kernel",
    [dgm.HMC(), dgm.NUTS(), dgm.kernels.RandomWalk(), dgm.kernels.LinearSlice()],
    ids=lambda k: type(k).__name__,
)
def test_a_network_of_fewer_digits_than_its_energy_is_sampled_with_its_own(kernel):
    """An energy of 64 bits does not make positions of 64 bits, which the network does not take."""
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 300)
    target = dgm.Target(lambda x: 0.5 * network(x).double().square().sum(-1), 2)
    draws = dgm.sample(target, kernel, chains=64, warmup=60, draws=60, seed=1, progress=False)
    assert draws.inputs.dtype == torch.float32
    weight, bias = (p.detach().double() for p in (network.weight, network.bias))
    precision = weight.T @ weight
    standard = (draws.inputs.double() + torch.linalg.solve(precision, weight.T @ bias)) @ torch.linalg.cholesky(
        precision
    )
    assert standard.mean((0, 1)).abs().max() < 0.15
    assert (standard.std((0, 1)) - 1).abs().max() < 0.1


def test_rounding_of_32_bits_within_an_energy_of_64_is_no_dependence_on_other_points():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(20, 256), torch.nn.Tanh(), torch.nn.Linear(256, 784))
    x = torch.randn(16, 20, dtype=FLOAT)

    def energy(x, of_others=0.0):
        own = network(x.float()).double().square().sum(-1)
        return own * (1 + of_others * x.mean())

    assert energy_fault(dgm.Target(energy, 20), x, "") is None
    # the control
    coupled = dgm.Target(lambda x: energy(x, 1e-3), 20)
    assert "other points" in energy_fault(coupled, x, "")
