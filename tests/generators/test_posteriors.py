"""Draws of the simulators' parameters against importance sampling and quadrature, for a few observations."""

import pytest

import dgm_infer as dgm
from tests.generators.oracles import Reference, lotka_volterra_posterior, quantile_posterior
from tests.mistakes import WithoutGramTerm
from tests.oracles import assert_agrees, assert_refuted

CASES = {
    "generalised lambda": (lambda: quantile_posterior("generalised lambda"), 0.4),
    "g-and-k": (lambda: quantile_posterior("g-and-k"), 0.3),
    "Lotka-Volterra": (lotka_volterra_posterior, 0.6),
}


def from_the_posterior(reference: Reference, step_size: float, problem: dgm.Fibre | None = None) -> dgm.Draws:
    """Chains that start in the posterior and, if nothing is wrong, stay in it."""
    kernel = dgm.ConstrainedHMC(step_size, n_steps=(1, 6))
    return dgm.sample(
        problem or reference.problem,
        kernel,
        chains=300,
        warmup=0,
        draws=25,
        seed=1,
        initial=reference.starts(300),
        progress=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_chains_from_the_posterior_stay_in_it(case):
    make, step_size = CASES[case]
    reference = make()
    assert_agrees(reference, from_the_posterior(reference, step_size))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_control_without_the_gram_term_they_leave_it(case):
    make, step_size = CASES[case]
    reference = make()
    wrong = WithoutGramTerm(reference.problem.observed, reference.problem.values)
    assert_refuted(reference, from_the_posterior(reference, step_size, wrong))


# the g-and-k model is of the generalised lambda's kind
BOTH_KINDS = ("generalised lambda", "Lotka-Volterra")


# a warning of single chains is not what is tested
@pytest.mark.slow
@pytest.mark.parametrize("case", BOTH_KINDS)
def test_chains_from_prior_draws_reach_the_posterior_with_all_the_defaults(case):
    reference = CASES[case][0]()
    draws = dgm.sample(reference.problem, chains=100, warmup=100, draws=80, seed=2, progress=False)
    assert float(draws.summary()["r_hat"].max()) <= 1.05
    assert_agrees(reference, draws)
    if case == "generalised lambda":
        # the control: the posterior of other data
        assert_refuted(quantile_posterior(case, shift=0.3, draws=40_000), draws)
