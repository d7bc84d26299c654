"""Continuous tempering: the law of the temperature, starts, diagnostics, refinement of a base."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.evidence.tempering.temperatures import draw_beta
from dgm_infer.evidence.tempering.tempering import base_check
from dgm_infer.kernels.integrators import PhasePoint
from tests.findings import honest
from tests.known_evidence import MixtureTarget, known_bimodal, known_gaussian, known_linear_gaussian
from tests.oracles import FLOAT
from tests.quick import cases

# runs as short as these may have no round trip, and say so
pytestmark = honest

METHODS = (dgm.GibbsTempering(), dgm.ContinuousTempering(), dgm.SimulatedTempering())


def run(known, method, **settings):
    return dgm.log_evidence(known.target, known.base, method, **{"seed": 2, "progress": False} | settings)


@pytest.mark.parametrize("delta", [-300.0, -5.0, -1e-3, 0.0, 1e-12, 0.5, 5.0, 300.0])
def test_temperatures_given_x_follow_the_truncated_exponential(delta):
    n = 200_000
    beta = draw_beta(torch.full((n,), delta, dtype=FLOAT), torch.Generator().manual_seed(0))
    assert beta.min() >= 0
    assert beta.max() <= 1

    def ks(rate):
        """Largest distance of the distribution functions, in units of ``1/sqrt(n)``."""
        b = beta.sort().values
        exact = (
            b
            if abs(rate) < 1e-9
            else torch.expm1(-rate * b) / math.expm1(-rate)
            if rate > -50
            else (torch.exp(rate * (1 - b)))
        )
        return (exact - (torch.arange(n, dtype=FLOAT) + 0.5) / n).abs().max() * n**0.5

    assert ks(delta) < 2.2
    # a rate of the other sign, or a tenth larger, is another law
    if abs(delta) > 0.4:
        assert ks(-delta) > 2.2
        assert ks(1.1 * delta) > 2.2


every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
# what the methods share is tested by one of them in the quick run
first_method = pytest.mark.parametrize(
    "method",
    cases({type(m).__name__: m for m in METHODS}, quick=(type(METHODS[0]).__name__,)),
)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_diagnostics_of_a_run_that_went_well(method):
    known = known_gaussian(10, (2, 3))
    estimate = run(known, method, chains=32)
    d = estimate.diagnostics
    assert d["base_moments_agree"].all()
    assert (d["base_moment_error"] < 0.15).all()
    assert (d["base_moment_z"] < 2.5).all()
    assert d["beta_occupancy"].shape == (10, 2, 3)
    torch.testing.assert_close(d["beta_occupancy"].sum(0), torch.ones(2, 3, dtype=FLOAT))
    assert (d["beta_occupancy"] > 0.02).all()
    assert (d["round_trips"] > 32).all()
    assert ((d["acceptance"] > 0.65) & (d["acceptance"] < 0.95)).all()
    assert ((d["log_zeta"] - known.log_z).abs() < 1).all()
    assert (d["max_weight_share"] < 0.05).all()
    kept = estimate.draws.shape
    assert kept == (32, method.draws, 2, 3, 10)
    expected = method.pilot_temperatures + 7 + method.warmup + method.draws
    assert d["gradient_evaluations"] == expected * method.n_steps + 1
    assert d["gradient_evaluations"] - d["pilot_evaluations"] == method.draws * method.n_steps


@pytest.mark.slow
def test_the_base_check_fires_when_chains_are_cut_short():
    # what is checked are the moments that all methods record alike
    method = METHODS[0]
    known = known_gaussian(50, (10,))
    # a wrong guess of log Z: the chains have far to go
    whole = run(known, method.replace(log_zeta=-7.0, draws=800), chains=16)
    assert whole.diagnostics["base_moments_agree"].double().mean() > 0.9
    with pytest.warns(UserWarning, match="no chain went from the base to the target and back"):
        cut = run(known, method.replace(log_zeta=-7.0, draws=5, warmup=20), chains=4)
    assert cut.diagnostics["base_moments_agree"].double().mean() < 0.1
    assert cut.diagnostics["base_moment_error"].mean() > 3 * whole.diagnostics["base_moment_error"].mean()


def test_the_base_check_fires_for_moments_of_something_else():
    v = torch.randn(16, 500, 3, 4, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    one = torch.full((16, 3), 500.0, dtype=FLOAT)

    def check(v):
        return base_check(v.sum(1), v.square().sum(1), one)

    right = check(v)
    assert right["base_moments_agree"].all()
    assert (right["base_moment_z"] < 2.5).all()
    for wrong in (v + 0.1, 1.1 * v, 0.9 * v):
        assert not check(wrong)["base_moments_agree"].any()


@pytest.mark.slow
def test_round_trips_are_few_when_a_guess_of_log_z_pins_the_chains():
    known = known_gaussian(10)
    free = run(known, dgm.GibbsTempering())
    pinned = run(known, dgm.GibbsTempering(log_zeta=-53.0))
    assert pinned.diagnostics["round_trips"] < 0.1 * free.diagnostics["round_trips"]
    assert pinned.diagnostics["beta_occupancy"][-1] > 0.9
    assert pinned.std_error > 2 * free.std_error


def test_the_guess_of_log_z_is_the_bases_own_a_number_importance_or_a_pilots():
    known = known_linear_gaussian()
    method = dgm.GibbsTempering(draws=5, warmup=0, pilot_temperatures=20)

    def guess(method, base=known.base):
        return dgm.log_evidence(known.target, base, method, seed=0, progress=False).diagnostics["log_zeta"]

    assert ((guess(method) - known.log_z).abs() < 1).all()
    assert ((guess(method.replace(log_zeta="importance")) - known.log_z).abs() < 1).all()
    assert guess(method.replace(log_zeta=2.5)).tolist() == [2.5] * 3
    assert guess(method.replace(log_zeta=torch.arange(3.0))).tolist() == [0, 1, 2]
    own = dgm.Gaussian(known.base.mean, known.base.covariance_diagonal.sqrt(), log_zeta=torch.arange(3.0))
    assert guess(method, own).tolist() == [0, 1, 2]


@first_method
def test_thinned_runs_keep_every_second_draw_and_use_all(method):
    known = known_gaussian(2)
    short = method.replace(draws=21, warmup=20)
    whole, thinned = run(known, short), run(known, short.replace(thin=2))
    torch.testing.assert_close(thinned.draws, whole.draws[:, 1::2])
    torch.testing.assert_close(thinned.log_weights, whole.log_weights[:, 1::2])
    torch.testing.assert_close(thinned.log_z, whole.log_z)


@pytest.mark.slow
def test_a_base_refined_by_a_pilot_makes_better_estimates():
    means = torch.tensor([[4.0] * 10], dtype=FLOAT)
    covariance = 0.05 * torch.eye(10, dtype=FLOAT)[None]
    target = MixtureTarget(torch.ones(1, dtype=FLOAT), means, covariance, 2.0)
    poor = dgm.Gaussian(torch.zeros(10, dtype=FLOAT), 2.0)
    method = dgm.GibbsTempering(draws=200, warmup=50)
    with pytest.warns(UserWarning, match="the estimate says nothing|log Z and std_error are unreliable"):
        pilot = dgm.log_evidence(target, poor, method, seed=3, progress=False)
    base = poor.refined(pilot.draws, pilot.log_weights, pilot.log_z, kind="full")
    again = dgm.log_evidence(target, base, method, seed=4, progress=False)
    torch.testing.assert_close(again.diagnostics["log_zeta"], pilot.log_z)
    assert abs(again.log_z - 2.0) <= 5 * again.std_error
    assert again.std_error < 0.25 * pilot.std_error


TREES = dgm.ContinuousTempering(draws=100, warmup=50, n_steps=3, nuts=15, pilot_temperatures=50)


def standard_errors_off(known, method=TREES):
    estimate = run(known, method, chains=64)
    return ((estimate.log_z - estimate.bias - known.log_z) / estimate.std_error).abs().max(), estimate


@pytest.mark.slow
def test_trajectories_that_end_where_they_turn_temper_too():
    off, estimate = standard_errors_off(known_gaussian(10, (3,)))
    assert off <= 3
    assert estimate.std_error.max() < 0.05
    d = estimate.diagnostics
    assert d["base_moments_agree"].all()
    assert (d["round_trips"] > 64).all()
    assert ((d["acceptance"] > 0.6) & (d["acceptance"] < 0.95)).all()
    # no more than 15 steps a state, and more than 3
    assert 3 * 100 < d["gradient_evaluations"] - d["pilot_evaluations"] <= 15 * 100


@pytest.mark.slow
def test_control_trees_weighed_without_the_kinetic_energy_are_noticed(monkeypatch):
    monkeypatch.setattr(PhasePoint, "hamiltonian", property(lambda self: self.energy))
    assert standard_errors_off(known_gaussian(10, (3,)), TREES.replace(draws=50, warmup=30))[0] > 5


@pytest.mark.slow
def test_two_modes_are_both_visited():
    known = known_bimodal()
    estimate = run(known, dgm.GibbsTempering(), chains=64)
    left = estimate.expectation(lambda x: (x[..., 0] < -0.3).double())
    assert abs(left.value - 0.35) <= 5 * left.std_error
    assert left.std_error < 0.03


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgm.GibbsTempering(draws=0), r"GibbsTempering\(draws=0\): must be an integer >= 1"),
        (lambda: dgm.GibbsTempering(warmup=-1), "warmup=-1"),
        (lambda: dgm.GibbsTempering(draws=5, thin=6), "thin=6"),
        (lambda: dgm.GibbsTempering(step_size=-0.1), "step_size=-0.1"),
        (lambda: dgm.GibbsTempering(log_zeta="nothing"), "log_zeta='nothing'"),
        (lambda: dgm.GibbsTempering(target_acceptance=1.5), "target_acceptance=1.5"),
        (lambda: dgm.ContinuousTempering(mass=0), "mass=0"),
        (lambda: dgm.ContinuousTempering(warmup=3), "warmup=3"),
        (lambda: dgm.ContinuousTempering(nuts=0), r"ContinuousTempering\(nuts=0\): must be an integer >= 1"),
        (
            lambda: run(known_gaussian(2, (3,)), dgm.GibbsTempering(draws=1, log_zeta=torch.zeros(2))),
            r"log_zeta of shape \(2,\)",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        make()


class _Edged(dgm.Target):
    """A standard normal law in the plane whose energy is ``wall`` beyond ``x_0 = edge``."""

    def __init__(self, edge: float, wall: float):
        super().__init__(None, 2)
        self.edge, self.wall = edge, wall

    def energy(self, x):
        return torch.where(x[..., 0] > self.edge, self.wall, 0.5 * x.square().sum(-1))


def _base(sd: float, shift: float = 0.0) -> dgm.Gaussian:
    return dgm.Gaussian(torch.tensor([shift, 0.0]), sd)


EDGE = {"AIS": dgm.AIS(temperatures=60), "Gibbs": dgm.GibbsTempering(draws=200), "joint": dgm.ContinuousTempering()}


@pytest.mark.parametrize("method", cases(EDGE, quick=("AIS",)))
def test_no_chain_moves_to_an_energy_of_minus_infinity(method):
    target = _Edged(2.5, -math.inf)
    evidence = dgm.log_evidence(target, _base(0.45), method, chains=64, seed=0, progress=False)
    assert evidence.draws[..., 0].max() <= 2.5
    truth = math.log(2 * math.pi) + math.log(0.5 * math.erfc(-2.5 / 2**0.5))
    assert abs(evidence.log_z - truth) < 4 * evidence.std_error


WALLED = {
    "AIS": dgm.AIS(temperatures=60),
    "HamiltonianAIS": dgm.evidence.HamiltonianAIS(temperatures=100),
    "Gibbs": dgm.GibbsTempering(draws=60, warmup=20),
    "path": dgm.evidence.PathSampling(dgm.GibbsTempering(draws=200)),
    "importance": dgm.evidence.ImportanceTempering(),
    "parallel": dgm.ParallelTempering(),
}


def _mass_below(edge: float) -> float:
    return math.log(2 * math.pi) + math.log(0.5 * math.erfc(-edge / 2**0.5))


EDGES = {name: (method, 2.3) for name, method in WALLED.items()}
EDGES |= {f"{name}, half": (WALLED[name], 0.0) for name in ("AIS", "Gibbs")}


@pytest.mark.parametrize(("method", "edge"), cases(EDGES, quick=("AIS", "Gibbs")))
def test_the_base_counts_by_its_mass_inside_the_support(method, edge):
    """All chains agree on log Z less the log of it: 0.01 and 0.69 nats, many times what their spread claims."""
    runs = [
        dgm.log_evidence(_Edged(edge, math.inf), _base(1.0), method, seed=seed, progress=False) for seed in range(4)
    ]
    errors = torch.stack([(run.log_z - _mass_below(edge)) / run.std_error for run in runs])
    assert errors.abs().max() < 4
    draws, weights = runs[0].draws[..., 0], runs[0].log_weights.exp()
    assert draws[weights > 0].max() <= edge


def test_control_chains_that_agree_claim_too_small_an_error(monkeypatch):
    monkeypatch.setattr(AnnealedPath, "restrict", lambda self, rng: None)
    monkeypatch.setattr(AnnealedPath, "draws", _inside(AnnealedPath.draws))
    run = dgm.log_evidence(_Edged(2.3, math.inf), _base(1.0), WALLED["Gibbs"], seed=0, progress=False)
    assert (run.log_z - _mass_below(2.3)) / run.std_error > 10


def _inside(draws):
    """Draws of the base without those outside, as if they were all."""

    def chosen(path, chains, rng):
        v = draws(path, 4 * chains, rng)
        return v[path.differences(v).isfinite()][:chains]

    return chosen


def test_a_base_that_is_hardly_inside_the_support_is_refused():
    for method in (dgm.AIS(temperatures=60), dgm.GibbsTempering(draws=10)):
        with pytest.raises(dgm.errors.EvidenceError, match=r"zero density at \d.* % of the base's draws"):
            dgm.log_evidence(_Edged(-2.3, math.inf), _base(1.0), method, chains=4, seed=1, progress=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_guess_that_is_not_finite_is_refused(value):
    with pytest.raises(dgm.errors.ArgumentError, match=r"log_zeta=.*not finite"):
        dgm.GibbsTempering(log_zeta=value)
