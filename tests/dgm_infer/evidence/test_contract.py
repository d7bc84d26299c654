"""What every method of evidence keeps to: those that the registry exports, and one defined here as a user would."""

import dataclasses
import inspect
from dataclasses import dataclass

import pytest
import torch

import dgm_infer as dgm
from dgm_infer import evidence
from dgm_infer.evidence.estimators import log_mean
from dgm_infer.evidence.method import Outcome
from dgm_infer.settings import Settings
from tests.known_evidence import known_gaussian
from tests.quick import cases

REGISTERED = [
    value
    for name in evidence.__all__
    if inspect.isclass(value := getattr(evidence, name)) and dataclasses.is_dataclass(value) and hasattr(value, "run")
]

# Sizes under which a method takes a fraction of a second; fields that a method does not have are left out.
SMALL = {
    "temperatures": 40,
    "pilot_temperatures": 20,
    "draws": 60,
    "warmup": 30,
    "samples": 60,
    "parts": 2,
    "fit_steps": 40,
}
SMALL["tempering"] = dgm.GibbsTempering(draws=60, warmup=0, pilot_temperatures=20)
# and those that are enough where nothing is estimated
TINY = {
    "temperatures": 10,
    "pilot_temperatures": 10,
    "draws": 12,
    "warmup": 20,
    "samples": 12,
    "parts": 2,
    "fit_steps": 5,
}
TINY["tempering"] = dgm.GibbsTempering(draws=12, warmup=0, pilot_temperatures=10)


@dataclass(frozen=True, eq=False)
class Weighted(Settings):
    """A user's own method: the mean of importance weights, one per chain."""

    samples: int = 50

    @property
    def status(self):
        return "unbiased"

    def run(self, path, chains, rng, progress):
        v = path.draws(chains * self.samples, rng)
        log_weights = -path.differences(v).unflatten(0, (chains, self.samples))
        draws = path.base.unwhiten(v).unflatten(0, (chains, self.samples))
        each = log_mean(log_weights.movedim(1, 0)).log_z
        progress.update("importance")
        return Outcome(log_mean(each), draws, log_weights, {})


@dataclass(frozen=True, eq=False)
class Inflated(Weighted):
    """The same with a planted bias of half a nat."""

    def run(self, path, chains, rng, progress):
        outcome = super().run(path, chains, rng, progress)
        estimate = outcome.estimate._replace(log_z=outcome.estimate.log_z + 0.5)
        return outcome._replace(estimate=estimate)


# where a temperature is a chain, or has states of its own
FEWER = {
    dgm.ParallelTempering: {"temperatures": 5, "draws": 32},
    dgm.ImportanceTempering: {
        "tempering": dgm.SimulatedTempering(
            temperatures=6, schedule="sigmoid", draws=60, warmup=10, pilot_temperatures=20
        )
    },
}


def small(method: type, sizes=SMALL):
    """The method with small sizes."""
    names = {field.name for field in dataclasses.fields(method)}
    sizes = sizes | FEWER.get(method, {})
    return method(**{name: value for name, value in sizes.items() if name in names})


def estimated(method, *, problems=(2,), chains=16, seed=3, **options):
    known = known_gaussian(2, problems)
    estimate = dgm.log_evidence(known.target, known.base, method, chains=chains, seed=seed, progress=False, **options)
    return known, estimate


KINDS = [*REGISTERED, Weighted]
METHODS = pytest.mark.parametrize("method", KINDS, ids=lambda method: method.__name__)


def test_the_registry_is_what_the_package_exports():
    assert len(REGISTERED) >= 9
    assert all(getattr(dgm, method.__name__) is method for method in REGISTERED)


@METHODS
def test_a_method_is_frozen_and_equal_to_one_of_the_same_fields(method):
    one = small(method)
    assert one == small(method)
    assert isinstance(one, Settings)
    name = dataclasses.fields(one)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, name, getattr(one, name))


def within(known, estimate):
    """Whether estimates are where their status says, up to five standard errors."""
    z = (estimate.log_z - estimate.bias.nan_to_num(0) - known.log_z) / estimate.std_error
    if estimate.status == "lower":
        return bool(((estimate.log_z - known.log_z) / estimate.std_error <= 5).all())
    return bool((z.abs() <= 5).all())


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
        with pytest.raises(dgm.ArgumentError, match="expected an instance"):
            dgm.log_evidence(known.target, known.base, wrong, progress=False)
