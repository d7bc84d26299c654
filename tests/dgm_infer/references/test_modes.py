"""Minimisations from many starts, the modes they find, and Gaussians that cover them."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.references.density import GaussianDensity
from dgm_infer.references.minimise import curvature, minimise, same_minimum, same_mode
from dgm_infer.references.modes import Modes, _merged, laplace_masses, settled
from tests.known_evidence import MixtureTarget, known_bimodal
from tests.oracles import FLOAT


def rosenbrock(x):
    return 100 * (x[..., 1] - x[..., 0].square()).square() + (1 - x[..., 0]).square()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_row_reaches_its_minimum(dtype):
    target = dgm.Target(rosenbrock, 2)
    start = 2 * torch.randn(20, 3, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    minima = minimise(target.energy_and_gradient, start, iterations=200)
    assert minima.converged.all()
    assert (minima.position - 1).abs().max() < (1e-3 if dtype == torch.float64 else 0.1)
    # control: cut short, they say that they have not
    assert not minimise(target.energy_and_gradient, start, iterations=5).converged.any()


def test_rows_outside_the_support_and_without_a_minimum_do_not_converge():
    def energy(x):
        return torch.where(x[..., 0] > 0, x[..., 0] - x[..., 0].log(), math.inf)

    start = torch.tensor([[0.2], [3.0], [-1.0]], dtype=FLOAT)
    minima = minimise(dgm.Target(energy, 1).energy_and_gradient, start)
    assert minima.converged.tolist() == [True, True, False]
    assert (minima.position[:2] - 1).abs().max() < 1e-4
    assert not minimise(dgm.Target(lambda x: x.sum(-1), 1).energy_and_gradient, start).converged.any()


def test_minima_are_the_same_if_near_in_place_and_energy():
    v = torch.tensor([[0.0], [0.001], [1.0], [1.001], [1.0]], dtype=FLOAT)
    assert same_minimum(v, torch.zeros(5, dtype=FLOAT)).tolist() == [0, 0, 2, 2, 2]
    assert same_minimum(v, torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=FLOAT)).tolist() == [0, 0, 2, 2, 4]


def test_minima_are_one_mode_if_near_in_its_standard_deviations():
    x = torch.tensor([[0.0, 0.0], [0.0, 0.2], [0.01, 0.0], [0.0, 0.2], [0.0, 0.2]], dtype=FLOAT)
    covariance = torch.diag(torch.tensor([1e-6, 1.0], dtype=FLOAT)).expand(5, 2, 2).clone()
    energy = torch.tensor([0.0, 0.05, 0.06, 0.07, 0.5], dtype=FLOAT)
    counts = torch.ones(5, dtype=torch.bool)
    # the third is ten standard deviations away, the last half a nat higher
    assert same_mode(x, energy, covariance, counts).tolist() == [0, 0, 2, 0, 4]
    # what is no minimum, or has no mass, stands for none
    assert same_mode(x, energy, covariance, counts & (energy > 0)).tolist() == [0, 1, 2, 1, 4]
    covariance[0] = math.nan
    assert same_mode(x, energy, covariance, counts).tolist() == [0, 1, 2, 1, 4]


def curved_valley(width, offset):
    """Two modes of masses 0.7 and 0.3 along a wave; the integral of ``exp(-energy)`` is ``pi width exp(-offset)``."""

    def energy(x):
        along, across = (x[..., 0] - x[..., 1]) / math.sqrt(2), (x[..., 0] + x[..., 1]) / math.sqrt(2)
        left, right = -2 * (along + 2).square() + math.log(0.3), -2 * (along - 2).square() + math.log(0.7)
        wave = (across - 0.3 * torch.cos(2 * along)) / width
        return 0.5 * wave.square() - torch.logaddexp(left, right) + offset

    return dgm.Target(energy, 2)


@pytest.mark.parametrize(("width", "offset"), [(1e-3, 1e3), (1e-2, 1e6)])
def test_ends_of_descents_along_a_narrow_valley_are_not_modes_of_their_own(width, offset):
    target = curved_valley(width, offset)
    found = dgm.modes(target)
    mass = found.log_masses.softmax(0)
    # a small mode between the two, where the valley bends
    assert (mass[:2] - torch.tensor([0.7, 0.3], dtype=FLOAT)).abs().max() < 0.01
    assert abs(found.log_z + offset - math.log(math.pi * width)) < 0.02
    # control: descents end in more places, each with a mass of its own
    start = 4 * torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    minima = minimise(target.energy_and_gradient, start, iterations=200)
    x, energy = minima.position[minima.converged], minima.energy[minima.converged]
    ends = same_minimum(x, energy).unique()
    log_mass, _ = laplace_masses(target, x[ends], energy[ends])
    assert log_mass.logsumexp(0) + offset - math.log(math.pi * width) > 0.3


def test_what_is_no_mode_takes_nothing_from_modes():
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    place, unit = torch.full((1, 2), 1e-3, dtype=FLOAT), torch.eye(2, dtype=FLOAT).unsqueeze(0)
    nothing = torch.zeros(1, dtype=torch.int64)
    refused = Modes(place, target.energy(place), torch.full((1,), -math.inf, dtype=FLOAT), nothing, unit, 0)
    reach = GaussianDensity(torch.zeros(2, dtype=FLOAT), torch.ones(2, dtype=FLOAT))
    v = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    found = _merged(target, reach, v, 200, refused)
    assert found.hits[0] == 8
    assert found.log_z.item() == pytest.approx(math.log(2 * math.pi), abs=1e-6)

    # a plateau, where descents end as well, beside a valley that is too long for the gradients allowed
    def valley(x):
        wave = (x[..., 1] - torch.sin(2 * x[..., 0])) / 1e-3
        return -torch.logaddexp(-0.5 * (wave.square() + x[..., 0].square()), torch.tensor(-400.0, dtype=FLOAT))

    x = torch.tensor([[1.0, math.sin(2.0)], [50.0, 50.0]], dtype=FLOAT)
    part = settled(dgm.Target(valley, 2), x, torch.ones(2, dtype=torch.bool), 1, 10)
    assert part.counts.tolist() == [True, True]


def test_the_modes_of_a_mixture_have_its_masses_for_every_problem():
    """Five normals far apart, of different widths, twice."""
    rng = torch.Generator().manual_seed(5)
    means = 12 * torch.randn(5, 3, generator=rng, dtype=FLOAT)
    covariances = torch.diag_embed(0.2 + torch.rand(5, 3, generator=rng, dtype=FLOAT))
    weights = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=FLOAT)
    found = dgm.modes(MixtureTarget(weights, means, covariances, 2.0, (2,)))
    assert found.counts.tolist() == [5, 5]
    for problem in range(2):
        torch.testing.assert_close(found.positions[:5, problem], means, atol=1e-3, rtol=0)
        torch.testing.assert_close(found.log_masses[:5, problem], weights.log() + 2.0, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.log_z, torch.full((2,), 2.0, dtype=FLOAT), atol=1e-3, rtol=0)
    base = dgm.Gaussian.covering(found)
    assert (base.whiten(means.unsqueeze(1)).square().mean(-1) < 3).all()
    # control: few steps find nothing
    with pytest.raises(dgm.errors.EvidenceError, match="no mode was found"):
        dgm.modes(MixtureTarget(weights, means, covariances, 2.0), iterations=2)


def test_a_broad_gaussian_covers_what_a_fit_misses():
    known = known_bimodal()
    broad = dgm.Gaussian.broad(known.target)
    means = known.target.parts[1]
    assert broad.whiten(means).norm(dim=-1).max() < 1.5
    assert abs(broad.log_zeta - known.log_z) < 0.05
    narrow = dgm.Gaussian.laplace(known.target, start=means[1])
    assert narrow.whiten(means).norm(dim=-1).max() > 5


def test_where_there_is_a_prior_it_is_the_broad_gaussian():
    class Posterior(dgm.Target):
        standardised = True

    broad = dgm.Gaussian.broad(Posterior(lambda x: (x - 3).square().sum(-1), 2))
    assert broad.mean.tolist() == [0, 0]
    assert broad.covariance_diagonal.tolist() == [1, 1]


@pytest.mark.parametrize("call", [dgm.modes, dgm.Gaussian.broad])
def test_bad_settings_are_named(call):
    target = dgm.Target(lambda x: x.square().sum(-1), 2)
    for wrong in ({"starts": 0}, {"iterations": 0.5}, {"seed": "x"}):
        with pytest.raises(dgm.errors.ArgumentError, match=next(iter(wrong))):
            call(target, **wrong)
    with pytest.raises(dgm.errors.ArgumentError, match="expected a Target"):
        call(3)


def test_second_derivatives_that_overflow_are_differences_of_gradients():
    def energy(x):
        wide, narrow = (x - 20).square().sum(-1) / 2, 2 * (x + 20).square().sum(-1)
        return -torch.logaddexp(math.log(0.7) - wide, math.log(0.3) + 3 * math.log(2) - narrow)

    target = dgm.Target(energy, 3)
    x = torch.full((2, 3), 20.0, dtype=torch.float64)
    # what torch makes of it
    hessian = torch.autograd.functional.hessian(energy, x[0])
    assert isinstance(hessian, torch.Tensor)
    assert hessian.isnan().all()
    torch.testing.assert_close(curvature(target, x)[2], torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    start = dgm.Gaussian(torch.zeros(3, dtype=torch.float64), 10.0)
    found = dgm.modes(target, start=start)
    torch.testing.assert_close(found.log_masses.softmax(0), torch.tensor([0.7, 0.3], dtype=torch.float64))
