"""Metrics: linear maps that agree with their covariance, integrators under them, and what they gain."""

import functools
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.kernels.integrators import PhasePoint, leapfrog
from dgm_infer.kernels.metrics import METRICS, MetricSettings
from dgm_infer.kernels.metrics import fitted as fitted_to
from dgm_infer.linear_maps import IDENTITY, DiagonalMap, IdentityMap, LowRankMap, TriangularMap
from tests.dgm_infer.kernels.quartic import QUARTIC, leapfrog_start, slope
from tests.oracles import FLOAT, assert_agrees, assert_refuted, gaussian_oracle
from tests.quick import marks

ADAPTED = [name for name in METRICS if name != "identity"]


def draws(*shape, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


MIX = torch.linalg.qr(draws(4, 4))[0] * torch.tensor([0.05, 1.0, 3.0, 0.4], dtype=FLOAT)


def fitted(name, n=4000, batch=(2,)):
    return IDENTITY if name == "identity" else fitted_to(name, draws(n, *batch, 4) @ MIX.mT)


def matrix(linear, batch=(2,)):
    """The matrix ``[*batch, D, D]`` of a linear map of vectors ``[chains, *batch, D]``."""
    basis = torch.eye(4, dtype=FLOAT).reshape(4, *[1] * len(batch), 4).expand(4, *batch, 4)
    return linear(basis).movedim(0, -1)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", METRICS)
def test_velocity_force_and_whitening_are_one_factor_its_transpose_and_its_inverse(name, batch):
    metric = fitted(name, 50, batch)
    factor = matrix(metric.apply, batch)
    torch.testing.assert_close(matrix(metric.transpose, batch), factor.mT)
    torch.testing.assert_close(matrix(metric.solve, batch) @ factor, torch.eye(4, dtype=FLOAT).expand_as(factor))


@pytest.mark.parametrize("name", ["dense", "low_rank"])
def test_samples_give_their_covariance(name):
    factor = matrix(fitted(name).apply)
    whitened = torch.linalg.solve(factor, MIX.expand_as(factor))
    torch.testing.assert_close(whitened @ whitened.mT, torch.eye(4, dtype=FLOAT).expand_as(factor), rtol=0, atol=0.2)


def ratio(metric, factor):
    """Largest over smallest eigenvalue, in the metric's coordinates, of the covariance with this factor."""
    values = torch.linalg.eigvalsh((white := metric.solve(factor.mT)).mT @ white)
    return (values[-1] / values[0]).item()


@pytest.mark.parametrize("seen", [1.0, 0.05], ids=["all", "a twentieth"])
@pytest.mark.parametrize("n", [60, 250, 1000])
def test_few_positions_and_their_gradients_give_the_covariance_of_a_normal_density(n, seen):
    dim = 100
    truth = torch.linalg.qr(draws(dim, dim))[0] * torch.logspace(-1, 1, dim, dtype=FLOAT)
    # of each direction they see this share
    positions = seen * draws(n, dim) @ truth.mT
    gradients = positions @ torch.linalg.inv(truth @ truth.mT)
    found = fitted_to("dense", positions, gradients)
    # the control: from positions alone
    assert ratio(fitted_to("dense", positions), truth) > 2 * ratio(found, truth)
    if n > 2 * dim:
        assert ratio(found, truth) < 3
    for name, few in (("diagonal", 1), ("low_rank", 2)):
        # a coordinate's own width takes a few positions, a direction some more
        widths, mixed = torch.logspace(-2, 1, dim, dtype=FLOAT), torch.eye(dim, dtype=FLOAT)
        if name == "low_rank":
            mixed = torch.linalg.cholesky(mixed + 50 * torch.ones_like(mixed) / dim)
        factor = widths.unsqueeze(-1) * mixed
        positions = seen * draws(n, dim) @ factor.mT
        found = fitted_to(name, positions, positions @ torch.linalg.inv(factor @ factor.mT))
        assert ratio(found, factor) < 2 * few


def test_positions_and_gradients_refine_a_metric_where_they_differ_from_it():
    dim = 100
    truth = torch.linalg.qr(draws(dim, dim))[0] * torch.logspace(-2, 1, dim, dtype=FLOAT)
    narrower = truth[:, [40]] @ truth[:, [40]].mT * (1 / 50**2 - 1)
    changed = torch.linalg.cholesky(truth @ truth.mT + narrower)
    mine = TriangularMap(torch.linalg.cholesky(truth @ truth.mT))
    precision = torch.linalg.inv(changed @ changed.mT)
    for n, most in ((60, 1000), (250, 2)):
        positions = draws(n, dim) @ changed.mT
        assert ratio(mine, changed) > 2000
        assert ratio(fitted_to("dense", positions, positions @ precision, mine), changed) < most


def test_coordinates_without_a_gradient_have_the_width_of_their_positions():
    positions = draws(200, 2, 3) * torch.tensor([3.0, 1.0, 0.2], dtype=FLOAT)
    gradients = positions * torch.tensor([0.0, 1.0, torch.nan], dtype=FLOAT)
    for name in ADAPTED:
        metric = fitted_to(name, positions, gradients)
        moved = metric.apply(draws(2000, 2, 3)).std(0)
        torch.testing.assert_close(moved, positions.std(0), rtol=0.2, atol=0)


def test_the_diagonal_metric_has_the_variances_of_the_samples():
    diagonal: Any = fitted("diagonal")
    scale = diagonal.sd
    torch.testing.assert_close(scale, MIX.square().sum(-1).sqrt().expand_as(scale), rtol=0.1, atol=0)


def test_few_samples_and_constant_coordinates_still_give_a_metric():
    for name in ADAPTED:
        metric = fitted_to(name, torch.cat([draws(3, 2, 6), torch.ones(3, 2, 1, dtype=FLOAT)], -1))
        moved = metric.apply(draws(5, 2, 7))
        assert moved.isfinite().all()
        assert (moved != 0).any(-1).all()


def test_a_low_rank_metric_has_few_directions_in_many_dimensions():
    metric = fitted_to("low_rank", draws(30, 2, 400))
    assert isinstance(metric, LowRankMap)
    assert metric.directions.shape == (2, 400, MetricSettings().rank)


# ------------------------------------------------------------------------------------------------------ the integrator


@pytest.mark.parametrize("name", ADAPTED)
def test_a_trajectory_under_a_metric_run_backwards_returns_to_its_start(name):
    start, metric = leapfrog_start(), fitted(name, batch=())
    step = torch.full(start.energy.shape, 0.05, dtype=FLOAT)
    there = leapfrog(QUARTIC, start, step, 20, metric)
    back = leapfrog(QUARTIC, there._replace(momentum=-there.momentum), step, 20, metric)
    assert (there.position - start.position).abs().min() > 1e-5
    torch.testing.assert_close(back.position, start.position, rtol=0, atol=1e-6)
    torch.testing.assert_close(back.momentum, -start.momentum, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ADAPTED)
def test_a_trajectory_under_a_metric_preserves_volume(name):
    metric, start = fitted(name, batch=()), leapfrog_start()

    def flow(state):
        x, p = state.split(4)
        x, p = x[None], p[None]
        end = leapfrog(traced, PhasePoint(x, p, *traced(x)), torch.full((1,), 0.2, dtype=FLOAT), 3, metric)
        return torch.cat([end.position[0], end.momentum[0]])

    def traced(x):
        gradient, energy = torch.func.grad_and_value(lambda y: quartic(y).sum())(x)
        return energy[None], gradient, ()

    def quartic(x):
        return 0.5 * x.square().sum(-1) + 0.25 * x.square().sum(-1).square() + x[..., 0] * x[..., 1].sin()

    for i in range(3):
        jacobian = torch.func.jacrev(flow)(torch.cat([start.position[i], start.momentum[i]]))
        torch.testing.assert_close(torch.linalg.det(jacobian), torch.ones((), dtype=FLOAT), rtol=0, atol=1e-8)


class Mistaken(TriangularMap):
    """The mistake: velocity and force are not transposes of each other."""

    def transpose(self, gradient):
        return self.apply(gradient)


def energy_slope(metric):
    start, counts, errors = leapfrog_start(), (40, 80, 160, 320), []
    for n in counts:
        end = leapfrog(QUARTIC, start, torch.full(start.energy.shape, 1.0 / n, dtype=FLOAT), n, metric)
        errors.append((end.hamiltonian - start.hamiltonian).square().mean().sqrt().item())
    return slope(counts, errors)


@pytest.mark.parametrize("name", ADAPTED)
def test_the_energy_error_under_a_metric_scales_as_the_step_squared(name):
    assert 1.8 < energy_slope(fitted(name, batch=())) < 2.2


def test_control_a_force_that_is_not_the_transpose_does_not_conserve_energy():
    dense: Any = fitted("dense", batch=())
    assert energy_slope(Mistaken(dense.factor)) < 0.5


# ------------------------------------------------------------------------------------------------ what adaptation gains


class Normal(dgm.Target):
    """``N(0, covariance)``, one covariance per problem."""

    def __init__(self, covariances):
        super().__init__(None, covariances.shape[-1], tuple(covariances.shape[:-2]))
        self.precision = torch.linalg.inv(covariances)

    def energy(self, x):
        return 0.5 * (x * (self.precision @ x.unsqueeze(-1)).squeeze(-1)).sum(-1)

    def initial_draws(self, n, rng):
        return super().initial_draws(n, rng).to(FLOAT)


def scaled(wrong=1.0):
    """Coordinates of scales between 0.05 and 2, in another order for the other problem; known covariance."""
    scales = torch.tensor([[0.05, 2.0, 0.2, 1.0, 0.5], [1.0, 0.5, 2.0, 0.05, 0.2]], dtype=FLOAT)
    return normal(torch.diag_embed(scales.square()), wrong)


def correlated(wrong=1.0):
    """Scales as before, along directions that are no axes."""
    turn = torch.linalg.qr(draws(2, 5, 5))[0]
    return normal(turn @ torch.diag_embed(torch.tensor([0.05, 2.0, 0.2, 1.0, 0.5]).double().square()) @ turn.mT, wrong)


def normal(covariances, wrong):
    means = torch.zeros(covariances.shape[:-1], dtype=FLOAT)
    return gaussian_oracle(Normal(covariances), means, wrong * covariances, lambda x: x)


def run(oracle, kernel, *, chains=40, warmup=80, n=100):
    return dgm.sample(oracle.problem, kernel, chains=chains, warmup=warmup, draws=n, seed=1, progress=False)


def ess_per_gradient(oracle, draws):
    return (oracle.compare(draws).ess.min() / draws.stats["n_steps"].sum()).item()


CASES = [(scaled, "diagonal"), (correlated, "dense"), (correlated, "low_rank")]


@pytest.mark.parametrize(
    ("kernel", "make", "name"),
    [
        *[pytest.param(dgm.HMC(), *case, id=f"HMC, {case[1]}") for case in CASES],
        *[pytest.param(dgm.NUTS(), *case, id=f"NUTS, {case[1]}", marks=pytest.mark.slow) for case in CASES],
    ],
)
def test_under_an_adapted_metric_draws_have_the_right_moments(kernel, make, name):
    draws = run(make(), kernel.replace(metric=name))
    assert_agrees(make(), draws)
    assert_refuted(make(1.4), draws)
    adapted: Any = draws.kernel
    assert adapted.metric.kind == {"dense": "full"}.get(name, name)


@functools.cache
def gain(make, name, kernel=dgm.HMC):
    """Effective draws per gradient, over those of the identity."""
    return ess_per_gradient(make(), run(make(), kernel(metric=name))) / baseline(make, kernel)


@functools.cache
def baseline(make, kernel):
    return ess_per_gradient(make(), run(make(), kernel(metric="identity"), warmup=60, n=20))


@pytest.mark.parametrize(
    ("make", "name"), [pytest.param(*case, marks=marks(case[1] == "dense"), id=case[1]) for case in CASES]
)
def test_an_adapted_metric_takes_far_fewer_gradients(make, name):
    assert gain(make, name) > 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "low_rank"])
def test_it_does_for_trajectories_that_end_at_a_turn(name):
    assert gain(correlated, name, dgm.NUTS) > 4


@pytest.mark.slow
def test_control_a_diagonal_metric_gains_little_where_directions_are_no_axes():
    assert gain(correlated, "diagonal") < 0.5 * gain(correlated, "dense")


def test_the_identity_is_what_there_was_before():
    oracle = scaled()
    metric = DiagonalMap(torch.ones(2, 5, dtype=FLOAT))
    for kernel in (dgm.HMC(0.01, n_steps=4), dgm.NUTS(0.01, n_steps=7)):
        same = [run(oracle, k, chains=3, warmup=0, n=5).inputs for k in (kernel, kernel.replace(metric=IdentityMap()))]
        assert torch.equal(*same)
        torch.testing.assert_close(same[0], run(oracle, kernel.replace(metric=metric), chains=3, warmup=0, n=5).inputs)


def test_an_adapted_metric_can_be_reused():
    oracle = scaled()
    kernel: Any = run(oracle, dgm.HMC(metric="diagonal"), chains=6, n=2).kernel
    again: Any = run(oracle, kernel, chains=6, warmup=0, n=2).kernel
    assert again == kernel


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgm.HMC(metric="full"), r"HMC\(metric='full'\)"),
        (lambda: dgm.NUTS(metric=1), r"NUTS\(metric=1\)"),
        (lambda: dgm.LiftedHMC(metric="round"), r"LiftedHMC\(metric='round'\)"),
        (lambda: run(scaled(), dgm.HMC(metric=DiagonalMap(torch.ones(2, 4)))), "2, 4.*problems of 5 coordinates"),
        (lambda: run(scaled(), dgm.HMC(metric=TriangularMap(torch.eye(5)))), "give the metric's name"),
    ],
)
def test_bad_metrics_are_named(make, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        make()


def test_an_adapted_kernel_prints_shapes_in_the_place_of_numbers():
    kernel = dgm.LiftedHMC(0.5, metric=fitted("dense"))
    assert "metric=TriangularMap(factor of shape (2, 4, 4))" in repr(kernel)
    assert repr(IdentityMap()) == "IdentityMap()"
