"""Pseudo-marginal kernels on posteriors that are known, by every estimator; and what a wrong estimator does."""

import math
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError
from tests.gradient_free_oracles import gaussian_latent
from tests.oracles import FLOAT
from tests.quick import marks

METHODS = {
    "PM-MH": dgm.kernels.PseudoMarginalMH(),
    "MI+MH": dgm.kernels.Alternating(dgm.kernels.Independence(), dgm.kernels.RandomWalk(), blocks=("noise", "target")),
    "SS+MH": dgm.kernels.Alternating(
        dgm.kernels.EllipticalSlice(), dgm.kernels.RandomWalk(), blocks=("noise", "target")
    ),
    "MI+SS": dgm.kernels.Alternating(
        dgm.kernels.Independence(), dgm.kernels.EllipticalSlice(), blocks=("noise", "target")
    ),
    "SS+SS": dgm.kernels.Alternating(
        dgm.kernels.EllipticalSlice(), dgm.kernels.LinearSlice(), blocks=("noise", "target")
    ),
}
UNIFORM = dgm.kernels.Alternating(
    dgm.kernels.LinearSlice(1.0, 1, reflect=True), dgm.kernels.RandomWalk(), blocks=("noise", "target")
)


def run(oracle, kernel, chains=200, draws=80):
    return dgm.sample(oracle.problem, kernel, chains=chains, warmup=100, draws=draws, seed=1, progress=False)


def deviations(oracle, draws):
    """Of the moments, in standard errors over chains."""
    values = oracle.statistics(draws.inputs).mean(1)
    return (values.mean(0) - oracle.expected) * len(values) ** 0.5 / values.std(0)


QUICK = ["PM-MH", "MI+MH"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n in QUICK)) for n in METHODS])
def test_draws_have_the_moments_of_the_exact_posterior(name):
    oracle = gaussian_latent()
    draws = run(oracle, METHODS[name])
    assert deviations(oracle, draws).abs().max() <= 5
    if name != "PM-MH":
        # both updates are reported
        assert {"noise_acceptance_rate", "target_acceptance_rate"} <= set(draws.stats)


@pytest.mark.slow
def test_uniform_noise_by_reflected_slices_has_them_too():
    oracle = gaussian_latent(uniform=True)
    assert deviations(oracle, run(oracle, UNIFORM)).abs().max() <= 5


def test_control_an_estimate_that_is_drawn_afresh_at_every_step_is_noticed():
    """The mistake: the estimate at the present point is not the one that it was accepted with."""

    class Forgetful(dgm.kernels.PseudoMarginalMH):
        def step(self, problem: Any, state, rng):
            x, u = problem.split(state.position)
            fresh = torch.randn(u.shape, generator=rng, dtype=u.dtype)
            return super().step(problem, self.init(problem, torch.cat([x, fresh], -1)), rng)

    oracle = gaussian_latent(n_data=6, samples=1)
    assert deviations(oracle, run(oracle, Forgetful())).abs().max() > 5


def test_the_longest_stay_of_a_chain_counts_the_draws_that_repeat():
    x = torch.tensor([[0.0, 1.0, 1.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]).unsqueeze(-1)
    draws = dgm.Draws(
        inputs=None,
        latents={"x": x},
        stats={"acceptance_rate": x[..., 0]},
        kernel=dgm.kernels.PseudoMarginalMH(),
        seed=0,
    )
    assert draws.longest_stay.tolist() == [2, 0]


def test_statistics_are_summarised_by_problem():
    x = torch.tensor([[[0.0, 1.0], [0.0, 3.0], [2.0, 3.0], [2.0, 5.0]]]).unsqueeze(-1)
    diverging = torch.tensor([[[True, False]] * 2 + [[False, False]] * 2])
    stats = {"acceptance_rate": x[..., 0], "diverging": diverging}
    draws = dgm.Draws(inputs=None, latents={"x": x}, stats=stats, kernel=dgm.kernels.PseudoMarginalMH(), seed=0)
    assert draws.stats_summary().to_dict("list") == {
        "acceptance_rate": [1.0, 3.0], "diverging": [0.5, 0.0], "longest_stay": [1, 1]
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------- estimators


def exponential_error(log_estimate, truth):
    """Of the mean of estimates of a density, in standard errors."""
    ratio = (log_estimate - truth).exp()
    return (ratio.mean() - 1) / ratio.std() * math.sqrt(len(ratio))


def linear_chain(n_steps=4, particles=8):
    """``z_t = a z_{t-1} + n_t``, ``y_t = z_t + N(0, 1)``, with the exact likelihood of the data."""
    y = torch.tensor([0.5, -1.0, 0.3, 1.2], dtype=FLOAT)[:n_steps]

    def step(t, x, previous, n):
        return n if previous is None else x * previous + n

    def log_observation(t, x, state):
        return -0.5 * (y[t] - state[..., 0]).square() - 0.5 * math.log(2 * math.pi)

    def exact(a):
        chain = torch.eye(n_steps, dtype=FLOAT) - torch.diag(torch.full((n_steps - 1,), a, dtype=FLOAT), -1)
        root = torch.linalg.inv(chain)
        covariance = root @ root.mT + torch.eye(n_steps, dtype=FLOAT)
        return torch.distributions.MultivariateNormal(torch.zeros(n_steps, dtype=FLOAT), covariance).log_prob(y)

    return dgm.kernels.ParticleFilter(step, log_observation, n_steps, 1, particles), exact


def test_a_particle_filter_is_unbiased():
    estimate, exact = linear_chain()
    u = torch.randn(20_000, estimate.noise_dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    x = torch.full((20_000, 1), 0.8, dtype=FLOAT)
    assert abs(exponential_error(estimate(x, u), exact(0.8))) < 5
    # the control: of another chain it is the estimate of another likelihood
    assert abs(exponential_error(estimate(x, u), exact(0.3))) > 5


def logit(x, z):
    """A normal latent of scale x, seen through a logit, for a datum of 1."""
    return -0.5 * (z / x).square().sum(-1) - x.log().sum(-1) + torch.nn.functional.logsigmoid(z).sum(-1)


def test_importance_by_the_laplace_approximation_is_unbiased_and_closer_than_by_the_prior():
    rng, x = torch.Generator().manual_seed(2), torch.full((5000, 1), 1.5, dtype=FLOAT)
    laplace = dgm.kernels.LaplaceEstimate(logit, 1, samples=4)
    prior = dgm.kernels.ImportanceEstimate(logit, lambda x: (0 * x, x), 1, samples=4)
    truth = math.log(0.5) + 0.5 * math.log(2 * math.pi)
    u = torch.randn(5000, laplace.noise_dim, generator=rng, dtype=FLOAT)
    estimates = [method(x, u) for method in (laplace, prior)]
    for log_estimate in estimates:
        assert abs(exponential_error(log_estimate, truth)) < 5
        assert abs(exponential_error(log_estimate, truth + 0.05)) > 5
    assert 2 * estimates[0].std() < estimates[1].std()


@pytest.mark.parametrize(
    ("log_estimate", "named"),
    [
        (lambda x, u: x[..., 0] * math.nan, "NaN at 16 of 16"),
        # the log of what is negative
        (lambda x, u: u[..., 0].log(), r"NaN at \d+ of 16 .* not negative"),
        (lambda x, u: torch.where(u[..., 0] > 0, math.inf, 0.0), "plus infinity at"),
        (lambda x, u: x, r"shape \(16, 2\)"),
        (lambda x, u: x.no_such_method(), "fails at prior draws"),
        (3.0, "must be a function"),
    ],
)
def test_estimators_that_return_no_density_are_named(log_estimate, named):
    with pytest.raises(ArgumentError, match=named):
        dgm.kernels.PseudoMarginal(log_estimate, dgm.StandardNormal(2), dgm.StandardNormal(3))


def test_a_broken_estimate_later_on_is_a_divergence_of_its_chain():
    target = dgm.kernels.PseudoMarginal(
        lambda x, u: torch.where(x[..., 0] > 4, math.nan, 0.0 * u[..., 0]),
        dgm.StandardNormal(1),
        dgm.kernels.Uniform(1),
    )
    kernel = dgm.kernels.PseudoMarginalMH(step_size=3.0)
    state = kernel.init(target, torch.tensor([[3.9, 0.5]], dtype=FLOAT).repeat(100, 1))
    after, info = kernel.step(target, state, torch.Generator().manual_seed(1))
    assert (info.status == dgm.errors.Status.DIVERGED).any()
    assert (after.position[:, 0] <= 4).all()
