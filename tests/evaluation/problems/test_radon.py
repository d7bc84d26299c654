"""The radon regression as a Pyro program."""

import math
from itertools import combinations

import pytest
import torch
from torch.distributions import HalfCauchy, Normal

import dgm_infer as dgm
from dgm_infer.interop.pyro import PyroTarget
from evaluation.problems.radon import Radon, radon_target, read_radon
from tests.files import reference_folder

FLOAT = torch.float64


def simulated(n=40, counties=5):
    rng = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(n, generator=rng, dtype=FLOAT)

    return Radon(torch.randint(counties, (n,), generator=rng), (normal() > 0).double(), normal(), normal(), counties)


def log_density(data, x):
    """Log density of latent variables in the program's order, with log scales, as the model is written on paper."""
    mu_a, log_sigma_a, n_a, mu_b = x[0], x[1], x[2 : 2 + data.n_counties], x[2 + data.n_counties]
    log_sigma_b, n_b, log_eps = x[3 + data.n_counties], x[4 + data.n_counties : 6 + data.n_counties], x[-1]
    sigma_a, sigma_b, eps = log_sigma_a.exp(), log_sigma_b.exp(), log_eps.exp()
    prior = sum(Normal(0.0, 1.0).log_prob(part).sum() for part in (mu_a, mu_b, n_a, n_b))
    prior += sum(HalfCauchy(2.5).log_prob(scale) + scale.log() for scale in (sigma_a, sigma_b, eps))
    b = mu_b + sigma_b * n_b
    mean = mu_a + sigma_a * n_a[data.county] + b[0] * data.floor + b[1] * data.log_uranium
    return prior + Normal(mean, eps).log_prob(data.log_radon).sum()


def test_the_energy_is_that_of_the_model_on_paper():
    data = simulated()
    target = radon_target(data)
    assert target.dim == data.n_counties + 7
    assert isinstance(target, PyroTarget)
    assert target.vectorised
    x = torch.randn(3, target.dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    expected = torch.stack([log_density(data, row) for row in x])
    torch.testing.assert_close(-target.energy(x), expected)


def test_missing_data_are_named(tmp_path):
    with pytest.raises(dgm.errors.CheckpointError, match=r"radon\.npz does not exist"):
        read_radon(tmp_path)


@pytest.mark.slow
def test_methods_agree_on_the_evidence_of_the_published_data():
    target = radon_target(read_radon(reference_folder("radon")))
    assert target.dim == 92
    fitted = dgm.Gaussian.fit(target, steps=2000, start=dgm.Gaussian.standard(target, FLOAT))
    assert fitted.elbo == pytest.approx(-1087, abs=1)
    pilot = dgm.GibbsTempering(draws=250)
    base = dgm.evidence.refine_base(target, fitted, pilot, kind="full", seed=1, progress=False).base
    found = [
        dgm.log_evidence(target, base, method, chains=chains, seed=1, progress=False)
        for method, chains in (
            (dgm.GibbsTempering(draws=250), 48),
            # errors over 8 seeds: 0.09 to 0.22 where no weight has more than 14 %, 0.30 to 0.57 where one has 25 to
            # 56 %, as of heavy tails; and of SMC 0.04 to 0.15, but that a single particle had a quarter of the weight
            # in one of 16 (0.22), and 78 % in another (0.83, which is named)
            (dgm.AIS(temperatures=150), 96),
            (dgm.SMC(particles=32, schedule="barrier", temperatures=80), 24),
        )
    ]
    # 0.10 to 0.13 over seeds
    assert found[0].std_error <= 0.2
    for evidence in found[1:]:
        most = 0.8 if evidence.diagnostics["max_weight_share"] > 0.2 else 0.3
        assert evidence.std_error <= most or any("of the weight" in line.what for line in evidence.diagnose())
    for evidence in found:
        assert evidence.log_z == pytest.approx(-1081.2, abs=0.1 + 3 * float(evidence.std_error))
        assert evidence.log_z > fitted.elbo + 3
    for one, other in combinations(found, 2):
        error = math.hypot(float(one.std_error), float(other.std_error))
        assert abs(float(one.log_z - other.log_z)) <= 3 * error
