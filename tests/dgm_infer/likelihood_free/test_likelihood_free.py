"""ABC of a simulator whose ABC posteriors are known by quadrature."""

import math

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError, StartError
from tests.oracles import FLOAT
from tests.quick import marks

Y, EPS = 2.0, 0.5


def simulate(z, rng):
    return z + torch.randn(z.shape, generator=rng, dtype=z.dtype)


def simulate_in_numpy(z, rng):
    return z + rng.standard_normal(z.shape)


def simulation(**options):
    return dgm.likelihood_free.Simulation(simulate, dgm.StandardNormal(1), [Y], **options)


def exact(eps=EPS):
    """Mean and variance of ``z ~ N(0, 1)`` given ``|z + n - Y| < eps``."""
    z = torch.linspace(-8, 8, 20_001, dtype=FLOAT)
    mass = torch.special.ndtr(Y + eps - z) - torch.special.ndtr(Y - eps - z)
    weights = mass * (-0.5 * z.square()).exp()
    mean = weights @ z / weights.sum()
    return mean, weights @ (z - mean).square() / weights.sum()


METHODS = {
    "rejection": dgm.likelihood_free.ABCRejection(EPS),
    "importance": dgm.likelihood_free.ABCImportance(EPS, "uniform", dgm.Gaussian(torch.ones(1, dtype=FLOAT), 1.5)),
    "chains": dgm.likelihood_free.ABCMCMC(EPS, chains=200, warmup=10),
    "SMC": dgm.likelihood_free.ABCSMC(EPS),
}


def runs(method, problem, n=12, draws=2000):
    """Means and variances by independent runs, ``[n, 2]``."""
    found = [dgm.likelihood_free.sample_abc(problem, method, draws=draws, seed=seed) for seed in range(n)]
    return torch.stack([torch.cat([f.mean, f.sd.square()]) for f in found])


def deviations(values, expected):
    return (values.mean(0) - torch.stack(expected)) * len(values) ** 0.5 / values.std(0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n in ("rejection", "importance"))) for n in METHODS])
def test_methods_agree_with_the_exact_abc_posterior(name):
    values = runs(METHODS[name], simulation())
    assert deviations(values, exact()).abs().max() <= 5
    # the control: it is not that of another tolerance
    assert deviations(values, exact(2 * EPS)).abs().max() > 5


def test_a_simulator_in_numpy_serves_as_well():
    problem = dgm.likelihood_free.Simulation(simulate_in_numpy, dgm.StandardNormal(1), [Y], library="numpy")
    assert deviations(runs(dgm.likelihood_free.ABCSMC(EPS), problem, draws=500), exact()).abs().max() <= 5
    first, second = (
        dgm.likelihood_free.sample_abc(problem, dgm.likelihood_free.ABCSMC(EPS), draws=50, seed=3) for _ in range(2)
    )
    assert torch.equal(first.parameters, second.parameters)


@pytest.mark.slow
def test_expectations_converge_to_the_exact_posterior_with_the_square_of_the_tolerance():
    bias = []
    for eps in (1.0, 0.5):
        found = dgm.likelihood_free.sample_abc(
            simulation(), dgm.likelihood_free.ABCImportance(eps, "uniform"), draws=2_000_000, seed=1
        )
        bias.append(found.mean.item() - Y / 2)
    assert 1.6 < math.log2(bias[0] / bias[1]) < 2.2


def test_a_gaussian_kernel_is_noise_of_its_width():
    values = runs(dgm.likelihood_free.ABCRejection(0.7, "gaussian"), simulation())
    total = 1 + 1 + 0.7**2
    expected = (torch.tensor(Y / total), torch.tensor(1 - 1 / total))
    assert deviations(values, expected).abs().max() <= 5


def test_the_simulator_is_called_in_batches_of_the_memory_budget():
    sizes = []

    def counted(z, rng):
        sizes.append(len(z))
        return simulate(z, rng)

    small = dgm.likelihood_free.Simulation(counted, dgm.StandardNormal(1), [Y], memory=100_000)
    found = dgm.likelihood_free.sample_abc(small, dgm.likelihood_free.ABCRejection(EPS), draws=500, seed=1)
    assert max(sizes) == small.rows < 1000
    assert sum(sizes[1:]) == found.simulations
    assert len(found.parameters) == 500
    assert found.acceptance_rate == pytest.approx(0.11, abs=0.04)
    assert (found.distances <= EPS).all()


@pytest.mark.parametrize(
    "method",
    [
        dgm.likelihood_free.ABCRejection(1e-9, max_simulations=5000),
        dgm.likelihood_free.ABCImportance(1e-9, "uniform"),
        dgm.likelihood_free.ABCMCMC(1e-9, max_simulations=5000),
    ],
)
def test_a_run_without_acceptances_ends_with_the_smallest_distance(method):
    with pytest.raises(StartError, match=r"none of 5000 .* smallest distance seen is 0\.00\d+.*below 0\.0006"):
        dgm.likelihood_free.sample_abc(simulation(), method, draws=5000, seed=1)


def test_fewer_draws_than_asked_for_are_said():
    method = dgm.likelihood_free.ABCRejection(EPS, max_simulations=5000)
    with pytest.warns(dgm.diagnosis.DiagnosisWarning, match=r"draws=4000\): 5000 simulations made only \d+ draws"):
        found = dgm.likelihood_free.sample_abc(simulation(), method, draws=4000, seed=1)
    assert len(found.parameters) < 4000


def test_sequential_runs_stop_where_nothing_moves_and_say_what_they_reached():
    discrete = dgm.likelihood_free.Simulation(
        lambda z, rng: simulate(z, rng).round(), dgm.StandardNormal(1), [Y + 0.25]
    )
    with pytest.warns(UserWarning, match=r"stopped at 0\.25"):
        found = dgm.likelihood_free.sample_abc(discrete, dgm.likelihood_free.ABCSMC(1e-3), draws=200, seed=1)
    assert found.tolerance == 0.25


def nan_beyond_one(z, rng):
    return torch.where(z > 1, math.nan, simulate(z, rng))


def test_simulations_that_are_not_numbers_are_rejected():
    problem = dgm.likelihood_free.Simulation(nan_beyond_one, dgm.StandardNormal(1), [0.0])
    for method in METHODS.values():
        if not isinstance(method, dgm.likelihood_free.ABCImportance):
            assert (dgm.likelihood_free.sample_abc(problem, method, draws=200, seed=1).parameters <= 1).all()


@pytest.mark.parametrize(
    ("make", "kind", "named"),
    [
        (lambda: dgm.likelihood_free.Simulation(simulate, 3.0, [Y]), ArgumentError, "prior=3.0"),
        (
            lambda: dgm.likelihood_free.Simulation(simulate, dgm.StandardNormal(1), [[Y]]),
            ArgumentError,
            "observed of shape",
        ),
        (
            lambda: dgm.likelihood_free.Simulation(lambda z, rng: z[:1], dgm.StandardNormal(1), [Y]),
            ModelError,
            r"must be \(4, 1\)",
        ),
        (
            lambda: dgm.likelihood_free.Simulation(lambda z, rng: z.nothing, dgm.StandardNormal(1), [Y]),
            ModelError,
            "simulator fails",
        ),
        (lambda: simulation(distance=lambda a, b: a), ArgumentError, "one non-negative number"),
        (lambda: simulation(library="jax"), ArgumentError, "library='jax'"),
        (lambda: dgm.likelihood_free.ABCRejection(0.0), ArgumentError, "tolerance=0"),
        (lambda: dgm.likelihood_free.ABCSMC(0.1, survive=1.5), ArgumentError, "survive=1.5"),
        (lambda: dgm.likelihood_free.sample_abc(simulation(), dgm.likelihood_free.ABCSMC), ArgumentError, "method="),
        (
            lambda: dgm.likelihood_free.sample_abc(np.zeros(3), dgm.likelihood_free.ABCSMC(0.1)),
            ArgumentError,
            "simulation=",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, kind, named):
    with pytest.raises(kind, match=named):
        make()
