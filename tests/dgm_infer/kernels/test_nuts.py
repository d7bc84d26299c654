"""NUTS: moments of targets that are known, the sub-trees it checks, and what a mistake in it does."""

from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import Status
from dgm_infer.kernels import nuts
from dgm_infer.kernels.integrators import PhasePoint
from dgm_infer.kernels.nuts import deepest, grow
from tests.oracles import FLOAT, assert_agrees, assert_refuted, correlated_gaussian, funnel
from tests.quick import some

SCALES = (0.1, 1.0, 10.0)


def run(oracle, *, chains=100, warmup=100, draws=40):
    return dgm.sample(
        oracle.problem, dgm.NUTS(metric="identity"), chains=chains, warmup=warmup, draws=draws, seed=1, progress=False
    )


@pytest.mark.slow
def test_gaussians_of_three_scales_at_once_have_their_means_and_covariances():
    oracle = correlated_gaussian(SCALES)
    draws = run(oracle)
    assert_agrees(oracle, draws)
    kernel: Any = draws.kernel
    steps = kernel.step_size / torch.tensor(SCALES, dtype=FLOAT)
    assert steps.max() / steps.min() < 2
    assert kernel.n_steps == 1023
    # trajectories of many lengths, none of which was asked for
    assert draws.stats["n_steps"].unique().numel() > 5
    assert_refuted(correlated_gaussian(SCALES, wrong=1.1), draws)


def test_the_non_centred_funnel_has_its_moments():
    oracle = funnel()
    assert_agrees(oracle, run(oracle))


@pytest.mark.slow
def test_control_the_funnel_without_its_change_of_variables_is_noticed():
    oracle = funnel(jacobian=False)
    assert_refuted(oracle, run(oracle, draws=20))


# ------------------------------------------------------------------------------------------------ what leaves as it is


SPREAD = torch.tensor([1.0, 2.5], dtype=FLOAT)


def gaussian(x):
    return 0.5 * (x / SPREAD).square().sum(-1)


def variance_in_standard_errors(step_size, *, chains=3000, transitions=15):
    """Largest deviation of the variances of chains that started from exact draws."""
    rng = torch.Generator().manual_seed(0)
    target, kernel = dgm.Target(gaussian, 2), dgm.NUTS(step_size=step_size)
    state = kernel.init(target, SPREAD * torch.randn(chains, 2, generator=rng, dtype=FLOAT))
    total = torch.zeros(())
    for _ in range(transitions):
        state, _ = kernel.step(target, state, rng)
        total = total + (state.position / SPREAD).square() / transitions
    return ((total.mean(0) - 1) / (total.std(0) / chains**0.5)).abs().max()


@pytest.mark.parametrize("step_size", some((0.5, 1.2, 1.9), quick=(1.2,)))
def test_exact_draws_stay_exact(step_size):
    assert variance_in_standard_errors(step_size) <= 5


@pytest.mark.parametrize("step_size", some((0.5, 1.2), quick=(1.2,)))
def test_control_sub_trees_that_are_not_checked_are_noticed(monkeypatch, step_size):
    monkeypatch.setattr(nuts._SubTree, "_turned", lambda *_: None)
    assert variance_in_standard_errors(step_size) > 5


def test_control_weights_without_the_kinetic_energy_are_noticed(monkeypatch):
    monkeypatch.setattr(PhasePoint, "hamiltonian", property(lambda self: self.energy))
    assert variance_in_standard_errors(0.5) > 5


# ------------------------------------------------------------------------------------------------------------ the tree


def turned_somewhere(p, first, last):
    """Whether leaves ``first`` to ``last`` have turned, or their halves with the next step of the other."""
    found = nuts.turns(p[first], p[last], p[first : last + 1].sum(0))
    if last - first > 1:
        middle = (first + last + 1) // 2
        found = found | nuts.turns(p[first], p[middle], p[first : middle + 1].sum(0))
        found = found | nuts.turns(p[middle - 1], p[last], p[middle - 1 : last + 1].sum(0))
    return found


@pytest.mark.parametrize("level", [1, 2, 3, 5])
def test_every_sub_tree_is_checked_when_its_last_leaf_is_there(level):
    rng = torch.Generator().manual_seed(level)
    # momenta that turn slowly, so that some sub-trees have turned and others have not
    angle = torch.linspace(0, 2.5, 2**level, dtype=FLOAT).unsqueeze(-1) * 3 * torch.rand(200, generator=rng).double()
    p = torch.stack([angle.cos(), angle.sin()], -1) + 0.3 * torch.randn(2**level, 200, 2, generator=rng).double()
    zero = torch.zeros(200, dtype=FLOAT)
    sub = nuts._SubTree(PhasePoint(p[0], p[0], zero, p[0]), zero, zero == 0, level)
    seen = 0
    for i in range(2**level):
        before, sub.total = sub.total, sub.total + p[i]
        found = sub._turned(i, p[i], before, p[i - 1])
        expected, size = torch.zeros(200, dtype=torch.bool), 2
        while (i + 1) % size == 0:
            expected |= turned_somewhere(p, i + 1 - size, i)
            size *= 2
        assert torch.equal(torch.zeros_like(expected) if found is None else found, expected)
        seen += int(expected.sum())
    assert 0 < seen < 200 * 2 ** (level - 1)


def one_tree(step, depth, *, chains=500, energy=gaussian):
    target, rng = dgm.Target(energy, 2), torch.Generator().manual_seed(3)
    x = SPREAD * torch.randn(chains, 2, generator=rng, dtype=FLOAT)
    start = PhasePoint(x, torch.randn(chains, 2, generator=rng, dtype=FLOAT), *target.energy_and_gradient(x))
    calls = []

    def evaluate(x):
        calls.append(None)
        return (*target.energy_and_gradient(x), (2 * x, x.sum(-1)))

    start = start._replace(extra=(2 * x, x.sum(-1)))
    return start, grow(start, evaluate, torch.full((chains,), step, dtype=FLOAT), depth, rng), len(calls)


def test_a_tree_is_no_deeper_than_it_may_be():
    for n_steps, depth in ((1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (1023, 10)):
        assert deepest(n_steps) == depth
    for depth in (1, 2, 4):
        _, tree, calls = one_tree(1e-3, depth)
        assert (tree.n_steps == 2**depth - 1).all()
        assert calls == 2**depth - 1


def test_trajectories_end_after_about_half_a_turn():
    start, tree, calls = one_tree(0.1, 10)
    # half a turn of the slower coordinate takes 2.5 pi
    assert tree.n_steps.max() <= 255
    assert tree.n_steps.double().mean() * 0.1 > 2
    assert calls == tree.n_steps.max()
    assert (tree.status == Status.OK).all()
    assert (tree.draw.position != start.position).any(-1).double().mean() > 0.97


def test_what_belongs_to_a_position_comes_with_it():
    _, tree, _ = one_tree(0.4, 6)
    draw = tree.draw
    torch.testing.assert_close(draw.extra[0], 2 * draw.position)
    torch.testing.assert_close(draw.extra[1], draw.position.sum(-1))
    torch.testing.assert_close(draw.energy, gaussian(draw.position))
    torch.testing.assert_close(draw.gradient, draw.position / SPREAD**2)


def test_a_divergence_ends_the_tree_and_is_never_drawn():
    def walled(x):
        return gaussian(x) + torch.where(x[..., 0] > 0.5, torch.inf, 0.0)

    start, tree, _ = one_tree(0.2, 8, energy=walled)
    inside = start.position[:, 0] <= 0.5
    assert (tree.draw.position[inside, 0] <= 0.5).all()
    hit = inside & (tree.status == Status.DIVERGED)
    assert 0.2 < hit[inside].double().mean() < 0.95
    # states before the wall still count
    assert (tree.draw.position[hit] != start.position[hit]).any(-1).double().mean() > 0.5
    assert (tree.acceptance[hit] < 1).all()


def open_step():
    target, kernel = dgm.Target(gaussian, 2), dgm.NUTS()
    return kernel.step(target, kernel.init(target, torch.zeros(1, 2, dtype=FLOAT)), torch.Generator())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgm.NUTS(step_size=-1.0), r"NUTS\(step_size=-1\): must be positive"),
        (lambda: dgm.NUTS(n_steps=0), r"NUTS\(n_steps=0\)"),
        (lambda: dgm.NUTS(n_steps=None), r"NUTS\(n_steps=None\): must be an integer >= 1"),
        (lambda: dgm.sample(dgm.condition(Line(), [0.5]), dgm.NUTS()), "NUTS samples a Target, not a Fibre"),
        (lambda: open_step(), "step_size=None is chosen by"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        make()


class Line(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return u[..., :1] + u[..., 1:]
