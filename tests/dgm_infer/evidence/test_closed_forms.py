"""Every method against targets of exact log evidence; bounds on their side; controls that the same law rejects."""

import dataclasses
import functools

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.autodiff.randomness import uniform
from dgm_infer.evidence import annealing
from dgm_infer.evidence.path import AnnealedPath, Move
from dgm_infer.evidence.tempering import continuous, temperatures
from tests.known_evidence import known_bimodal, known_gaussian, known_linear_gaussian
from tests.mistakes import anneal_with_weights_after_the_move
from tests.oracles import FLOAT

TARGETS = {
    "gaussian 2": lambda: known_gaussian(2, (3,)),
    "gaussian 10": lambda: known_gaussian(10, (3,)),
    "gaussian 50": lambda: known_gaussian(50, (3,)),
    "bimodal": lambda: known_bimodal((3,)),
    "linear Gaussian": known_linear_gaussian,
}
METHODS = {
    "AIS": dgm.AIS(),
    "AIS, barrier": dgm.AIS(schedule="barrier"),
    "AIS, linear": dgm.AIS(schedule="linear"),
    "Hamiltonian AIS": dgm.evidence.HamiltonianAIS(500),
    "Gibbs tempering": dgm.GibbsTempering(),
    "continuous tempering": dgm.ContinuousTempering(),
    "simulated tempering": dgm.SimulatedTempering(),
    "SMC": dgm.SMC(),
}


# Intervals of every method on a normal target and on two modes: test_statistics. Here targets that are harder.
# Schedules of AIS share its code.
HARDER = [
    *(("gaussian 50", name) for name in METHODS if name not in ("AIS, barrier", "AIS, linear")),
    *(("linear Gaussian", name) for name in ("AIS, barrier", "Hamiltonian AIS", "simulated tempering", "SMC")),
    ("gaussian 2", "continuous tempering"),
    ("bimodal", "AIS, linear"),
    ("gaussian 10", "AIS"),
]
# One target of some methods, and another of one: the others are for the long run.
QUICK = {("gaussian 10", method) for method in ("AIS",)}


def cases(names, quick=QUICK):
    """Parameters, by their names, of which only the quick ones are not slow."""
    for name in names:
        marks = () if name in quick else pytest.mark.slow
        yield pytest.param(*name, marks=marks, id=", ".join(name))


def standard_errors_off(estimate, known):
    """Errors per problem in standard errors, corrected for the bias of the logarithm."""
    return (estimate.log_z - estimate.bias - known.log_z) / estimate.std_error


def assert_right(estimate, known, *, largest_error=0.05):
    assert estimate.std_error.max() <= largest_error, f"standard errors {estimate.std_error.tolist()}"
    z = standard_errors_off(estimate, known)
    assert z.abs().max() <= 3, f"{z.tolist()} standard errors off"


def assert_wrong(estimate, known):
    assert standard_errors_off(estimate, known).abs().max() > 5


def run(known, method, **settings):
    # a chain of SMC is a run of many particles
    chains = 64 if isinstance(method, dgm.SMC) else 192
    return dgm.log_evidence(
        known.target,
        known.base,
        method,
        # the method's own error, which what is looked for beside its draws would widen
        **{"chains": chains, "seed": 1, "progress": False, "coverage": False} | settings,
    )


@functools.cache
def estimated(target, name):
    """The known answer, and the estimate of it that several laws are about."""
    known = TARGETS[target]()
    return known, run(known, METHODS[name])


@pytest.mark.parametrize(("target", "name"), cases(HARDER))
def test_estimates_are_within_three_standard_errors_of_the_truth(target, name):
    known, estimate = estimated(target, name)
    assert_right(estimate, known)
    frozen = isinstance(METHODS[name], dgm.AIS | dgm.evidence.HamiltonianAIS)
    assert estimate.status == ("unbiased" if frozen else "consistent")
    assert estimate.diagnostics["ess"].min() > 20
    # the control: a truth that is three tenths off
    assert_wrong(estimate, dataclasses.replace(known, log_z=known.log_z - 0.3))


@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)
def test_bounds_are_on_their_side_and_in_order(make):
    known = make()
    elbo, few, many = (
        run(known, m) for m in (dgm.Elbo(), dgm.evidence.ImportanceSampling(5), dgm.evidence.ImportanceSampling(500))
    )
    for below, above in ((elbo, few), (few, many)):
        assert (below.log_z < above.log_z + 3 * above.std_error).all()
    assert (elbo.log_z < many.log_z).all()
    for bound in (elbo, few, many):
        assert bound.status == "lower"
        assert (bound.log_z - 3 * bound.std_error <= known.log_z).all()
    # and not by being useless
    assert (few.log_z - elbo.log_z > 3 * elbo.std_error).all()


BOTH_WAYS = {"AIS": dgm.AIS(), "Hamiltonian AIS": dgm.evidence.HamiltonianAIS(400)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name"),
    cases(
        [
            *((target, "AIS") for target in ("gaussian 50", "bimodal", "linear Gaussian")),
            *((target, "Hamiltonian AIS") for target in ("gaussian 10", "bimodal")),
        ]
    ),
)
def test_exact_draws_give_bounds_from_both_sides_and_bennett_between_them(target, name):
    known, method = TARGETS[target](), BOTH_WAYS[name]
    exact = known.draw(512, torch.Generator().manual_seed(2))
    bounds = dgm.bidirectional(known.target, known.base, exact, method, chains=512, seed=3, progress=False)
    assert [e.status for e in (bounds.lower, bounds.upper, bounds.combined)] == ["lower", "upper", "consistent"]
    assert_right(bounds.lower, known, largest_error=0.06)
    assert_right(bounds.upper, known, largest_error=0.06)
    assert (bounds.upper.bias > 0).all()
    assert (bounds.lower.bias < 0).all()
    z = (bounds.combined.log_z - known.log_z) / bounds.combined.std_error
    # 15 of them in all cases: one in five thousand runs is false
    assert z.abs().max() <= 4.3
    # both weight sets together are worth more than either
    assert (bounds.combined.std_error < torch.minimum(bounds.lower.std_error, bounds.upper.std_error)).all()
    error = bounds.gap.abs() / (bounds.lower.std_error.square() + bounds.upper.std_error.square()).sqrt()
    assert error.max() <= 4


@pytest.mark.slow
def test_few_temperatures_leave_a_gap_that_has_the_truth_inside():
    known = known_gaussian(50, (200,))
    exact = known.draw(16, torch.Generator().manual_seed(4))
    bounds = dgm.bidirectional(
        known.target, known.base, exact, dgm.AIS(10, n_steps=1), chains=16, seed=5, progress=False
    )
    low, high = bounds.lower.log_z, bounds.upper.log_z
    noise = 5 / 200**0.5
    assert low.mean() + noise * low.std() < known.log_z[0] < high.mean() - noise * high.std()


def test_draws_that_are_not_exact_make_heuristic_bounds():
    known = known_gaussian(2)
    bounds = dgm.bidirectional(
        known.target, known.base, known.base.mean, dgm.AIS(10), exact=False, seed=0, progress=False
    )
    assert (bounds.lower.status, bounds.upper.status, bounds.combined.status) == ("lower", "heuristic", "heuristic")
    assert bounds.upper.diagnostics["shared_exact_draw"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", cases([(name,) for name in METHODS if name not in ("AIS, barrier", "AIS, linear")], {("Gibbs tempering",)})
)
def test_weighted_draws_have_the_targets_moments(name):
    method = METHODS[name]
    if isinstance(method, dgm.AIS | dgm.evidence.HamiltonianAIS):
        # one draw a chain
        known = TARGETS["gaussian 10"]()
        estimate = run(known, method.replace(temperatures=60), chains=2000)
    else:
        known, estimate = estimated("gaussian 10", name)
    mean, covariance = known.target.parts[1][0], known.target.parts[2][0]
    first = estimate.expectation(lambda x: x)
    assert ((first.value - mean).abs() <= 5 * first.std_error).all()
    second = estimate.expectation(lambda x: (x - mean).square())
    assert ((second.value - covariance.diagonal()).abs() <= 5 * second.std_error).all()
    # the base is half a standard deviation off in all, and a fifth too wide: it would not pass
    off = (known.base.mean - mean).abs() / first.std_error
    assert off.max() > 5
    assert ((known.base.covariance_diagonal - covariance.diagonal()).abs() / second.std_error).max() > 5


# ------------------------------------------------------------------------------------------------- negative controls

# A third of the gradients: what is wrong by dozens of standard errors of a whole run is noticed in a short one too.
SHORT = {"draws": 100, "warmup": 50, "pilot_temperatures": 50}


@pytest.mark.slow
# the last one is off by a hundred standard errors of 10 000 chains
@pytest.mark.parametrize(
    ("mistake", "chains"), [("none", 20_000), ("not turned round", 20_000), ("not accepted or rejected", 2000)]
)
def test_control_a_momentum_that_is_not_turned_round_is_noticed(monkeypatch, mistake, chains):
    right = AnnealedPath.moved_on

    def wrong(self, point, momentum, beta, step, rng):
        end, p, probability = self.trajectory(point, momentum, beta, step, 1)
        accepted = uniform(point.v.shape[:-1], point.v, rng) < probability
        if mistake == "not accepted or rejected":
            return Move(end, probability), p
        return Move(end.where(accepted, point), probability), torch.where(accepted.unsqueeze(-1), p, momentum)

    monkeypatch.setattr(AnnealedPath, "moved_on", right if mistake == "none" else wrong)
    known = known_gaussian(2, (3,))
    # long steps, often rejected
    estimate = run(known, dgm.evidence.HamiltonianAIS(40, half_life=5.0, step_size=1.9), chains=chains)
    off = standard_errors_off(estimate, known).abs().max()
    assert off <= 5 if mistake == "none" else off > 5


@pytest.mark.slow
def test_control_weights_of_the_state_after_the_move_are_noticed(monkeypatch):
    known = known_gaussian(10, (3,))
    method = dgm.AIS(20)
    assert standard_errors_off(run(known, method, chains=1000), known).abs().max() <= 5
    monkeypatch.setattr(annealing, "anneal", anneal_with_weights_after_the_move)
    assert_wrong(run(known, method, chains=1000), known)


@pytest.mark.slow
def test_control_weights_of_the_two_ends_swapped_are_noticed(monkeypatch):
    right = temperatures.log_weights_at_ends
    monkeypatch.setattr(temperatures, "log_weights_at_ends", lambda delta: right(delta)[::-1])
    known = known_gaussian(10, (3,))
    for method in (dgm.GibbsTempering(log_zeta=-3.7, **SHORT), dgm.ContinuousTempering(log_zeta=-3.7, **SHORT)):
        assert_wrong(run(known, method), known)


@pytest.mark.slow
def test_control_a_sum_of_ratios_is_noticed(monkeypatch):
    right = temperatures.log_weights_at_ends

    def sum_of_ratios(delta):
        w1, w0 = right(delta)
        return w1 - w0, torch.zeros_like(w0)

    known = known_gaussian(10, (3,))
    monkeypatch.setattr(temperatures, "log_weights_at_ends", sum_of_ratios)
    assert_wrong(run(known, dgm.GibbsTempering(**SHORT)), known)


@pytest.mark.slow
def test_control_temperatures_of_the_wrong_law_are_noticed(monkeypatch):
    def uniform(delta, rng):
        return torch.rand(delta.shape, generator=rng, dtype=FLOAT)

    known = known_gaussian(10, (3,))
    # a guess of log Z that is off makes the law of beta given x far from uniform
    method = dgm.GibbsTempering(log_zeta=-1.0, n_steps=2, **SHORT)
    assert standard_errors_off(run(known, method), known).abs().max() <= 5
    monkeypatch.setattr(temperatures, "draw_beta", uniform)
    assert_wrong(run(known, method), known)


@pytest.mark.slow
def test_control_a_trajectory_without_the_control_variables_jacobian_is_noticed(monkeypatch):
    def without(self, point, t):
        return torch.lerp(point.square, point.energy + self.offset, t.sigmoid())

    known = known_gaussian(10, (3,))
    monkeypatch.setattr(continuous._JointChain, "_potential", without)
    assert_wrong(run(known, dgm.ContinuousTempering(**SHORT), chains=600), known)
