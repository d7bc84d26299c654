"""Parallel tempering: barrier, swaps, trips, and evidence of targets with modes that a base misses."""

import math
import warnings

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.path import AnnealedPath, Move
from dgm_infer.evidence.plan import equal_distances, interpolated
from dgm_infer.evidence.tempering import replicas as replicas_module
from dgm_infer.evidence.tempering.legs import Legs, broad_reference
from dgm_infer.evidence.tempering.replicas import Replicas, Round, SteppingStones, swap_log_ratios, swaps
from dgm_infer.references.modes import search
from evaluation.problems.boltzmann import BoltzmannRelaxation, random_system
from tests.known_evidence import known_bimodal, known_gaussian
from tests.oracles import FLOAT

DIM, SD = 5, 0.1


def narrow() -> dgm.Target:
    """``N(0, SD^2 I)``, normalised."""
    constant = DIM * math.log(SD) + 0.5 * DIM * math.log(2 * math.pi)
    return dgm.Target(lambda x: 0.5 * (x / SD).square().sum(-1) + constant, DIM)


def exact_barrier() -> float:
    """Of the path from a standard normal to :func:`narrow` (math 6.11)."""
    shape = DIM / 2
    difference = 4 * shape * math.exp(math.lgamma(shape + 0.5) - math.lgamma(shape + 1)) / math.sqrt(math.pi)
    return 0.5 * math.log(1 / SD) * difference


class ExactMoves(Legs):
    """Legs to :func:`narrow` whose every move is an independent draw."""

    def move(self, point, beta, step_size, n_steps, rng):
        noise = torch.randn(point.v.shape, generator=rng, dtype=FLOAT)
        v = noise / (1 - beta + beta / SD**2).sqrt().unsqueeze(-1)
        return Move(self.at(v), torch.ones_like(point.energy))


def travelled(sweeps=300, temperatures=12, chains=32):
    """A round of sweeps with exact moves after the schedule has been equalised."""
    rng = torch.Generator().manual_seed(1)
    legs = ExactMoves(AnnealedPath(narrow(), dgm.Gaussian(torch.zeros(DIM, dtype=FLOAT), 1.0)), None)
    betas = torch.linspace(0, 1, temperatures + 1, dtype=FLOAT).pow(4).unsqueeze(-1)
    start = torch.randn((temperatures + 1) * chains, DIM, generator=rng, dtype=FLOAT)
    replicas = Replicas(legs, betas, torch.ones_like(betas), torch.zeros_like(betas[1:]), start, 1, rng)
    for n in (40, 80, 160):
        tuned = Round(replicas)
        for _ in range(n):
            tuned.add(replicas.sweep(None))
        replicas.betas = equal_distances(len(tuned.rejections), replicas.betas, tuned.rejections)
    final = Round(replicas, keep=1, thin=sweeps)
    for _ in range(sweeps):
        final.add(replicas.sweep(None))
    return final


def round_trips(final):
    """Per chain and sweep, and ``sum r / (1 - r)`` over pairs of neighbours."""
    r = final.rejections
    rate = final.outcome(torch.ones(1, dtype=FLOAT), 0, False).diagnostics["round_trip_rate"]
    return rate.item(), (r / (1 - r)).sum().item()


@pytest.mark.slow
def test_the_barrier_and_the_rate_of_round_trips_are_those_of_the_theory(monkeypatch):
    final = travelled()
    r = final.rejections
    assert abs(r.sum().item() / exact_barrier() - 1) < 0.05
    assert r.max() < 1.3 * r.mean()
    twice, _ = round_trips(final)
    # the theory's scheme: pairs of one parity a sweep, in turn
    calls = iter(range(10**6))

    def alternating(probabilities, parity, rng):
        turn = next(calls) // 2 % 2
        return swaps(probabilities if parity == turn else torch.zeros_like(probabilities), parity, rng)

    monkeypatch.setattr(replicas_module, "swaps", alternating)
    rate, odds = round_trips(travelled())
    assert abs(rate * (2 + 2 * odds) - 1) < 0.1
    # both parities a sweep, for as many gradients: less than twice, as both see the same energies
    assert 1.5 * rate < twice < 2 * rate
    # control: pairs of a random parity let replicas turn back
    coin = torch.Generator().manual_seed(2)

    def reversible(probabilities, parity, rng):
        turn = int(torch.randint(2, (), generator=coin))
        return swaps(probabilities if parity == turn else torch.zeros_like(probabilities), parity, rng)

    monkeypatch.setattr(replicas_module, "swaps", reversible)
    slower, _ = round_trips(travelled(sweeps=100))
    assert slower < 0.8 * rate


def test_swaps_are_of_neighbours_of_one_parity():
    rng = torch.Generator().manual_seed(0)
    always = torch.ones(5, 3, dtype=FLOAT)
    assert swaps(always, 0, rng)[:, 0].tolist() == [1, 0, 3, 2, 5, 4]
    assert swaps(always, 1, rng)[:, 0].tolist() == [0, 2, 1, 4, 3, 5]
    assert swaps(0 * always, 0, rng)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    # states of zero density go down, and never up
    d = torch.tensor([[math.inf, 0.0, math.inf], [0.0, math.inf, math.inf]], dtype=FLOAT)
    ratios = swap_log_ratios(torch.tensor([0.0, 1.0], dtype=FLOAT), d)
    assert ratios.tolist() == [[-math.inf, math.inf, -math.inf]]


def test_a_replica_that_is_never_rejected_goes_two_temperatures_a_sweep():
    rng = torch.Generator().manual_seed(1)
    legs = Legs(AnnealedPath(narrow(), dgm.Gaussian(torch.zeros(DIM, dtype=FLOAT), 1.0)), None)
    betas = torch.zeros(5, 1, dtype=FLOAT)
    start = torch.randn(5, DIM, generator=rng, dtype=FLOAT)
    replicas = Replicas(legs, betas, torch.full_like(betas, 1e-9), torch.zeros_like(betas[1:]), start, 1, rng)
    replicas.sweep(None)
    # at equal temperatures every swap is accepted, and the reference is drawn anew
    torch.testing.assert_close(replicas.point.v[1:, 0, 0], start[[3, 0, 4, 2]], atol=1e-6, rtol=0)
    assert (replicas.point.v[0, 0, 0] - start[1]).abs().max() > 0.1


def test_temperatures_go_to_equal_distances_along_the_barrier():
    betas = torch.tensor([[0.0, 0.0], [0.5, 0.1], [1.0, 1.0]], dtype=FLOAT)
    new = equal_distances(2, betas, torch.tensor([[0.3, 0.2], [0.3, 0.2]], dtype=FLOAT))
    torch.testing.assert_close(new, betas)
    skewed = equal_distances(2, betas, torch.tensor([[0.9, 0.0], [0.1, 0.0]], dtype=FLOAT))
    assert 0.25 < skewed[1, 0] < 0.3
    at = torch.tensor([[0.25, 0.05]], dtype=FLOAT)
    torch.testing.assert_close(interpolated(at, betas, 2 * betas), 2 * at)


def test_stepping_stones_agree_from_below_above_and_between():
    """Normals of variance 1 and 1/4: ``log Z`` is ``-log 2`` per dimension."""
    rng = torch.Generator().manual_seed(3)
    betas = torch.linspace(0, 1, 5, dtype=FLOAT).reshape(-1, 1)
    stones = SteppingStones(betas, torch.zeros(4, 1, dtype=FLOAT), chains=16)
    for _ in range(200):
        x = torch.randn(5, 16, 1, generator=rng, dtype=FLOAT) / (1 + 3 * betas.unsqueeze(1)).sqrt()
        stones.add(1.5 * x.square())
    estimates = stones.estimates(torch.ones(1, dtype=FLOAT))
    for name, estimate in estimates.items():
        assert abs(estimate.log_z + math.log(2)) < 5 * estimate.std_error, name
        assert estimate.std_error < 0.03
    torch.testing.assert_close(estimates["bennett"].log_z, stones.bennett.sum())


BIMODAL = known_bimodal()
# at one of its modes, and blind to the other
BAD = dgm.Gaussian(torch.tensor([1.5, 1.0], dtype=FLOAT), 0.5)
SHORT = dgm.ParallelTempering(draws=64, temperatures=8, pilot_temperatures=20)


def error(method, base=BAD, known=BIMODAL, **options):
    estimate = dgm.log_evidence(known.target, base, method, seed=4, progress=False, **options)
    return estimate, ((estimate.log_z - known.log_z) / estimate.std_error).abs().max().item()


def test_a_mode_that_the_base_misses_comes_from_the_broad_reference():
    found, z = error(SHORT)
    assert z < 4
    assert found.std_error < 0.1
    assert found.diagnostics["restarts"] > 10
    left = found.draws[..., 0] < -0.5
    assert abs(left.double().mean() - 0.35) < 0.1
    # control: without it the estimate is wrong, and sure of itself
    alone, z = error(SHORT.replace(broad=False), coverage=False)
    assert z > 10
    assert alone.std_error < 0.05


@pytest.mark.slow
def test_control_a_wrong_swap_ratio_is_noticed(monkeypatch):
    def wrong(betas, differences):
        return swap_log_ratios(0.5 * betas, differences)

    monkeypatch.setattr(replicas_module, "swap_log_ratios", wrong)
    # the method's own error: what is looked for around its draws has another log Z
    assert error(SHORT.replace(draws=128), coverage=False)[1] > 5


def test_the_base_is_fitted_to_what_the_broad_reference_finds():
    """One that is blind to a mode is cut off, unless tuning fits it to the draws."""
    fitted, z = error(SHORT)
    assert z < 4
    assert fitted.diagnostics["leg_shares"][0] > 0.2
    # control
    fixed, z = error(SHORT.replace(adapt_base=False))
    assert z < 4
    assert fixed.diagnostics["leg_shares"][0] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wide", [True, False])
def test_a_base_that_is_cut_off_but_knows_more_is_heard(wide):
    """A narrow normal, in a wide one of as much mass or not: the broad reference covers the mode alone."""
    dim, sd = 6, 0.05

    def energy(x):
        square = x.square().sum(-1)
        narrow = -0.5 * square / sd**2 - dim * (math.log(sd) + 0.5 * math.log(2 * math.pi))
        around = -0.5 * square - 0.5 * dim * math.log(2 * math.pi)
        return -torch.logaddexp(narrow, around) + math.log(2) if wide else -narrow

    base = dgm.Gaussian(torch.zeros(dim, dtype=FLOAT), 2.0)
    run = dgm.log_evidence(dgm.Target(energy, dim), base, dgm.ParallelTempering(), chains=8, seed=1, progress=False)
    assert run.diagnostics["leg_shares"][0] == 0
    heard = [finding for finding in run.diagnose() if "replicas from the base" in finding.what]
    assert [finding.severity for finding in heard] == ["misleading"] * wide
    assert run.std_error < 0.05 + wide
    assert abs(run.log_z) < (4 * run.std_error if wide else 0.05)


def test_a_base_is_fitted_to_many_draws_and_stays_where_there_are_few():
    path = AnnealedPath(
        dgm.Target(lambda x: 0.5 * x.square().sum(-1), 20),
        dgm.Gaussian(3 * torch.ones(20, dtype=FLOAT), cholesky=3 * torch.eye(20, dtype=FLOAT)),
    )
    rng = torch.Generator().manual_seed(0)
    for draws, share in ((400, 0.9), (2, 0.1)):
        legs = Legs(path, dgm.Gaussian(torch.zeros(20, dtype=FLOAT), 5.0))
        assert legs.can_refit
        legs.refit(torch.randn(16, draws, 20, generator=rng, dtype=FLOAT))
        # the covariance is 1 of the draws and 9 of the base
        kept = (legs.base.covariance_diagonal[0].mean() - 1) / 8
        assert kept < 1 - share if draws > 2 else kept > share
        torch.testing.assert_close(legs.base.mean[1], torch.zeros(20, dtype=FLOAT))
        torch.testing.assert_close(legs.base.covariance_diagonal[1], torch.full((20,), 25.0, dtype=FLOAT))


def test_many_problems_any_kind_of_base_and_given_references():
    known = known_gaussian(3, (2, 2))
    broad = dgm.Gaussian(torch.zeros(3, dtype=FLOAT), 3.0)
    full = dgm.Gaussian(known.base.mean, cholesky=torch.linalg.cholesky(known.base.covariance))
    low = dgm.Gaussian(known.base.mean, 1.0, factor=0.3 * torch.ones(2, 2, 3, 1, dtype=FLOAT))
    method = dgm.ParallelTempering(draws=16, temperatures=3, broad=broad, pilot_temperatures=10)
    for base in (known.base, full, low):
        estimate, z = error(method, base, known, chains=8)
        assert z < 5
        assert estimate.diagnostics["barrier"].shape == (2, 2, 2)
        assert estimate.draws.shape == (8, 32, 2, 2, 3)
    with pytest.raises(dgm.errors.ArgumentError, match="broad of shape"):
        error(method.replace(broad=dgm.Gaussian(torch.zeros(2), 1.0)), full, known)
    with pytest.raises(dgm.errors.ArgumentError, match="must be a Gaussian"):
        method.replace(broad=3.0)


def test_a_base_that_reaches_beyond_the_support_is_no_obstacle():
    def energy(x):
        return torch.where(x.squeeze(-1) > 0, 0.5 * x.square().sum(-1), math.inf)

    base = dgm.Gaussian(torch.zeros(1, dtype=FLOAT), 1.5)
    method = SHORT.replace(broad=False)
    estimate = dgm.log_evidence(dgm.Target(energy, 1), base, method, seed=1, progress=False)
    assert abs(estimate.log_z - 0.5 * math.log(math.pi / 2)) < 5 * estimate.std_error


def test_gradients_are_counted_for_all_replicas():
    known = known_gaussian(2)
    method = dgm.ParallelTempering(draws=8, temperatures=4, n_steps=2, broad=False, pilot_temperatures=10)
    estimate = dgm.log_evidence(known.target, known.base, method, chains=4, progress=False)
    # a sweep moves four replicas by two steps, and draws one anew
    assert estimate.diagnostics["gradient_evaluations"] - estimate.diagnostics["pilot_evaluations"] == 8 * (4 * 2 + 1)


class Hierarchy(dgm.Target):
    """Two normalised problems: a hierarchy whose density is unbounded, and a standard normal.

    ``v ~ Logistic(0, S)``, ``x_i ~ N(0, exp(v)^2)``, i = 1, 2, 3: at x = 0 the density grows without bound as v falls.
    """

    S = 0.75

    def __init__(self):
        super().__init__(None, 4, (2,))

    def energy(self, x):
        v, rest = x[..., 0], x[..., 1:]
        scale = v / self.S + 2 * torch.nn.functional.softplus(-v / self.S) + math.log(self.S)
        unbounded = scale + 0.5 * (-2 * v).exp() * rest.square().sum(-1) + 3 * v + 1.5 * math.log(2 * math.pi)
        normal = 0.5 * x.square().sum(-1) + 2 * math.log(2 * math.pi)
        return torch.stack([unbounded[..., 0], normal[..., 1]], -1)


def test_a_problem_without_a_minimum_has_the_wider_base_as_its_broad_reference():
    target, base = Hierarchy(), dgm.Gaussian(torch.zeros(2, 4, dtype=FLOAT), 0.5)
    rng = torch.Generator().manual_seed(0)
    broad = broad_reference(search(target, base, 64, 200, rng, required=False), base)
    torch.testing.assert_close(broad.covariance[0], torch.eye(4, dtype=FLOAT))
    torch.testing.assert_close(broad.covariance[1], torch.eye(4, dtype=FLOAT), atol=1e-3, rtol=0)
    assert broad.mean.abs().max() < 1e-2
    # control: the minima where its numbers end are of no scale
    assert not (dgm.Gaussian.covering(search(target, base, 64, 200, rng)).covariance[0].diagonal() < 1e3).all()


def test_the_evidence_of_a_problem_without_a_minimum():
    target, base = Hierarchy(), dgm.Gaussian(torch.zeros(2, 4, dtype=FLOAT), 0.5)
    estimate = dgm.log_evidence(target, base, dgm.ParallelTempering(draws=128), seed=1, progress=False)
    assert (estimate.log_z.abs() < 0.2).all()
    assert estimate.log_z[0].abs() < 5 * estimate.std_error[0]
    # control: both references as narrow as the spike
    spike = dgm.Gaussian(torch.tensor([-3.0, 0.0, 0.0, 0.0], dtype=FLOAT).expand(2, -1), 0.05)
    method = dgm.ParallelTempering(draws=32, n_steps=1, broad=spike, adapt_base=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        narrow = dgm.log_evidence(target, spike, method, seed=1, coverage=False, progress=False)
    assert narrow.log_z[0].abs() > 0.5


class Mixtures(dgm.Target):
    """Mixtures of unit normals, one per problem, of log Z 0: weights ``[K, B]``, means ``[K, B, D]``."""

    def __init__(self, weights, means):
        super().__init__(None, means.shape[-1], means.shape[1:2])
        self.means = means
        self.constants = weights.log() - 0.5 * means.square().sum(-1) - 0.5 * self.dim * math.log(2 * math.pi)

    def energy(self, x):
        return 0.5 * x.square().sum(-1) - self._log_parts(x).logsumexp(-1)

    @torch.no_grad()
    def energy_and_gradient(self, x):
        # a formula, for a fraction of the time of automatic differentiation
        logs = self._log_parts(x)
        pull = torch.einsum("...bk,kbd->...bd", logs.softmax(-1), self.means)
        return 0.5 * x.square().sum(-1) - logs.logsumexp(-1), x - pull

    def _log_parts(self, x):
        """Logs of the parts, less ``-|x|^2/2``, ``[..., B, K]``."""
        return self.constants.mT + torch.einsum("...bd,kbd->...bk", x, self.means)


def test_mixtures_are_normalised_and_have_their_gradient():
    weights, means = torch.tensor([[0.3], [0.7]], dtype=FLOAT), torch.tensor([[[-2.0]], [[1.0]]], dtype=FLOAT)
    target, x = Mixtures(weights, means), torch.linspace(-12, 12, 4001, dtype=FLOAT).reshape(-1, 1, 1)
    assert (-target.energy(x)).exp().sum().mul(24 / 4000).item() == pytest.approx(1)
    energy, gradient = dgm.Target.energy_and_gradient(target, x)
    torch.testing.assert_close(target.energy_and_gradient(x), (energy, gradient))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "seeds"), [(2, (1, 2)), (50, (1,))])
def test_modes_of_random_mixtures_that_the_base_misses(dim, seeds):
    """Twenty mixtures of four modes of which the base is one, some ten standard deviations apart."""
    rng = torch.Generator().manual_seed(dim)
    means = 4 * torch.randn(4, 20, dim, generator=rng, dtype=FLOAT) / (dim / 2) ** 0.25
    weights = torch.rand(4, 20, generator=rng, dtype=FLOAT) + 0.2
    target, base = Mixtures(weights / weights.sum(0), means), dgm.Gaussian(means[0], 1.0)
    options = {"chains": 16, "keep_draws": False, "coverage": False, "progress": False}
    covered = 0
    for seed in seeds:
        found = dgm.log_evidence(target, base, dgm.ParallelTempering(), seed=seed, **options)
        assert found.log_z.square().mean().sqrt() < 0.1
        low, high = found.interval()
        covered += ((low < 0) & (high > 0)).sum()
    # fewer of 20 or 40 have a probability of 0.003 if 0.95 of the intervals cover
    assert covered >= {1: 16, 2: 34}[len(seeds)]
    # control: without the broad reference
    alone = dgm.log_evidence(target, base, dgm.ParallelTempering(broad=False, draws=32), seed=1, **options)
    assert alone.log_z.square().mean().sqrt() > 0.5


@pytest.mark.slow
def test_a_frustrated_machine_from_generic_tools():
    machine = BoltzmannRelaxation(*random_system(12, 1))
    truth = machine.exact()
    base = dgm.Gaussian.laplace(machine, start=dgm.modes(machine).positions[0])
    estimate = dgm.log_evidence(machine, base, dgm.ParallelTempering(draws=512), chains=16, seed=1, progress=False)
    assert abs(estimate.log_z - truth.log_z) < 0.15
    assert abs(estimate.log_z - truth.log_z) < 4 * estimate.std_error
    options = {"chains": 16, "seed": 1, "coverage": False, "progress": False}
    alone = dgm.log_evidence(machine, base, dgm.ParallelTempering(broad=False), **options)
    assert abs(alone.log_z - truth.log_z) > 4 * alone.std_error
