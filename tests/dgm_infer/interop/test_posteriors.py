"""Posteriors of twelve Pyro programs: against quadrature of Pyro's own densities, closed forms, and Pyro's NUTS."""

import pytest
import torch

import dgm_infer as dgm
from tests.program_oracles import (
    BOX_OF_VECTOR,
    CASES,
    FLOAT,
    Y,
    by_chains,
    by_quadrature,
    distances,
    estimates,
    largest,
    nuts,
    of_total,
    of_vector,
    potential_of,
    vector,
)

# Where 50 iterations leave chains in the tails that they started from: a step size of the bulk does not move them.
LONG = {"LKJ correlation": 120, "hierarchical normal": 100}
# what the oracle by quadrature has integrated out
WITHOUT = {"hierarchical normal": {"group"}, "a sum": {"total"}}


def model_of(name, **wrong):
    case = CASES[name]
    return dgm.from_pyro(case.program, *case.args, observed=case.observed, **wrong)


def sampled(model, name, chains=48, draws=40, seed=1):
    """As users do, with the default kernel and its own tuning."""
    fibre = dgm.condition(model, model.data)
    return dgm.sample(fibre, chains=chains, warmup=LONG.get(name, 60), draws=draws, seed=seed, progress=False)


def smallest(ess):
    return min(each.min().item() for each in ess.values())


def from_pyros_density(name, **wrong):
    """Largest difference of the energy that quadrature integrates from Pyro's own, over a few points."""
    case = CASES[name]
    target = dgm.target_from_pyro(case.program, *case.args, **wrong)
    x = 0.4 * torch.randn(4, target.dim, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    start, potential, bijections = potential_of(case)
    latents = target.latents(x)
    at = [{key: bijections[key](latents[key][i].to(start[key])) for key in start} for i in range(len(x))]
    return (target.energy(x) - torch.stack([potential(each).double() for each in at])).abs().max()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.observed is None])
def test_the_density_that_quadrature_integrates_is_pyros_own(name):
    # in the 32 bits of the program's own numbers
    assert from_pyros_density(name) < 1e-4
    # the control: that of a slightly wrong program
    assert from_pyros_density(name, **CASES[name].wrong) > 1e-2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize("name", CASES)
def test_the_posterior_of_a_program_is_that_of_quadrature_or_of_nuts(name):
    case = CASES[name]
    draws = sampled(model_of(name), name)
    ours, exact = by_chains(draws.latents), case.exact()
    assert set(draws.latents) - set(exact) == WITHOUT.get(name, set())
    assert smallest(ours.ess) > 400
    assert largest(distances(ours, exact)) < 5
    # the control: a program with a slightly wrong prior has another posterior
    assert largest(distances(ours, case.exact(**case.wrong))) > 5
    if case.has_nuts:
        peer = estimates(nuts(case, chains=2, warmup=80, draws=150))
        assert set(peer.moments) == set(draws.latents)
        assert smallest(peer.ess) > 40
        assert largest(distances(ours, peer.moments, peer.errors)) < 5


@pytest.mark.slow
# of gammas and betas the factor is within a few per cent of 1, which integrals in test_priors hold it to
@pytest.mark.parametrize("name", ["Poisson", "Bernoulli", "mixed"])
def test_control_without_the_log_factor_the_posterior_is_another(name):
    model = model_of(name)
    assert model.has_log_factor
    model.has_factor = False
    assert largest(distances(by_chains(sampled(model, name).latents), CASES[name].exact())) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformed", "mixed"])
def test_control_a_wrong_program_has_another_posterior(name):
    case = CASES[name]
    draws = by_chains(sampled(model_of(name, **case.wrong), name).latents)
    assert largest(distances(draws, case.exact())) > 5
    # and it is its own
    assert largest(distances(draws, case.exact(**case.wrong))) < 5


def test_quadrature_has_the_closed_form():
    found = by_quadrature(vector, Y[:3], box=BOX_OF_VECTOR, n=80)()
    torch.testing.assert_close(found["mean"], of_vector()["mean"], rtol=1e-6, atol=1e-6)
    parts = of_total()
    torch.testing.assert_close(parts["first"], torch.tensor([1.5, 3.0], dtype=FLOAT), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts["second"], parts["first"])


def test_moments_of_draws_have_the_errors_of_their_chains():
    rng = torch.Generator().manual_seed(1)
    draws = {"x": torch.randn(50, 40, 2, generator=rng, dtype=FLOAT), "one": torch.ones(50, 40, dtype=FLOAT)}
    for found in (by_chains(draws), estimates(draws)):
        assert largest(distances(found, {"x": torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=FLOAT)})) < 5
        torch.testing.assert_close(found.errors["x"][0], torch.full((2,), 2000**-0.5, dtype=FLOAT), rtol=0.4, atol=0)
        assert found.ess["x"].shape == (2, 2)
        assert (found.ess["one"] == torch.inf).all()
