"""The annealed path in whitened coordinates, its moves, schedules and pilots."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.evidence.plan import StepSizes, equal_distances, even_schedule, sigmoid
from dgm_infer.progress import Progress
from tests.known_evidence import known_bimodal, known_gaussian, known_linear_gaussian
from tests.oracles import FLOAT, compare
from tests.quick import some


def full_base(known):
    """A base whose whitening mixes the coordinates."""
    dim = known.target.dim
    mixing = torch.randn(dim, dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT).tril(-1) * 0.2
    return dgm.Gaussian(known.base.mean, cholesky=mixing + torch.diag_embed(known.base.covariance_diagonal.sqrt()))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_annealed_energy_and_gradient_are_those_of_the_mixture_of_energies(beta):
    known = known_linear_gaussian()
    base = full_base(known)
    path = AnnealedPath(known.target, base)
    v = path.normal(4, torch.Generator().manual_seed(0)).requires_grad_()
    x = base.unwhiten(v)
    energy = (1 - beta) * base.energy(x) + beta * known.target.energy(x)
    (gradient,) = torch.autograd.grad(energy.sum(), v)
    point = path.at(v.detach())
    torch.testing.assert_close(torch.lerp(point.v, point.gradient, torch.tensor(beta, dtype=FLOAT)), gradient)
    own = (1 - beta) * (point.square + path.base_constant) + beta * point.energy
    torch.testing.assert_close(own, energy.detach())
    torch.testing.assert_close(path.difference(point), (known.target.energy(x) - base.energy(x)).detach())
    torch.testing.assert_close(path.differences(v.detach()), path.difference(point))


@pytest.mark.slow
@pytest.mark.parametrize("step", some((0.3, 0.9), quick=(0.3,)))
def test_moves_leave_every_density_of_the_path_as_it_is(step):
    dim = 3
    known = known_gaussian(dim)
    base = full_base(known)
    path = AnnealedPath(known.target, base)
    mean, precision = known.target.parts[1][0], torch.linalg.inv(known.target.parts[2][0])
    rng = torch.Generator().manual_seed(2)
    betas = torch.tensor([0.1, 0.5, 0.9], dtype=FLOAT)
    # between Gaussians all densities are Gaussian
    mixed = betas[:, None, None] * precision + (1 - betas)[:, None, None] * torch.linalg.inv(base.covariance)
    covariance = torch.linalg.inv(mixed)
    prior = torch.linalg.solve(base.covariance, base.mean)
    target = (covariance @ (betas[:, None] * (precision @ mean) + (1 - betas)[:, None] * prior).unsqueeze(-1)).squeeze(
        -1
    )
    noise = torch.randn(20000, 3, dim, generator=rng, dtype=FLOAT)
    x = target + (torch.linalg.cholesky(covariance) @ noise.unsqueeze(-1)).squeeze(-1)
    factor = torch.linalg.cholesky(base.covariance)
    replicated = dgm.Gaussian(base.mean.expand(3, dim), cholesky=factor.expand(3, dim, dim))
    path = AnnealedPath(dgm.Target(known.target.energy, dim, (3,)), replicated)
    point, acceptance = path.at(replicated.whiten(x)), 0.0
    for _ in range(3):
        point, accepted = path.move(point, betas, torch.full((3,), step, dtype=FLOAT), 4, rng)
        acceptance += accepted.mean() / 3
    assert 0.5 < acceptance < 0.9999
    moved = replicated.unwhiten(point.v)
    assert (moved - x).abs().mean() > 0.1
    d = moved - target
    i, j = torch.triu_indices(dim, dim)
    values = torch.cat([d, d[..., i] * d[..., j]], -1).flatten(1).unsqueeze(1)
    expected = torch.cat([torch.zeros_like(target), covariance[:, i, j]], -1).flatten()
    z = (values.mean((0, 1)) - expected) / (values.std((0, 1)) / 20000**0.5)
    assert z.abs().max() <= 5
    # a temperature that is off by a fifth is noticed
    wrong = path.at(replicated.whiten(x))
    for _ in range(20):
        wrong = path.move(wrong, 0.8 * betas, torch.full((3,), step, dtype=FLOAT), 4, rng).point
    d = replicated.unwhiten(wrong.v) - target
    values = torch.cat([d, d[..., i] * d[..., j]], -1).flatten(1).unsqueeze(1)
    assert ((values.mean((0, 1)) - expected) / (values.std((0, 1)) / 20000**0.5)).abs().max() > 5


def test_the_energy_error_goes_with_the_square_of_the_step():
    known = known_bimodal()
    path = AnnealedPath(known.target, known.base)
    errors = []
    for step, n in ((0.02, 8), (0.01, 16)):
        rng = torch.Generator().manual_seed(3)
        point = path.at(path.normal(20000, rng))
        move = path.move(point, torch.tensor(0.7, dtype=FLOAT), torch.tensor(step, dtype=FLOAT), n, rng)
        errors.append(1 - move.acceptance.mean())
    assert 3.0 < errors[0] / errors[1] < 5.0


def test_points_without_a_density_are_never_accepted_and_never_spread():
    target = dgm.Target(lambda x: x.square().sum(-1) - (x.sum(-1) + 1).log(), 2)
    path = AnnealedPath(target, dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 1.0))
    rng = torch.Generator().manual_seed(4)
    v = path.normal(1000, rng)
    inside = v[v.sum(-1) > -1]
    point = path.at(inside)
    for _ in range(5):
        point = path.move(point, torch.tensor(0.5, dtype=FLOAT), torch.tensor(1.0, dtype=FLOAT), 3, rng).point
    assert (point.v.sum(-1) > -1).all()
    assert point.energy.isfinite().all()
    lost = path.at(v[v.sum(-1) < -1])
    assert (path.difference(lost) == math.inf).all()
    assert lost.gradient.isfinite().all()


def test_one_gradient_a_leapfrog_step_and_none_between_temperatures():
    known = known_gaussian(4, (2,))
    path = AnnealedPath(known.target, known.base)
    rng = torch.Generator().manual_seed(0)
    point = path.at(path.normal(3, rng))
    for beta in (0.2, 0.8):
        point = path.move(point, torch.tensor(beta), torch.tensor(0.3), 7, rng).point
    assert path.evaluations == 1 + 2 * 7


# ------------------------------------------------------------------------------------------- schedules and pilots


@pytest.mark.parametrize("schedule", [even_schedule, sigmoid])
def test_schedules_rise_from_0_to_1(schedule):
    for n in (1, 2, 50):
        betas = schedule(n)
        assert betas.shape == (n + 1,)
        assert betas[0] == 0
        assert betas[-1] == 1
        assert (betas.diff() > 0).all()
    torch.testing.assert_close(sigmoid(10) + sigmoid(10).flip(0), torch.ones(11, dtype=FLOAT))
    assert sigmoid(100).diff()[0] < 0.3 * sigmoid(100).diff()[50]


def test_a_schedule_at_equal_distances_makes_the_steps_alike():
    betas = sigmoid(400)
    # sd of Delta 1/(0.05 + beta) for one problem, constant for the other
    sd = torch.stack([1 / (0.05 + betas), torch.full_like(betas, 3.0)], -1)
    lengths = 0.5 * (sd[1:] + sd[:-1]) * betas.diff().unsqueeze(-1)
    schedule = equal_distances(40, betas.unsqueeze(-1).expand(-1, 2), lengths)
    assert schedule.shape == (41, 2)
    assert (schedule[0] == 0).all()
    assert (schedule[-1] == 1).all()
    assert (schedule.diff(dim=0) > 0).all()

    def variance(betas):
        """Variance of a log weight, in short steps."""
        middle = 0.5 * (betas[1:] + betas[:-1])
        return (betas.diff() / (0.05 + middle)).square().sum()

    # the least that 40 steps can have is the squared length of the path over 40
    least = math.log(1.05 / 0.05) ** 2 / 40
    assert variance(schedule[:, 0]) < 1.25 * least
    assert variance(even_schedule(40)) > 1.8 * least
    assert variance(sigmoid(40)) > 1.3 * least


def test_step_sizes_are_linear_between_their_knots_for_every_problem():
    sizes = StepSizes(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[1.0, 4.0], [0.5, 2.0], [0.1, 8.0]]).log())
    beta = torch.tensor([[0.0, 0.5], [0.25, 1.0], [0.5, 0.75]])
    expected = [[1.0, 2.0], [0.5**0.5, 8.0], [0.5, 4.0]]
    torch.testing.assert_close(sizes.at(beta), torch.tensor(expected))


def test_a_pilot_finds_step_sizes_that_are_accepted_as_asked_at_every_temperature():
    # problems whose targets are 1, 3 and 10 times narrower than the base
    scales = torch.tensor([1.0, 3.0, 10.0], dtype=FLOAT)
    target = dgm.Target(lambda x: 0.5 * (scales.unsqueeze(-1) * x).square().sum(-1), 8, (3,))
    path = AnnealedPath(target, dgm.Gaussian(torch.zeros(3, 8, dtype=FLOAT), 1.0))
    rng = torch.Generator().manual_seed(5)
    pilot = dgm.AIS(pilot_temperatures=100).pilot(path, 64, rng, Progress(False))
    last = pilot.step_sizes.at(torch.ones(3))
    torch.testing.assert_close(last[0] / last, scales, rtol=0.35, atol=0)
    for beta in (0.01, 0.3, 1.0):
        b = torch.full((3,), beta, dtype=FLOAT)
        precision = 1 - b + b * scales.square()
        v = torch.randn(4000, 3, 8, generator=rng, dtype=FLOAT) / precision.sqrt().unsqueeze(-1)
        acceptance = path.move(path.at(v), b, pilot.step_sizes.at(b), 5, rng).acceptance.mean(0)
        assert ((acceptance - 0.8).abs() < 0.12).all(), acceptance.tolist()


@pytest.mark.slow
def test_a_pilot_keeps_points_from_all_along_the_path():
    known = known_gaussian(10)
    path = AnnealedPath(known.target, known.base)
    rng = torch.Generator().manual_seed(6)
    pilot = dgm.AIS(n_steps=3, pilot_temperatures=60).pilot(path, 4000, rng, Progress(False))
    # with a right guess of log Z these are draws of the joint density: Delta has the mean that tempering finds
    start = path.difference(pilot.point) + known.log_z
    chain = dgm.log_evidence(
        known.target, known.base, dgm.GibbsTempering(log_zeta=-3.0), chains=64, seed=1, progress=False
    )
    x = chain.draws
    delta = known.target.energy(x) + known.log_z - known.base.energy(x)
    error = (start.var() / 4000 + delta.mean(1).var() / 64).sqrt()
    # the marginal of beta is only nearly uniform
    assert (start.mean() - delta.mean()).abs() < 5 * error + 0.2
    assert compare(pilot.point.v.unsqueeze(1)[:, :1].expand(-1, 4, -1), torch.zeros(10, dtype=FLOAT)).z.abs().max() > 5
