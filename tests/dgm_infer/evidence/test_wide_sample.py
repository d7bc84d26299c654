"""Mass around a run's draws that no chain came near is found by independent points, and named."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence import wide_sample
from dgm_infer.evidence.wide_sample import WideSampleSettings
from tests.oracles import FLOAT
from tests.quick import cases


def banana(x):
    """Along ``y = x^2``, whose arms are ten times as long as the curvature at the mode tells."""
    return x[..., 0].square() / 18 + 50 * (x[..., 1] - x[..., 0].square()).square()


def funnel(x):
    """Three normal numbers with a log variance that is normal (Neal 2003)."""
    v, y = x[..., 0], x[..., 1:]
    return v.square() / 18 + 0.5 * y.square().sum(-1) * torch.exp(-v) + 1.5 * v


def concentric(x):
    """Half of the mass in a mode, half around it: a hundred times as wide, and without a mode of its own."""

    def energy(sd):
        return -0.5 * (x / sd).square().sum(-1) - x.shape[-1] * math.log(sd)

    return -torch.logaddexp(energy(1.0), energy(0.01))


TARGETS = {
    "banana": (banana, 2, math.log(2 * math.pi * 3 * 0.1)),
    "funnel": (funnel, 4, math.log(3 * (2 * math.pi) ** 2)),
    "concentric": (concentric, 5, math.log(2) + 2.5 * math.log(2 * math.pi)),
}


def found(name, seed=1, **options):
    energy, dim, _ = TARGETS[name]
    return dgm.log_evidence(dgm.Target(energy, dim), seed=seed, progress=False, **options)


def missed(evidence):
    return any("miss mass around them" in each.what for each in evidence.diagnose())


@pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")
@pytest.mark.parametrize("name", TARGETS)
def test_mass_around_the_draws_is_named_and_in_the_error(name):
    evidence, exact = found(name), TARGETS[name][2]
    assert missed(evidence)
    assert abs(evidence.log_z.item() - exact) < 3 * evidence.std_error.item()
    assert evidence.diagnostics["wide_shift"].item() == pytest.approx(exact - evidence.log_z.item(), rel=0.3)


@pytest.mark.parametrize("name", TARGETS)
def test_control_without_the_sample_nothing_is_said(name, monkeypatch):
    monkeypatch.setattr(wide_sample, "SETTINGS", WideSampleSettings(dim=0))
    evidence = found(name)
    assert not missed(evidence)
    assert abs(evidence.log_z.item() - TARGETS[name][2]) > 4 * evidence.std_error.item()


METHODS = (dgm.AIS(), dgm.SMC(), dgm.ParallelTempering(draws=64))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("name", TARGETS)
def test_intervals_of_other_methods_hold_what_they_miss(name, method):
    for seed in (1, 2, 3):
        evidence = found(name, seed, method=method)
        # an error that a difference has widened is about that difference
        assert abs(evidence.log_z.item() - TARGETS[name][2]) < 4 * evidence.std_error.item()


class Many(dgm.Target):
    """Correlated densities with and without heavy tails, log Z = 0."""

    def __init__(self, n, dim, dof):
        rng = torch.Generator().manual_seed(dim)
        root = torch.randn(n, dim, dim, generator=rng, dtype=FLOAT) / dim**0.5 + torch.eye(dim, dtype=FLOAT)
        self.inverse, self.log_det = torch.linalg.inv(root), torch.linalg.slogdet(root).logabsdet
        self.dof = dof
        super().__init__(None, dim, (n,))

    def energy(self, x):
        white = (self.inverse @ x.unsqueeze(-1)).squeeze(-1)
        if self.dof is None:
            return 0.5 * white.square().sum(-1) + self.log_det + 0.5 * self.dim * math.log(2 * math.pi)
        density = torch.distributions.StudentT(torch.tensor(self.dof, dtype=FLOAT), validate_args=False)
        return self.log_det - density.log_prob(white).sum(-1)


WHOLE = {"tails in 2": (2, 5.0), "normal in 8": (8, None), "tails in 8": (8, 5.0)}


# a base of unit width is too narrow for some
@pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")
@pytest.mark.parametrize(("dim", "dof"), cases(WHOLE, quick=["tails in 8"]))
def test_where_nothing_is_missed_nothing_is_said(dim, dof):
    target = Many(50, dim, dof)
    base = dgm.Gaussian(torch.zeros(50, dim, dtype=FLOAT), 1.0)
    options = {"method": dgm.GibbsTempering(), "seed": 1, "progress": False, "chains": 16}
    evidence = dgm.log_evidence(target, base, **options)
    # one run in a thousand has one by chance
    assert not evidence.diagnostics["wide_shift"].any()
