"""``Evidence``: intervals, expectations, tables, files."""

import math

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from tests.known_evidence import known_gaussian
from tests.oracles import FLOAT


@pytest.fixture(scope="module")
def estimate():
    known = known_gaussian(3, (2, 3))
    method = dgm.GibbsTempering(draws=20, warmup=10, pilot_temperatures=20)
    return dgm.log_evidence(known.target, known.base, method, chains=5, seed=1, progress=False)


def made(log_weights, draws):
    zero = torch.zeros(log_weights.shape[2:], dtype=FLOAT)
    return dgm.Evidence(
        log_z=zero,
        std_error=zero + 0.5,
        bias=zero,
        dof=log_weights.shape[0] - 1,
        status="unbiased",
        method="made",
        diagnostics={},
        draws=draws,
        log_weights=log_weights,
        seed=0,
    )


def test_intervals_are_students():
    made_of = made(torch.zeros(5, 1, 2, dtype=FLOAT), torch.zeros(5, 1, 2, 1))
    low, high = made_of.interval(0.95)
    # t of 4 degrees of freedom at 0.975
    assert high.tolist() == pytest.approx([2.7764451 * 0.5] * 2)
    assert low.tolist() == pytest.approx([-2.7764451 * 0.5] * 2)
    narrow = made_of.interval(0.5)
    assert (narrow[1] < high).all()


def test_expectations_are_ratios_of_sums_with_the_error_of_chains():
    rng = torch.Generator().manual_seed(0)
    chains, draws, problems = 20, 30, 2000
    x = torch.randn(chains, draws, problems, 1, generator=rng, dtype=FLOAT)
    # weights exp(x/2): the weighted mean of x is 1/2
    result = made(0.5 * x[..., 0], x).expectation(lambda x: x[..., 0])
    error = result.value - 0.5
    assert error.mean().abs() <= 5 * error.std() / problems**0.5 + 2e-3
    assert result.std_error.square().mean().sqrt() == pytest.approx(error.std().item(), rel=0.05)
    plain = made(torch.zeros(chains, draws, problems, dtype=FLOAT), x).expectation(lambda x: x[..., 0])
    assert (plain.value.mean() - 0.5).abs() > 0.4


def test_a_draw_of_no_weight_counts_for_nothing_whatever_its_value():
    x = torch.tensor([1.0, math.nan]).reshape(2, 1, 1)
    result = made(torch.tensor([0.0, -math.inf], dtype=FLOAT).reshape(2, 1), x).expectation(lambda x: x)
    assert result.value.tolist() == [1]


def test_expectations_of_any_shape(estimate):
    assert estimate.expectation(lambda x: x).value.shape == (2, 3, 3)
    assert estimate.expectation(lambda x: x.sum(-1)).std_error.shape == (2, 3)
    with pytest.raises(dgm.errors.ArgumentError, match=r"f returns shape \(5,"):
        estimate.expectation(lambda x: x[:, :5])


def test_draws_can_be_left_out():
    known = known_gaussian(2)
    method = dgm.evidence.ImportanceSampling(10)
    result = dgm.log_evidence(known.target, known.base, method, keep_draws=False, seed=0, progress=False)
    assert result.draws is None
    with pytest.raises(dgm.errors.ArgumentError, match="keep_draws=True"):
        result.expectation(lambda x: x)


def test_the_table_has_a_row_a_problem(estimate):
    table = estimate.to_dataframe()
    assert table.shape[0] == 6
    assert table.index.names == ["problem_0", "problem_1"]
    assert table.loc[(1, 2), "log_z"] == estimate.log_z[1, 2].item()
    assert {"std_error", "bias", "low", "high", "status", "method", "ess", "round_trips", "seconds"} <= set(table)
    assert "beta_occupancy" not in table
    np.testing.assert_allclose(table["high"], estimate.interval()[1].flatten())


def test_a_file_holds_all_of_it(estimate, tmp_path):
    path = tmp_path / "evidence.npz"
    estimate.save(path)
    loaded = dgm.Evidence.load(path)
    for name in ("log_z", "std_error", "bias", "draws", "log_weights"):
        assert torch.equal(getattr(loaded, name), getattr(estimate, name))
    for name in ("dof", "status", "method", "seed"):
        assert getattr(loaded, name) == getattr(estimate, name)
    assert loaded.diagnostics.keys() == estimate.diagnostics.keys()
    assert torch.equal(loaded.diagnostics["beta_occupancy"], estimate.diagnostics["beta_occupancy"])
    assert loaded.diagnostics["seconds"] == estimate.diagnostics["seconds"]
    assert repr(loaded) == repr(estimate)


def test_a_file_without_draws(tmp_path):
    made_of = made(torch.zeros(5, 1, 2, dtype=FLOAT), None)
    made_of.save(tmp_path / "e.npz")
    assert dgm.Evidence.load(tmp_path / "e.npz").draws is None


def test_files_that_are_missing_or_of_another_kind_are_named(tmp_path, estimate):
    with pytest.raises(dgm.errors.CheckpointError, match="no evidence at"):
        dgm.Evidence.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(dgm.errors.CheckpointError, match="damaged"):
        dgm.Evidence.load(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(dgm.errors.CheckpointError, match=r"was not written by Evidence.save"):
        dgm.Evidence.load(tmp_path / "other.npz")
    with pytest.raises(dgm.errors.ArgumentError, match="does not exist"):
        estimate.save(tmp_path / "no" / "folder.npz")
    with pytest.raises(dgm.errors.ArgumentError, match="it is a folder"):
        estimate.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.npz", "text.npz"]


@pytest.mark.parametrize("level", [0, 1, 95, "0.9"])
def test_levels_outside_their_range_are_named(estimate, level):
    with pytest.raises(dgm.errors.ArgumentError, match="must lie between 0 and 1"):
        estimate.interval(level)


def test_the_summary_is_short(estimate):
    assert repr(estimate).startswith("Evidence(GibbsTempering, *batch = (2, 3); mean log_z ")
    assert "consistent" in repr(estimate)
