"""Trajectories reverse, keep the constraint, and conserve energy to second order in the step size."""

import itertools
import math
from functools import partial

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.conditioning.projection import damped_gauss_newton, project
from dgm_infer.errors import Status
from dgm_infer.kernels.integrators import CIRCULAR, STRAIGHT, FreeMotion, PhasePoint, geodesic, leapfrog
from tests.dgm_infer.kernels.quartic import CHAINS, QUARTIC, leapfrog_start, slope
from tests.models import Bent, BentPairs, Stretched
from tests.oracles import FLOAT, Ellipse, Wave, linear_gaussian_model, trusted, without_reverse_check

TOLERANCE = 1e-12


# ------------------------------------------------------------------------------------------------------------ leapfrog


def euler(evaluate, start, step_size, n_steps):
    """Explicit Euler: neither reversible nor of second order, the control of both laws."""
    x, p, energy, gradient, _ = start
    for _ in range(n_steps):
        x, p = x + step_size.unsqueeze(-1) * p, p - step_size.unsqueeze(-1) * gradient
        energy, gradient, _ = evaluate(x)
    return PhasePoint(x, p, energy, gradient)


def return_error_on_r_d(integrate):
    start, step = leapfrog_start(), torch.full((CHAINS,), 0.05, dtype=FLOAT)
    there = integrate(QUARTIC, start, step, 20)
    back = integrate(QUARTIC, there._replace(momentum=-there.momentum), step, 20)
    assert (there.position - start.position).abs().min() > 1e-4
    return max((back.position - start.position).abs().max(), (back.momentum + start.momentum).abs().max()).item()


def test_a_leapfrog_trajectory_run_backwards_returns_to_its_start():
    assert return_error_on_r_d(leapfrog) < 1e-6


def test_control_an_euler_trajectory_does_not_return():
    assert return_error_on_r_d(euler) > 1e-3


def energy_slope_on_r_d(integrate):
    start, counts, errors = leapfrog_start(), (40, 80, 160, 320), []
    for n in counts:
        end = integrate(QUARTIC, start, torch.full((CHAINS,), 1.0 / n, dtype=FLOAT), n)
        errors.append((end.hamiltonian - start.hamiltonian).square().mean().sqrt().item())
    return slope(counts, errors)


def test_the_energy_error_of_leapfrog_scales_as_the_step_squared():
    assert 1.8 < energy_slope_on_r_d(leapfrog) < 2.2


def test_control_the_energy_error_of_euler_scales_as_the_step():
    assert 0.8 < energy_slope_on_r_d(euler) < 1.3


def test_leapfrog_reports_energy_and_gradient_of_its_end():
    end = leapfrog(QUARTIC, leapfrog_start(), torch.full((CHAINS,), 0.1, dtype=FLOAT), 3)
    energy, gradient, _ = QUARTIC(end.position)
    assert torch.equal(end.energy, energy)
    assert torch.equal(end.gradient, gradient)


def test_rows_of_different_numbers_of_steps_go_as_each_does_alone():
    start, step = leapfrog_start(), torch.linspace(0.01, 0.1, CHAINS, dtype=FLOAT)
    n_steps = torch.arange(CHAINS) % 7 + 1
    together = leapfrog(QUARTIC, start, step, n_steps)
    for row in range(CHAINS):
        only = slice(row, row + 1)
        alone = leapfrog(QUARTIC, PhasePoint(*(t[only] for t in start[:4])), step[only], int(n_steps[row]))
        for mine, theirs in zip(together[:4], alone[:4], strict=True):
            torch.testing.assert_close(mine[only], theirs, rtol=0, atol=1e-13)


def test_a_trajectory_leaves_its_start_as_it_was():
    start = leapfrog_start()
    before = [tensor.clone() for tensor in start[:4]]
    end = leapfrog(QUARTIC, start, torch.full((CHAINS,), 0.1, dtype=FLOAT), 4)
    assert all(torch.equal(a, b) for a, b in zip(start[:4], before, strict=True))
    assert not torch.equal(end.momentum, start.momentum)


# ------------------------------------------------------------------------------------------------------------ geodesic


CASES = {
    "low rank": lambda: dgm.condition(Bent(), torch.linspace(-0.8, 0.8, 5)),
    "blocks": lambda: dgm.condition(BentPairs(), torch.linspace(-0.8, 0.8, 6)),
    "dense": lambda: dgm.condition(Bent("dense"), torch.linspace(-0.8, 0.8, 5)),
    "ellipse": lambda: dgm.condition(Ellipse(), [2.0]),
    "not normal": lambda: dgm.condition(Stretched(), torch.linspace(-0.8, 0.8, 5)),
}
FLOWS = {"straight": STRAIGHT, "circular": CIRCULAR}


def in_turn(*choices):
    """Fibres by choices: every fibre with one choice in the quick run, in turn, and with all in the long one."""
    return [
        pytest.param(
            (CASES[name], *(values[key] for values, key in zip(choices, keys, strict=True))),
            id=", ".join((name, *keys)),
            marks=() if i % len(combinations) == j else pytest.mark.slow,
        )
        for combinations in [list(itertools.product(*choices))]
        for i, name in enumerate(CASES)
        for j, keys in enumerate(combinations)
    ]


SOLVERS = {name: name for name in ("quasi_newton", "broyden", "newton")}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def fibre(request):
    return request.param()


@pytest.fixture(params=in_turn(FLOWS))
def fibre_and_flow(request):
    make, flow = request.param
    return make(), flow


@pytest.fixture(params=in_turn(FLOWS, SOLVERS))
def fibre_flow_and_solver(request):
    make, flow, solver = request.param
    return make(), flow, solver


@pytest.fixture(params=FLOWS.values(), ids=FLOWS.keys())
def flow(request):
    return request.param


def geodesic_start(fibre):
    """Rows of the fibre, points on it, tangent momenta, and the linearisation there."""
    rng = torch.Generator().manual_seed(41)
    flat = fibre.rows(CHAINS)
    u = fibre.start(CHAINS, rng, tolerance=TOLERANCE)
    here = flat.linearise(u)
    return flat, u, here.jacobian.tangent(torch.randn(u.shape, generator=rng, dtype=FLOAT)), here


def solver_named(name):
    def solve(fibre, v, base, **options):
        return project(fibre, v, base, tolerance=TOLERANCE * fibre.scale, solvers=(name,), **options)

    return solve


def nearest_point(flat, v, base, *, active, **_):
    """Projects along the rows of J at the root instead of at the start: not reversible, the control."""
    point, residual = damped_gauss_newton(flat, v, tolerance=TOLERANCE * flat.scale)
    return trusted(point, active & (residual < 1e-9))


def return_error_on_a_fibre(fibre, make_solver, flow, reversal_tolerance=1e-5):
    flat, u, p, here = geodesic_start(fibre)
    solver = make_solver(flat)
    step = torch.full((CHAINS,), 0.1, dtype=FLOAT)
    settings = (step, 8, 2, solver, reversal_tolerance)
    there = geodesic(flat, u, p, here, *settings, flow=flow)
    back = geodesic(flat, there.position, -there.momentum, there.linearisation, *settings, flow=flow)
    ok = (there.status == Status.OK) & (back.status == Status.OK)
    assert ok.double().mean() > 0.8
    assert (there.position - u)[ok].abs().amax(-1).median() > 0.1
    return max((back.position - u)[ok].abs().max(), (back.momentum + p)[ok].abs().max()).item()


def test_a_geodesic_trajectory_run_backwards_returns_to_its_start(fibre_flow_and_solver):
    fibre, flow, solver = fibre_flow_and_solver
    assert return_error_on_a_fibre(fibre, lambda _: solver_named(solver), flow) < 1e-6


def test_control_projecting_to_the_nearest_point_does_not_return():
    fibre, flow = CASES["ellipse"](), CIRCULAR
    assert return_error_on_a_fibre(fibre, lambda flat: without_reverse_check(nearest_point), flow, math.inf) > 1e-4


def energy_slope_on_a_fibre(fibre, flow):
    flat, u, p, here = geodesic_start(fibre)
    counts, ends = (6, 12, 24), []
    for n in counts:
        step = torch.full((CHAINS,), 0.6 / n, dtype=FLOAT)
        ends.append(geodesic(flat, u, p, here, step, n, 2, solver_named("quasi_newton"), 1e-5, flow=flow))
    ok = torch.stack([end.status == Status.OK for end in ends]).all(0)
    assert ok.double().mean() > 0.8
    errors = []
    for end in ends:
        change = end.linearisation.energy + 0.5 * end.momentum.square().sum(-1) - here.energy - 0.5 * p.square().sum(-1)
        errors.append(change[ok].square().mean().sqrt().item())
    return slope(counts, errors)


def test_the_energy_error_on_a_fibre_scales_as_the_step_squared(fibre_and_flow):
    assert 1.8 < energy_slope_on_a_fibre(*fibre_and_flow) < 2.2


def test_control_without_the_gram_term_in_the_gradient_energy_is_not_conserved():
    fibre, flow = CASES["ellipse"](), CIRCULAR
    assert abs(energy_slope_on_a_fibre(fibre.computed(gram_force=False), flow)) < 0.5


def largest_departure(flat, positions):
    return max(flat.constraint_error(u).max().item() for u in positions)


def test_every_step_stays_on_the_fibre_and_every_momentum_in_its_tangent_space(fibre_flow_and_solver):
    fibre, flow, solver = fibre_flow_and_solver
    flat, u, p, here = geodesic_start(fibre)
    step = torch.full((CHAINS,), 0.15, dtype=FLOAT)
    ends = [geodesic(flat, u, p, here, step, n, 3, solver_named(solver), 1e-6, flow=flow) for n in (1, 2, 10)]
    end = ends[-1]
    assert largest_departure(flat, [each.position for each in ends]) < TOLERANCE * 10
    assert end.linearisation.jacobian.forward(end.momentum).abs().max() < 1e-10
    # the control: the same move without projections
    assert largest_departure(flat, [flow.move(u, p, step.unsqueeze(-1))]) > 1e-4


def test_the_linearisation_at_the_end_is_of_the_end(fibre):
    flat, u, p, here = geodesic_start(fibre)
    end = geodesic(flat, u, p, here, torch.full((CHAINS,), 0.15, dtype=FLOAT), 4, 2, solver_named("newton"), 1e-6)
    again = flat.linearise(end.position)
    torch.testing.assert_close(end.linearisation.energy, again.energy)
    torch.testing.assert_close(end.linearisation.gradient, again.gradient)
    torch.testing.assert_close(end.linearisation.jacobian.log_det, again.jacobian.log_det)


def test_the_gradient_is_that_of_the_energy(fibre):
    flat, u, _, here = geodesic_start(fibre)
    direction = torch.randn(u.shape, generator=torch.Generator().manual_seed(42), dtype=FLOAT)
    h = 1e-5
    ahead, behind = flat.linearise(u + h * direction), flat.linearise(u - h * direction)
    torch.testing.assert_close(
        (here.gradient * direction).sum(-1), (ahead.energy - behind.energy) / (2 * h), rtol=1e-6, atol=1e-7
    )


def test_a_failed_solve_ends_the_trajectory_of_that_row_alone(fibre):
    flat, u, p, here = geodesic_start(fibre)
    step = torch.full((CHAINS,), 0.1, dtype=FLOAT)
    plain = geodesic(flat, u, p, here, step, 5, 2, solver_named("quasi_newton"), 1e-6)
    wild = p.clone()
    wild[3] = 1e6 * p[3]
    wild[4] = float("nan")
    end = geodesic(flat, u, wild, here, step, 5, 2, solver_named("quasi_newton"), 1e-6)
    assert end.status[4] == Status.PROJECTION_FAILED
    assert end.status[3] in (Status.PROJECTION_FAILED, Status.REVERSAL_FAILED)
    assert torch.equal(end.position[4], u[4])
    others = torch.arange(CHAINS) > 4
    assert torch.equal(end.status[others], plain.status[others])
    torch.testing.assert_close(end.position[others], plain.position[others], rtol=0, atol=1e-9)


def test_rows_of_different_numbers_of_steps_go_along_the_fibre_as_each_does_alone(fibre_and_flow):
    fibre, flow = fibre_and_flow
    flat, u, p, here = geodesic_start(fibre)
    step, n_steps = torch.linspace(0.05, 0.15, CHAINS, dtype=FLOAT), torch.arange(CHAINS) % 6 + 1
    # one that fails early, in the midst of the others
    p[7] *= 1e6
    together = geodesic(flat, u, p, here, step, n_steps, 2, solver_named("newton"), 1e-6, flow=flow)
    assert together.status[7] != Status.OK
    for row in (0, 7, 29):
        only = torch.tensor([row])
        one = flat.take(only)
        there = type(here)(here.jacobian[only], *(tensor[only] for tensor in here[1:]))
        settings = (step[only], int(n_steps[row]), 2, solver_named("newton"), 1e-6)
        alone = geodesic(one, u[only], p[only], there, *settings, flow=flow)
        assert alone.status.item() == together.status[row].item()
        assert alone.iterations.item() == together.iterations[row].item()
        torch.testing.assert_close(together.position[only], alone.position, rtol=0, atol=1e-9)
        torch.testing.assert_close(together.linearisation.energy[only], alone.linearisation.energy)
        if row != 7:
            torch.testing.assert_close(together.momentum[only], alone.momentum, rtol=0, atol=1e-9)
    assert together.iterations[together.status == Status.OK].min() >= 2


# ------------------------------------------------------------------------------------------------ the circular flow


def linear_fibre():
    model = linear_gaussian_model(n_outputs=6, sd=0.5)
    return dgm.condition(model, torch.linspace(-3, 3, 6)), model


def test_on_a_linear_fibre_the_circular_flow_is_exact():
    # about the point m of the fibre nearest to 0: u(t) = m + (u - m) cos t + p sin t
    fibre, model = linear_fibre()
    flat, u, p, here = geodesic_start(fibre)
    matrix = torch.cat([model.weight, model.sd * torch.eye(6, dtype=FLOAT)], 1)
    m = torch.linalg.pinv(matrix) @ (fibre.values - model.bias)
    step = torch.full((CHAINS,), 0.9, dtype=FLOAT)
    time = torch.tensor(3 * 0.9, dtype=FLOAT)
    end = geodesic(flat, u, p, here, step, 3, 2, solver_named("newton"), 1e-6, flow=CIRCULAR)
    torch.testing.assert_close(end.position, m + (u - m) * time.cos() + p * time.sin(), rtol=0, atol=1e-9)
    torch.testing.assert_close(end.momentum, p * time.cos() - (u - m) * time.sin(), rtol=0, atol=1e-9)


def energy_errors(flow):
    fibre, _ = linear_fibre()
    flat, u, p, here = geodesic_start(fibre)
    step = torch.full((CHAINS,), 1.5, dtype=FLOAT)
    end = geodesic(flat, u, p, here, step, 3, 2, solver_named("newton"), 1e-6, flow=flow)
    assert (end.status == Status.OK).all()
    change = end.linearisation.energy + 0.5 * end.momentum.square().sum(-1) - here.energy - 0.5 * p.square().sum(-1)
    return change.abs()


def test_on_probabilistic_pca_the_circular_flow_conserves_energy_where_the_straight_one_does_not():
    assert energy_errors(CIRCULAR).max() < 1e-10
    assert energy_errors(STRAIGHT).median() > 0.1


def without_multiplier():
    """The circular flow with ``p' = -u sin h + p cos h``: the multiplier moves the position alone (math 3.6)."""
    moved = []

    def move(u, p, h):
        moved.append(p)
        return CIRCULAR.move(u, p, h)

    # on arrival the last motion is the forward one
    return FreeMotion(move, lambda u, u_new, h: moved[-1] * h.cos() - u * h.sin(), CIRCULAR.force)


def ellipse_by_arc_length():
    t = torch.linspace(0.1, 6.2, CHAINS, dtype=FLOAT)
    u = math.sqrt(2) * torch.stack([t.cos(), t.sin() / 2], -1)
    return dgm.condition(Ellipse(), [2.0]), u, math.sqrt(2) * torch.stack([-t.sin(), t.cos() / 2], -1)


def wave_by_arc_length():
    t = torch.linspace(-2, 2, CHAINS, dtype=FLOAT)
    u = torch.stack([t, 0.5 * torch.sin(3 * t)], -1)
    return dgm.condition(Wave(), [0.0]), u, torch.stack([torch.ones_like(t), 1.5 * torch.cos(3 * t)], -1)


def area_factors(curve, flow):
    """``|d(s', q') / d(s, q)|`` of a step on a plane curve, of arc length s and momentum q along it."""
    fibre, u, velocity = curve()
    flat, h = fibre.rows(CHAINS), 1e-4
    tangent = velocity / velocity.norm(dim=-1, keepdim=True)
    momentum = torch.linspace(-1.3, 1.1, CHAINS, dtype=FLOAT)
    tolerance = torch.full((CHAINS,), 1e-14, dtype=FLOAT)
    project_exactly = partial(project, tolerance=tolerance, solvers=("newton",))

    def along(v):
        """Components along the curve, of which the tangent turns one way."""
        here = flat.jacobian(v).matrix.squeeze(-2)
        across = here / here.norm(dim=-1, keepdim=True)
        return torch.stack([-across[:, 1], across[:, 0]], -1)

    orientation = (along(u) * tangent).sum(-1).sign().unsqueeze(-1)

    def step(ds, dq):
        start = project_exactly(flat, u + ds * tangent, flat.jacobian(u), active=torch.ones(CHAINS, dtype=torch.bool))
        # ds along the tangent is arc length to second order
        p = (momentum + dq).unsqueeze(-1) * orientation * along(start.position)
        there = flat.linearise(start.position)
        size = torch.full((CHAINS,), 0.3, dtype=FLOAT)
        # whether a step returns is another law
        end = geodesic(flat, start.position, p, there, size, 1, 1, project_exactly, math.inf, flow=flow)
        assert (end.status == Status.OK).all()
        return end

    middle = step(0, 0).position
    direction = orientation * along(middle)
    columns = []
    for ds, dq in ((h, 0), (0, h)):
        ahead, behind = step(ds, dq), step(-ds, -dq)
        s = ((ahead.position - behind.position) * direction).sum(-1) / (2 * h)
        q = [(end.momentum * orientation * along(end.position)).sum(-1) for end in (ahead, behind)]
        columns.append((s, (q[0] - q[1]) / (2 * h)))
    (s_s, q_s), (s_q, q_q) = columns
    return (s_s * q_q - s_q * q_s).abs()


CURVES = [ellipse_by_arc_length, wave_by_arc_length]


@pytest.mark.parametrize("curve", CURVES, ids=["ellipse", "wave"])
def test_a_step_preserves_the_area_of_phase_space(curve, flow):
    assert (area_factors(curve, flow) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("curve", CURVES, ids=["ellipse", "wave"])
def test_control_without_the_multiplier_in_the_momentum_a_step_does_not(curve):
    assert (area_factors(curve, without_multiplier()) - 1).abs().max() > 1e-2
