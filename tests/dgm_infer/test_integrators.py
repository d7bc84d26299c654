"""Trajectories reverse, keep the constraint, and conserve energy to second order in the step size."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import Status
from dgm_infer.integrators import geodesic, leapfrog
from dgm_infer.projection import Projection, damped_gauss_newton, project
from tests.dgm_infer.test_projection import Bent
from tests.oracles import FLOAT, Ellipse, without_reverse_check

TOLERANCE = 1e-12
CHAINS = 30


class Quartic(dgm.Target):
    """``|x|^2 / 2 + |x|^4 / 4`` with a coupling: no step of it is exact."""

    def __init__(self):
        super().__init__(None, 4)

    def energy(self, x):
        return 0.5 * x.square().sum(-1) + 0.25 * x.square().sum(-1).square() + x[..., 0] * x[..., 1].sin()


# ------------------------------------------------------------------------------------------------------------ leapfrog


def leapfrog_start():
    rng = torch.Generator().manual_seed(40)
    x = torch.randn(CHAINS, 4, generator=rng, dtype=FLOAT)
    return x, torch.randn(CHAINS, 4, generator=rng, dtype=FLOAT)


def euler(target, x, p, gradient, step_size, n_steps):
    """Explicit Euler: neither reversible nor of second order, the control of both laws."""
    from dgm_infer.integrators import Endpoint

    for _ in range(n_steps):
        x, p = x + step_size.unsqueeze(-1) * p, p - step_size.unsqueeze(-1) * gradient
        energy, gradient = target.energy_and_gradient(x)
    return Endpoint(x, p, energy, gradient)


def return_error_on_r_d(integrate):
    target, (x, p) = Quartic(), leapfrog_start()
    step = torch.full((CHAINS,), 0.05, dtype=FLOAT)
    there = integrate(target, x, p, target.energy_and_gradient(x)[1], step, 20)
    back = integrate(target, there.position, -there.momentum, there.gradient, step, 20)
    assert (there.position - x).abs().min() > 1e-4
    return max((back.position - x).abs().max(), (back.momentum + p).abs().max()).item()


def test_a_leapfrog_trajectory_run_backwards_returns_to_its_start():
    assert return_error_on_r_d(leapfrog) < 1e-6


def test_control_an_euler_trajectory_does_not_return():
    assert return_error_on_r_d(euler) > 1e-3


def energy_slope_on_r_d(integrate):
    target, (x, p) = Quartic(), leapfrog_start()
    energy, gradient = target.energy_and_gradient(x)
    counts, errors = (40, 80, 160, 320), []
    for n in counts:
        end = integrate(target, x, p, gradient, torch.full((CHAINS,), 1.0 / n, dtype=FLOAT), n)
        error = end.energy + 0.5 * end.momentum.square().sum(-1) - energy - 0.5 * p.square().sum(-1)
        errors.append(error.square().mean().sqrt().item())
    return slope(counts, errors)


def slope(counts, errors):
    return np.polyfit(-np.log(counts), np.log(errors), 1)[0]


def test_the_energy_error_of_leapfrog_scales_as_the_step_squared():
    assert 1.8 < energy_slope_on_r_d(leapfrog) < 2.2


def test_control_the_energy_error_of_euler_scales_as_the_step():
    assert 0.8 < energy_slope_on_r_d(euler) < 1.3


def test_leapfrog_reports_energy_and_gradient_of_its_end():
    target, (x, p) = Quartic(), leapfrog_start()
    end = leapfrog(target, x, p, target.energy_and_gradient(x)[1], torch.full((CHAINS,), 0.1, dtype=FLOAT), 3)
    energy, gradient = target.energy_and_gradient(end.position)
    assert torch.equal(end.energy, energy)
    assert torch.equal(end.gradient, gradient)


# ------------------------------------------------------------------------------------------------------------ geodesic

CASES = {
    "low rank": lambda: dgm.condition(Bent(), torch.linspace(-0.8, 0.8, 5)),
    "dense": lambda: dgm.condition(Bent("dense"), torch.linspace(-0.8, 0.8, 5)),
    "ellipse": lambda: dgm.condition(Ellipse(), [2.0]),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def fibre(request):
    return request.param()


def geodesic_start(fibre):
    """Rows of the fibre, points on it, tangent momenta, and the linearisation there."""
    rng = torch.Generator().manual_seed(41)
    flat = fibre.rows(CHAINS)
    u = fibre.start(CHAINS, rng, tolerance=TOLERANCE)
    here = flat.linearise(u)
    return flat, u, here.jacobian.tangent(torch.randn(u.shape, generator=rng, dtype=FLOAT)), here


def solver_named(name, flat):
    return partial(project, tolerance=TOLERANCE * flat.scale, solver=name)


def nearest_point(flat, v, base, *, active):
    """Projects along the rows of J at the root instead of at the start: not reversible, the control."""
    point, residual = damped_gauss_newton(flat, v, tolerance=TOLERANCE * flat.scale)
    return Projection(point, active & (residual < 1e-9), 0)


def return_error_on_a_fibre(fibre, make_solver, reversal_tolerance=1e-5):
    flat, u, p, here = geodesic_start(fibre)
    solver = make_solver(flat)
    step = torch.full((CHAINS,), 0.1, dtype=FLOAT)
    settings = (step, 8, 2, solver, reversal_tolerance)
    there = geodesic(flat, u, p, here, *settings)
    back = geodesic(flat, there.position, -there.momentum, there.linearisation, *settings)
    ok = (there.status == Status.OK) & (back.status == Status.OK)
    assert ok.double().mean() > 0.8
    assert (there.position - u)[ok].abs().amax(-1).median() > 0.1
    return max((back.position - u)[ok].abs().max(), (back.momentum + p)[ok].abs().max()).item()


@pytest.mark.parametrize("solver", ["quasi_newton", "newton"])
def test_a_geodesic_trajectory_run_backwards_returns_to_its_start(fibre, solver):
    assert return_error_on_a_fibre(fibre, partial(solver_named, solver)) < 1e-6


def test_control_projecting_to_the_nearest_point_does_not_return(fibre):
    assert return_error_on_a_fibre(fibre, lambda flat: without_reverse_check(nearest_point), math.inf) > 1e-4


def energy_slope_on_a_fibre(fibre):
    flat, u, p, here = geodesic_start(fibre)
    counts, ends = (8, 16, 32, 64), []
    for n in counts:
        step = torch.full((CHAINS,), 0.6 / n, dtype=FLOAT)
        ends.append(geodesic(flat, u, p, here, step, n, 2, solver_named("quasi_newton", flat), 1e-5))
    ok = torch.stack([end.status == Status.OK for end in ends]).all(0)
    assert ok.double().mean() > 0.8
    errors = []
    for end in ends:
        change = end.linearisation.energy + 0.5 * end.momentum.square().sum(-1) - here.energy - 0.5 * p.square().sum(-1)
        errors.append(change[ok].square().mean().sqrt().item())
    return slope(counts, errors)


def test_the_energy_error_on_a_fibre_scales_as_the_step_squared(fibre):
    assert 1.8 < energy_slope_on_a_fibre(fibre) < 2.2


class WrongGradient(dgm.Fibre):
    """The energy has its Gram term, the gradient has not."""

    def _gram_cotangent(self, jacobian):
        return tuple(torch.zeros_like(c) for c in super()._gram_cotangent(jacobian))


def test_control_without_the_gram_term_in_the_gradient_energy_is_not_conserved(fibre):
    assert abs(energy_slope_on_a_fibre(WrongGradient(fibre.observed, fibre.values))) < 0.5


def largest_departure(flat, positions):
    return max(flat.constraint_error(u).max().item() for u in positions)


@pytest.mark.parametrize("solver", ["quasi_newton", "newton"])
def test_every_step_stays_on_the_fibre_and_every_momentum_in_its_tangent_space(fibre, solver):
    flat, u, p, here = geodesic_start(fibre)
    visited = []
    step = torch.full((CHAINS,), 0.15, dtype=FLOAT)
    end = geodesic(flat, u, p, here, step, 10, 3, solver_named(solver, flat), 1e-6, trace=visited.append)
    assert len(visited) == 10
    assert torch.equal(visited[-1], end.position)
    assert largest_departure(flat, visited) < TOLERANCE * 10
    assert end.linearisation.jacobian.forward(end.momentum).abs().max() < 1e-10
    # the control: the same move without projections
    assert largest_departure(flat, [u + step.unsqueeze(-1) * p]) > 1e-4


def test_the_linearisation_at_the_end_is_of_the_end(fibre):
    flat, u, p, here = geodesic_start(fibre)
    end = geodesic(flat, u, p, here, torch.full((CHAINS,), 0.15, dtype=FLOAT), 4, 2, solver_named("newton", flat), 1e-6)
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
    plain = geodesic(flat, u, p, here, step, 5, 2, solver_named("quasi_newton", flat), 1e-6)
    wild = p.clone()
    wild[3] = 1e6 * p[3]
    wild[4] = float("nan")
    end = geodesic(flat, u, wild, here, step, 5, 2, solver_named("quasi_newton", flat), 1e-6)
    assert end.status[4] == Status.PROJECTION_FAILED
    assert end.status[3] in (Status.PROJECTION_FAILED, Status.REVERSAL_FAILED)
    assert torch.equal(end.position[4], u[4])
    others = torch.arange(CHAINS) > 4
    assert torch.equal(end.status[others], plain.status[others])
    torch.testing.assert_close(end.position[others], plain.position[others], rtol=0, atol=1e-9)
