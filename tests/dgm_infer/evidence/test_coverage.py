"""What a run has not seen is looked for, named, and part of its error."""

import math
import warnings

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence import checks as searches
from dgm_infer.evidence.checks import Components, Unseen, widened
from dgm_infer.evidence.estimate import base_with
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.references.modes import spread_out
from tests.known_evidence import MixtureTarget, known_bimodal, known_gaussian
from tests.oracles import FLOAT
from tests.quick import cases

BIMODAL = known_bimodal()
# at one of its modes, and blind to the other
BLIND = dgm.Gaussian(torch.tensor([1.5, 1.0], dtype=FLOAT), 0.5)
SIMULATED = dgm.SimulatedTempering(draws=100, warmup=20, pilot_temperatures=30)
METHODS = {
    "simulated": SIMULATED,
    "Gibbs": dgm.GibbsTempering(draws=100, warmup=20, pilot_temperatures=30),
    "AIS": dgm.AIS(100, pilot_temperatures=30),
}


def said(target, base, method, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimate = dgm.log_evidence(target, base, method, chains=8, seed=1, progress=False, **options)
    return estimate, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("method", cases(METHODS, quick=("AIS",)))
def test_a_mode_that_no_chain_has_seen_is_named_and_widens_the_interval(method):
    estimate, lines = said(BIMODAL.target, BLIND, method)
    assert any("modes that no draw has visited" in line for line in lines)
    assert estimate.diagnostics["unseen_modes"] == 1
    # 0.35 of the mass is missing
    assert abs(estimate.diagnostics["unseen_shift"] + math.log(0.65)) < 0.1
    low, high = estimate.interval()
    assert low < BIMODAL.log_z < high
    # control: without the check the estimate is as wrong, and sure of itself
    unchecked, lines = said(BIMODAL.target, BLIND, method, coverage=False)
    assert lines == []
    assert torch.equal(unchecked.log_z, estimate.log_z)
    assert (BIMODAL.log_z - unchecked.log_z).abs() > 5 * unchecked.std_error


@pytest.mark.parametrize("method", cases(METHODS, quick=("AIS",)))
def test_nothing_is_said_where_all_modes_are_seen(method):
    known = known_gaussian(6, (3,))
    estimate, lines = said(known.target, known.base, method)
    assert lines == []
    assert (estimate.diagnostics["unseen_modes"] == 0).all()
    if method is not METHODS["AIS"]:
        assert said(BIMODAL.target, BIMODAL.base, method)[1] == []


def test_nothing_is_said_of_one_mode_that_is_far_from_normal():
    """A curved ridge, and the tails of a Student's t, whose draws are not where a normal at the mode has them."""
    curved = dgm.Target(
        lambda x: 0.5 * (x[..., 0] / 2).square() + 2 * (x[..., 1] - 0.5 * x[..., 0].square()).square(), 2
    )
    heavy = dgm.Target(lambda x: 12.5 * (x.square().sum(-1) / 5).log1p(), 20)
    for target in (curved, heavy):
        base = dgm.Gaussian(torch.zeros(target.dim, dtype=FLOAT), 2.0)
        assert [line for line in said(target, base, SIMULATED)[1] if "visited" in line] == []


class TwoMeans(dgm.Target):
    """``y_i ~ 1/2 N(m_1, 0.5^2) + 1/2 N(m_2, 0.5^2)``, ``m ~ N(0, 3^2)``: labels of two means switch."""

    def __init__(self):
        super().__init__(None, 2)
        self.y = torch.tensor([-2.0, -1.8, 2.2, 1.9, 2.1], dtype=FLOAT)

    def energy(self, x):
        apart = (self.y.to(x).unsqueeze(-1) - x.unsqueeze(-2)) / 0.5
        parts = -0.5 * apart.square() - math.log(0.5 * math.sqrt(2 * math.pi)) - math.log(2)
        return 0.5 * (x / 3).square().sum(-1) + math.log(2 * math.pi * 9) - parts.logsumexp(-1).sum(-1)


def test_descents_that_end_beside_each_other_are_of_one_mode():
    # a ripple of a thousandth of a nat, as the kinks of a ReLU network make: two minima a twelfth of a sd apart
    def energy(x):
        return 0.5 * x.square().sum(-1) + 6e-4 * (80 * x[..., 0]).cos()

    base = dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 1.0)

    def found(energy):
        path = AnnealedPath(dgm.Target(energy, 2), base)
        ends = searches._minima(path, 16, 100, torch.Generator().manual_seed(0))[1]
        return int(ends.isfinite().sum()), int(searches.count_minima(path, torch.Generator().manual_seed(0)))

    ends, modes = found(energy)
    assert ends == 2
    assert modes == 1
    # control: modes proper are counted
    assert found(BIMODAL.target.energy)[1] == 2


@pytest.mark.parametrize("method", cases(METHODS | {"SMC": dgm.SMC(16)}, quick=("simulated", "SMC")))
def test_a_mode_that_is_far_from_a_narrow_base_is_looked_for_all_the_same(method):
    target = TwoMeans()
    axis = torch.linspace(-9, 9, 601, dtype=FLOAT)
    log_z = (-target.energy(torch.cartesian_prod(axis, axis))).logsumexp(0) + 2 * math.log(axis[1] - axis[0])
    assert log_z == pytest.approx(-8.9587, abs=1e-4)
    base = dgm.Gaussian.laplace(target)
    found, lines = said(target, base, method)
    assert any("modes that no draw has visited" in line for line in lines)
    low, high = found.interval()
    assert low < log_z < high
    # the default goes where both are
    found, lines = said(target, base, None)
    assert lines == []
    assert (found.log_z - log_z).abs() < 4 * found.std_error


def test_control_searches_from_the_base_alone_miss_it_in_some_runs(monkeypatch):
    target = TwoMeans()
    base = dgm.Gaussian.laplace(target)

    def named():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dgm.diagnosis.DiagnosisWarning)
            for seed in range(6):
                run = dgm.log_evidence(target, base, dgm.SMC(8, n_steps=2), chains=8, seed=seed, progress=False)
                yield int(run.diagnostics["unseen_modes"])

    assert list(named()) == [1] * 6
    monkeypatch.setattr(searches, "_starts", lambda path, n, rng: spread_out(path.normal(n, rng)))
    assert 0 in named()


def nested():
    """A first-order transition: half of the mass in a hundred-millionth of the volume, in 10 dimensions."""
    weights, means = torch.tensor([0.5, 0.5], dtype=FLOAT), torch.zeros(2, 10, dtype=FLOAT)
    covariances = torch.stack([torch.eye(10, dtype=FLOAT), 0.15**2 * torch.eye(10, dtype=FLOAT)])
    return MixtureTarget(weights, means, covariances, 0.0), dgm.Gaussian(torch.zeros(10, dtype=FLOAT), 1.1)


def test_the_limit_of_tempering_a_narrow_deep_mode_inside_a_wide_one_is_named():
    target, base = nested()
    for method in (SIMULATED, dgm.ParallelTempering(draws=32, temperatures=6, broad=False, pilot_temperatures=20)):
        estimate, lines = said(target, base, method)
        assert any("modes that no draw has visited" in line for line in lines)
        assert abs(estimate.log_z) > 0.4
        low, high = estimate.interval()
        assert low < 0 < high


def test_a_narrow_deep_mode_that_a_search_finds_is_no_limit_once_the_base_has_it():
    target, base = nested()
    estimate, lines = said(target, base, SIMULATED, refine=True)
    assert lines == []
    assert estimate.diagnostics["refinements"] == 1
    assert estimate.std_error < 0.1
    assert abs(estimate.log_z) < 4 * estimate.std_error


@pytest.mark.parametrize("method", cases(METHODS, quick=("simulated",)))
def test_modes_that_were_missed_are_added_to_the_base(method):
    estimate, lines = said(BIMODAL.target, BLIND, method, refine=True)
    assert lines == []
    assert estimate.diagnostics["refinements"] == 1
    assert estimate.diagnostics["added_modes"] == 1
    assert estimate.diagnostics["unseen_modes"] == 0
    assert (estimate.log_z - BIMODAL.log_z).abs() < 4 * estimate.std_error
    # control: the base as it was is wrong by more
    once, lines = said(BIMODAL.target, BLIND, method)
    assert estimate.std_error < once.std_error
    assert any("no draw has visited" in line for line in lines)
    assert (once.log_z - BIMODAL.log_z).abs() > 0.35
    # both runs count, the first as tuning
    assert estimate.diagnostics["gradient_evaluations"] > 1.9 * once.diagnostics["gradient_evaluations"]
    assert estimate.diagnostics["pilot_evaluations"] > once.diagnostics["gradient_evaluations"]


def test_a_base_without_unseen_modes_is_left_as_it_is():
    method = METHODS["Gibbs"]
    estimate, lines = said(BIMODAL.target, BIMODAL.base, method, refine=True)
    assert lines == []
    assert estimate.diagnostics["refinements"] == 0
    assert torch.equal(estimate.log_z, said(BIMODAL.target, BIMODAL.base, method)[0].log_z)
    for wrong in ({"coverage": False}, {"method": dgm.Elbo(10)}):
        with pytest.raises(dgm.errors.ArgumentError, match="refine=True"):
            said(BIMODAL.target, BIMODAL.base, **{"method": method, "refine": True, **wrong})


def test_a_base_with_modes_covers_each_problem_by_its_own():
    base = dgm.Gaussian(torch.zeros(2, 3, dtype=FLOAT), 2.0)
    means = torch.stack([torch.full((2, 3), 4.0, dtype=FLOAT), torch.full((2, 3), -8.0, dtype=FLOAT)])
    covariances = 1e-4 * torch.eye(3, dtype=FLOAT).repeat(2, 2, 1, 1)
    covariances[1, 1] = math.nan
    masses = torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]], dtype=FLOAT)
    new = base_with(base, Components(means, covariances, masses), torch.zeros(2, dtype=FLOAT))
    torch.testing.assert_close(new.mean[0], torch.full((3,), 2.0, dtype=FLOAT))
    assert (new.covariance_diagonal[0] > 2.0).all()
    x = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    torch.testing.assert_close(new.energy(x)[:, 1], base.energy(x)[:, 1])
    assert (new.energy(x) <= base.energy(x) + math.log(2) + 1e-12).all()
    # a mode of a base that has some already joins them
    again = base_with(new, Components(-means, covariances, masses), torch.zeros(2, dtype=FLOAT))
    assert (again.log_weights.exp() > 0).sum(0).tolist() == [3, 1]
    torch.testing.assert_close(new.mean[1], base.mean[1])
    torch.testing.assert_close(new.covariance[1], base.covariance[1])
    torch.testing.assert_close(new.log_zeta, torch.tensor([math.log(2.0), 0.0], dtype=FLOAT))


def test_a_shift_within_the_error_is_not_counted():
    error = torch.tensor([0.1, 0.1, math.nan], dtype=FLOAT)
    unseen = Unseen(torch.tensor([1, 2, 1]), torch.tensor([0.05, 0.3, 0.3], dtype=FLOAT), torch.tensor([2, 3, 2]))
    wider, kept = widened(error, unseen)
    assert wider[0] == 0.1
    torch.testing.assert_close(wider[1], torch.tensor(0.1**0.5, dtype=FLOAT))
    assert kept.modes.tolist() == [0, 2, 0]


def test_the_searches_take_a_small_share_of_the_gradients():
    known = known_gaussian(3)
    calls = []

    class Counted(dgm.Target):
        def energy_and_gradient(self, x):
            calls.append(x.shape[:-1].numel())
            return known.target.energy_and_gradient(x)

    target = Counted(known.target.energy, 3)
    for method in (SIMULATED, dgm.AIS(20, pilot_temperatures=10)):
        rows = []
        for coverage in (False, True):
            calls.clear()
            said(target, known.base, method, coverage=coverage)
            rows.append(sum(calls))
        assert rows[1] <= 1.1 * rows[0]
    assert rows[0] < 8 * 300


class OnceOnly(torch.autograd.Function):
    """An energy whose gradient cannot be differentiated, as that of attention on a CPU."""

    @staticmethod
    def forward(ctx, x, known):
        energy, ctx.gradient = known.target.energy_and_gradient(x)
        return energy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient.unsqueeze(-1) * ctx.gradient, None


def test_modes_of_an_energy_that_is_not_twice_differentiable_are_looked_for():
    estimate, lines = said(dgm.Target(lambda x: OnceOnly.apply(x, BIMODAL), 2), BLIND, METHODS["AIS"])
    assert any("modes that no draw has visited" in line for line in lines)
    assert abs(estimate.diagnostics["unseen_shift"] + math.log(0.65)) < 0.1
    known = known_gaussian(2)
    assert said(dgm.Target(lambda x: OnceOnly.apply(x, known), 2), known.base, METHODS["AIS"])[1] == []


def test_modes_are_looked_for_where_an_energy_has_more_bits_than_its_base():
    """Data of 64 bits make such energies; no search was made, and no word said."""
    narrow = dgm.Gaussian(BLIND.mean.float(), 0.5)
    target = dgm.Target(lambda x: BIMODAL.target.energy(x.double()), 2)
    assert any("modes that no draw has visited" in line for line in said(target, narrow, METHODS["AIS"])[1])
    estimate = dgm.log_evidence(target, narrow, chains=8, seed=1, progress=False)
    assert abs(estimate.log_z - BIMODAL.log_z) < 5 * estimate.std_error


def test_searches_that_end_in_no_minimum_find_no_mode():
    """An energy without one, whose mass is finite all the same: no Hessians of no points are asked for."""

    def energy(x):
        assert x.numel(), "no energies of no points"
        return (x.abs() + 0.5 * x.abs().log()).sum(-1)

    base = dgm.Gaussian(torch.zeros(8, dtype=FLOAT), 1.0)
    estimate, lines = said(dgm.Target(energy, 8), base, SIMULATED)
    assert estimate.diagnostics["minima"] == 0
    assert [line for line in lines if "visited" in line] == []
