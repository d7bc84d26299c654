"""Temperatures at equal distances along the communication barrier, as a pilot estimates it."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.evidence.plan import TUNING, _mean_gap, equal_distances, sigmoid
from dgm_infer.evidence.tempering.temperatures import ListedLadder
from dgm_infer.progress import Progress
from tests.known_evidence import known_gaussian
from tests.oracles import FLOAT

DIM, SD = 4, 0.1


def test_the_mean_gap_is_that_of_all_pairs_of_finite_values():
    d = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    d[3, 0] = d[5, 0] = math.inf
    gaps = _mean_gap(d)
    for column, gap in zip(d.mT, gaps, strict=True):
        kept = column[column.isfinite()]
        pairs = (kept.unsqueeze(0) - kept.unsqueeze(1)).abs().sum() / (len(kept) * (len(kept) - 1))
        torch.testing.assert_close(gap, pairs / 2)
    assert _mean_gap(torch.full((3, 1), math.inf)).item() == 0


def narrow_pilot():
    """A pilot from a standard normal to ``N(0, SD^2 I)``, whose precision is ``1 - beta + beta/SD^2`` on the way."""
    path = AnnealedPath(
        dgm.Target(lambda x: 0.5 * (x / SD).square().sum(-1), DIM), dgm.Gaussian(torch.zeros(DIM, dtype=FLOAT), 1.0)
    )
    rng = torch.Generator().manual_seed(1)
    return dgm.AIS(pilot_temperatures=200).pilot(path, 500, rng, Progress(False))


def test_the_pilot_measures_the_barrier_of_a_normal():
    """Half the mean difference of d falls as the precision grows, by the constant of math 6.11."""
    pilot = narrow_pilot()
    rng = torch.Generator().manual_seed(2)
    precision = 1 - pilot.betas + pilot.betas / SD**2
    shape = DIM / 2
    constant = 4 * shape * math.exp(math.lgamma(shape + 0.5) - math.lgamma(shape + 1)) / math.sqrt(math.pi) / 2
    exact = 0.5 * (1 / SD**2 - 1) / precision * constant
    # by exact draws, to their errors of half a per cent
    x = torch.randn(20_000, len(precision), DIM, generator=rng, dtype=FLOAT) / precision.sqrt().unsqueeze(-1)
    gaps = _mean_gap(0.5 * (1 / SD**2 - 1) * x.square().sum(-1))
    assert (gaps / exact - 1).abs().max() < 0.03
    # a pilot's states lag behind, and its running means at the ends are one-sided
    ratio = (pilot.rates / exact)[20:-20]
    assert (ratio - 1).abs().max() < 0.2
    # control: the spread of one temperature does not do for the others
    assert (pilot.rates[0] / exact - 1).abs().max() > 10


def test_temperatures_are_as_far_apart_as_the_barrier_says():
    """Equal distances are equal ratios of the precision, in the part that the pilot determines."""
    n, betas = 40, sigmoid(2000)
    precision = 1 - betas + betas / SD**2
    new = equal_distances(n, betas, 0.5 * (1 / precision[1:] + 1 / precision[:-1]) * betas.diff())
    distance = (1 - new + new / SD**2).log() / math.log(1 / SD**2)
    own = torch.searchsorted(betas, new).double() / 2000
    torch.testing.assert_close(
        (1 - TUNING.even) * distance + TUNING.even * own, torch.linspace(0, 1, n + 1, dtype=FLOAT), atol=2e-3, rtol=0
    )
    # control: even temperatures are not
    even = torch.linspace(0, 1, n + 1, dtype=FLOAT)
    assert ((1 - even + even / SD**2).log() / math.log(1 / SD**2) - even).abs().max() > 0.3


@pytest.mark.parametrize(
    "method",
    [
        dgm.AIS(60, "barrier", pilot_temperatures=30),
        dgm.evidence.HamiltonianAIS(120, "barrier", pilot_temperatures=30),
        dgm.SMC(16, schedule="barrier", temperatures=20, pilot_temperatures=30),
        dgm.SimulatedTempering(draws=200, schedule="barrier", temperatures=20, pilot_temperatures=30),
    ],
    ids=lambda method: f"{type(method).__name__} {method.schedule}",
)
def test_methods_are_right_with_temperatures_of_every_problem_s_own(method):
    known = known_gaussian(3, (4,))
    estimate = dgm.log_evidence(known.target, known.base, method, chains=16, seed=3, progress=False)
    assert ((estimate.log_z - known.log_z).abs() < 4 * estimate.std_error).all()
    assert (estimate.std_error < 0.3).all()


def test_a_ladder_takes_temperatures_of_every_problem_s_own():
    rng = torch.Generator().manual_seed(4)
    betas = torch.stack([torch.linspace(0, 1, 6, dtype=FLOAT), torch.linspace(0, 1, 6, dtype=FLOAT).square()], -1)
    h, d = torch.randn(6, 2, generator=rng, dtype=FLOAT), 3 * torch.randn(50, 2, generator=rng, dtype=FLOAT)

    def draw(betas, h, d):
        return ListedLadder(betas, h).draw(d, torch.Generator().manual_seed(5))

    # two problems alike take the numbers that they take with temperatures in common
    same = draw(betas[:, :1].expand(6, 2), h, d)
    for own, common in zip(same, draw(betas[:, 0], h, d), strict=True):
        torch.testing.assert_close(own, common)
    # each with its own: the probabilities of the ends are those of each alone
    both = draw(betas, h, d)
    for i in range(2):
        alone = draw(betas[:, i], h[:, i], d[:, i])
        torch.testing.assert_close(both.log_p1[:, i], alone.log_p1)
        assert torch.isin(both.beta[:, i], betas[:, i]).all()
    assert not torch.isin(both.beta[:, 1], betas[:, 0]).all()
