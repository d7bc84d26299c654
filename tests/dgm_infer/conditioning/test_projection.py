"""Solvers find roots along the rows of one Jacobian, row by row."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.conditioning.projection import SOLVERS, Stop, damped_gauss_newton, masked, project
from dgm_infer.structures import DenseJacobian
from dgm_infer.structures.blocks import solve_local_inputs
from tests.models import Bent
from tests.oracles import FLOAT, Circle, Ellipse, Wave

TOLERANCE = 1e-10


def off_the_fibre(structure="independent", n=40, distance=0.3, seed=31):
    """Points moved off a fibre along tangents, with the Jacobian at where they came from."""
    rng = torch.Generator().manual_seed(seed)
    fibre = dgm.condition(Bent(structure), torch.linspace(-0.8, 0.8, 5, dtype=FLOAT))
    flat = fibre.rows(n)
    u = fibre.start(n, rng, tolerance=1e-12)
    base = flat.jacobian(u)
    p = base.tangent(torch.randn(u.shape, generator=rng, dtype=FLOAT))
    return flat, u + distance * p, base


def settings(fibre, v, **changes):
    n = len(v)
    plain = {"tolerance": torch.full((n,), TOLERANCE, dtype=FLOAT), "active": torch.ones(n, dtype=torch.bool)}
    return {**plain, **changes}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("structure", ["independent", "dense"])
def test_a_projection_is_on_the_fibre_and_moved_along_the_rows_of_the_jacobian(solver, structure):
    fibre, v, base = off_the_fibre(structure)
    assert (fibre.units is not None) == (structure == "independent")
    result = project(fibre, v, base, solvers=(solver,), **settings(fibre, v))
    assert result.converged.all()
    assert fibre.constraint_error(result.position).max() < TOLERANCE
    assert fibre.constraint_error(v).min() > 1e3 * TOLERANCE
    move = result.position - v
    assert base.tangent(move).abs().max() < 1e-12 * move.abs().max().clamp_min(1)


def test_all_solvers_reach_the_same_root():
    fibre, v, base = off_the_fibre()
    quasi, newton = (project(fibre, v, base, solvers=(s,), **settings(fibre, v)) for s in ("quasi_newton", "newton"))
    torch.testing.assert_close(quasi.position, newton.position, rtol=0, atol=1e-8)


def test_newton_needs_fewer_iterations():
    fibre, v, base = off_the_fibre()
    quasi, newton = (project(fibre, v, base, solvers=(s,), **settings(fibre, v)) for s in ("quasi_newton", "newton"))
    assert (newton.iterations <= quasi.iterations).all()
    assert newton.iterations.max() < quasi.iterations.max()


class Mixed(dgm.GenerativeModel):
    """Linear outputs, so that a wrong Jacobian is wrong by a constant matrix."""

    input_density = dgm.StandardNormal(5)

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linspace(-1, 1, 15).reshape(5, 3).cos() + torch.eye(5, 3))

    def observed(self, u):
        return u @ self.weight


def iterations_with_a_wrong_jacobian(solver):
    fibre = dgm.condition(Mixed(), [0.1, 0.2, 0.3]).rows(4)
    rng = torch.Generator().manual_seed(39)
    u = torch.randn(4, 5, generator=rng, dtype=FLOAT)
    (matrix,) = fibre.entries(u).entries
    wrong = DenseJacobian.factorise(matrix + 0.3 * torch.randn(4, 3, 5, generator=rng, dtype=FLOAT))
    result = project(fibre, u, wrong, solvers=(solver,), **settings(fibre, u))
    # along the rows of the Jacobian that was given
    assert wrong.tangent(result.position - u).abs().max() < 1e-10
    return result.iterations[result.converged]


def test_broydens_method_solves_linear_equations_in_twice_their_number_of_steps():
    # Gay 1979: at most 2 N steps, from any matrix that is not singular
    found = iterations_with_a_wrong_jacobian("broyden")
    assert len(found) == 4
    assert found.max() <= 6
    # the control: a fixed matrix needs more, or diverges
    fixed = iterations_with_a_wrong_jacobian("quasi_newton")
    assert len(fixed) < 4 or fixed.min() > 6


def test_broydens_method_needs_fewer_iterations_than_a_fixed_factorisation():
    fibre, v, base = off_the_fibre(distance=0.6)
    fixed, broyden = (project(fibre, v, base, solvers=(s,), **settings(fibre, v)) for s in ("quasi_newton", "broyden"))
    both = fixed.converged & broyden.converged
    assert both.sum() > 30
    assert broyden.iterations[both].sum() < 0.9 * fixed.iterations[both].sum()
    torch.testing.assert_close(fixed.position[both], broyden.position[both], rtol=0, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solve_stops_early_where_it_contracts_towards_the_expected_root(solver):
    fibre, v, base = off_the_fibre()
    whole = project(fibre, v, base, solvers=(solver,), **settings(fibre, v))
    near = {"expected": whole.position, "within": 1e-4}
    early = project(fibre, v, base, solvers=(solver,), **settings(fibre, v, **near))
    assert torch.equal(early.converged, whole.converged)
    assert (early.iterations <= whole.iterations).all()
    assert early.iterations.sum() < whole.iterations.sum()
    assert (early.position - whole.position).abs().amax(-1)[early.converged].max() < 1e-4
    # the control: near a point that is not its root, it goes on
    near["expected"] = whole.position + 0.01
    other = project(fibre, v, base, solvers=(solver,), **settings(fibre, v, **near))
    assert torch.equal(other.position, whole.position)


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_that_are_not_active_stay(solver):
    fibre, v, base = off_the_fibre()
    active = torch.arange(len(v)) % 3 == 0
    some = project(fibre, v, base, solvers=(solver,), **settings(fibre, v, active=active))
    every = project(fibre, v, base, solvers=(solver,), **settings(fibre, v))
    assert torch.equal(some.position[~active], v[~active])
    assert torch.equal(some.converged, active)
    assert (some.iterations[~active] == 0).all()
    torch.testing.assert_close(some.position[active], every.position[active], rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_without_active_rows_nothing_happens(solver):
    fibre, v, base = off_the_fibre()
    nobody = torch.zeros(len(v), dtype=torch.bool)
    none = project(fibre, v, base, solvers=(solver,), **settings(fibre, v, active=nobody))
    assert torch.equal(none.position, v)
    assert not none.converged.any()
    assert (none.iterations == 0).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_row_in_a_batch_is_solved_as_it_is_alone(solver):
    # very different distances, so that rows stop at different iterations and the batch is compacted on the way
    fibre, v, base = off_the_fibre(distance=torch.logspace(-5, 0.3, 40, dtype=FLOAT).unsqueeze(-1))
    together = project(fibre, v, base, solvers=(solver,), **settings(fibre, v))
    for row in range(len(v)):
        only = torch.tensor([row])
        alone = project(fibre.take(only), v[only], base[only], solvers=(solver,), **settings(fibre, v[only]))
        assert alone.converged.item() == together.converged[row].item()
        assert alone.iterations.item() == together.iterations[row].item()
        torch.testing.assert_close(alone.position[0], together.position[row], rtol=0, atol=1e-10)
    assert len(together.iterations.unique()) > 2


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_row_without_a_root_is_reported_and_disturbs_no_other(solver):
    # moving radially from (r, 0) never reaches the circle once the tangential move is longer than the radius
    fibre = dgm.condition(Circle(), [1.0]).rows(4)
    u = torch.tensor([[1.0, 0.0]] * 4, dtype=FLOAT)
    v = u + torch.tensor([[0.0, 0.2], [0.0, 3.0], [0.0, math.nan], [0.0, -0.5]], dtype=FLOAT)
    base = fibre.jacobian(u)
    result = project(fibre, v, base, solvers=(solver,), **settings(fibre, v))
    assert result.converged.tolist() == [True, False, False, True]
    expected = torch.tensor([[math.sqrt(1 - 0.04), 0.2], [math.sqrt(1 - 0.25), -0.5]], dtype=FLOAT)
    torch.testing.assert_close(result.position[[0, 3]], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_iterations_are_bounded_and_the_residual_decides(solver):
    fibre, v, base = off_the_fibre()
    few = project(fibre, v, base, solvers=(solver,), max_iterations=2, **settings(fibre, v))
    assert (few.iterations[~few.converged] == 2).all()
    assert torch.equal(few.converged, fibre.constraint_error(few.position) < TOLERANCE)
    assert not few.converged.all()


def test_every_row_has_its_own_tolerance():
    fibre, v, base = off_the_fibre()
    tolerance = torch.logspace(-12, -1, len(v), dtype=FLOAT)
    result = project(fibre, v, base, **settings(fibre, v, tolerance=tolerance))
    error = fibre.constraint_error(result.position)
    assert (error < tolerance).all()
    # quasi-Newton stops as soon as it may
    assert error[-5:].min() > 1e-6


@pytest.mark.parametrize("solver", SOLVERS)
def test_masked_updates_of_a_device_are_those_of_a_compacted_batch(solver):
    fibre, v, base = off_the_fibre(distance=torch.logspace(-5, -1, 40, dtype=FLOAT).unsqueeze(-1))
    given = settings(fibre, v, active=torch.arange(len(v)) % 3 > 0)
    compacted = project(fibre, v, base, solvers=(solver,), **given)
    stop = Stop.of(given["tolerance"], 16)
    found = masked(SOLVERS[solver], fibre, v, base, stop, given["active"], 16)
    assert compacted.converged.sum() == given["active"].sum()
    assert torch.equal(found.converged, compacted.converged)
    assert torch.equal(found.iterations, compacted.iterations)
    torch.testing.assert_close(found.position, compacted.position, rtol=0, atol=1e-12)
    # the control: too few updates
    few = Stop.of(given["tolerance"], 1)
    assert masked(SOLVERS[solver], fibre, v, base, few, given["active"], 1).retried.any()


def far_off_the_wave():
    """Points that quasi-Newton, Newton, both or neither can project."""
    fibre, rng = dgm.condition(Wave(), [0.0]), torch.Generator().manual_seed(37)
    u = fibre.start(400, rng, tolerance=1e-12)
    flat = fibre.rows(400)
    base = flat.jacobian(u)
    return flat, u + base.tangent(torch.randn(u.shape, generator=rng, dtype=FLOAT)), base


@pytest.mark.parametrize("solvers", [("quasi_newton", "newton"), ("newton", "quasi_newton")], ids=" then ".join)
@pytest.mark.parametrize("step", [1, 3], ids=["all rows", "every third row"])
def test_rows_that_the_first_solver_fails_go_to_the_next(solvers, step):
    fibre, v, base = far_off_the_wave()
    active = torch.arange(len(v)) % step == 0
    first, second = (project(fibre, v, base, solvers=(s,), **settings(fibre, v, active=active)) for s in solvers)
    saved = second.converged & ~first.converged
    # something for either to save, and something for neither
    assert saved.sum() > 3
    assert (active & ~first.converged & ~second.converged).sum() > 3
    both = project(fibre, v, base, solvers=solvers, **settings(fibre, v, active=active))
    assert torch.equal(both.converged, first.converged | second.converged)
    torch.testing.assert_close(both.position[first.converged], first.position[first.converged], rtol=0, atol=1e-9)
    torch.testing.assert_close(both.position[saved], second.position[saved], rtol=0, atol=1e-9)
    assert torch.equal(both.position[~active], v[~active])
    tried = second.iterations.masked_fill(first.converged, 0)
    assert torch.equal(both.iterations, first.iterations + tried)
    assert torch.equal(both.retried, active & ~first.converged)
    assert not first.retried.any()


# --------------------------------------------------------------------------------------------- starting points


def test_damped_gauss_newton_reaches_the_fibre_from_afar():
    fibre = dgm.condition(Ellipse(), [2.0]).rows(50)
    u = 10 * torch.randn(50, 2, generator=torch.Generator().manual_seed(32), dtype=FLOAT)
    point, residual = damped_gauss_newton(fibre, u, tolerance=torch.full((50,), TOLERANCE, dtype=FLOAT))
    assert residual.max() < TOLERANCE
    torch.testing.assert_close(residual, fibre.constraint_error(point))


def test_damped_gauss_newton_reports_the_residual_where_there_is_no_solution():
    fibre = dgm.condition(Circle(), [[-1.0], [1.0]])
    u = torch.randn(2, 2, generator=torch.Generator().manual_seed(33), dtype=FLOAT)
    _, residual = damped_gauss_newton(fibre.rows(1), u, tolerance=torch.full((2,), TOLERANCE, dtype=FLOAT))
    assert residual[0] >= 1
    assert residual[1] < TOLERANCE


def test_damped_gauss_newton_solves_a_row_in_a_batch_as_it_is_alone():
    fibre = dgm.condition(Ellipse(), [2.0])
    u = torch.randn(20, 2, generator=torch.Generator().manual_seed(38), dtype=FLOAT)
    u *= torch.logspace(-2, 2, 20, dtype=FLOAT).unsqueeze(-1)
    tolerance = torch.full((20,), TOLERANCE, dtype=FLOAT)
    # the first row is on the fibre, and stays
    u[0] = torch.tensor([math.sqrt(2), 0], dtype=FLOAT)
    together, residual = damped_gauss_newton(fibre.rows(20), u, tolerance=tolerance)
    assert torch.equal(together[0], u[0])
    for row in range(20):
        only = slice(row, row + 1)
        alone, alone_residual = damped_gauss_newton(fibre.rows(1), u[only], tolerance=tolerance[only])
        torch.testing.assert_close(alone, together[only], rtol=0, atol=1e-9)
        torch.testing.assert_close(alone_residual, residual[only], rtol=0, atol=1e-12)


def local(function, y):
    """The constraint ``function(u1, u2) - y`` of units with two global inputs."""
    return lambda u: function(u[..., :2], u[..., 2:]) - y


LINKS = {
    "cubic": lambda u1, v: u1[..., :1] + v + v**3,
    "exponential": lambda u1, v: u1[..., 1:].exp() * v.exp(),
    "decreasing": lambda u1, v: u1[..., :1] - torch.sinh(v),
    "flat in the middle": lambda u1, v: u1[..., :1] + v**5,
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
def test_monotone_units_are_solved_one_by_one(link):
    rng = torch.Generator().manual_seed(34)
    u1 = torch.randn(30, 2, generator=rng, dtype=FLOAT)
    truth = 3 * torch.randn(30, 6, generator=rng, dtype=FLOAT)
    y = link(u1, truth)
    start = torch.cat([u1, torch.randn(30, 6, generator=rng, dtype=FLOAT)], -1)
    tolerance = 1e-10 * y.abs().amax(-1).clamp_min(1)
    solved = solve_local_inputs(local(link, y), start, 2, tolerance)
    assert torch.equal(solved[:, :2], u1)
    assert (local(link, y)(solved).abs().amax(-1) < tolerance).all()


def solve_by_one_newton_step(function):
    rng = torch.Generator().manual_seed(35)
    u1, y = torch.randn(30, 2, generator=rng, dtype=FLOAT), torch.randn(30, 6, generator=rng, dtype=FLOAT)
    constraint, start = local(function, y), torch.cat([u1, torch.ones(30, 6, dtype=FLOAT)], -1)
    tolerance = torch.full((30,), 1e-12, dtype=FLOAT)
    return constraint(solve_local_inputs(constraint, start, 2, tolerance, newton=1, bisections=0)).abs().max().item()


def test_additive_noise_is_exact_at_once():
    assert solve_by_one_newton_step(lambda u1, v: u1[..., :1].sin() + 0.1 * v) < 1e-12
    # the control
    assert solve_by_one_newton_step(LINKS["cubic"]) > 1e-3


def test_a_unit_without_a_root_keeps_its_best_point_and_leaves_the_others_alone():
    y = torch.tensor([[-1.0, 2.0, 0.5]], dtype=FLOAT)
    constraint = local(lambda u1, v: v.exp() + 0 * u1[..., :1], y)
    solved = solve_local_inputs(constraint, torch.zeros(1, 5, dtype=FLOAT), 2, torch.full((1,), 1e-10, dtype=FLOAT))
    assert solved.isfinite().all()
    torch.testing.assert_close(solved[0, 3:], y[0, 1:].log(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "y"),
    [
        (Bent(), torch.linspace(-0.8, 0.8, 5)),
        (Bent("dense"), torch.linspace(-0.8, 0.8, 5)),
        (Ellipse(), torch.tensor([[0.5], [2.0]])),
    ],
    ids=["independent", "dense", "two problems"],
)
def test_starting_points_are_on_the_fibre_and_differ(model, y):
    fibre = dgm.condition(model, y)
    start = fibre.start(16, torch.Generator().manual_seed(36))
    assert start.shape == (16, *fibre.batch_shape, fibre.dim)
    assert (fibre.constraint_error(start) < 1e-8 * fibre.scale).all()
    assert start.std(0).min() > 0.1
    assert torch.equal(start, fibre.start(16, torch.Generator().manual_seed(36)))


class Rare(dgm.GenerativeModel):
    """``|u| = 1``, but only inputs in a narrow cone give outputs at all."""

    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        x = u.square().sum(-1, keepdim=True)
        return torch.where(torch.atan2(u[..., 1:], u[..., :1]).abs() < 0.5, x, torch.nan)


def test_a_chain_that_finds_no_start_shares_one_of_its_problem():
    fibre = dgm.condition(Rare(), [[1.0], [2.0]])
    rng = torch.Generator().manual_seed(0)
    with pytest.warns(UserWarning, match="share another's"):
        start = fibre.start(40, rng, attempts=2)
    assert fibre.constraint_error(start).max() < 2e-8
    assert len(start[:, 0].unique(dim=0)) > 1
