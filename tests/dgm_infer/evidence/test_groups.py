"""Groups of chains with pilots of their own have the pilots' luck in their error."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.estimators import mean_of_chains
from dgm_infer.evidence.method import Outcome
from tests.known_evidence import known_bimodal, known_gaussian
from tests.oracles import FLOAT

PROBLEMS = 2000
MANY = known_gaussian(1, (PROBLEMS,))


class Lucky:
    """Estimates of log Z = 0 whose chains share the error of a pilot."""

    status = "consistent"

    def __init__(self, luck: float):
        self.luck = luck

    def run(self, path, chains, rng, progress):
        path.evaluations += 10
        pilot, own = (torch.randn(n, *path.batch_shape, generator=rng, dtype=FLOAT) for n in (1, chains))
        estimate = mean_of_chains(self.luck * pilot + 0.1 * own)
        weights = torch.zeros(chains, 1, *path.batch_shape, dtype=FLOAT)
        return Outcome(estimate, weights.unsqueeze(-1), weights, {"ess": weights.sum((0, 1))})


def covered(luck: float, groups: int, chains: int = 16) -> tuple[float, dgm.Evidence]:
    options = {"chains": chains, "groups": groups, "seed": 1, "coverage": False, "progress": False}
    estimate = dgm.log_evidence(MANY.target, MANY.base, Lucky(luck), **options)
    low, high = estimate.interval()
    return ((low < 0) & (high > 0)).double().mean().item(), estimate


@pytest.mark.parametrize("luck", [0.0, 0.05, 0.2])
def test_the_error_covers_the_luck_of_the_pilot(luck):
    share, estimate = covered(luck, 4)
    assert 0.92 < share < 0.99
    assert estimate.draws.shape[0] == 16
    assert estimate.diagnostics["gradient_evaluations"] == 10
    # control: one pilot, whose luck all chains share
    if luck:
        assert covered(luck, 1)[0] < 0.85


@pytest.mark.parametrize(
    "method",
    [
        dgm.AIS(30, pilot_temperatures=15),
        dgm.GibbsTempering(draws=50, warmup=10, pilot_temperatures=20),
        dgm.ParallelTempering(draws=64, temperatures=4, pilot_temperatures=10),
        dgm.SMC(16, "equalised", 10, pilot_temperatures=10),
    ],
    ids=lambda method: type(method).__name__,
)
def test_every_method_runs_in_groups(method):
    known = known_bimodal()
    options = {"chains": 16, "seed": 2, "progress": False}
    estimate = dgm.log_evidence(known.target, known.base, method, groups=4, **options)
    assert (estimate.log_z - known.log_z).abs() < 5 * estimate.std_error
    assert estimate.diagnostics["between_groups"] >= 0
    # weights of different groups compare: the mean of x is that of the target
    mean = estimate.expectation(lambda x: x)
    parts = known.target.parts
    assert ((mean.value - (parts[0].unsqueeze(-1) * parts[1]).sum(0)).abs() < 5 * mean.std_error).all()
    whole = dgm.log_evidence(known.target, known.base, method, **options)
    assert estimate.draws.shape == whole.draws.shape
    # only tuning may cost more
    runs = [d["gradient_evaluations"] - d["pilot_evaluations"] for d in (estimate.diagnostics, whole.diagnostics)]
    assert runs[0] == runs[1] > 0


@pytest.mark.parametrize("groups", [3, 16, 0, 1.5])
def test_groups_that_do_not_divide_the_chains_are_named(groups):
    known = known_gaussian(1)
    with pytest.raises(dgm.errors.ArgumentError, match="groups"):
        dgm.log_evidence(known.target, known.base, dgm.AIS(5), groups=groups, chains=16, progress=False)
