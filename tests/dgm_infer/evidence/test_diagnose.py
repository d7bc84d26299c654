"""Estimates say what is wrong with them; bounds that are not tight are not."""

import math
import warnings
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.method import EstimateStatus
from dgm_infer.target import as_target
from tests.known_evidence import known_gaussian
from tests.models import Function
from tests.oracles import FLOAT

CHAINS = 16


def estimated(
    error=(0.1, 0.1),
    status: EstimateStatus = "unbiased",
    log_z=(1.0, 2.0),
    chains=CHAINS,
    interrupted=False,
    **diagnostics: Any,
) -> dgm.Evidence:
    values = torch.tensor(log_z, dtype=FLOAT)
    fine = {"max_weight_share": torch.full((2,), 0.1), "effective_chains": torch.full((2,), 12.0), "seconds": 1.0}
    return dgm.Evidence(
        log_z=values,
        std_error=torch.tensor(error, dtype=FLOAT),
        bias=torch.zeros(2),
        dof=chains - 1,
        status=status,
        method="AIS",
        diagnostics=fine | diagnostics,
        draws=None,
        log_weights=torch.zeros(chains, 1, 2),
        seed=0,
        interrupted=interrupted,
    )


def test_an_estimate_that_is_fine_says_by_which_numbers():
    found = estimated().diagnose()
    assert not found
    assert (
        str(found) == "nothing is wrong: unbiased, 16 chains, standard error at most 0.1, effective chains at least 12"
    )


SECOND: dict[str, tuple[dict[str, Any], str, str]] = {
    "one draw": ({"max_weight_share": torch.tensor([0.1, 1.0])}, "useless", "all weight is on one draw of problem 1"),
    "few chains": (
        {"effective_chains": torch.tensor([9.0, 1.2])},
        "misleading",
        "the estimate rests on one or two of 16 chains of problem 1 (effectively 1.2)",
    ),
    "fewer chains than it seems": (
        {"effective_chains": torch.tensor([9.0, 2.7])},
        "misleading",
        "the estimate rests on effectively 2.7 of 16 chains of problem 1",
    ),
    "unseen modes": (
        {"unseen_shift": torch.tensor([0.0, 2.0])},
        "misleading",
        "a search found modes that no draw has visited of problem 1",
    ),
    "rare modes": (
        {"rare_shift": torch.tensor([0.0, 2.0])},
        "misleading",
        "the draws visit some modes too rarely of problem 1",
    ),
    "mass around the draws": (
        {"wide_shift": torch.tensor([0.0, 2.0])},
        "misleading",
        "the draws miss mass around them of problem 1",
    ),
    "a neck": (
        {"neck_shift": torch.tensor([0.0, 2.0])},
        "misleading",
        "the density narrows to a neck, where moves hardly come of problem 1",
    ),
    "restarts": (
        {"restarts": torch.tensor([30.0, 0.5])},
        "misleading",
        "only 0.5 restarts per chain reached the target of problem 1",
    ),
    "no round trip": (
        {"round_trips": torch.tensor([40, 0]), "base_moments_agree": torch.tensor([True, False])},
        "misleading",
        "no chain went from the base to the target and back of problem 1",
    ),
    "few round trips": (
        {"round_trips": torch.tensor([40, 3]), "base_moments_agree": torch.tensor([True, False])},
        "misleading",
        f"only 3 round trips between base and target for {CHAINS} chains of problem 1",
    ),
    "base moments": (
        {"round_trips": torch.tensor([40, 40]), "base_moments_agree": torch.tensor([True, False])},
        "misleading",
        "base moments are not recovered at beta = 0 of problem 1",
    ),
    "half of the weight": (
        {"max_weight_share": torch.tensor([0.1, 0.7])},
        "misleading",
        "one draw has 70 % of the weight of problem 1",
    ),
    "no move": ({"acceptance": torch.tensor([0.6, 0.0])}, "useless", "no chain moved of problem 1"),
    "no meaning": ({"error": (0.1, 30.0)}, "useless", "the standard error of log Z of problem 1 is 30 nats"),
    "wide": ({"error": (0.1, 2.5)}, "imprecise", "the standard error of log Z of problem 1 is 2.5 nats"),
}


@pytest.mark.parametrize(("changes", "severity", "what"), SECOND.values(), ids=SECOND)
def test_what_is_wrong_is_named_once_with_its_problem(changes, severity, what, tmp_path):
    evidence = estimated(**changes)
    (found,) = evidence.diagnose()
    assert (found.severity, found.what, found.problems) == (severity, what, (1,))
    assert found.remedy
    evidence.save(tmp_path / "evidence.npz")
    assert dgm.Evidence.load(tmp_path / "evidence.npz").diagnose() == evidence.diagnose()


@pytest.mark.parametrize("status", ["lower", "upper", "heuristic"])
@pytest.mark.parametrize("changes", [changes for changes, *_ in SECOND.values()], ids=SECOND)
def test_bounds_that_are_not_tight_are_no_fault(changes, status):
    found = estimated(status=status, **changes).diagnose()
    assert not found
    assert str(found).startswith(f"nothing is wrong: {status}, 16 chains")


def test_one_chain_has_no_error():
    (found,) = estimated(error=(math.nan, math.nan), chains=1).diagnose()
    assert found.what == "there is one chain, and no standard error"


def test_problems_without_an_estimate_are_named():
    lost, rest = estimated(
        log_z=(1.0, math.nan), error=(0.1, math.nan), interrupted=True, base_moments_agree=torch.tensor([True, False])
    ).diagnose()
    assert (lost.severity, lost.problems) == ("useless", (1,))
    assert lost.what == "there is no estimate of problem 1 (1 of 2 problems)"
    assert "interrupted" in lost.remedy
    assert rest.what == "the estimate of problem 0 is from an interrupted run"


@pytest.mark.parametrize(
    "method",
    [dgm.AIS(20, pilot_temperatures=10), dgm.GibbsTempering(draws=100, warmup=20, pilot_temperatures=10)],
    ids=lambda method: type(method).__name__,
)
def test_what_a_run_warns_of_is_in_its_diagnosis(method):
    known = known_gaussian(2)
    good = dgm.log_evidence(known.target, known.base, method, chains=8, seed=1, progress=False)
    assert not good.diagnose(), good.diagnose()
    narrow = dgm.Target(lambda x: 1e12 * x.square().sum(-1), 1)
    base = dgm.Gaussian(torch.zeros(1, dtype=FLOAT), 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bad = dgm.log_evidence(narrow, base, method, chains=8, seed=1, progress=False)
    name = type(method).__name__
    warned = {str(warning.message).removeprefix(f"{name}: ") for warning in caught}
    assert warned
    assert warned <= {found.line for found in bad.diagnose()}


SAID = pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")


def cold_softmax(cold):
    """``softmax(cold u)``, observed with noise: log Z = -0.62 +- 0.01 at 100, by 20 million prior draws."""
    values = torch.tensor([0.7, 0.3, 0.0, 0.0, 0.0], dtype=FLOAT)
    return dgm.condition(Function(lambda u: torch.softmax(cold * u, -1), 5), values, noise=0.1)


@SAID
@pytest.mark.parametrize("method", [None, dgm.GibbsTempering(), dgm.AIS()], ids=lambda m: type(m).__name__)
def test_a_likelihood_of_plateaus_is_named(method):
    def flat(cold):
        found = dgm.log_evidence(cold_softmax(cold), method=method, seed=0, progress=False).diagnose()
        return [each.severity for each in found if "the likelihood is flat at" in each.what]

    assert flat(100.0) == ["misleading"]
    # the control, where it has slopes everywhere
    assert flat(1.0) == []


def test_what_a_finding_of_plateaus_advises_is_right():
    target = as_target(cold_softmax(100.0))
    best = dgm.evidence.ImportanceSampling(10_000)
    found = dgm.log_evidence(target, dgm.Gaussian.broad(target), best, seed=0, progress=False)
    assert abs(found.log_z + 0.62) < 3 * found.std_error + 0.02


@SAID
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_has_not_settled_is_named_and_its_error_includes_it(seed):
    """Parallel tempering begins on the plateaus, and its chains find the mass between them one by one, or in part."""
    found = dgm.log_evidence(cold_softmax(100.0), method=dgm.ParallelTempering(), seed=seed, progress=False)
    said = [each.what for each in found.diagnose()]
    named = "from the first half of the run to the second", "the draws miss mass around them"
    assert any(words in line for words in named for line in said), said
    assert abs(found.log_z + 0.62) < 3 * found.std_error


class Drifting(dgm.ParallelTempering):
    """Finds a change from one half to the other."""

    def run(self, *given):
        outcome = super().run(*given)
        return outcome._replace(diagnostics=outcome.diagnostics | {"drift": torch.tensor(-0.5, dtype=FLOAT)})


@SAID
def test_a_change_between_the_halves_of_a_run_is_named_and_part_of_its_error():
    target, base = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2), dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 1.5)
    found = dgm.log_evidence(target, base, method=Drifting(), seed=0, progress=False)
    assert [each.what for each in found.diagnose()] == [
        "log Z changes by 0.5 nats from the first half of the run to the second"
    ]
    assert 0.5 < found.std_error < 0.6
    # the control
    calm = dgm.log_evidence(target, base, method=dgm.ParallelTempering(), seed=0, progress=False)
    assert calm.diagnostics["drift"] == 0
    assert not calm.diagnose()


@SAID
@pytest.mark.parametrize("shared", [False, True])
def test_bounds_that_cross_are_named(shared):
    """Three normals in two dimensions, one per problem, with draws of their own or at one point far out."""
    shape = (8, 2) if shared else (16, 3, 2)
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2, batch_shape=shape[-2:-1])
    base = dgm.Gaussian(torch.full((*target.batch_shape, 2), 0.5, dtype=FLOAT), 1.2)
    draws = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    few = dgm.AIS(temperatures=10, step_size=0.05)

    def found(exact):
        bounds = dgm.bidirectional(target, base, exact, few, chains=16, seed=1, progress=False)
        return [each for each in bounds.diagnose() if "exceeds the upper one" in each.what]

    (one,) = found(torch.full_like(draws, 3.0))
    assert one.severity == "misleading"
    assert one.problems == tuple(range(len(draws) if shared else 3))
    # the control
    assert found(draws) == []


def test_bounds_say_that_nothing_is_wrong():
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    base = dgm.Gaussian(torch.full((2,), 0.5, dtype=FLOAT), 1.2)
    draws = torch.randn(16, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    bounds = dgm.bidirectional(target, base, draws, seed=1, progress=False)
    assert not bounds.diagnose()
    assert str(bounds.diagnose()).startswith("nothing is wrong")
