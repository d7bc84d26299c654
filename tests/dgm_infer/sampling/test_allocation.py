"""Chains are shared out over the modes of a posterior by their masses."""

from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.references.minimise import minimise
from dgm_infer.sampling import allocation, annealed_starts
from dgm_infer.sampling.allocation import Allocation, AllocationSettings, _weighed, allocate_chains
from evaluation.problems.small import squares
from tests.findings import honest
from tests.oracles import FLOAT, compare

NOISE = 0.01


class Folded(dgm.GenerativeModel):
    """Slope 1 on the right and -4 on the left: an output of 1 has a wide and a narrow mode, masses 0.71 and 0.29."""

    input_density = dgm.StandardNormal(1)
    output_shape = (1,)

    def observed(self, u):
        return -1.5 * u + 2.5 * (u.square() + 0.01).sqrt()


def folded(*values):
    """Outputs of 1 have two modes; of -0.5, which is less than any output, the bottom of the fold is one."""
    data = torch.tensor(values, dtype=FLOAT).unsqueeze(-1)
    return dgm.condition(dgm.WithNoise(Folded(), NOISE), data[0] if len(values) == 1 else data)


def wide_mass(value=1.0):
    u = torch.linspace(-8, 8, 400_001, dtype=FLOAT)
    misfit = (value - Folded().observed(u.unsqueeze(-1)).squeeze(-1)) / NOISE
    return torch.softmax(-0.5 * (u.square() + misfit.square()), 0)[u > 0].sum().item()


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def points(n_wide, n_narrow):
    """Near the modes of an output of 1, ``[n, 1]``."""
    at = torch.cat([torch.full((n_wide, 1), 0.99), torch.full((n_narrow, 1), -0.24)]).double()
    return at + 0.002 * torch.randn(at.shape, generator=rng(), dtype=FLOAT)


@pytest.mark.parametrize("n_wide", [8, 32, 56])
@pytest.mark.parametrize("chains", [16, 64])
def test_modes_hold_chains_in_proportion_to_their_masses(n_wide, chains):
    u = points(n_wide, 64 - n_wide)
    chosen = allocate_chains(folded(1.0).marginal, u, chains, rng(1)).chosen
    assert chosen.shape == (chains,)
    share = (u[chosen, 0] > 0).double().mean().item()
    # a systematic sample rounds to one chain; Laplace's masses are good to a hundredth here
    assert abs(share - wide_mass()) < 1 / chains + 0.01
    assert abs(n_wide / 64 - wide_mass()) > 1 / chains + 0.01
    # the points of a mode take turns
    assert chosen.bincount().max() <= chains // min(n_wide, 64 - n_wide) + 1


def test_every_problem_has_modes_of_its_own():
    u = torch.stack([points(16, 48), points(16, 48).flip(0), torch.zeros(64, 1, dtype=FLOAT)], 1)
    chosen = allocate_chains(folded(1.0, 1.0, -0.5).marginal, u, 64, rng(1)).chosen
    share = (u.squeeze(-1).gather(0, chosen)[:, :2] > 0).double().mean(0)
    assert (share - wide_mass()).abs().max() < 0.03
    # one mode, whose points are left alone
    assert chosen[:, 2].tolist() == list(range(64))


def moved(problem, u, chains=64):
    """Whether some chain starts from another point than its own."""
    return allocate_chains(problem.marginal, u, chains, rng()).chosen.tolist() != list(range(chains))


@pytest.mark.parametrize("n", [1, 3, 4, 40])
def test_chains_leave_a_mode_without_mass_however_few_points_the_other_has(n):
    # of an output of 8 the mode at 8 has no mass beside that at -2
    u = torch.cat([torch.full((64 - n, 1), 7.99, dtype=FLOAT), torch.full((n, 1), -1.99, dtype=FLOAT)])
    u += 0.002 * torch.randn(u.shape, generator=rng(), dtype=FLOAT)
    found = allocate_chains(folded(8.0).marginal, u, 8, rng())
    start = u[found.chosen.clamp_max(63)] if found.position is None else found.position
    assert (start < 0).all()
    # few begin at the same point
    assert len(start.unique()) >= 4


def test_where_descents_do_not_end_or_take_long_every_chain_keeps_its_own(monkeypatch):
    problem, few = folded(8.0), torch.full((64, 1), 7.99, dtype=FLOAT)
    few[60:] = -1.99
    assert moved(problem, few)
    monkeypatch.setattr(allocation, "_SETTINGS", AllocationSettings(iterations=1))
    assert not moved(problem, few)
    monkeypatch.setattr(allocation, "_SETTINGS", AllocationSettings(numbers=63))
    monkeypatch.setattr(allocation, "minimise", underivable)
    assert not moved(problem, few)


def test_where_no_descent_of_a_point_converges_none_begins_at_a_prior_draw(monkeypatch):
    begun, real = [], allocation._descended

    def slow(posterior, x, evaluated):
        begun.append(len(x))
        position, energy, converged = real(posterior, x, evaluated)
        return position, energy, converged & (len(begun) > 2)

    monkeypatch.setattr(allocation, "_descended", slow)
    u1 = points(8, 8)
    found = allocate_chains(folded(1.0).marginal, u1, 8, rng())
    assert begun == [16]
    assert found.chosen.tolist() == list(range(8))
    assert found.jumps is None
    begun.extend([0, 0])
    assert allocate_chains(folded(1.0).marginal, u1, 8, rng()).jumps is not None
    assert begun[3:] == [16, 8, 248]


def test_descents_that_take_longer_hold_no_mode_back_and_no_chain_that_has_stranded(monkeypatch):
    """A point whose descent has not ended: near the others, all keep their own; far above, chains leave it."""
    like, real = points(0, 64) - 2.25, allocation._descended

    def slow(posterior, x, evaluated):
        position, energy, converged = real(posterior, x, evaluated)
        return position, energy, torch.where((x[..., 0] == 9.99) | (x[..., 0] == -2.489), False, converged)

    monkeypatch.setattr(allocation, "_descended", slow)
    far, near = like.clone(), like.clone()
    far[2], near[2] = 9.99, -2.489
    # the mode at 10 is 47 nats above that at -2.5
    assert (far[allocate_chains(folded(10.0).marginal, far, 8, rng()).chosen.clamp_max(63)] < 0).all()
    found = allocate_chains(folded(10.0).marginal, near, 8, rng())
    assert found.chosen.tolist() == list(range(8))
    # jumps between modes of the others, whatever becomes of it
    both = points(32, 32)
    both[2] = -2.489
    found = allocate_chains(folded(1.0).marginal, both, 8, rng())
    assert found.chosen.tolist() == list(range(8))
    assert found.jumps is not None
    assert found.jumps.counts == 2


class Kinked(dgm.GenerativeModel):
    """A smooth mode at -1, and one along a kink at 1 whose curvature says nothing of its width."""

    input_density = dgm.StandardNormal(2)
    output_shape = (2,)

    def observed(self, u):
        a, b = u[..., 0], u[..., 1]
        right = torch.stack([a - 1, 3 * b.abs() + 0.05], -1)
        left = torch.stack([a + 1, b], -1)
        return torch.where(a.unsqueeze(-1) > 0, right, left)


class Ring(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)
    output_shape = (1,)

    def observed(self, u):
        return u.square().sum(-1, keepdim=True)


def test_kinks_and_ridges_are_told_from_modes():
    u = 0.03 * torch.randn(64, 2, generator=rng(), dtype=FLOAT) + torch.tensor([-1.0, 0.0], dtype=FLOAT)
    u[:16, 0] += 2
    u[:16, 1] /= 3
    assert not moved(dgm.condition(dgm.WithNoise(Kinked(), 0.03), torch.zeros(2, dtype=FLOAT)), u)
    angle = torch.linspace(0, 6.2, 64, dtype=FLOAT)
    ring = 2 * torch.stack([angle.cos(), angle.sin()], -1)
    for noise in (0.05, 0.5):
        assert not moved(dgm.condition(dgm.WithNoise(Ring(), noise), torch.tensor([4.0], dtype=FLOAT)), ring)


def test_problems_in_32_bits_are_shared_out_as_those_in_64():
    problem = dgm.condition(dgm.WithNoise(Folded(), NOISE), torch.ones(1), dtype=torch.float32)
    u = points(8, 56)
    rough, exact = (
        allocate_chains(each.marginal, x, 16, rng(1)) for each, x in ((problem, u.float()), (folded(1.0), u))
    )
    assert torch.equal(u[rough.chosen] > 0, u[exact.chosen] > 0)
    assert rough.jumps is not None
    assert rough.jumps.centres.dtype == torch.float32


class Tilted(dgm.GenerativeModel):
    """``u^2 + u/2`` in noise: an output of 4 has a mode on the left, where it is less likely, and one on the right."""

    input_density = dgm.StandardNormal(1)
    output_shape = (1,)

    def observed(self, u):
        return u.square() + 0.5 * u


def test_a_mode_that_no_point_is_in_is_found_by_descents_from_the_prior():
    problem = dgm.condition(dgm.WithNoise(Tilted(), 0.1), torch.tensor([4.0], dtype=FLOAT))
    left = torch.full((64, 1), -2.26, dtype=FLOAT) + 0.02 * torch.randn(64, 1, generator=rng(), dtype=FLOAT)
    found = allocate_chains(problem.marginal, left, 64, rng(1))
    assert found.position is not None
    u = torch.linspace(-8, 8, 400_001, dtype=FLOAT)
    log_density = -0.5 * (u.square() + ((4 - u.square() - 0.5 * u) / 0.1).square())
    right = torch.softmax(log_density, 0)[u > 0].sum().item()
    assert abs((found.position > 0).double().mean().item() - right) < 1 / 64 + 0.02
    assert found.jumps is not None
    assert found.jumps.counts == 2
    anew = found.chosen >= 64
    assert torch.equal(anew, found.position[:, 0] > 0)
    # draws of the mode, which has a width
    spread = found.position[anew].std().item()
    assert 0.5 < spread / 0.022 < 1.6


def test_control_without_descents_from_the_prior_it_is_not_found(monkeypatch):
    monkeypatch.setattr(allocation, "_SETTINGS", AllocationSettings(searches=0))
    problem = dgm.condition(dgm.WithNoise(Tilted(), 0.1), torch.tensor([4.0], dtype=FLOAT))
    found = allocate_chains(problem.marginal, torch.full((64, 1), -2.26, dtype=FLOAT), 64, rng(1))
    assert found.position is None
    assert found.jumps is None


def test_minima_that_stop_short_are_one_mode():
    marginal = folded(1.0).marginal
    low, narrow = (minimise(marginal.energy_and_gradient, points(1, 1)).position for _ in range(2))
    x = torch.stack([low[0], low[0] + 0.002, narrow[1], narrow[1] - 0.0004])
    energy = marginal.energy(x)
    x = x[energy.argsort()]
    found = _weighed(marginal, x, torch.ones(4, dtype=torch.bool))
    assert found.sound
    assert (found.mass > 0).sum() == 2
    wide = x[:, 0] > 0
    assert found.mass[wide].sum().item() == pytest.approx(wide_mass(), abs=0.01)
    assert (wide[found.same] == wide).all()
    # control: a minimum that is none
    assert not _weighed(marginal, x + 0.01, torch.ones(4, dtype=torch.bool)).sound


def underivable(*arguments, **options):
    raise NotImplementedError("the derivative for some operation is not implemented")


def test_where_there_are_no_second_derivatives_every_chain_keeps_its_point(monkeypatch):
    monkeypatch.setattr(allocation, "laplace_masses", underivable)
    assert allocate_chains(folded(1.0).marginal, points(8, 56), 64, rng()).chosen.tolist() == list(range(64))


def test_modes_of_no_mass_hold_no_chain():
    # an output of 8 has modes at 8 and -2, 30 nats apart
    u = torch.cat([torch.full((20, 1), 7.99), torch.full((44, 1), -1.99)]).double()
    chosen = allocate_chains(folded(8.0).marginal, u, 32, rng()).chosen
    assert (u[chosen] < 0).all()
    assert len(chosen.unique()) == 32


@pytest.mark.slow
def test_annealed_starts_have_the_shares_of_the_posterior(monkeypatch):
    problem, settings = folded(1.0), {"tolerance": 1e-8, "target_acceptance": 0.8}

    def found():
        begun = [
            annealed_starts.anneal_noise(problem, dgm.ConstrainedHMC(), 1000, rng(seed), **settings)
            for seed in range(12)
        ]
        return torch.stack([(start.position[:, 0] > 0).double().mean() for start in begun])

    mass = wide_mass()
    assert (found() - mass).abs().max() < 1 / 1000 + 0.01
    # control: all points have a start of their own. Of independent draws of the posterior the statistic is chi-square
    # with 12 degrees of freedom, 54 at 5 standard deviations
    monkeypatch.setattr(
        annealed_starts, "allocate_chains", lambda marginal, u, chains, *_: Allocation(torch.arange(chains))
    )
    assert ((found() - mass).square() / (mass * (1 - mass) / 1000)).sum() > 54


def test_chains_of_several_modes_have_their_shares_and_the_warning_names_the_masses():
    kernel = dgm.ConstrainedHMC(n_steps=3)
    with pytest.warns(UserWarning, match=r"2 groups that never overlap .*dgm\.modes\(fibre\).*ModeJumps\(kernel\)"):
        draws = dgm.sample(folded(1.0), kernel, chains=32, warmup=20, draws=50, seed=1, progress=False)
    right = draws.inputs[..., 0] > 0
    assert (right == right[:, :1]).all()
    assert abs(right.double().mean().item() - wide_mass()) < 1 / 32 + 0.01
    masses = dgm.modes(draws.problem).log_masses.softmax(0)
    assert masses[0].item() == pytest.approx(wide_mass(), abs=0.01)
    # control: points that are given are not shared out
    given = draws.inputs[:, -1]
    with pytest.warns(UserWarning, match=r"2 groups that never overlap .*are not posterior weights"):
        dgm.sample(draws.problem, draws.kernel, chains=32, warmup=0, draws=50, initial=given, seed=1, progress=False)


@pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")
def test_modes_that_no_chain_is_in_are_named_with_their_mass(tmp_path):
    problem, settings = squares(), {"chains": 4, "warmup": 20, "draws": 50, "seed": 0, "progress": False}
    for kernel in (dgm.LiftedHMC(), dgm.ConstrainedHMC(n_steps=2)):
        draws = dgm.sample(problem, kernel, **settings)
        centres = draws.modes.centres
        # signs tell the modes apart, and the chains, which stay where they began
        visited = (centres[:, None].sign() == draws.inputs[:, -1, :4].sign()).all(-1).any(1)
        share = 100 * draws.modes.log_weights.exp()[~visited].sum()
        draws.save(tmp_path / "draws.nc")
        for each in (draws, dgm.Draws.load(tmp_path / "draws.nc", problem)):
            (found,) = (one for one in each.diagnose() if "no draw is in modes" in one.what)
            assert f"{share:.0f} %" in found.what
            assert found.severity == "misleading"
    # control: chains that jump are in all of them
    draws = dgm.sample(problem, **settings)
    assert draws.modes.counts == 16
    assert not any("no draw is in modes" in each.what for each in draws.diagnose())


# what is said of chains that do not
@honest
@pytest.mark.parametrize("kind", [dgm.LiftedHMC, dgm.ConstrainedHMC], ids=lambda kind: kind.__name__)
def test_chains_jump_between_modes_in_proportion_to_their_masses(kind):
    kernel = kind(n_steps=1)
    problem, settings = folded(1.0, 8.0), {"chains": 8, "warmup": 20, "draws": 300, "seed": 1, "progress": False}
    draws: Any = dgm.sample(problem, dgm.ModeJumps(kernel), **settings)
    assert draws.stats["constraint_error"].max() < 1e-7
    assert draws.kernel.modes.counts.tolist() == [2, 1]
    right = (draws.inputs[:, :, 0, 0] > 0).double()
    assert ((right[:, 1:] != right[:, :-1]).sum(1) > 50).all()
    z, ess = compare(right.unsqueeze(-1), torch.tensor([wide_mass()], dtype=FLOAT))
    assert ess > 500
    assert z.abs() < 5
    accepted = draws.stats["jump_acceptance"].mean((0, 1))
    assert accepted[0] > 0.5
    assert (accepted[1:] == 0).all()
    # control: without them no chain ever crosses
    still = dgm.sample(problem, kernel, **(settings | {"warmup": 20, "draws": 40}))
    right = still.inputs[:, :, 0, 0] > 0
    assert (right == right[:, :1]).all()
