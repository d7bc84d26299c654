"""Estimates from log weights: values, errors, and weights that are zero, huge or not numbers."""

import math

import pytest
import torch

from dgm_infer.evidence.estimators import (
    bennett,
    drift,
    finite_or_zero,
    log_mean,
    log_ratio,
    log_weights_at_ends,
    mean_of_chains,
    weight_ess,
)
from tests.oracles import FLOAT


def log_normal(n, problems, sd, seed=0):
    """Log weights of mean 1: ``N(-sd^2/2, sd^2)``."""
    rng = torch.Generator().manual_seed(seed)
    return sd * torch.randn(n, problems, generator=rng, dtype=FLOAT) - 0.5 * sd**2


def test_the_log_of_a_mean_has_the_error_and_bias_it_states():
    estimate = log_mean(log_normal(50, 20000, 0.7))
    spread, mean = estimate.log_z.std(), estimate.log_z.mean()
    assert estimate.std_error.square().mean().sqrt() == pytest.approx(spread.item(), rel=0.03)
    assert estimate.bias.mean() == pytest.approx(mean.item(), abs=5 * spread.item() / 20000**0.5 + 1e-3)
    assert mean < -5 * spread / 20000**0.5


def own_error(log_weights):
    """The standard error of the log of their mean by the variance of the weights that are there."""
    n = len(log_weights)
    return ((n / weight_ess(log_weights) - 1) / (n - 1)).sqrt()


@pytest.mark.parametrize(
    ("n", "sd", "least", "alone"),
    [(16, 1.0, 0.91, 0.9), (16, 2.0, 0.88, 0.72), (16, 3.0, 0.87, 0.5), (64, 3.0, 0.88, 0.55)],
)
def test_the_error_of_wide_log_weights_counts_what_they_miss(n, sd, least, alone):
    log_weights = log_normal(n, 20000, sd)
    estimate = log_mean(log_weights)

    def coverage(error):
        return (estimate.log_z.abs() < 2.1 * error).double().mean()

    assert coverage(estimate.std_error) > least
    # the control
    assert coverage(own_error(log_weights)) < alone


def test_the_error_of_weights_that_miss_nothing_is_their_own():
    rng = torch.Generator().manual_seed(3)
    chance = torch.rand(64, 2000, generator=rng, dtype=FLOAT)
    noise = 0.1 * torch.randn(64, 2000, generator=rng, dtype=FLOAT)
    # some chains in a mode of three nats more, some lost, some far behind, and all near each other
    unequal = (noise + torch.where(chance < p, shift, 0.0) for p, shift in ((0.4, 3.0), (0.6, -math.inf), (0.6, -40.0)))
    for log_weights in (*unequal, log_normal(64, 2000, 0.5)):
        larger = log_mean(log_weights).std_error > 1.02 * own_error(log_weights)
        # a share that is near a quarter by chance may look like a tail
        assert larger.double().mean() < 0.03


def test_a_jackknifed_ratio_has_the_error_and_bias_it_states():
    numerators = log_normal(20, 20000, 0.8)
    denominators = 0.5 * numerators + log_normal(20, 20000, 0.4, seed=1)
    truth = -math.log(math.exp(-0.125 * 0.8**2))
    estimate = log_ratio(numerators, denominators)
    error = estimate.log_z - truth
    assert estimate.std_error.square().mean().sqrt() == pytest.approx(error.std().item(), rel=0.1)
    assert (error - estimate.bias).mean().abs() < 5 * error.std() / 20000**0.5 + 1e-3
    # the ratio of the sums, not the sum of the ratios
    apart = log_normal(20, 20000, 0.4, seed=2)
    error = log_ratio(numerators, apart).log_z
    assert error.mean().abs() < 5 * error.std() / 20000**0.5 + 0.02
    assert (numerators - apart).exp().mean(0).log().mean() > 0.1


def test_the_error_of_a_ratio_knows_that_its_parts_move_together():
    numerators = log_normal(20, 100, 1.0)
    together = log_ratio(numerators, numerators + 0.3)
    torch.testing.assert_close(together.log_z, torch.full((100,), -0.3, dtype=FLOAT))
    assert together.std_error.max() < 1e-12
    apart = log_ratio(numerators, log_normal(20, 100, 1.0, seed=2))
    assert apart.std_error.min() > 0.05


def test_halves_of_a_run_that_differ_by_more_than_chance_are_told():
    halves = torch.stack([log_normal(16, 200, 0.5, seed=seed) for seed in (1, 2)]).unsqueeze(2)
    same = torch.zeros_like(halves)
    # the control
    assert (drift(halves, same) == 0).all()
    halves[1] += 2.0
    found = drift(halves, same)
    assert (found > 0).double().mean() > 0.9
    assert abs(found.median() - 2.0) < 0.2
    # a share of it counts in proportion, and one chain has no error
    torch.testing.assert_close(drift(halves, same, torch.full((1, 200), 0.5, dtype=FLOAT)), 0.5 * found)
    assert (drift(halves[:, :1], same[:, :1]) == 0).all()
    # what rounding leaves of exact halves, whose chains agree to all digits, is none; the control is ten thousand of it
    exact = torch.full((2, 16, 3, 200), -2.1, dtype=FLOAT)
    exact[1] *= 1 + torch.finfo(FLOAT).eps
    assert (drift(exact, torch.zeros_like(exact)) == 0).all()
    exact[1] *= 1 + 1e4 * torch.finfo(FLOAT).eps
    assert (drift(exact, torch.zeros_like(exact)) != 0).all()


def test_the_ends_weights_are_those_of_the_truncated_exponential():
    delta = torch.tensor([-700.0, -30.0, -1.0, -1e-3, 0.0, 1e-9, 1e-3, 1.0, 30.0, 700.0], dtype=FLOAT)
    w1, w0 = log_weights_at_ends(delta)
    moderate = (delta.abs() < 100) & (delta.abs() > 1e-4)
    d = delta[moderate]
    torch.testing.assert_close(w1[moderate], (d / torch.expm1(d)).log())
    torch.testing.assert_close(w0[moderate], (d / -torch.expm1(-d)).log())
    torch.testing.assert_close(w0 - w1, delta)
    assert w1[4] == w0[4] == 0
    assert w1[[0, -1]].tolist() == pytest.approx([math.log(700), math.log(700) - 700])


def test_the_ends_weights_of_infinite_differences_are_zero_or_infinite():
    w1, w0 = log_weights_at_ends(torch.tensor([math.inf], dtype=FLOAT))
    assert w1.isneginf().all()
    assert w0.isposinf().all()


@pytest.mark.parametrize("sizes", [(40, 40), (60, 20)])
def test_bennett_meets_the_closed_form_of_gaussian_work(sizes):
    # f ~ N(c - s^2/2, s^2) forwards makes r ~ N(-c - s^2/2, s^2) backwards, with E[exp f] = exp c
    c, s = 2.0, 1.5
    forward, reverse = log_normal(sizes[0], 4000, s) + c, log_normal(sizes[1], 4000, s, seed=1) - c
    estimate, overlap = bennett(forward, reverse)
    assert ((overlap > 0.3) & (overlap < 1)).all()
    error = estimate.log_z - c
    assert error.mean().abs() < 5 * error.std() / 4000**0.5 + 0.01
    assert estimate.std_error.square().mean().sqrt() == pytest.approx(error.std().item(), rel=0.05)
    # a one-sided mean is worse, and the wrong sign of the reverse weights is another number
    assert error.std() < 0.8 * (log_mean(forward).log_z - c).std()
    assert (bennett(forward, reverse + 2 * c)[0].log_z - c).mean().abs() > 1


def test_bennett_of_exact_weights_is_exact():
    estimate, overlap = bennett(torch.full((5, 2), 3.0, dtype=FLOAT), torch.full((7, 2), -3.0, dtype=FLOAT))
    torch.testing.assert_close(overlap, torch.ones(2, dtype=FLOAT))
    torch.testing.assert_close(estimate.log_z, torch.full((2,), 3.0, dtype=FLOAT))
    assert estimate.std_error.max() < 1e-12


def test_weights_that_do_not_overlap_have_an_infinite_error():
    estimate, overlap = bennett(log_normal(20, 3, 1.0) - 200, log_normal(20, 3, 1.0, seed=1) - 200)
    assert (overlap < 1e-6).all()
    assert estimate.std_error.isinf().all()


def test_weights_that_are_no_numbers_count_as_zero_and_are_not_dropped():
    raw = torch.tensor([0.0, math.nan, math.inf, -math.inf], dtype=FLOAT)
    weights = finite_or_zero(raw)
    assert weights.tolist() == [0.0, -math.inf, -math.inf, -math.inf]
    assert log_mean(weights.unsqueeze(-1)).log_z.item() == pytest.approx(-math.log(4))
    assert weight_ess(weights).item() == pytest.approx(1)


def test_all_weights_zero_give_no_evidence_and_no_certainty():
    estimate = log_mean(torch.full((4, 1), -math.inf, dtype=FLOAT))
    assert estimate.log_z.isneginf().all()
    assert estimate.std_error.isinf().all()
    assert weight_ess(torch.full((4, 1), -math.inf, dtype=FLOAT)).item() == 0


def test_one_chain_has_no_standard_error():
    one = log_normal(1, 3, 1.0)
    for estimate in (log_mean(one), mean_of_chains(one), log_ratio(one, one + 1)):
        assert estimate.std_error.isnan().all()
        assert estimate.log_z.isfinite().all()


def test_a_chain_that_holds_all_of_the_weight_makes_the_error_infinite():
    numerators = torch.tensor([[0.0], [-math.inf], [-math.inf]], dtype=FLOAT)
    assert log_ratio(numerators, torch.zeros(3, 1, dtype=FLOAT)).std_error.isinf().all()


def test_huge_weights_do_not_overflow():
    shifted = log_mean(log_normal(100, 2, 1.0) + 5000)
    torch.testing.assert_close(shifted.log_z - 5000, log_mean(log_normal(100, 2, 1.0)).log_z)
    torch.testing.assert_close(shifted.std_error, log_mean(log_normal(100, 2, 1.0)).std_error)
