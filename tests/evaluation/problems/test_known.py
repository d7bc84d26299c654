"""The known targets of the field: their densities by independent formulas, their log Z, their draws, their data."""

import bz2
import gzip
import lzma
import math
import struct
import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor

import dgm_infer as dgm
from evaluation.problems import debian_data
from evaluation.problems.brownian import Brownian
from evaluation.problems.cox import CoxProcess, covariance
from evaluation.problems.funnel import Funnel
from evaluation.problems.known import NAMES, known_target
from evaluation.problems.mixtures import NormalMixture, StudentMixture
from evaluation.problems.r_data import read_frame
from evaluation.problems.regressions import LogisticRegression, Seeds
from evaluation.problems.wells import ManyWell

FLOAT = torch.float64


def points(dim: int, n: int = 3, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)


def funnel(x):
    v = x[0]
    return stats.norm.logpdf(v, 0, 3) + stats.norm.logpdf(x[1:], 0, math.exp(v / 2)).sum()


def wells(x):
    return sum(-(a**4) + 6 * a**2 + a / 2 - b**2 / 2 for a, b in zip(x[::2], x[1::2], strict=True))


def normals(target):
    def log_density(x):
        parts = [stats.multivariate_normal(m, target.sd**2 * np.eye(len(m))).logpdf(x) for m in target.means.numpy()]
        return special.logsumexp(parts) - math.log(len(parts))

    return log_density


def students(target):
    def log_density(x):
        parts = [stats.t.logpdf(x, target.dof, m).sum() for m in target.means.numpy()]
        return special.logsumexp(parts) - math.log(len(parts))

    return log_density


def brownian(target):
    seen, y = target.seen.numpy(), target.observed.numpy()

    def log_density(x):
        scales, path = x[:2], x[2:]
        s, e = np.exp(scales)
        moves = stats.norm.logpdf(path, np.r_[0, path[:-1]], s).sum()
        return stats.norm.logpdf(scales, 0, 2).sum() + moves + stats.norm.logpdf(y, path[seen], e).sum()

    return log_density


def seeds(target):
    r, n = target.germinated.numpy(), target.sown.numpy()

    def log_density(x):
        tau, a, b = math.exp(x[0]), x[1:5], x[5:]
        logits = target.design.numpy() @ a + b
        # d tau = tau d log tau
        prior = stats.gamma.logpdf(tau, 0.01, scale=1 / 0.01) + math.log(tau)
        prior += stats.norm.logpdf(a, 0, 10).sum() + stats.norm.logpdf(b, 0, tau**-0.5).sum()
        return prior + stats.binom.logpmf(r, n, special.expit(logits)).sum()

    return log_density


def regression(target):
    design, y = target.design.numpy(), target.labels.numpy()

    def log_density(x):
        return stats.norm.logpdf(x).sum() + stats.bernoulli.logpmf(y, special.expit(design @ x)).sum()

    return log_density


def cox(target):
    y = target.counts.numpy()

    def log_density(x):
        rate = np.exp(target.mean + target.factor.numpy() @ x) / len(y)
        # without the factorials, but with the powers of 1/D, of the counts
        likelihood = stats.poisson.logpmf(y, rate) + special.gammaln(y + 1) + y * math.log(len(y))
        return stats.norm.logpdf(x).sum() + likelihood.sum()

    return log_density


def small_targets():
    forty, tails = NormalMixture.forty(), StudentMixture.spread(4, 3, 5, seed=2)
    motion, plates = Brownian(), Seeds()
    logistic, process = LogisticRegression.simulated(20, 3, 0), CoxProcess.simulated(3, 0)
    return {
        "funnel": (Funnel(4), funnel),
        "wells": (ManyWell(4), wells),
        "normals": (forty, normals(forty)),
        "students": (tails, students(tails)),
        "brownian": (motion, brownian(motion)),
        "seeds": (plates, seeds(plates)),
        "regression": (logistic, regression(logistic)),
        "cox": (process, cox(process)),
    }


SMALL = small_targets()


@pytest.mark.parametrize("name", SMALL)
def test_a_density_is_that_of_an_independent_formula(name):
    target, log_density = SMALL[name]
    x = points(target.dim)
    expected = torch.tensor([log_density(row) for row in x.numpy()], dtype=FLOAT)
    torch.testing.assert_close(-target.energy(x), expected, rtol=1e-10, atol=1e-10)
    # control: the formula tells other points apart
    assert not torch.allclose(-target.energy(x + 0.01), expected, rtol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_a_gradient_is_that_of_finite_differences(name):
    target, _ = SMALL[name]
    x, h = points(target.dim, 1)[0], 1e-5
    _, gradient = target.energy_and_gradient(x)
    steps = h * torch.eye(target.dim, dtype=FLOAT)
    differences = (target.energy(x + steps) - target.energy(x - steps)) / (2 * h)
    torch.testing.assert_close(gradient, differences, rtol=1e-5, atol=1e-5)


def test_the_evidence_of_wells_is_that_of_quadrature():
    one, _ = integrate.quad(lambda x: math.exp(-(x**4) + 6 * x**2 + x / 2), -5, 5, epsabs=0, epsrel=1e-12)
    for dim in (2, 10, 32):
        assert ManyWell(dim).log_z == pytest.approx(dim / 2 * (math.log(one) + 0.5 * math.log(2 * math.pi)), abs=1e-9)


@pytest.mark.parametrize(
    "target", [Funnel(2), NormalMixture.spread(3, 2, 4, 0), StudentMixture.spread(3, 2, 4, 0)], ids=["f", "n", "s"]
)
def test_targets_that_claim_to_be_normalised_are(target):
    # the heavy tails of Student's t by a map of the line to (-1, 1)
    nodes, weights = np.polynomial.legendre.leggauss(400)
    line = np.arctanh(nodes) * 6
    stretch = weights * 6 / (1 - nodes**2)
    grid = torch.tensor(np.stack(np.meshgrid(line, line, indexing="ij"), -1), dtype=FLOAT)
    mass = (torch.exp(-target.energy(grid)).numpy() * stretch[:, None] * stretch).sum()
    assert mass == pytest.approx(1, abs=0.02)


def test_what_cannot_be_made_is_named():
    rng = torch.Generator().manual_seed(0)
    with pytest.raises(dgm.errors.ArgumentError, match="even degrees of freedom"):
        StudentMixture.spread(2, 2, 1, 0, dof=3).draw(4, rng)
    with pytest.raises(dgm.errors.ArgumentError, match="must be even"):
        ManyWell(3)
    with pytest.raises(dgm.errors.ArgumentError, match=r"expected \[n, n\]"):
        CoxProcess(torch.zeros(2, 3))
    with pytest.raises(dgm.errors.ArgumentError, match="labels 0 or 1"):
        LogisticRegression(torch.zeros(3, 2), torch.full((3,), 2.0))


def test_the_evidence_of_brownian_motion_is_that_of_adaptive_quadrature():
    target = Brownian()
    t = target.seen.numpy() + 1
    y = target.observed.numpy()
    values, vectors = np.linalg.eigh(np.minimum.outer(t, t).astype(float))
    squares = (vectors.T @ y) ** 2

    def integrand(b, a):
        spread = np.exp(2 * a) * values + np.exp(2 * b)
        log = stats.norm.logpdf([a, b], 0, 2).sum() - 0.5 * (np.log(2 * np.pi * spread) + squares / spread).sum()
        return math.exp(log)

    total, _ = integrate.dblquad(integrand, -7, 4, -7, 4, epsabs=0, epsrel=1e-4)
    assert target.log_z == pytest.approx(math.log(total), abs=1e-3)


@pytest.mark.parametrize("name", ["funnel-10", "many-well-10", "normals-2", "students-10"])
def test_exact_draws_have_the_moments_of_the_density(name):
    target: Any = known_target(name, None).target
    n = 20000
    x = target.draw(n, torch.Generator().manual_seed(2))
    # E[(d phi/d x) g] = E[d g/d x] for any bounded g: Stein's identity, of the density alone
    _, gradient = target.energy_and_gradient(x)
    scale = 3.0

    def deviations(x, gradient):
        g, slope = torch.tanh(x / scale), (1 - torch.tanh(x / scale).square()) / scale
        difference = gradient * g - slope
        return difference.mean(0) / (difference.std(0) / math.sqrt(n))

    assert deviations(x, gradient).abs().max() < 5
    # control: draws that are moved or spread by a tenth are not of it
    for other in (1.1 * x, x + 0.3):
        assert deviations(other, target.energy_and_gradient(other)[1]).abs().max() > 5


def marginal_likelihood_of_seeds(target: Seeds, log_tau: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Given those, plates are independent: a product of integrals over their effects, by Gauss-Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    r, n = target.germinated.numpy(), target.sown.numpy()
    log_choices = special.gammaln(n + 1) - special.gammaln(r + 1) - special.gammaln(n - r + 1)
    linear = slopes @ target.design.numpy().T
    logits = linear[..., None] + np.exp(-0.5 * log_tau)[:, None, None] * nodes
    logs = log_choices[:, None] + r[:, None] * logits - n[:, None] * np.logaddexp(0, logits)
    return np.asarray(special.logsumexp(logs + np.log(weights / math.sqrt(2 * math.pi)), axis=-1)).sum(-1)


@pytest.mark.slow
def test_the_evidence_of_seeds_by_another_route():
    # importance sampling of the five variables that are left, the precision's logarithm uniformly
    target, low, high = Seeds(), -3.0, 8.0
    base = dgm.Gaussian.fit(target, kind="full", steps=1000, start=dgm.Gaussian.standard(target, FLOAT))
    mean, covariance_of_slopes = base.mean[1:5].numpy(), base.covariance[1:5, 1:5].numpy()
    proposal = stats.multivariate_t(mean, 2 * covariance_of_slopes, df=4, seed=0)
    logs, jacobians = [], []
    for seed in range(10):
        log_tau = np.random.default_rng(seed).uniform(low, high, 4000)
        slopes = proposal.rvs(4000)
        prior = (
            stats.gamma.logpdf(np.exp(log_tau), 0.01, scale=100) + log_tau + stats.norm.logpdf(slopes, 0, 10).sum(-1)
        )
        likelihood = marginal_likelihood_of_seeds(target, log_tau, slopes)
        logs.append(likelihood + prior - proposal.logpdf(slopes) + math.log(high - low))
        jacobians.append(log_tau)
    w, jacobian = (torch.from_numpy(np.concatenate(parts)) for parts in (logs, jacobians))
    shares = w.softmax(0)
    error = math.sqrt(float(shares.square().sum()) - 1 / len(w))
    assert error < 0.02
    estimate = dgm.log_evidence(target, base, dgm.AIS(temperatures=2000), chains=32, seed=0, progress=False)
    allowed = 5 * math.hypot(error, float(estimate.std_error))
    assert allowed < 0.15
    assert abs(float(estimate.log_z) - float(w.logsumexp(0)) + math.log(len(w))) < allowed
    # control: without the factor of the change to log tau
    assert abs(float(estimate.log_z) - float((w - jacobian).logsumexp(0)) + math.log(len(w))) > allowed


def test_the_field_of_the_cox_process_has_its_covariance():
    k = covariance(4)
    torch.testing.assert_close(k.diagonal(), torch.full((16,), 1.91, dtype=FLOAT))
    # neighbours in a row and in a column are a quarter of the square apart
    for i, j in ((0, 1), (0, 4)):
        assert float(k[i, j]) == pytest.approx(1.91 * math.exp(-33 / 4))
    process = CoxProcess.simulated(3, 0)
    torch.testing.assert_close(process.factor @ process.factor.mT, covariance(3))


def test_points_are_counted_in_their_cells():
    process = CoxProcess.of_points(torch.tensor([[0.1, 0.9], [0.1, 0.8], [0.6, 0.2], [1.0, 1.0]]), 2)
    assert process.counts.tolist() == [0, 2, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_every_target_is_made_without_data(name):
    known = known_target(name, None)
    assert known.target.dim == int(name.split("-")[-1]) if name.split("-")[-1].isdigit() else known.target.dim > 20
    assert torch.isfinite(known.target.energy(points(known.target.dim))).all()
    simulated = name in ("ionosphere", "sonar", "credit", "cox-1600")
    assert ("simulated" in known.words) == simulated


def written(flags: int, *parts: bytes) -> bytes:
    return struct.pack(">i", flags) + b"".join(parts)


def text(value: str) -> bytes:
    return written(9, struct.pack(">i", len(value)), value.encode())


def symbol(value: str) -> bytes:
    return written(1, text(value))


def r_frame(version: int) -> bytes:
    """A data frame of a number and a factor, as R would write it."""
    end = struct.pack(">i", 254)
    reals = written(14, struct.pack(">i2d", 2, 1.5, -2.0))
    levels = written(1026, symbol("levels"), written(16, struct.pack(">i", 2), text("M"), text("R")))
    factor = written(13 | 512, struct.pack(">3i", 2, 2, 1), levels, end)
    names = written(1026, symbol("names"), written(16, struct.pack(">i", 2), text("V1"), text("Class")))
    frame = written(19 | 512, struct.pack(">i", 2), reals, factor, names, end)
    head = struct.pack(">3i", version, 0, 0) + (struct.pack(">i", 5) + b"UTF-8" if version == 3 else b"")
    return f"RDX{version}\nX\n".encode() + head + written(1026, symbol("Frame"), frame, end)


@pytest.mark.parametrize(("version", "pack"), [(2, gzip.compress), (3, bz2.compress), (3, lzma.compress)])
def test_a_data_frame_of_r_is_read(tmp_path, version, pack):
    path = tmp_path / "frame.rda"
    path.write_bytes(pack(r_frame(version)))
    columns = read_frame(path)
    assert {name: values.tolist() for name, values in columns.items()} == {"V1": [1.5, -2.0], "Class": [1.0, 0.0]}


def test_a_file_that_holds_no_data_frame_is_named(tmp_path):
    for name, content in (("a.rda", b"PK"), ("b.rda", gzip.compress(b"RDX2\nX\n")), ("c.rda", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(dgm.errors.CheckpointError, match=name):
            read_frame(tmp_path / name)
    with pytest.raises(dgm.errors.CheckpointError, match="no data frame"):
        read_frame(tmp_path / "missing.rda")


def test_data_are_fetched_from_packages_and_used(tmp_path, monkeypatch):
    def installed(command, cwd, check):
        # in place of apt-get and dpkg-deb, which a test must not run
        assert check
        if command[0] == "apt-get":
            assert command[1:] == ["download", "r-cran-caret", "r-cran-mlbench", "r-cran-spatstat.data"]
            (cwd_path := Path(cwd)).joinpath("one.deb").touch()
            return types.SimpleNamespace(path=cwd_path)
        for _, path in debian_data.FILES.values():
            target = Path(cwd) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"x y\n-5 -8\n" + b"0 -3\n" * 125)
        return None

    monkeypatch.setattr(debian_data.subprocess, "run", installed)
    debian_data.fetch(tmp_path / "known_targets")
    assert sorted(path.name for path in (tmp_path / "known_targets").iterdir()) == sorted(debian_data.FILES)
    known = known_target("cox-1600", tmp_path / "known_targets")
    assert "126 Finnish pine saplings" in known.words
    counts = cast(CoxProcess, known.target).counts
    assert counts.sum() == 126
    # the first at the corner, the others in the middle
    assert counts[0] == 1
    assert counts[20 * 40 + 20] == 125
    with pytest.raises(dgm.errors.CheckpointError, match="Sonar"):
        known_target("sonar", tmp_path / "known_targets")
