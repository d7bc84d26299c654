"""Normalizing flows as bases: density, draws, training."""

import builtins
import math

import pytest
import torch

import dgm_infer as dgm
from tests.known_evidence import known_bimodal
from tests.oracles import FLOAT, compare

pytest.importorskip("zuko")

SMALL = {"layers": 2, "width": 8, "bins": 4}


def flow_of(batch=(2,), dim=2, seed=0):
    """A flow that hardly any training has bent, by draws that are far from normal."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 200, *batch, dim, generator=rng, dtype=FLOAT)
    return dgm.Flow.from_draws(x.abs() * x.sign() + 0.5 * x.flip(-1).square(), steps=40, rate=0.02, seed=seed, **SMALL)


@pytest.fixture(scope="module")
def base():
    return flow_of()


def test_the_density_is_normalised(base):
    wide = dgm.Gaussian(base.mean, 2 * base.covariance_diagonal.sqrt())
    y = wide.sample((20000,), torch.Generator().manual_seed(1))
    ratio = (base.log_prob(y) - wide.log_prob(y)).exp()
    z = (ratio.mean(0) - 1) / (ratio.std(0) / 20000**0.5)
    assert z.abs().max() <= 5
    # a density that is a tenth too large is noticed
    wrong = (1.1 * ratio.mean(0) - 1) / (1.1 * ratio.std(0) / 20000**0.5)
    assert wrong.abs().min() > 5


def test_draws_are_of_the_density(base):
    x = base.sample((10, 2000), torch.Generator().manual_seed(3))
    assert x.shape == (10, 2000, 2, 2)
    inner = dgm.Gaussian(base.mean, 0.5 * base.covariance_diagonal.sqrt())
    share = (inner.log_prob(x) - base.log_prob(x)).exp()
    one = torch.ones(2, dtype=FLOAT)
    assert compare(share, one).z.abs().max() <= 5
    # draws of the Gaussian of the same moments are noticed
    y = base.moments.sample((10, 2000), torch.Generator().manual_seed(3))
    wrong = (inner.log_prob(y) - base.log_prob(y)).exp()
    assert compare(wrong, one).z.abs().max() > 5


def test_energy_gradient_and_problems(base):
    x = base.sample((5,), torch.Generator().manual_seed(4)).requires_grad_()
    (expected,) = torch.autograd.grad(base.energy(x).sum(), x)
    energy, gradient = base.energy_and_gradient(x.detach())
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(energy, base.energy(x).detach())
    taken = base.take(torch.tensor([1]))
    torch.testing.assert_close(taken.energy(x[:, 1:]), energy[:, 1:])
    assert base.to(torch.float32).sample(3).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in base.networks.parameters())
    # moments are those of the draws
    v = base.whiten(base.sample((20000,), torch.Generator().manual_seed(5)))
    assert v.mean(0).abs().max() < 0.04
    assert (v.var(0) - 1).abs().max() < 0.1


def test_training_leaves_torchs_own_randomness_as_it_was_and_repeats():
    state = torch.random.get_rng_state()
    one, two, other = flow_of((), seed=1), flow_of((), seed=1), flow_of((), seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    x = torch.zeros(2, dtype=FLOAT)
    assert one.energy(x) == two.energy(x)
    assert one.energy(x) != other.energy(x)


def test_zuko_is_asked_for_in_one_line_where_it_is_missing(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "zuko":
            raise ModuleNotFoundError("No module named 'zuko'", name="zuko")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(dgm.errors.MissingExtraError, match=r"zuko is not installed: pip install .dgm-infer\[flows\]"):
        flow_of(())


def test_arguments_are_checked():
    with pytest.raises(dgm.errors.ArgumentError, match="20 draws or more"):
        dgm.Flow.from_draws(torch.zeros(2, 3, 4))
    target = dgm.Target(lambda x: x.square().sum(-1), 2)
    with pytest.raises(dgm.errors.ArgumentError, match="expected a Gaussian over"):
        dgm.Flow.fit(target, start=dgm.Gaussian(torch.zeros(3), 1.0))
    with pytest.raises(dgm.errors.EvidenceError, match=r"diverged at step [1-9]: use a rate"):
        dgm.Flow.from_draws(torch.randn(2, 20, 2, generator=torch.Generator().manual_seed(0)), rate=1e30, **SMALL)


def test_a_fit_by_the_bound_is_nearer_than_the_gaussian_it_starts_from():
    target = dgm.Target(lambda x: x.square().sum(-1).square(), 1)
    # in one dimension all parameters are offsets, which move by their rate per step
    base = dgm.Flow.fit(target, start=dgm.Gaussian.standard(target, FLOAT), steps=200, rate=0.05, layers=2, bins=16)
    log_z = math.lgamma(1.25) + math.log(2)
    # the best Gaussian, whose bound is known: sd 12^(-1/4)
    gaussian = 0.5 * math.log(2 * math.pi * math.e / math.sqrt(12)) - 0.25
    assert log_z - base.elbo < 0.5 * (log_z - gaussian)
    assert base.elbo < log_z + 0.01


@pytest.mark.slow
def test_a_flow_of_exact_draws_of_two_modes_is_near_them_and_one_gaussian_is_not():
    known = known_bimodal()
    x = known.draw(4000, torch.Generator().manual_seed(0)).unflatten(0, (4, 1000))
    base = dgm.Flow.from_draws(x, steps=200, layers=2, width=16)
    fresh = known.draw(4000, torch.Generator().manual_seed(1))
    posterior = -known.target.energy(fresh) - known.log_z
    assert (posterior - base.log_prob(fresh)).mean() < 0.1
    assert (posterior - base.moments.log_prob(fresh)).mean() > 0.5
    short = dgm.GibbsTempering(draws=60, warmup=20, pilot_temperatures=20)
    for method in (dgm.AIS(15, pilot_temperatures=10), short):
        estimate = dgm.log_evidence(known.target, base, method, seed=0, progress=False)
        assert ((estimate.log_z - known.log_z) / estimate.std_error).abs() < 5
