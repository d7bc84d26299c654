"""Modes by low points: two pieces of a fibre are told apart by two draws of each chain."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.sampling import chain_groups as module
from dgm_infer.sampling.chain_groups import basins
from tests.dgm_infer.sampling.two_sides import CHAINS, TwoSides, fibre
from tests.oracles import FLOAT


@pytest.fixture(scope="module")
def draws():
    """Few draws of chains that start on both sides, with steps too short to go round the corner."""
    problem = fibre(far=1.5)
    kernel = dgm.ConstrainedHMC(step_size=0.2, n_steps=3)
    return dgm.sample(problem, kernel, chains=CHAINS, warmup=0, draws=8, seed=1, progress=False)


def test_chains_on_either_side_are_in_a_mode_each(draws):
    found = draws.basins()
    left = draws.inputs[:, -1, :, 0] < 0
    assert found.mode.shape == (CHAINS, 3)
    assert found.point.shape == (2, CHAINS, 3, 5)
    for mode, side in zip(found.mode.T, left.T, strict=True):
        assert 0 < side.sum() < CHAINS
        larger = 2 * side.sum() > CHAINS or (2 * side.sum() == CHAINS and side[0])
        assert torch.equal(mode == 0, side if larger else ~side)
        assert mode.max() == 1


def test_low_points_are_those_next_to_the_origin(draws):
    found = draws.basins()
    problem = draws.problem
    assert (problem.constraint_error(found.point) < 1e-7).all()
    rows = problem.rows(CHAINS)
    for point, energy in zip(found.point, found.energy, strict=True):
        flat = point.flatten(0, 1)
        assert rows.jacobian(flat).tangent(flat).norm(dim=-1).max() < 0.05
        torch.testing.assert_close(energy.flatten(), rows.linearise(flat).energy)


def test_a_chain_that_went_between_makes_two_basins_one_mode(draws):
    position = draws.inputs[:, [3, 7]].movedim(1, 0).clone()
    sides = position[0, :, 0, 0] < 0
    there, here = int(sides.nonzero()[0]), int((~sides).nonzero()[0])
    position[0, here, 0] = position[0, there, 0]
    found = basins(draws.problem, position)
    assert (found.mode[:, 0] == 0).all()
    assert (found.mode[:, 1:].amax(0) == 1).all()


def test_control_with_a_wide_reach_all_is_one_mode(draws, monkeypatch):
    monkeypatch.setattr(module, "_BASINS", module.BasinSettings(same=2.0))
    assert (draws.basins().mode == 0).all()


def test_one_problem_without_batch_dimensions():
    problem = dgm.condition(TwoSides(1.5), torch.ones(1, dtype=FLOAT))
    found = basins(problem, problem.start(CHAINS, torch.Generator()).unsqueeze(0))
    assert found.mode.shape == (CHAINS,)
    assert found.energy.shape == (1, CHAINS)


class OfLogistics(TwoSides):
    input_density = dgm.Logistic(5)


def test_what_has_no_basins_is_refused(draws, tmp_path):
    draws.save(tmp_path / "draws.nc")
    with pytest.raises(dgm.errors.ArgumentError, match="with their problem"):
        dgm.Draws.load(tmp_path / "draws.nc").basins()
    problem = dgm.condition(OfLogistics(1.5), torch.ones(1, dtype=FLOAT))
    with pytest.raises(dgm.errors.ArgumentError, match="standard normal inputs"):
        basins(problem, problem.start(2, torch.Generator()).unsqueeze(0))
