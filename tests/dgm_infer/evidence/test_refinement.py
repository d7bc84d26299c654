"""Bases refined by tempered pilots."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence import estimate
from tests.known_evidence import known_gaussian
from tests.oracles import FLOAT

METHOD = dgm.GibbsTempering(draws=100, warmup=20, pilot_temperatures=30)


@pytest.mark.slow
def test_pilots_give_a_poor_base_the_moments_and_the_evidence_of_the_target():
    known = known_gaussian(4)
    mean, covariance = known.target.parts[1][0], known.target.parts[2][0]
    poor = dgm.Gaussian(mean + covariance.diagonal().sqrt(), 0.6 * covariance.diagonal().sqrt())
    refined = dgm.evidence.refine_base(
        known.target, poor, METHOD, rounds=3, kind="full", chains=32, seed=1, progress=False
    )
    base = refined.base
    assert len(refined.pilots) == 3
    assert base.kind == "full"
    torch.testing.assert_close(base.covariance, covariance, rtol=0.25, atol=0.1 * float(covariance.diagonal().max()))
    assert (base.mean - mean).abs().max() < 0.15 * (poor.mean - mean).abs().max()
    assert base.log_zeta == pytest.approx(float(refined.pilots[-1].log_z))
    # what refinement is for: the same run from the new base is more precise
    errors = [dgm.log_evidence(known.target, b, METHOD, seed=2, progress=False).std_error for b in (poor, base)]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_base():
    known = known_gaussian(3)
    base = dgm.Gaussian(torch.zeros(3, dtype=FLOAT), 2.0)
    one, other = (
        dgm.evidence.refine_base(known.target, base, METHOD, rounds=2, chains=4, seed=5, progress=False)
        for _ in range(2)
    )
    torch.testing.assert_close(one.base.mean, other.base.mean, rtol=0, atol=0)
    # rounds are independent of each other
    assert one.pilots[0].seed != one.pilots[1].seed
    assert one.gradient_evaluations == sum(p.diagnostics["gradient_evaluations"] for p in one.pilots)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": dgm.Elbo()}, "it draws from the base"),
        ({"method": dgm.GibbsTempering}, "method=GibbsTempering: expected an instance"),
        ({"method": "Gibbs"}, "method='Gibbs': expected an instance"),
        ({"rounds": 0}, "rounds=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_arguments_are_named(options, message):
    known = known_gaussian(2)
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        dgm.evidence.refine_base(known.target, dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 1.0), **options)


def correlated(dim, rho=0.9):
    """A stationary walk of unit variance, and its log Z."""

    def energy(x):
        steps = x[..., 1:] - rho * x[..., :-1]
        return 0.5 * (x[..., 0].square() + steps.square().sum(-1) / (1 - rho**2))

    log_z = 0.5 * dim * math.log(2 * math.pi) + 0.5 * (dim - 1) * math.log(1 - rho**2)
    return dgm.Target(energy, dim), log_z


@pytest.mark.parametrize("dense", [512, 0])
def test_a_base_without_correlations_gets_those_of_the_draws(dense, monkeypatch):
    target, log_z = correlated(40)
    base = dgm.Gaussian(torch.full((40,), 0.1, dtype=FLOAT), 1.0)
    monkeypatch.setattr(estimate, "REFINE", replace(estimate.REFINE, dense=dense))
    method = dgm.GibbsTempering(draws=300, warmup=100, pilot_temperatures=50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dgm.log_evidence(target, base, method, chains=16, seed=3, refine=True, progress=False)
    told = [each for each in found.diagnose() if each.severity != "imprecise"]
    if dense:
        assert float((found.log_z - log_z).abs()) < 4 * float(found.std_error)
        assert float(found.std_error) < 0.2
        assert found.diagnostics["refinements"] >= 1
        assert not told
    else:
        # the control, of which it is said, with what has not been tried
        assert "dgm.ParallelTempering() or dgm.SMC()" in str(told)
        assert "refine=True" not in str(told)
