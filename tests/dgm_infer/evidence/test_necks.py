"""Necks of densities: named, with an error that holds what is missed there, and not seen where there is none."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.diagnosis import DiagnosisWarning
from dgm_infer.evidence import checks
from dgm_infer.evidence.wide_sample import CrossCheck
from tests.schools import Schools, log_z_of_schools

SEEDS = {"seed": 1, "progress": False}


def base() -> dgm.Gaussian:
    mean = torch.tensor([4.0, 1.0, *[5.0] * 8], dtype=torch.float64)
    return dgm.Gaussian(mean, torch.tensor([4.0, 1.2, *[5.0] * 8], dtype=torch.float64))


def test_a_centred_hierarchy_is_named_and_its_error_holds_what_is_missed(monkeypatch):
    with pytest.warns(DiagnosisWarning, match="neck, where moves hardly come.*not centred"):
        found = dgm.log_evidence(Schools(), base(), dgm.SMC(), **SEEDS)
    truth = log_z_of_schools()
    assert abs(found.log_z - truth) < 2 * found.std_error
    # the points themselves know it
    assert abs(found.log_z + found.diagnostics["neck_shift"] - truth) < 0.06
    # control: without them nothing is said, and the error does not hold it
    monkeypatch.setattr(checks, "neck_sample", lambda path, outcome, rng: CrossCheck.none(outcome.estimate.log_z))
    silent = dgm.log_evidence(Schools(), base(), dgm.SMC(), **SEEDS)
    assert silent.log_z == found.log_z
    assert (truth - silent.log_z) / silent.std_error > 4


def heavy(x):
    return 2 * torch.log1p(x.square() / 3).sum(-1)


def banana(x):
    ends = 0.5 * x[..., 0].square() + 5 * (x[..., 1] - x[..., 0].square()).square()
    return ends + 0.5 * x[..., 2:].square().sum(-1)


def narrow(x):
    return 0.5 * (x / torch.logspace(-3, 3, x.shape[-1]).to(x)).square().sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, dgm.AIS(), dgm.evidence.HamiltonianAIS()], ids=lambda m: type(m).__name__)
@pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")
def test_errors_of_other_methods_hold_what_a_neck_hides(method):
    runs = [dgm.log_evidence(Schools(), base(), method, seed=seed, progress=False) for seed in range(2)]
    errors = torch.stack([(run.log_z - log_z_of_schools()) / run.std_error for run in runs])
    assert errors.abs().max() < 3


@pytest.mark.slow
@pytest.mark.parametrize("energy", [heavy, banana, narrow], ids=lambda energy: energy.__name__)
@pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")
def test_densities_without_a_neck_have_none(energy):
    # short runs, whose errors are large and whose draws are few
    method = dgm.SMC(particles=64, temperatures=10)
    for seed in range(5):
        found = dgm.log_evidence(dgm.Target(energy, 4), method=method, seed=seed, progress=False)
        assert found.diagnostics["neck_shift"] == 0


def test_the_sample_along_a_neck_has_the_mass_of_a_hierarchy_of_any_size():
    """Effects given a scale are normal: log Z is that of their sum over the scale."""
    n = 20
    y = 0.4 * torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def energy(x):
        log_tau, theta = x[..., 0], x[..., 1:]
        log_prob = -log_tau.square() / 8 - 0.5 * (theta / log_tau.exp().unsqueeze(-1)).square().sum(-1) - n * log_tau
        return -log_prob + 0.5 * (theta - y.to(x)).square().sum(-1)

    grid = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    variance = 1 + (2 * grid).exp()
    terms = -grid.square() / 8 - 0.5 * n * variance.log() - 0.5 * y.square().sum() / variance
    truth = terms.logsumexp(0) + math.log(grid[1] - grid[0]) + 0.5 * n * math.log(2 * math.pi)
    start = dgm.Gaussian(torch.zeros(n + 1, dtype=torch.float64), 1.0)
    with pytest.warns(DiagnosisWarning, match="neck"):
        found = dgm.log_evidence(dgm.Target(energy, n + 1), start, dgm.SMC(), **SEEDS)
    assert abs(found.log_z + found.diagnostics["neck_shift"] - truth) < 0.06
