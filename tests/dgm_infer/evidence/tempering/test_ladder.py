"""Discrete temperatures: draws of k given x follow their law exactly, whatever the weights, differences and parts."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.plan import interpolated
from dgm_infer.evidence.tempering import temperatures
from dgm_infer.evidence.tempering.temperatures import ListedLadder
from tests.known_evidence import known_bimodal, known_gaussian
from tests.oracles import FLOAT
from tests.quick import cases

N = 10
KNOTS = torch.tensor([0, 1, 4, N])
BETAS = torch.arange(N + 1, dtype=FLOAT) / N
# of two problems
H = torch.tensor([[0.0, 0.0], [-0.7, 0.4], [0.2, 3.0], [-1.0, 2.0]], dtype=FLOAT)


def spread(h):
    """Weights at the knots ``[R + 1, *batch]``, at all temperatures."""
    shape = (-1, *[1] * (h.ndim - 1))
    at, knots = (x.reshape(shape).expand(-1, *h.shape[1:]) for x in (BETAS, KNOTS.double() / N))
    return interpolated(at, knots, h)


def listed():
    return ListedLadder(BETAS, spread(H))


def exact(difference):
    """Log probabilities of all temperatures ``[N + 1, 2]``."""
    logits = spread(H) - BETAS.unsqueeze(-1) * difference
    return logits - logits.logsumexp(0)


DIFFERENCES = [-2000.0, -30.0, -5.0, -1e-9, 0.0, 2.0, 7.0, 30.0, 2000.0]


def chi_square(beta, expected):
    """Of the frequencies of the temperatures, with its degrees of freedom: ``expected [N + 1]`` log probabilities."""
    count = torch.bincount((beta * N).round().long(), minlength=N + 1).to(FLOAT)
    mean = len(beta) * expected.exp()
    # temperatures that are hardly ever visited tell nothing
    often = mean > 5
    assert count[~often].sum() <= 5 + 10 * mean[~often].sum()
    return ((count - mean).square() / mean)[often].sum(), max(int(often.sum()) - 1, 1)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_temperatures_given_x_have_their_probabilities(difference):
    n = 40_000
    rung = listed().draw(torch.full((n, 2), difference, dtype=FLOAT), torch.Generator().manual_seed(0))
    log_p = exact(difference)
    for problem in range(2):
        value, dof = chi_square(rung.beta[:, problem], log_p[:, problem])
        assert value <= dof + 5 * math.sqrt(2 * dof) + 10
        # the weights of the other problem, or a difference that is a little off, make another law
        if abs(difference) < 10:
            for wrong in (log_p[:, 1 - problem], exact(difference + 0.5)[:, problem]):
                value, dof = chi_square(rung.beta[:, problem], wrong)
                assert value > dof + 5 * math.sqrt(2 * dof) + 10
    torch.testing.assert_close(rung.log_p0, log_p[0].expand(n, 2), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rung.log_p1, log_p[-1].expand(n, 2), rtol=1e-10, atol=1e-10)


def test_a_problem_and_a_chain_has_its_own_difference():
    difference = torch.tensor([[-3.0, 4.0], [8.0, -0.5]], dtype=FLOAT)
    rung = listed().draw(difference, torch.Generator().manual_seed(1))
    for chain in range(2):
        for problem in range(2):
            expected = exact(difference[chain, problem])[:, problem]
            assert rung.log_p0[chain, problem] == pytest.approx(expected[0].item(), abs=1e-10)
            assert rung.log_p1[chain, problem] == pytest.approx(expected[-1].item(), abs=1e-10)


def test_draws_in_parts_are_those_of_the_whole(monkeypatch):
    difference = 5 * torch.randn(7, 2, generator=torch.Generator().manual_seed(2), dtype=FLOAT)
    whole = listed().draw(difference, torch.Generator().manual_seed(3))
    for at_once in (1, 30):
        monkeypatch.setattr(temperatures, "_AT_ONCE", at_once)
        for a, b in zip(listed().draw(difference, torch.Generator().manual_seed(3)), whole, strict=True):
            assert torch.equal(a, b)


def test_a_batch_of_any_shape_will_do():
    for batch in ((), (3,), (2, 3)):
        h = torch.zeros(2, *batch, dtype=FLOAT)
        difference = torch.full((5, *batch), 2.0, dtype=FLOAT)
        one = ListedLadder(torch.linspace(0, 1, 2, dtype=FLOAT), h)
        rung = one.draw(difference, torch.Generator().manual_seed(0))
        assert all(value.shape == difference.shape for value in rung)


# ------------------------------------------------------------------------------------------------- simulated tempering


def run(known, method, **settings):
    return dgm.log_evidence(known.target, known.base, method, **{"chains": 64, "seed": 1, "progress": False} | settings)


def off(estimate, known):
    return ((estimate.log_z - estimate.bias - known.log_z) / estimate.std_error).abs().max()


SETTINGS = {
    "equal": dgm.SimulatedTempering(weights="equal", log_zeta=-1.0),
    "a guess that is off": dgm.SimulatedTempering(log_zeta=-6.0),
    "two": dgm.SimulatedTempering(temperatures=1, n_steps=10),
    "four": dgm.SimulatedTempering(temperatures=3, weights="equal"),
    "values": dgm.SimulatedTempering(schedule=torch.tensor([0.0, 0.1, 0.5, 1.0])),
    "sigmoid": dgm.SimulatedTempering(temperatures=40, schedule="sigmoid", log_zeta=-1.0),
    "a function": dgm.SimulatedTempering(schedule=lambda n: torch.linspace(0, 1, n + 1) ** 2, temperatures=20),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", cases(SETTINGS, quick=("values",)))
def test_temperatures_weights_and_guesses_change_no_answer(method):
    known = known_gaussian(3, (3,))
    assert off(run(known, method), known) <= 5


@pytest.mark.slow
def test_weights_of_the_pilot_make_all_temperatures_equally_likely():
    known = known_gaussian(50)
    pilot, equal = (run(known, dgm.SimulatedTempering(weights=w)).diagnostics for w in ("pilot", "equal"))
    assert ((pilot["beta_occupancy"] > 0.06) & (pilot["beta_occupancy"] < 0.16)).all()
    # log Z(beta) is convex: equal weights stay at the ends
    assert equal["beta_occupancy"].max() > 0.16


@pytest.mark.slow
def test_a_mode_that_only_hot_chains_reach_is_weighted_right():
    known = known_bimodal()
    estimate = run(known, dgm.SimulatedTempering())
    left = estimate.expectation(lambda x: (x[..., 0] < -0.3).double())
    assert abs(left.value - 0.35) <= 5 * left.std_error
    assert left.std_error < 0.03


@pytest.mark.slow
def test_control_temperatures_that_are_drawn_one_off_are_noticed(monkeypatch):
    known = known_gaussian(10, (3,))
    method = dgm.SimulatedTempering(temperatures=10, n_steps=3)
    right = ListedLadder.draw
    # a temperature too high or too low: resampling with a planted bias
    for shift in (0, 1):

        def biased(self, difference, rng, shift=shift):
            rung = right(self, difference, rng)
            return rung._replace(beta=(rung.beta + shift / 10).clamp(0, 1))

        monkeypatch.setattr(ListedLadder, "draw", biased)
        assert (off(run(known, method), known) > 5) == (shift != 0)


def test_control_a_law_without_the_prior_weights_is_noticed():
    one = listed()
    one.h = torch.zeros_like(one.h)
    beta = one.draw(torch.full((40_000, 2), 2.0, dtype=FLOAT), torch.Generator().manual_seed(0)).beta
    value, dof = chi_square(beta[:, 0], exact(2.0)[:, 0])
    assert value > dof + 5 * math.sqrt(2 * dof) + 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": 0}, r"SimulatedTempering\(temperatures=0\): must be an integer >= 1"),
        (
            {"schedule": "cubic"},
            r"schedule='cubic'\): must be one of linear, sigmoid, barrier, a function",
        ),
        ({"schedule": torch.tensor([0.0, 0.5])}, "must rise from 0 to 1"),
        ({"weights": "none"}, "weights='none'"),
        ({"draws": 0}, "draws=0"),
        ({"thin": 500}, "thin=500"),
    ],
)
def test_bad_arguments_are_named(settings, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        dgm.SimulatedTempering(**settings)
