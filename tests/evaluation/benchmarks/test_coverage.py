"""Intervals of log Z cover it as often as they say, or the run says that they may not."""

import json
import warnings

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence import estimators
from evaluation.benchmarks import coverage
from evaluation.problems.families import FAMILIES, HEAVY

QUICK = {
    "AIS": dgm.AIS(10, n_steps=1, pilot_temperatures=10),
    "Gibbs tempering": dgm.GibbsTempering(draws=10, warmup=2, pilot_temperatures=10),
}


@pytest.mark.parametrize("make", [*FAMILIES.values(), HEAVY["students-8"], HEAVY["secants"]])
def test_the_families_are_normalised(make):
    target, base = make(3)
    assert base.mean.shape == (*target.batch_shape, target.dim) == (3, target.dim)
    # importance weights from a wide Student's t, which has heavier tails than all of them
    centre, sd = getattr(target, "mean", base.mean), getattr(target, "sd", base.covariance_diagonal.sqrt())
    wide = torch.distributions.StudentT(3.0, centre, 1.5 * sd)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = wide.sample((60_000,))
    log_weights = -target.energy(x) - wide.log_prob(x).sum(-1)
    found = estimators.log_mean(log_weights)
    assert (found.std_error < 0.2).all()
    assert (found.log_z.abs() < 5 * found.std_error).all()
    torch.testing.assert_close(target.take(torch.tensor([2])).energy(x[:5, 2:]), target.energy(x[:5])[:, 2:])


def test_every_method_is_measured_on_every_family_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coverage, "METHODS", QUICK)
    for methods in ("AIS", "Gibbs tempering"):
        path = coverage.bench(problems=3, chains=4, methods=methods, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert list(record["rows"]) == list(QUICK)
    for by_family in record["rows"].values():
        assert list(by_family) == list(FAMILIES)
        for row in by_family.values():
            assert max(row["covered"], row["named"]) <= row["covered_or_named"] <= 1
    assert (tmp_path / "coverage.md").read_text() == coverage.page(record)
    with pytest.raises(dgm.errors.ConfigError, match="'SMC' is not one of AIS; Gibbs tempering"):
        coverage.bench(methods="SMC", output=str(tmp_path))


def share(name, family, n):
    """Share of problems whose interval covers the truth, or that are named."""
    target, base = FAMILIES[family](n)
    method = coverage.METHODS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dgm.diagnosis.DiagnosisWarning)
        found = dgm.log_evidence(target, base, method, seed=1, coverage=method is None, progress=False)
    return coverage.row(found)


# two methods have the harder of two priors, and the others the easier one
METHODS = ("default", "AIS", "Hamiltonian AIS", "SMC, frozen", "Gibbs tempering", "simulated tempering")
HELD = [(name, "normals-5, prior") for name in METHODS[2:]] + [(name, "normals-20, prior") for name in METHODS[:2]]
HELD += [(name, "students") for name in (*METHODS, "SMC, adaptive")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), HELD, ids=lambda value: value)
def test_nine_in_ten_problems_are_covered_or_named(name, family):
    n = 100
    assert share(name, family, n)["covered_or_named"] >= 0.9 - 3 * (0.09 / n) ** 0.5


def test_control_errors_by_the_spread_of_the_weights_alone_cover_too_little():
    # normal log weights of standard deviation 2, as those of annealing are, of mean weight 1
    rng = torch.Generator().manual_seed(1)
    log_weights = 2 * torch.randn(16, 4000, generator=rng, dtype=torch.float64) - 2
    found, ess = estimators.log_mean(log_weights), estimators.weight_ess(log_weights)
    alone = ((16 / ess - 1) / 15).sqrt()
    # Student's t with 15 degrees of freedom
    kept, own = ((found.log_z.abs() < 2.131 * error).double().mean() for error in (found.std_error, alone))
    assert own < 0.8
    assert 0.88 < kept < 0.99
