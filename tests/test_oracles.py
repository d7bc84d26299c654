"""The oracles themselves, and the comparison that every statistical test relies on."""

import math

import pytest
import torch
from scipy import integrate

from tests.oracles import (
    FLOAT,
    LinearPairs,
    LinearWalk,
    LogisticEllipse,
    Oracle,
    assert_agrees,
    assert_refuted,
    compare,
    ellipse,
    linear_gaussian_model,
    linear_gaussian_posterior,
    linear_posterior,
    wave,
)


class _Given:
    def __init__(self, inputs):
        self.inputs = inputs


def test_independent_draws_of_the_right_mean_agree_and_a_shift_of_a_tenth_is_noticed():
    x = torch.randn(8, 1000, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    right = Oracle(None, lambda u: u, torch.zeros(2, dtype=FLOAT))
    wrong = Oracle(None, lambda u: u, torch.tensor([0.0, 0.1], dtype=FLOAT))
    assert_agrees(right, _Given(x), least_ess=6000)
    assert_refuted(wrong, _Given(x))
    with pytest.raises(AssertionError):
        assert_agrees(wrong, _Given(x))
    with pytest.raises(AssertionError):
        assert_refuted(right, _Given(x))


def test_correlated_draws_have_larger_standard_errors():
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(8, 1000, generator=rng, dtype=FLOAT)
    for i in range(1, 1000):
        x[:, i] = 0.9 * x[:, i - 1] + math.sqrt(1 - 0.81) * x[:, i]
    ess = compare(x.unsqueeze(-1), torch.zeros(1, dtype=FLOAT)).ess.item()
    # an autoregression of coefficient 0.9 has (1 - 0.9)/(1 + 0.9) effective draws a draw
    assert ess == pytest.approx(8000 / 19, rel=0.25)


def test_chains_that_do_not_move_have_no_effective_draws():
    starts = torch.randn(8, 1, 1, generator=torch.Generator().manual_seed(2), dtype=FLOAT)
    stuck = starts.expand(8, 100, 1) + 1e-6 * torch.randn(8, 100, 1, dtype=FLOAT)
    with pytest.raises(AssertionError, match="effective sample sizes"):
        assert_agrees(Oracle(None, lambda u: u, torch.zeros(1, dtype=FLOAT)), _Given(stuck))


def test_ellipse_expectations_by_an_independent_quadrature():
    # arc length sqrt(2 sin^2 + cos^2/2) cancels |J| = 4 sqrt(cos^2/2 + 2 sin^2): the density in t is exp(-|u|^2/2)
    def right(t):
        return math.exp(-(math.cos(t) ** 2) - 0.25 * math.sin(t) ** 2)

    def without_gram(t):
        return right(t) * math.sqrt(2 * math.sin(t) ** 2 + 0.5 * math.cos(t) ** 2)

    for gram, density in ((True, right), (False, without_gram)):
        total = integrate.quad(density, 0, 2 * math.pi)[0]
        cos_2t = integrate.quad(lambda t, p=density: math.cos(2 * t) * p(t), 0, 2 * math.pi)[0] / total
        assert ellipse(gram=gram).expected[2].item() == pytest.approx(cos_2t, abs=1e-10)


def test_expectations_on_the_ellipse_of_logistic_inputs_by_an_independent_quadrature():
    def density(t):
        u = math.sqrt(12) * math.cos(t), math.sqrt(3) * math.sin(t)
        return math.prod(math.cosh(math.pi * v / (2 * math.sqrt(3))) ** -2 for v in u)

    total = integrate.quad(density, 0, 2 * math.pi)[0]
    cos_2t = integrate.quad(lambda t: math.cos(2 * t) * density(t), 0, 2 * math.pi)[0] / total
    assert ellipse(12.0, model=LogisticEllipse).expected[2].item() == pytest.approx(cos_2t, abs=1e-10)


def test_wave_expectations_by_an_independent_quadrature():
    def density(t):
        return math.exp(-0.5 * (t**2 + (0.5 * math.sin(3 * t)) ** 2))

    total = integrate.quad(density, -10, 10, limit=400)[0]
    square = integrate.quad(lambda t: t**2 * density(t), -10, 10, limit=400)[0] / total
    assert wave().expected[1].item() == pytest.approx(square, abs=1e-8)


def test_linear_gaussian_posterior_is_that_of_tipping_and_bishop():
    model = linear_gaussian_model()
    y = torch.arange(6, dtype=FLOAT)
    mean, covariance = linear_gaussian_posterior(model, y, torch.eye(6, dtype=FLOAT))
    m = model.weight.mT @ model.weight + model.sd**2 * torch.eye(3, dtype=FLOAT)
    torch.testing.assert_close(mean, torch.linalg.solve(m, model.weight.mT @ (y - model.bias)))
    torch.testing.assert_close(covariance, model.sd**2 * torch.linalg.inv(m))


def test_posterior_of_pairs_and_of_a_walk_by_regression_on_their_innovations():
    y, identity = torch.arange(8, dtype=FLOAT), torch.eye(2, dtype=FLOAT)
    pairs, walk = LinearPairs(), LinearWalk()
    states = torch.cat([torch.zeros(1, 2, dtype=FLOAT), y.reshape(4, 2)])
    # rows (design of z, target) of every pair, or of every step given the state before it
    designs = {
        pairs: (pairs.weight.reshape(4, 2, 3), y.reshape(4, 2)),
        walk: (
            torch.stack([walk.decay + walk.push, *[walk.push] * 3]),
            states[1:] - states[:-1] @ walk.decay.mT,
        ),
    }
    for model, (design, target) in designs.items():
        whitening = torch.linalg.solve(model.mix, identity)
        design, target = (whitening @ design).flatten(0, 1), (target @ whitening.mT).flatten()
        covariance = torch.linalg.inv(torch.eye(design.shape[1], dtype=FLOAT) + design.mT @ design)
        mean, exact = linear_posterior(model, y)
        torch.testing.assert_close(exact, covariance)
        torch.testing.assert_close(mean, covariance @ design.mT @ target)
