"""Constrained HMC draws from the exact posterior on the fibre; what leaves a term or a check out is noticed."""

import dataclasses
import math
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.kernels import constrained
from dgm_infer.structures import Units
from generators import WithNoise
from tests.mistakes import WithoutGramTerm
from tests.oracles import (
    FLOAT,
    Ellipse,
    LinearGaussian,
    LinearPairs,
    LinearWalk,
    LogisticEllipse,
    assert_agrees,
    assert_refuted,
    ellipse,
    gaussian_oracle,
    linear,
    linear_gaussian,
    linear_gaussian_model,
    linear_gaussian_posterior,
    wave,
    without_reverse_check,
)

# solvers and flows, each of them once
STRAIGHT, CIRCULAR = {"solver": "quasi_newton", "split": False}, {"solver": "newton", "split": True}


def by_way(way, *more, slow=False):
    """Parameters of a test: a solver with a flow, and names of what else."""
    names = way["solver"], "circular" if way["split"] else "straight", *more
    return pytest.param(way, *more, marks=pytest.mark.slow if slow else (), id=", ".join(names))


def run(problem, *, step_size, n_steps=(1, 4), n_geodesic=1, chains=400, warmup=20, draws=25, **more):
    kernel = dgm.ConstrainedHMC(step_size, n_steps, n_geodesic=n_geodesic, **more)
    return dgm.sample(problem, kernel, chains=chains, warmup=warmup, draws=draws, seed=1, progress=False)


# ------------------------------------------------------------------------------------------------------------- curves


@pytest.mark.parametrize("way", [by_way(STRAIGHT, slow=True), by_way(CIRCULAR)])
def test_the_ellipse_has_the_density_with_the_gram_term(way):
    oracle = ellipse()
    assert_agrees(oracle, run(oracle.problem, step_size=0.3, **way))


@pytest.mark.slow
def test_without_gram_force_the_ellipse_has_the_same_density_at_a_lower_acceptance():
    oracle = ellipse()
    draws, other = (run(oracle.problem, step_size=0.3, gram_force=force) for force in (False, True))
    assert_agrees(oracle, draws)
    assert draws.stats["acceptance_rate"].mean() < other.stats["acceptance_rate"].mean() - 0.02


@pytest.mark.slow
def test_inputs_need_not_be_normal():
    # large enough for the tails of the density to tell
    oracle = ellipse(12.0, model=LogisticEllipse)
    draws = run(oracle.problem, step_size=0.6, n_steps=(2, 6), **CIRCULAR)
    assert_agrees(oracle, draws)
    # the control: normal ones have another density
    assert_refuted(ellipse(12.0), draws)


@pytest.mark.slow
def test_control_without_the_gram_term_the_ellipse_has_another_density():
    fibre = ellipse().problem
    wrong = WithoutGramTerm(fibre.observed, fibre.values)
    draws = run(wrong, step_size=0.3, **CIRCULAR)
    assert_refuted(ellipse(), draws)
    assert_agrees(ellipse(gram=False, problem=wrong), draws)


@pytest.mark.slow
def test_several_ellipses_at_once_keep_their_own_densities():
    # the eccentric angle of u1^2 + 4 u2^2 = r^2 has density exp(-|u|^2/2), whatever r
    oracle = ellipse()
    draws = run(
        dgm.condition(Ellipse(), [[0.5], [2.0], [4.0]]),
        step_size=torch.tensor([0.15, 0.3, 0.3]),
        chains=400,
        **STRAIGHT,
    )
    for problem in (0, 1, 2):
        values = oracle.statistics(draws.inputs[:, :, problem])
        radius = (draws.inputs[:, :, problem] * torch.tensor([1.0, 2.0])).norm(dim=-1)
        torch.testing.assert_close(radius, torch.full_like(radius, (0.5, 2.0, 4.0)[problem] ** 0.5))
        assert values.std() > 0.1
    only = dgm.Draws(inputs=draws.inputs[:, :, 1], latents=None, stats=draws.stats, kernel=draws.kernel, seed=1)
    other = dgm.Draws(inputs=draws.inputs[:, :, 2], latents=None, stats=draws.stats, kernel=draws.kernel, seed=1)
    assert_agrees(oracle, only)
    assert_refuted(oracle, other)


# -------------------------------------------------------------------------------------------------- the reverse check


def long_steps(problem):
    # few iterations: slow solves fail forwards, and the check must count them as failed backwards too
    return run(problem, step_size=0.8, chains=600, warmup=60, draws=60, max_iterations=20, **STRAIGHT)


# straight; on circular flows the default kernel has the density of the wave, below
@pytest.mark.slow
def test_the_wave_has_its_density_although_many_projections_find_far_roots():
    oracle = wave()
    draws = long_steps(oracle.problem)
    assert draws.stats["reversal_failed"].double().mean() > 0.05
    assert_agrees(oracle, draws)


@pytest.mark.slow
def test_control_without_the_reverse_check_the_wave_has_another_density(monkeypatch):
    geodesic: Any = constrained.geodesic

    def unchecked(*arguments, flow):
        *others, solver, _ = arguments
        return geodesic(*others, without_reverse_check(solver), math.inf, flow=flow)

    monkeypatch.setattr(constrained, "geodesic", unchecked)
    oracle = wave()
    draws = long_steps(oracle.problem)
    assert not draws.stats["reversal_failed"].any()
    assert_refuted(oracle, draws)


# ---------------------------------------------------------------------------------------------------- linear Gaussian

ROW = torch.tensor([True, False, True, True, False, True])
FEW = torch.tensor([False, True, False, False, True, False])
ROWS = torch.stack([ROW, ROW.roll(1), ROW.roll(2)])


SEEN = {
    "all outputs": {},
    "under a mask": {"masks": ROW},
    "fewer outputs than latents": {"masks": FEW},
    "three observations at once": {"problems": (3,)},
    "one mask per problem": {"problems": (3,), "masks": ROWS},
    "a grid of observations under one mask": {"problems": (2, 2), "masks": ROW},
}
QUICK = [(STRAIGHT, "under a mask")]
# what is seen has its code, and solvers and flows theirs: each in one case, the structure under a mask in both ways
WAYS = [(STRAIGHT, "under a mask"), (CIRCULAR, "under a mask"), (STRAIGHT, "all outputs")]
WAYS += [(CIRCULAR, "fewer outputs than latents"), (STRAIGHT, "three observations at once")]
WAYS += [(CIRCULAR, "one mask per problem"), (STRAIGHT, "a grid of observations under one mask")]
BY_WAY = [by_way(way, seen, slow=(way, seen) not in QUICK) for way, seen in WAYS]


@pytest.mark.parametrize(("way", "seen"), BY_WAY)
def test_latents_of_a_linear_gaussian_model_have_the_exact_posterior(way, seen):
    oracle = linear_gaussian(**SEEN[seen])
    assert_agrees(oracle, run(oracle.problem, step_size=0.5, n_geodesic=2, chains=200, **way))


@pytest.mark.slow
def test_control_the_posterior_under_another_mask_is_noticed():
    draws = run(linear_gaussian(masks=ROW).problem, step_size=0.5, n_geodesic=2, chains=200)
    assert_refuted(linear_gaussian(masks=ROW.roll(1)), draws)


@pytest.mark.slow
def test_control_a_tenth_more_noise_is_noticed():
    # W, b and y are the same: only sd differs
    draws = run(linear_gaussian(model=linear_gaussian_model(sd=0.55)).problem, step_size=0.5, n_geodesic=2, chains=400)
    assert_refuted(linear_gaussian(), draws)


class Undeclared(dgm.GenerativeModel):
    """A linear Gaussian model that declares nothing: its whole Jacobian is dense."""

    def __init__(self, model: LinearGaussian):
        super().__init__()
        self.inner = model
        self.input_density = model.input_density

    def observed(self, u):
        return self.inner.observed(u)


def test_an_undeclared_structure_and_unused_noise_inputs_leave_the_posterior_as_it_is():
    oracle = linear_gaussian(masks=ROW, wrap=Undeclared)
    # with the noise of hidden outputs among the inputs
    assert oracle.problem.dim == 9
    assert oracle.problem.units is None
    assert_agrees(oracle, run(oracle.problem, step_size=0.5, n_geodesic=2, chains=200))


class Mean(dgm.GenerativeModel):
    """``x = W z + b``, without noise."""

    def __init__(self, model: LinearGaussian):
        super().__init__()
        self.inner = model
        self.input_density = model.global_density

    def observed(self, u):
        return u @ self.inner.weight.mT + self.inner.bias


@pytest.mark.slow
def test_added_noise_gives_the_posterior_of_the_noisy_model():
    oracle = linear_gaussian(masks=ROW, wrap=lambda model: WithNoise(Mean(model), sd=model.sd))
    assert oracle.problem.units is not None
    assert_agrees(oracle, run(oracle.problem, step_size=0.5, n_geodesic=2, chains=200))


def test_a_tolerance_gives_the_same_posterior_as_added_noise_of_that_size():
    noisy = linear_gaussian()
    model = linear_gaussian_model()
    target = dgm.condition(Mean(model), noisy.problem.values, tolerance=0.5)
    kernel = dgm.HMC(step_size=0.15, n_steps=(2, 6))
    draws = dgm.sample(target, kernel, chains=200, warmup=40, draws=40, seed=1, progress=False)
    assert_agrees(noisy, draws)
    wider = dgm.condition(Mean(model), noisy.problem.values, tolerance=0.55)
    assert_refuted(noisy, dgm.sample(wider, kernel, chains=400, warmup=40, draws=40, seed=1, progress=False))


def mixed_outputs(swap: bool = False):
    """z of the linear Gaussian model given three averages of its outputs, and the problem of observing these."""
    model = linear_gaussian_model()
    mixing = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, -1, 0, 0], [0, 0, 0, 0, 2, 1]], dtype=FLOAT)
    y = torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, -3.0]], dtype=FLOAT)
    answers = [linear_gaussian_posterior(model, values, mixing) for values in (y.flip(0) if swap else y)]
    means, covariances = (torch.stack(a) for a in zip(*answers, strict=True))
    problem = dgm.condition(model, y, observe=lambda x: x @ mixing.to(x.dtype).mT)
    return gaussian_oracle(problem, means, covariances, lambda u: u[..., :3])


@pytest.mark.slow
def test_any_function_of_the_output_can_be_observed():
    oracle = mixed_outputs()
    draws = run(oracle.problem, step_size=0.5, n_geodesic=2, chains=200)
    assert_agrees(oracle, draws)
    assert_refuted(mixed_outputs(swap=True), draws)


# ------------------------------------------------------------------------------------------------------ larger units


def series(n):
    return 2 * torch.randn(n, generator=torch.Generator().manual_seed(102), dtype=FLOAT)


def pairs(correlation=0.8):
    return linear(LinearPairs(correlation), series(8))


def pairs_under_a_mask(correlation=0.8):
    mask = torch.tensor([False, True, False, True]).repeat_interleave(2)
    return linear(
        LinearPairs(correlation), series(8), observe=dgm.pixels(mask), operator=torch.eye(8, dtype=FLOAT)[mask]
    )


def a_walk(correlation=0.8):
    return linear(LinearWalk(correlation), series(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_oracle",
    [pytest.param(pairs, marks=pytest.mark.slow), pairs_under_a_mask, a_walk],
    ids=["pairs", "pairs under a mask", "a walk"],
)
def test_latents_of_linear_models_of_larger_units_have_the_exact_posterior(make_oracle):
    oracle = make_oracle()
    assert oracle.problem.units.outputs == 2
    draws = run(oracle.problem, step_size=0.7, chains=200)
    assert_agrees(oracle, draws)
    # the control: noise that is correlated less
    assert_refuted(make_oracle(0.5), draws)


SUMS = torch.tensor([[0.5, 0, 0, 0.5, 0], [0, 2, 0, 0, -1]], dtype=FLOAT)


def sums(y):
    """z of two latents given two sums of five outputs."""
    model = linear_gaussian_model(n_latents=2, n_outputs=5)
    y = torch.tensor(y, dtype=FLOAT)
    # any output of these sums
    whole = torch.linalg.pinv(SUMS) @ y
    oracle = linear(model, whole, operator=SUMS)
    return dataclasses.replace(oracle, problem=dgm.condition(model, y, observe=dgm.linear(SUMS)))


@pytest.mark.slow
def test_latents_given_sums_of_the_outputs_have_the_exact_posterior():
    oracle = sums([1.0, -2.0])
    assert oracle.problem.units == Units(2, 2, 1)
    draws = run(oracle.problem, step_size=0.7, chains=200)
    assert_agrees(oracle, draws)
    # the control: other sums
    assert_refuted(sums([1.0, -1.0]), draws)


# ------------------------------------------------------------------------------------------------ with all the defaults


# a transition costs as much as its longest trajectory: many chains, few transitions
DEFAULTS = {"chains": 300, "warmup": 70, "draws": 30, "seed": 3, "progress": False}


@pytest.mark.slow
@pytest.mark.parametrize("make", [ellipse, wave, linear_gaussian, pairs, a_walk], ids=lambda make: make.__name__)
def test_the_default_kernel_with_its_warm_up_draws_from_the_posterior(make):
    oracle = make()
    assert_agrees(oracle, dgm.sample(oracle.problem, **DEFAULTS))


@pytest.mark.slow
def test_control_the_default_kernel_on_the_fibre_without_the_gram_term():
    fibre = ellipse().problem
    wrong = WithoutGramTerm(fibre.observed, fibre.values)
    assert_refuted(ellipse(), dgm.sample(wrong, **DEFAULTS))
