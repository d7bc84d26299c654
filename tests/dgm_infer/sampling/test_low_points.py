"""Starting points of low energy: strays in negligible pieces of a fibre give way, pieces of comparable mass stay."""

import pytest
import torch
from torch.distributions import Normal

import dgm_infer as dgm
from dgm_infer.conditioning import start_points
from dgm_infer.conditioning.start_points import search_once
from dgm_infer.sampling import starts as module
from dgm_infer.sampling.starts import low_points
from tests.dgm_infer.sampling.two_sides import CHAINS, TwoSides, fibre
from tests.oracles import FLOAT


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def points(problem, seed=1):
    u, ancestors = low_points(problem, CHAINS, rng(seed), tolerance=1e-8)
    assert (problem.constraint_error(u) < 1e-8 * problem.scale).all()
    return u, ancestors


def test_strays_in_negligible_pieces_begin_anew_or_where_others_do():
    problem = fibre(far=10.0)
    searched = problem.start(CHAINS, rng(1))
    # the control: half the prior draws lead to where no mass is
    assert 0.25 < (searched[..., 0] < 0).double().mean() < 0.75
    u, ancestors = points(problem)
    assert (u[..., 0] > 0).all()
    own = torch.arange(CHAINS).unsqueeze(-1)
    shared = ancestors != own
    # another search of every stray leaves about one in four
    assert 0 < shared.sum() < 18
    torch.testing.assert_close(u[shared], u.gather(0, ancestors.unsqueeze(-1).expand_as(u))[shared])
    assert not shared.gather(0, ancestors).any()


def test_without_new_searches_strays_share_other_starts_evenly(monkeypatch):
    monkeypatch.setattr(module, "_STRAYS", module.StraySettings(rounds=0))
    _, ancestors = points(fibre(far=10.0))
    for own in ancestors.T:
        times = own.bincount(minlength=CHAINS)
        times = times[times > 0]
        assert times.max() - times.min() <= 1


def test_pieces_of_comparable_mass_keep_their_chains():
    u, ancestors = points(fibre(far=1.5))
    left = (u[..., 0] < 0).double().mean(0)
    assert ((left > 0) & (left < 1)).all()
    assert (ancestors == torch.arange(CHAINS).unsqueeze(-1)).all()


def test_points_are_near_modes():
    """At a mode the gradient of ``|u|^2`` is normal to the fibre; typical points are ``sqrt(4)`` away."""
    problem = fibre(far=1.5)
    u, _ = points(problem)
    searched = problem.start(CHAINS, rng(1))
    rows = problem.rows(CHAINS)
    along = [rows.jacobian(v.flatten(0, 1)).tangent(v.flatten(0, 1)).norm(dim=-1) for v in (u, searched)]
    assert along[0].max() < 0.2 < 1 < along[1].median()


def test_sampling_begins_at_low_points_after_a_warm_up_alone():
    problem, kernel = fibre(far=10.0), dgm.ConstrainedHMC(step_size=0.3, n_steps=2)
    options = {"chains": CHAINS, "draws": 5, "seed": 1, "progress": False}
    draws = dgm.sample(problem, kernel, warmup=10, **options)
    assert (draws.inputs[..., 0] > 0).all()
    assert draws.ancestors is not None
    assert draws.ancestors.shape == (CHAINS, 3)
    cold = dgm.sample(problem, kernel, warmup=0, **options)
    assert cold.ancestors is None
    assert (cold.inputs[..., 0] < 0).any()


def test_searches_that_fail_leave_strays_to_share(monkeypatch):
    problem, calls = fibre(far=10.0), []

    def fails_again(own, rng, **options):
        calls.append(len(options["tolerance"]))
        point, found = search_once(own, rng, **options)
        return (point, found) if len(calls) == 1 else (torch.full_like(point, torch.nan), torch.zeros_like(found))

    monkeypatch.setattr(module, "search_once", fails_again)
    u, _ = points(problem)
    assert len(calls) == 2
    assert calls[0] == 3 * CHAINS
    assert (u[..., 0] > 0).all()


@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_any_batch_shape(batch):
    problem = dgm.condition(TwoSides(10.0), torch.ones(*batch, 1, dtype=FLOAT))
    u, ancestors = points(problem)
    assert u.shape == (CHAINS, *batch, 5)
    assert ancestors.shape == (CHAINS, *batch)
    assert (u[..., 0] > 0).all()


def test_long_searches_end_when_most_rows_are_found(monkeypatch):
    """What is given up begins elsewhere; every problem has a start, and short searches give nothing up."""
    problem = fibre(far=1.5)
    rows = problem.rows(CHAINS)
    options = {"tolerance": 1e-8 * rows.scale, "report": lambda text: None, "enough": lambda found: found.any()}
    assert search_once(rows, rng(), **options)[1].all()
    monkeypatch.setattr(start_points, "SETTINGS", start_points.SearchSettings(long=0))
    found = search_once(rows, rng(), **options)[1]
    assert 0 < found.sum() < 36
    monkeypatch.setattr(module, "_most", lambda found: found.any())
    u, ancestors = points(problem)
    shared = ancestors != torch.arange(CHAINS).unsqueeze(-1)
    assert shared.any()
    assert not shared.all(0).any()
    torch.testing.assert_close(u[shared], u.gather(0, ancestors.unsqueeze(-1).expand_as(u))[shared])


def test_a_problem_without_any_point_has_more_attempts(monkeypatch):
    problem = fibre(far=1.5)

    def misses_one(own, rng, **options):
        point, found = search_once(own, rng, **options)
        return point, found & (torch.arange(len(found)) % 3 != 1)

    monkeypatch.setattr(module, "search_once", misses_one)
    u, _ = points(problem)
    assert u.isfinite().all()


def test_an_observation_that_nothing_generates_is_named(monkeypatch):
    monkeypatch.setattr(start_points, "SETTINGS", start_points.SearchSettings(rounds=1))
    problem = dgm.condition(TwoSides(1.5), torch.tensor([[1.0], [-5.0]], dtype=FLOAT))
    with pytest.raises(dgm.errors.StartError, match="problem 1"):
        points(problem)


@pytest.mark.slow
def test_starts_at_the_edge_of_a_bounded_input_begin_where_others_do():
    """Sums of one normal and two uniforms: the data bound the normal, and searches end where a uniform is 0 or 1, which
    is 60 standard deviations out in the input that it is made of. One such chain held the steps of all back."""
    model = dgm.from_simulator(lambda z: z + torch.rand(2), Normal(0.0, 1.0))
    fibre = dgm.condition(model, torch.tensor([0.5, 0.9]))
    grid = torch.linspace(-0.1, 0.5, 10_001, dtype=torch.float64)
    weight = (-grid.square() / 2).exp()
    mean = (weight * grid).sum() / weight.sum()
    draws = dgm.sample(fibre, chains=8, draws=200, seed=1, progress=False)
    assert (draws.inputs.abs() < 10).all()
    assert (draws.ancestors != torch.arange(8)).any()
    (z,) = draws.latents.values()
    assert abs(z.mean() - mean) < 4 * float(draws.summary()["mcse_mean"].max())
