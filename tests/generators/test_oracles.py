"""The reference posteriors themselves."""

import pytest
import torch

import dgm_infer as dgm
from tests.generators.oracles import G_AND_K, GENERALISED_LAMBDA, lotka_volterra_posterior, quantile_posterior
from tests.oracles import FLOAT

DISTRIBUTIONS = {
    "generalised lambda": (GENERALISED_LAMBDA, dgm.Logistic(1)),
    "g-and-k": (G_AND_K, dgm.StandardNormal(1)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_densities_are_those_of_the_quantile_functions(name):
    distribution, local = DISTRIBUTIONS[name]
    rng = torch.Generator().manual_seed(60)
    z = distribution.parameters(distribution.prior.sample((200,), generator=rng, dtype=FLOAT))
    u2 = local.sample((200,), generator=rng, dtype=FLOAT).requires_grad_()
    (slope,) = torch.autograd.grad(distribution.quantile(z, u2).sum(), u2)
    expected = local.log_prob(u2) - slope.squeeze(-1).log()
    torch.testing.assert_close(distribution.log_density(z, u2).squeeze(-1), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_references_know_their_own_errors_and_these_are_small(name):
    reference = quantile_posterior(name)
    # in standard deviations of the posterior; the largest are of the squares of heavy-tailed inputs
    assert reference.error.median() < 0.02
    assert reference.error.max() < 0.1
    again = quantile_posterior(name, seed=31)
    z = (again.expected - reference.expected) / (again.error.square() + reference.error.square()).sqrt()
    assert z.abs().max() < 5


def test_the_lotka_volterra_quadrature_has_converged():
    coarse = lotka_volterra_posterior(points=301)
    torch.testing.assert_close(coarse.expected, lotka_volterra_posterior().expected, rtol=0, atol=1e-8)


# the importance sampling of the quantile distributions takes seconds, and those whom it serves are slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: quantile_posterior("generalised lambda"), marks=pytest.mark.slow, id="generalised lambda"),
        pytest.param(lambda: quantile_posterior("g-and-k"), marks=pytest.mark.slow, id="g-and-k"),
        pytest.param(lotka_volterra_posterior, id="Lotka-Volterra"),
    ],
)
def test_starts_lie_on_the_fibre(make):
    reference = make()
    assert reference.problem.constraint_error(reference.starts(100)).max() < 1e-10
