"""Fits of a Gaussian by the lower bound, the thermodynamic objective and the upper bound."""

import math
from itertools import pairwise

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.references.variational import _BETAS, _Parameters, _slope, score_weights
from tests.known_evidence import known_gaussian
from tests.oracles import FLOAT

GRID = torch.linspace(-12, 12, 4001, dtype=FLOAT)


def two_modes(x):
    """Energy of a normalised mixture in one dimension, weights 0.3 and 0.7."""
    x = x.squeeze(-1)
    left = math.log(0.3 / 0.6) - 0.5 * ((x + 2) / 0.6).square()
    right = math.log(0.7 / 0.8) - 0.5 * ((x - 1.5) / 0.8).square()
    return 0.5 * math.log(2 * math.pi) - torch.logaddexp(left, right)


TARGET = dgm.Target(two_modes, 1)


def by_quadrature(objective, mean, log_sd):
    """The objective, as it is maximised, of N(mean, sd^2) on a grid."""
    log_p = -two_modes(GRID.unsqueeze(-1))
    log_q = -0.5 * ((GRID - mean) / log_sd.exp()).square() - log_sd - 0.5 * math.log(2 * math.pi)
    f, cell = log_p - log_q, GRID[1] - GRID[0]

    def mean_at(beta):
        log_density = log_q + beta * f
        return ((log_density - log_density.logsumexp(0)).exp() * f).sum()

    if objective == "eubo":
        return -mean_at(1.0)
    if objective == "elbo":
        return (log_q.exp() * f).sum() * cell
    return sum((high - low) * mean_at(low) for low, high in pairwise(_BETAS))


def parameters_at(mean, log_sd):
    start = torch.tensor([mean], dtype=FLOAT), torch.tensor([math.exp(log_sd)], dtype=FLOAT)
    return _Parameters(*start, "diagonal", 1, torch.Generator().manual_seed(0))


def estimated_gradients(objective, batches=40, samples=5000):
    """Estimates ``[batches, 2]`` of the gradient in mean and log sd."""
    parameters, rng = parameters_at(0.4, 0.5), torch.Generator().manual_seed(1)
    rows = []
    for _ in range(batches):
        x = parameters.sample(samples, rng).detach()
        log_q = parameters.log_prob(x)
        f = -TARGET.energy(x) - log_q.detach()
        loss = (score_weights(objective, f) * log_q).sum()
        rows.append(torch.cat(torch.autograd.grad(loss, parameters.all)))
    return torch.stack(rows)


def true_gradient(objective):
    at = torch.tensor([0.4, 0.5], dtype=FLOAT, requires_grad=True)
    return torch.autograd.grad(torch.as_tensor(by_quadrature(objective, *at)), at)[0]


@pytest.mark.parametrize("objective", ["tvo", "eubo"])
def test_gradients_are_those_of_the_objective_by_quadrature(objective):
    rows, truth = estimated_gradients(objective), true_gradient(objective)
    # finite differences agree with the differentiated quadrature
    step = torch.tensor([1e-5, 0.0], dtype=FLOAT)
    at = torch.tensor([0.4, 0.5], dtype=FLOAT)
    slope = (by_quadrature(objective, *(at + step)) - by_quadrature(objective, *(at - step))) / 2e-5
    assert slope == pytest.approx(truth[0].item(), rel=1e-5)
    z = (rows.mean(0) - truth) / (rows.std(0) / len(rows) ** 0.5)
    assert z.abs().max() <= 5
    # as the gradient of EUBO is printed, it points the other way
    wrong = (-rows.mean(0) - truth) / (rows.std(0) / len(rows) ** 0.5)
    assert wrong.abs().min() > 5


def test_the_objectives_are_ordered_around_log_z():
    at = torch.tensor([0.4, 0.5], dtype=FLOAT)
    elbo, tvo, eubo = (by_quadrature(name, *at) for name in ("elbo", "tvo", "eubo"))
    # log Z = 0; the upper bound is minimised, so that its negative is shown
    assert elbo < tvo < 0 < -eubo


def test_the_gradient_of_the_bound_has_no_variance_at_its_optimum_and_that_with_the_score_has():
    known = known_gaussian(3)
    target, covariance = known.target, known.target.parts[2][0]
    parameters = _Parameters(known.target.parts[1][0], torch.ones(3, dtype=FLOAT), "full", 1, torch.Generator())
    factor = torch.linalg.cholesky(covariance)
    with torch.no_grad():
        parameters.log_sd.copy_(factor.diagonal().log())
        parameters.lower.copy_((factor / factor.diagonal().unsqueeze(-1)).tril(-1))
    rng, stuck, plain = torch.Generator().manual_seed(2), [], []
    for _ in range(50):
        x = parameters.sample(8, rng)
        slope, _ = _slope(target, parameters, x.detach())
        grads = torch.autograd.grad((slope * x).sum() / 8, parameters.all, retain_graph=True)
        stuck.append(torch.cat([g.flatten() for g in grads]))
        # reparameterised in full: the parameters of the density are not held
        loss = (target.energy(x) + parameters.log_prob(x)).mean()
        plain.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters.all)]))
    assert torch.stack(stuck).abs().max() < 1e-10
    assert torch.stack(plain).var(0).sum() > 0.1


@pytest.mark.parametrize("kind", ["diagonal", "full", "low_rank"])
def test_parameters_have_the_density_of_their_draws(kind):
    rng = torch.Generator().manual_seed(3)
    parameters = _Parameters(torch.ones(2, 4, dtype=FLOAT), torch.full((2, 4), 0.7, dtype=FLOAT), kind, 2, rng)
    for parameter in parameters.all:
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=rng, dtype=FLOAT)
    x = parameters.sample(5, rng).detach()
    base = dgm.Gaussian._of(parameters.mean.detach(), parameters.scale())
    torch.testing.assert_close(parameters.log_prob(x), base.log_prob(x))


def test_draws_outside_the_support_have_no_weight():
    f = torch.tensor([[-math.inf, -math.inf], [1.0, math.nan], [0.5, -math.inf]], dtype=FLOAT)
    for objective in ("tvo", "eubo"):
        weights = score_weights(objective, f)
        assert weights.isfinite().all()
        assert (weights[0] == 0).all()
        assert (weights[:, 1] == 0).all()
        alone = score_weights(objective, f[1:, :1])
        torch.testing.assert_close(weights[1:, :1], alone)


@pytest.mark.parametrize("objective", ["tvo", "eubo"])
def test_a_fit_to_a_gaussian_recovers_it(objective):
    known = known_gaussian(2, (2,))
    base = dgm.Gaussian.fit(known.target, "full", objective=objective, start=known.base, steps=600, samples=128)
    _, means, covariances = known.target.parts
    torch.testing.assert_close(base.mean, means.expand(2, 2), atol=0.05, rtol=0)
    torch.testing.assert_close(base.covariance, covariances.expand(2, 2, 2), atol=0.08, rtol=0.08)
    assert (base.elbo - known.log_z).abs().max() < 0.02


def test_the_upper_bound_covers_both_modes_and_the_lower_bound_picks_one():
    start = dgm.Gaussian(torch.tensor([1.0], dtype=FLOAT), 2.0)
    fits = {name: dgm.Gaussian.fit(TARGET, objective=name, start=start, steps=500) for name in ("elbo", "tvo", "eubo")}
    # the target's own moments
    mean = 0.3 * -2 + 0.7 * 1.5
    sd = math.sqrt(0.3 * (0.36 + 4) + 0.7 * (0.64 + 2.25) - mean**2)
    assert fits["eubo"].mean.item() == pytest.approx(mean, abs=0.15)
    assert fits["eubo"].covariance_diagonal.sqrt().item() == pytest.approx(sd, rel=0.1)
    assert fits["elbo"].mean.item() == pytest.approx(1.5, abs=0.15)
    assert fits["elbo"].covariance_diagonal.sqrt().item() == pytest.approx(0.8, rel=0.2)
    assert fits["elbo"].covariance < fits["tvo"].covariance < 1.1 * fits["eubo"].covariance
    assert fits["elbo"].elbo > fits["eubo"].elbo


def test_an_unknown_objective_is_refused():
    with pytest.raises(dgm.errors.ArgumentError, match="objective='vlbo'"):
        dgm.Gaussian.fit(TARGET, objective="vlbo")
