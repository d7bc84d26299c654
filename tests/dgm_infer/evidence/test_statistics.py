"""Long runs: annealing is unbiased to a few thousandths, and intervals cover as often as they say."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence import annealing, smc
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.progress import Progress
from tests.known_evidence import known_bimodal, known_gaussian
from tests.mistakes import anneal_with_weights_after_the_move, systematic_without_chance

pytestmark = pytest.mark.slow


def mean_and_error(log_weights, log_z):
    """Mean of ``w/Z`` over all weights, one independent chain each, and its standard error."""
    ratio = (log_weights - log_z).exp().flatten()
    return ratio.mean(), ratio.std() / len(ratio) ** 0.5


# every problem tunes its plan on a pilot of its own; as many of them as an error of one or two thousandths takes
FROZEN = {
    "AIS": (dgm.AIS(100, n_steps=3, pilot_temperatures=25), 8, known_bimodal((16_000,)), 0.002),
    "Hamiltonian AIS": (dgm.evidence.HamiltonianAIS(200, pilot_temperatures=25), 8, known_bimodal((7_000,)), 0.002),
    "SMC": (
        dgm.SMC(8, schedule="barrier", temperatures=15, n_steps=2, threshold=0.8, pilot_temperatures=25),
        6,
        known_bimodal((10_000,)),
        0.002,
    ),
    "SMC, waste-free": (
        dgm.SMC(12, schedule="barrier", temperatures=10, n_steps=2, waste_free=3, pilot_temperatures=25),
        6,
        known_gaussian(3, (5_000,)),
        0.001,
    ),
}


def frozen(method, chains, known):
    settings = {"chains": chains, "seed": 0, "keep_draws": False, "coverage": False, "progress": False}
    estimate = dgm.log_evidence(known.target, known.base, method, **settings, chunk=20_000)
    # one Z-hat per run, the mean over its particles
    log_z = estimate.log_weights.logsumexp(1) - math.log(estimate.log_weights.shape[1])
    return mean_and_error(log_z, known.log_z)


@pytest.mark.parametrize(("method", "chains", "known", "largest_error"), FROZEN.values(), ids=FROZEN)
def test_frozen_methods_are_unbiased_to_a_few_thousandths(method, chains, known, largest_error):
    mean, error = frozen(method, chains, known)
    assert error <= largest_error
    assert (mean - 1).abs() <= 3 * error, f"{mean:.5f} +- {error:.5f}"


# a waste-free run is off by fifty standard errors of 1500 problems
@pytest.mark.parametrize(
    ("name", "known"),
    [("SMC", FROZEN["SMC"][2]), ("SMC, waste-free", known_gaussian(3, (500,)))],
    ids=["SMC", "SMC, waste-free"],
)
def test_control_resampling_with_a_planted_bias_is_noticed(monkeypatch, name, known):
    monkeypatch.setattr(smc, "systematic", systematic_without_chance)
    method, chains, _, _ = FROZEN[name]
    mean, error = frozen(method, chains, known)
    assert (mean - 1).abs() > 3 * error, f"{mean:.5f} +- {error:.5f}"


def test_control_adapting_inside_the_run_is_noticed():
    known = known_bimodal((60_000,))
    path = AnnealedPath(known.target, known.base)
    # a pilot's own weights: its step sizes follow the acceptance of the chains that they move
    rng = torch.Generator().manual_seed(0)
    pilot = dgm.AIS(n_steps=3, pilot_temperatures=100).pilot(path, 2, rng, Progress(False))
    mean, error = mean_and_error(pilot.log_weights, known.log_z)
    assert (mean - 1).abs() > 3 * error, f"{mean:.5f} +- {error:.5f}"


def test_control_weights_of_the_state_after_the_move_are_noticed(monkeypatch):
    monkeypatch.setattr(annealing, "anneal", anneal_with_weights_after_the_move)
    method, chains, _, _ = FROZEN["AIS"]
    mean, error = frozen(method, chains, known_bimodal((5_000,)))
    assert (mean - 1).abs() > 3 * error, f"{mean:.5f} +- {error:.5f}"


METHODS = {
    "AIS": dgm.AIS(),
    "AIS, barrier": dgm.AIS(schedule="barrier"),
    "Hamiltonian AIS": dgm.evidence.HamiltonianAIS(1000),
    "Gibbs tempering": dgm.GibbsTempering(),
    "continuous tempering": dgm.ContinuousTempering(),
    "simulated tempering": dgm.SimulatedTempering(),
    "path sampling": dgm.evidence.PathSampling(),
    "SMC": dgm.SMC(),
    "SMC, frozen": dgm.SMC(32, schedule="barrier", temperatures=30),
}
TARGETS = {"bimodal": lambda n: known_bimodal((n,)), "Gaussian": lambda n: known_gaussian(10, (n,))}


def coverage(estimate, log_z, *, widen=1.0):
    low, high = estimate.interval(0.95)
    middle, half = 0.5 * (low + high), 0.5 * widen * (high - low)
    return ((middle - half < log_z) & (log_z < middle + half)).double().mean().item()


# the two modes are the harder target, where schedules of AIS share its errors; on the easy one, the method whose
# errors are of dependent states
COVERED = [("bimodal", name) for name in METHODS if name != "AIS, barrier"] + [("Gaussian", "simulated tempering")]


@pytest.mark.parametrize(("target", "name"), COVERED, ids=[", ".join(names) for names in COVERED])
def test_intervals_cover_the_truth_as_often_as_they_say(target, name):
    # replicates in one batch, each with random numbers of its own; of 200 intervals that cover with probability 0.95
    # less than 0.90 do in 1e-3 of all runs, with 0.97, as most do here, in 1e-6
    known = TARGETS[target](200)
    estimate = dgm.log_evidence(known.target, known.base, METHODS[name], chains=16, seed=0, progress=False)
    assert coverage(estimate, known.log_z) >= 0.90
    # errors that are twice too large leave squares of about 1.15/4; 200 replicates know 1.15 to 0.13
    squares = ((estimate.log_z - known.log_z) / estimate.std_error).square().mean()
    assert squares > 0.5
    # controls: intervals half as wide cover too little, and errors twice as large are too large
    assert coverage(estimate, known.log_z, widen=0.5) < 0.90
    assert squares / 4 < 0.5


def test_intervals_of_both_directions_and_of_bennett_cover_the_truth():
    known = known_bimodal((200,))
    exact = known.draw(16, torch.Generator().manual_seed(3))
    bounds = dgm.bidirectional(known.target, known.base, exact, chains=16, seed=0, progress=False)
    for estimate in (bounds.lower, bounds.upper, bounds.combined):
        assert 0.90 <= coverage(estimate, known.log_z) <= 0.99, estimate.method
