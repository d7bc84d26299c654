"""Reverse solves that stop where they contract decide as those that run to the tolerance."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.conditioning.projection import project
from dgm_infer.errors import Status
from dgm_infer.kernels import integrators
from dgm_infer.kernels.integrators import geodesic
from tests.models import Bent
from tests.oracles import FLOAT, Wave
from tests.quick import cases, some


def statuses(fibre, solvers, step_size, reversal_tolerance=1e-4, whole=False, n=2000):
    """The outcome of one step per row, with reverse solves that stop where they contract, or run to the tolerance."""
    flat, rng = fibre.rows(n), torch.Generator().manual_seed(41)
    u = fibre.start(n, rng, tolerance=1e-8)
    here = flat.linearise(u)
    p = here.jacobian.tangent(torch.randn(u.shape, generator=rng, dtype=FLOAT))

    def solve(fibre, v, base, **options):
        return project(fibre, v, base, tolerance=torch.full((len(v),), 1e-8, dtype=FLOAT), solvers=solvers, **options)

    def to_the_end(fibre, v, base, *, active, **_):
        return solve(fibre, v, base, active=active)

    step = torch.full((n,), step_size, dtype=FLOAT)
    return geodesic(flat, u, p, here, step, 1, 1, to_the_end if whole else solve, reversal_tolerance).status


HARD = {
    "wave": (Wave, [0.0], 0.7),
    "steep wave": (lambda: Wave(1.0, 4.0), [0.0], 0.5),
    "dense": (lambda: Bent("dense"), [0.8] * 5, 2.0),
}


EARLY = {
    "quasi_newton": (("quasi_newton", "newton"),),
    "broyden": (("broyden", "newton"),),
    "newton": (("newton", "broyden"),),
}


@pytest.mark.parametrize("name", some(HARD, ["wave"]))
@pytest.mark.parametrize("solvers", cases(EARLY, quick=("quasi_newton",)))
def test_a_reverse_solve_that_stops_early_decides_as_one_that_does_not(name, solvers):
    model, y, step_size = HARD[name]
    fibre = dgm.condition(model(), y)
    whole = statuses(fibre, solvers, step_size, whole=True)
    # all outcomes, in numbers that mean something
    assert (whole == Status.OK).sum() > 200
    assert (whole == Status.REVERSAL_FAILED).sum() > 20
    assert torch.equal(statuses(fibre, solvers, step_size), whole)


def test_control_contraction_far_from_a_root_says_little_about_the_one_that_is_reached():
    fibre, solvers = dgm.condition(Wave(), [0.0]), ("broyden", "newton")
    whole = statuses(fibre, solvers, 0.7, reversal_tolerance=0.5, whole=True)
    assert not torch.equal(statuses(fibre, solvers, 0.7, reversal_tolerance=0.5), whole)


def ends(n=1000):
    """Trajectories of two problems, of one to four steps."""
    fibre, rng = dgm.condition(Wave(), [[0.0], [0.4]]), torch.Generator().manual_seed(3)
    flat, u = fibre.rows(n), fibre.start(n, rng, tolerance=1e-8).flatten(0, 1)
    here = flat.linearise(u)
    p = here.jacobian.tangent(torch.randn(u.shape, generator=rng, dtype=FLOAT))

    def solve(fibre, v, base, **options):
        return project(fibre, v, base, tolerance=1e-8 * fibre.scale, solvers=("quasi_newton", "newton"), **options)

    n_steps = torch.randint(1, 5, (2 * n,), generator=rng)
    return geodesic(flat, u, p, here, torch.full((2 * n,), 0.5, dtype=FLOAT), n_steps, 2, solve, 1e-4)


def test_drifts_reversed_together_are_decided_as_those_reversed_one_by_one(monkeypatch):
    together, solves = ends(), []
    reverse = integrators.ReverseChecks._reverse
    monkeypatch.setattr(integrators.ReverseChecks, "_reverse", lambda self: (solves.append(1), reverse(self)))
    assert torch.equal(ends().status, together.status)
    assert len(solves) == 1
    monkeypatch.setattr(integrators, "_WAITING", 0)
    one_by_one = ends()
    assert len(solves) == 1 + 8
    assert torch.equal(one_by_one.status, together.status)
    assert torch.equal(one_by_one.iterations, together.iterations)
    for status in (Status.OK, Status.REVERSAL_FAILED):
        assert (together.status == status).sum() > 50


def test_control_drifts_that_are_not_reversed_are_taken_for_good(monkeypatch):
    checked = ends().status
    monkeypatch.setattr(integrators.ReverseChecks, "add", lambda *arguments: None)
    assert not torch.equal(ends().status, checked)
