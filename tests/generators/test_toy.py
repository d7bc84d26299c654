"""The hyperbola: chains stay on a branch of its fibre, and output noise lets them cross."""

import pytest
import torch

import dgm_infer as dgm
from generators import Hyperbola, WithNoise
from tests.mistakes import WithoutGramTerm
from tests.oracles import FLOAT, Oracle, assert_agrees, assert_refuted


def run(problem, **more):
    kernel = dgm.ConstrainedHMC(0.4, n_steps=(2, 6), n_geodesic=2)
    settings = {"chains": 150, "warmup": 10, "draws": 25, "seed": 1, "progress": False} | more
    return dgm.sample(problem, kernel, **settings)


def test_the_output_is_the_difference_of_squares():
    u = torch.tensor([[2.0, 1.0], [1.0, -2.0], [-3.0, 0.0]])
    assert Hyperbola()(u).tolist() == [[3.0], [-3.0], [9.0]]
    z = Hyperbola().latents(u)
    assert z["u1"].tolist() == [2, 1, -3]
    assert z["u2"].tolist() == [1, -2, 0]


@pytest.mark.parametrize("x", [1.0, -0.5])
def test_on_the_fibre_the_branch_is_the_sign_of_the_input_that_cannot_vanish(x):
    fibre = dgm.condition(Hyperbola(), [x])
    u = fibre.start(50, torch.Generator().manual_seed(0))
    branch = fibre.latents(u)["branch"]
    assert torch.equal(branch, u[:, 0 if x > 0 else 1].sign())
    assert set(branch.tolist()) == {-1.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("x", [1.0, -0.5])
def test_without_noise_every_chain_keeps_to_its_branch(x):
    draws = run(dgm.condition(Hyperbola(), [x]))
    branch = draws.latents["branch"]
    assert (branch == branch[:, :1]).all()
    assert set(branch[:, 0].tolist()) == {-1.0, 1.0}
    # the chains move all the same: along the whole of their branch
    along = draws.latents["u2" if x > 0 else "u1"]
    assert (along.amin(1) < -0.3).all()
    assert (along.amax(1) > 0.3).all()


def noisy(sd: float, *, problem: dgm.Fibre | None = None) -> Oracle:
    """``u1^2 - u2^2 + sd n = 1``, by quadrature of ``p(u) N(1; u1^2 - u2^2, sd^2)`` over the plane."""
    grid = torch.linspace(-6, 6, 1201, dtype=FLOAT)
    u = torch.cartesian_prod(grid, grid)

    def statistics(u):
        u1, u2 = u[..., 0], u[..., 1]
        branch = torch.where(u1.abs() >= u2.abs(), u1, u2).sign()
        return torch.stack([branch, u1, u2, u1.square(), u2.square(), branch * u1], -1)

    misfit = (1 - u[:, 0].square() + u[:, 1].square()) / sd
    weights = (-0.5 * (u.square().sum(-1) + misfit.square())).softmax(0)
    problem = problem or dgm.condition(WithNoise(Hyperbola(), sd), [1.0])
    return Oracle(problem, statistics, weights @ statistics(u))


@pytest.mark.slow
def test_with_noise_chains_cross_and_spend_half_their_time_on_each_branch():
    oracle = noisy(0.7)
    # by symmetry; the branch jumps between points of the grid
    assert oracle.expected[0].abs() < 1e-4
    draws = run(oracle.problem)
    branch = draws.latents["branch"]
    both = (branch.amin(1) < 0) & (branch.amax(1) > 0)
    assert both.double().mean() > 0.9
    assert_agrees(oracle, draws)


@pytest.mark.slow
def test_control_chains_kept_on_one_branch_are_noticed():
    # all from one side, without noise enough to leave it
    oracle = noisy(0.1)
    side = torch.tensor([1.0, 0.0, 0.0], dtype=FLOAT).expand(150, 3)
    draws = run(oracle.problem, initial=side)
    assert (draws.latents["branch"] == 1).all()
    assert_refuted(oracle, draws)


@pytest.mark.slow
def test_control_without_the_gram_term_the_noisy_hyperbola_has_another_density():
    oracle = noisy(0.7)
    wrong = WithoutGramTerm(oracle.problem.observed, oracle.problem.values)
    assert_refuted(oracle, run(wrong))
