"""Reverse solves that stop where they contract decide as those that run to the tolerance."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.conditioning.projection import project
from dgm_infer.errors import Status
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
    "dense": (lambda: Bent("dense"), [0.8] * 5, 2.5),
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
