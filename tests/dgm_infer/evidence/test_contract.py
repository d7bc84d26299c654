"""What every method of evidence keeps to: those that the registry exports, and one defined here as a user would."""

import dataclasses

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.settings import Settings
from tests.dgm_infer.evidence.methods import (
    KINDS,
    REGISTERED,
    TINY,
    Inflated,
    Weighted,
    estimated,
    small,
    within,
)
from tests.findings import honest
from tests.known_evidence import known_gaussian
from tests.quick import cases

# runs as short as these may have no round trip, and say so
pytestmark = honest

METHODS = pytest.mark.parametrize("method", KINDS, ids=lambda method: method.__name__)


def test_the_registry_is_not_empty():
    assert len(REGISTERED) >= 9


@METHODS
def test_a_method_is_frozen_and_equal_to_one_of_the_same_fields(method):
    one = small(method)
    assert one == small(method)
    assert isinstance(one, Settings)
    name = dataclasses.fields(one)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, name, getattr(one, name))


@METHODS
def test_an_estimate_is_where_its_status_says(method):
    known, estimate = estimated(small(method), chains=32)
    assert estimate.status in ("unbiased", "consistent", "lower", "upper", "heuristic")
    assert estimate.std_error.max() < 0.3
    assert within(known, estimate)


def test_control_a_biased_method_is_not():
    known, estimate = estimated(Inflated(), chains=32)
    assert not within(known, estimate)


@METHODS
def test_shapes_types_and_diagnostics(method):
    _, estimate = estimated(small(method), problems=(3, 1), chains=5)
    assert estimate.log_z.shape == estimate.std_error.shape == estimate.bias.shape == (3, 1)
    assert estimate.log_z.dtype == estimate.log_weights.dtype == torch.float64
    assert estimate.draws.shape == (*estimate.log_weights.shape, 2)
    assert estimate.log_weights.shape[0] == 5
    assert estimate.dof == 4
    assert {"gradient_evaluations", "pilot_evaluations", "seconds"} <= set(estimate.diagnostics)


@METHODS
def test_the_same_seed_gives_the_same_numbers_and_another_does_not(method):
    one, two, other = (estimated(small(method, TINY), chains=4, seed=seed)[1] for seed in (3, 3, 4))
    assert torch.equal(one.log_z, two.log_z)
    assert torch.equal(one.log_weights, two.log_weights)
    assert not torch.equal(one.log_z, other.log_z)


# runs in chunks are the same code for all methods, whose draws differ in shape
@pytest.mark.parametrize("method", cases({kind.__name__: kind for kind in KINDS}, quick=("AIS", "SMC", "Weighted")))
def test_a_run_in_chunks_has_the_shape_of_one_without(method):
    known, estimate = estimated(small(method), problems=(3,), chains=32, chunk=2)
    assert estimate.log_z.shape == (3,)
    assert within(known, estimate)


@METHODS
def test_results_are_stored_whole(method, tmp_path):
    _, estimate = estimated(small(method), chains=4)
    estimate.save(tmp_path / "evidence.npz")
    loaded = dgm.Evidence.load(tmp_path / "evidence.npz")
    assert torch.equal(loaded.log_z, estimate.log_z)
    assert loaded.status == estimate.status
    assert loaded.method == method.__name__


def test_a_method_that_is_none_is_refused():
    known = known_gaussian(2)
    for wrong in (Weighted, "AIS", 3):
        with pytest.raises(dgm.errors.ArgumentError, match="expected an instance"):
            dgm.log_evidence(known.target, known.base, wrong, progress=False)
