"""Targets written with torch's distributions, whose checks of arguments end no run."""

import math
import threading

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Distribution, Normal, Uniform

import dgm_infer as dgm
from dgm_infer.arguments.distributions import unvalidated, validated, without_validation
from dgm_infer.errors import ArgumentError
from generators import from_module
from tests.schools import Schools, log_z_of_schools


def coin(x):
    return -Bernoulli(logits=x[..., 0]).log_prob(torch.tensor(0.5)) + 0.5 * x.square().sum(-1)


def within(x):
    return -Uniform(-3.0, 3.0).log_prob(x).sum(-1) + 0.5 * x.square().sum(-1)


class Scaled(nn.Module):
    def forward(self, z):
        return Normal(z[..., :1], (40 * z[..., 1:2]).exp()).icdf(torch.sigmoid(z[..., 2:6]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_distributions_has_its_evidence_though_scales_come_to_zero():
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(1), torch.exp(torch.tensor([-800.0])))
    found = dgm.log_evidence(Schools(), seed=1, progress=False)
    assert abs(float(found.log_z) - log_z_of_schools()) < 4 * float(found.std_error)
    assert Distribution._validate_args


@pytest.mark.filterwarnings("ignore")
def test_chains_of_a_model_of_distributions_end_though_some_come_to_no_density():
    draws = dgm.sample(Schools(), warmup=100, draws=50, chains=2, seed=1, progress=False)
    assert draws.inputs.isfinite().all()
    # beyond the edges is no density: a point like others
    draws = dgm.sample(dgm.Target(within, 2), warmup=100, draws=50, chains=2, seed=1, progress=False)
    assert draws.inputs.abs().max() < 3


@pytest.mark.filterwarnings("ignore")
def test_a_module_of_distributions_is_conditioned_though_scales_come_to_zero():
    fibre = dgm.condition(from_module(Scaled(), latent=6), torch.tensor([0.1, 0.2, -0.1, 0.3]), noise=0.1)
    assert dgm.sample(fibre, draws=20, chains=2, seed=1, progress=False).shape[:2] == (2, 20)


@pytest.mark.parametrize("call", [dgm.sample, dgm.log_evidence])
def test_control_data_out_of_a_support_are_refused(call):
    with pytest.raises(ArgumentError, match="support"):
        call(dgm.Target(coin, 2), progress=False)


def test_checks_are_off_within_any_number_of_calls_and_threads_and_on_again_after():
    inside, outside = threading.Event(), threading.Event()

    def other():
        with unvalidated():
            inside.set()
            outside.wait(10)

    thread = threading.Thread(target=other)
    with unvalidated():
        thread.start()
        assert inside.wait(10)
        with unvalidated():
            assert not Distribution._validate_args
        assert not Distribution._validate_args
    assert not Distribution._validate_args
    outside.set()
    thread.join()
    assert Distribution._validate_args
    with validated(), unvalidated():
        assert Distribution._validate_args


class Regression(nn.Module):
    """An energy with data that move with it, as one writes it."""

    def __init__(self):
        super().__init__()
        self.dim, self.batch_shape = 3, torch.Size()
        self.register_buffer("x", torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
        self.x: torch.Tensor

    def energy(self, w):
        return 0.5 * w.square().sum(-1) + nn.functional.softplus(-(w @ self.x.to(w).mT)).sum(-1)


def test_a_module_with_an_energy_is_a_target_and_another_is_none():
    found = dgm.log_evidence(Regression(), seed=1, progress=False)
    assert found.std_error < 0.1
    with pytest.raises(ArgumentError, match="expected a Target, not a Linear"):
        dgm.sample(nn.Linear(2, 2))


def correlated_by(x):
    """A density on -2 < x_0 < 2, beyond which a matrix has no factor."""
    a, one = x[..., 0] / 2, torch.ones_like(x[..., 0])
    matrix = torch.stack([torch.stack([one, a], -1), torch.stack([a, one], -1)], -2)
    log_det = 2 * torch.linalg.cholesky(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return 0.5 * x.square().sum(-1) - log_det


def test_a_subclass_with_an_init_of_its_own_is_a_target():
    class Own(dgm.Target):
        def __init__(self, **given):
            vars(self).update(given)

        def energy(self, x):
            return 0.5 * x.square().sum(-1)

    draws = dgm.sample(Own(dim=3, batch_shape=(2,)), chains=4, warmup=5, draws=5, seed=1, progress=False)
    assert draws.inputs.shape == (4, 5, 2, 3)
    assert dgm.log_evidence(Own(dim=3, batch_shape=()), method=dgm.Elbo(), seed=1, progress=False).log_z.shape == ()
    with pytest.raises(dgm.errors.ArgumentError, match=r"Own has no dim: set it, or call super\(\)"):
        dgm.sample(Own(), chains=4, warmup=5, draws=5, seed=1, progress=False)
    with pytest.raises(dgm.errors.ArgumentError, match=r"Own.batch_shape"):
        dgm.sample(Own(dim=3, batch_shape=-1), chains=4, warmup=5, draws=5, seed=1, progress=False)


def test_starts_are_drawn_until_all_are_inside_a_support_that_few_draws_meet():
    target = dgm.Target(lambda x: torch.where(x[..., 0] > 1.5, 0.5 * x.square().sum(-1), torch.inf), 2)
    start = target.start(64, torch.Generator().manual_seed(0))
    assert (start[:, 0] > 1.5).all()
    # the control: twenty draws of each, 0.067 of which are inside, leave some outside
    assert (target.start(64, torch.Generator().manual_seed(0), attempts=20)[:, 0] < 1.5).any()


def test_a_matrix_without_a_factor_is_a_point_without_density():
    x = torch.tensor([[0.5, 1.0], [3.0, 0.0]], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="linalg"):
        correlated_by(x)
    target = dgm.Target(correlated_by, 2)
    energy, gradient = target.energy_and_gradient(x)
    assert energy[0].isfinite()
    assert gradient[0].isfinite().all()
    assert energy[1].isnan()
    grid = torch.linspace(-2, 2, 20_001, dtype=torch.float64)[1:-1]
    mass = (-grid.square() / 2).exp() * (1 - grid.square() / 4)
    truth = (mass.sum() * (grid[1] - grid[0]) * (2 * math.pi) ** 0.5).log()
    evidence = dgm.log_evidence(target, seed=1, progress=False)
    assert abs(evidence.log_z - truth) < 4 * evidence.std_error < 0.05
    draws = dgm.sample(target, warmup=100, draws=200, seed=1, progress=False).latents["x"][..., 0]
    variance = (mass * grid.square()).sum() / mass.sum()
    assert abs(draws.var() / variance - 1) < 0.25


@pytest.mark.parametrize(
    "solve",
    [
        lambda m: torch.linalg.cholesky(m).sum((-1, -2)),
        lambda m: torch.linalg.inv(m).sum((-1, -2)),
        lambda m: torch.linalg.solve(m, torch.ones(2)).sum(-1),
    ],
)
def test_what_torch_refuses_of_one_matrix_is_nan_there_alone(solve):
    both = torch.stack([torch.eye(2), torch.zeros(2, 2)])
    with pytest.raises(RuntimeError, match="linalg"):
        solve(both)
    found = without_validation(solve)(both)
    assert found[1].isnan()
    assert torch.equal(found[0], solve(torch.eye(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_positions_have_the_only_type_that_an_energy_takes(dtype):
    rng = torch.Generator().manual_seed(0)
    data = torch.randn(40, 2, generator=rng).to(dtype)
    target = dgm.Target(lambda w: torch.nn.functional.softplus(w @ data.T).sum(-1) + w.square().sum(-1), 2)
    assert target.initial_draws(3, rng).dtype == dtype
    draws = dgm.sample(target, chains=2, warmup=20, draws=10, seed=0, progress=False)
    assert draws.inputs is not None
    assert draws.inputs.dtype == dtype
    assert dgm.Gaussian.laplace(target).mean.dtype == dtype
    assert dgm.modes(target, 2).positions.dtype == dtype
    # the control: one that takes both has torch's type, and estimates have the digits of float64
    both = dgm.Target(lambda w: w.square().sum(-1), 2)
    assert both.initial_draws(3, rng).dtype == torch.get_default_dtype()
    assert dgm.Gaussian.laplace(both).mean.dtype == torch.float64
