"""LiftedHMC: posteriors that are known, on the fibre, as the other routes draw them."""

from typing import Any

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import Status
from dgm_infer.kernels.metrics import fitted
from dgm_infer.sampling import adaptation
from tests.models import Bent, linear_vae
from tests.oracles import (
    FLOAT,
    LinearPairs,
    LinearWalk,
    Oracle,
    assert_agrees,
    assert_refuted,
    linear,
    linear_gaussian,
    linear_gaussian_model,
)
from tests.quick import cases

MASKS = torch.tensor([[True, True, False, True, False, False], [False, True, True, True, False, False]])


def run(problem, kernel=None, *, chains=100, warmup=80, draws=40, seed=1):
    kernel = kernel or dgm.LiftedHMC()
    return dgm.sample(problem, kernel, chains=chains, warmup=warmup, draws=draws, seed=seed, progress=False)


def outputs(n):
    return torch.randn(n, generator=torch.Generator().manual_seed(3), dtype=FLOAT)


def overlapping_sums():
    matrix = torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0.5]], dtype=FLOAT)
    oracle = linear(linear_gaussian_model(), outputs(6), operator=matrix)
    return oracle, dgm.condition(linear_gaussian_model(), matrix @ outputs(6), observe=dgm.linear(matrix))


def with_problem(oracle):
    return oracle, oracle.problem


CASES = {
    "masks": lambda: with_problem(linear_gaussian(masks=MASKS, problems=(2,))),
    "sums that overlap": overlapping_sums,
    "pairs": lambda: with_problem(linear(LinearPairs(), outputs(8))),
    "a walk": lambda: with_problem(linear(LinearWalk(), outputs(8))),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", cases(CASES, quick=()))
def test_draws_have_it_under_the_metric_of_their_curvature(make):
    oracle, problem = make()
    assert_agrees(oracle, run(problem, dgm.LiftedHMC(metric="curvature")))


@pytest.mark.parametrize("make", cases(CASES, quick=("pairs",)))
def test_draws_have_the_exact_posterior_on_the_fibre(make):
    oracle, problem = make()
    draws = run(problem)
    assert_agrees(oracle, draws)
    assert draws.stats["constraint_error"].max() < 1e-12
    assert problem.constraint_error(draws.inputs.movedim(1, 0)).max() < 1e-12
    assert draws.inputs.shape == (100, 40, *problem.batch_shape, problem.dim)


# of another model, which no step makes accepted more often
@pytest.mark.filterwarnings("ignore:warm-up stopped shrinking steps")
def test_the_law_is_that_of_the_energies_whatever_the_gradients_are():
    model = linear_gaussian_model()
    oracle = linear_gaussian(model=model)
    other = linear_gaussian(model=generators.LinearGaussian(1.1 * model.weight, model.bias, model.sd.item()))
    kernel = dgm.LiftedHMC(float32_gradients=True)
    draws = run(oracle.problem, kernel)
    assert_agrees(oracle, draws)
    # the control: gradients of another model were used, and moved the chains elsewhere
    coarse = linear_gaussian(model=model).problem.computed(float32=True)
    coarse._coarse = other.problem.observed.to(torch.float32)
    wrong = run(coarse, kernel)
    assert_agrees(oracle, wrong)
    assert not torch.allclose(wrong.inputs, draws.inputs)


class Narrow(dgm.GenerativeModel):
    """Twelve linear outputs of four latents, one of which they hardly show."""

    input_density = dgm.StandardNormal(4)
    output_shape = (12,)

    def observed(self, u):
        weight = torch.randn(4, 12, generator=torch.Generator().manual_seed(9), dtype=FLOAT)
        return (u * torch.tensor([1.0, 0.3, 0.1, 0.01]).to(u)) @ weight.to(u)


def narrow():
    y = Narrow().observed(torch.tensor([0.5, -1.0, 0.3, 1.0], dtype=FLOAT))
    return dgm.condition(dgm.WithNoise(Narrow(), 0.01), torch.stack([y, 0.5 * y]))


@pytest.mark.parametrize("float32", [False, True])
def test_curvature_is_the_covariance_of_a_linear_model(float32):
    fibre = narrow()
    kernel = dgm.LiftedHMC(metric="curvature", float32_gradients=float32)
    position = fibre.start(3, torch.Generator().manual_seed(1))
    metric: Any = kernel.metric_at(fibre, position)
    factor = metric.factor
    hessian: Any = torch.autograd.functional.hessian(lambda x: fibre.marginal.energy(x).sum(), position[0, :, :4])
    covariance = torch.stack([hessian[i, :, i, :].inverse() for i in range(2)])
    torch.testing.assert_close(factor @ factor.mT, covariance, rtol=1e-3 if float32 else 1e-9, atol=0)
    assert torch.equal(factor, factor.tril())


class Wide(dgm.GenerativeModel):
    """Sixty linear outputs of forty latents, of widths from 1 to 0.01."""

    input_density = dgm.StandardNormal(40)
    output_shape = (60,)

    def observed(self, u):
        weight = torch.randn(40, 60, generator=torch.Generator().manual_seed(9), dtype=FLOAT)
        return (u * torch.logspace(0, -2, 40, dtype=FLOAT).to(u)) @ weight.to(u)


def test_a_dense_metric_begins_with_it_and_few_draws_hardly_change_it(monkeypatch):
    fibre = dgm.condition(dgm.WithNoise(Wide(), 0.05), Wide().observed(torch.ones(1, 40, dtype=FLOAT))[0])
    exact: Any = dgm.LiftedHMC(metric="curvature").metric_at(fibre, fibre.start(1, torch.Generator().manual_seed(1)))

    def condition_number():
        kernel: Any = run(fibre, dgm.LiftedHMC(), chains=4, warmup=40, draws=1).kernel
        white = torch.linalg.solve_triangular(exact.factor, kernel.metric.factor, upper=False)
        return torch.linalg.cond(white) ** 2

    assert condition_number() < 10
    # the control: a metric of the positions alone
    monkeypatch.setattr(dgm.LiftedHMC, "metric_at", lambda *arguments: None)
    monkeypatch.setattr(adaptation, "fitted", lambda name, positions, *others: fitted(name, positions))
    assert condition_number() > 100


def test_it_is_right_from_the_start_where_many_chains_would_tell_it_as_well():
    # Fashion-MNIST needed 300 iterations of warm-up for what it now has after 100
    position = narrow().start(64, torch.Generator().manual_seed(1))
    dense, exact = (dgm.LiftedHMC(metric=name).metric_at(narrow(), position) for name in ("dense", "curvature"))
    assert isinstance(dense, type(exact))
    torch.testing.assert_close(vars(dense)["factor"], vars(exact)["factor"])
    assert dgm.LiftedHMC(metric="identity").metric_at(narrow(), position) is None


def test_of_few_precise_values_it_is_a_metric_in_float32_too():
    y = Wide().observed(torch.ones(1, 40, dtype=FLOAT))[0].float()
    few = dgm.pixels(torch.arange(60) < 10)
    fibre = dgm.condition(dgm.WithNoise(Wide(), 1e-4), y, observe=few, dtype=torch.float32)
    position = fibre.start(2, torch.Generator().manual_seed(1))
    metric: Any = dgm.LiftedHMC().metric_at(fibre, position)
    assert metric.factor.dtype == torch.float32
    # thirty directions in which the prior is left as it is, ten of the width of the noise
    widths = torch.linalg.svdvals(metric.factor.double())
    assert ((widths > 0.99) & (widths < 1.01)).sum() == 30
    assert (widths < 1e-2).sum() == 10


def test_with_it_chains_cross_a_narrow_posterior_in_a_few_steps():
    with_it, without = (
        run(narrow(), dgm.LiftedHMC(metric=metric), chains=8, warmup=40, draws=20)
        for metric in ("curvature", "identity")
    )
    assert with_it.stats["n_steps"].double().mean() < 5
    # along its widest direction
    moved, other = (draws.inputs[..., 3].diff(dim=1).abs().mean() for draws in (with_it, without))
    assert moved > 5 * other


def test_float32_gradients_are_those_of_the_model_to_rounding_and_energies_exactly_its_own():
    fibre = linear_gaussian(masks=MASKS, problems=(2,)).problem
    exact, coarse = fibre.marginal, fibre.computed(float32=True).marginal
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(3), dtype=FLOAT)
    energy, gradient = exact.energy_and_gradient(x)
    mine, rounded = coarse.energy_and_gradient(x)
    torch.testing.assert_close(mine, energy, rtol=1e-14, atol=0)
    torch.testing.assert_close(rounded, gradient, rtol=1e-4, atol=1e-5)
    assert not torch.equal(rounded, gradient)
    assert torch.equal(coarse.gradient(x), rounded)
    x[1, 0, 0] = torch.nan
    mine, _ = coarse.energy_and_gradient(x)
    assert mine[1, 0].isnan()
    assert mine.isnan().sum() == 1


def test_gradients_of_convolutions_are_float32_unless_told_and_never_those_of_trees():
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Unflatten(1, (2, 2, 2)), torch.nn.Conv2d(2, 2, 1)).eval()
    fibre = dgm.condition(generators.from_module(net, 4, noise=0.5), torch.zeros(2, 2, 2))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3), dtype=FLOAT)
    exact, coarse = fibre.marginal.gradient(x), fibre.computed(float32=True).marginal.gradient(x)
    assert not torch.equal(exact, coarse)

    def gradient(**settings):
        return dgm.LiftedHMC(**settings).init(fibre, fibre.marginal.lift(x, None)).marginal.gradient

    assert torch.equal(gradient(), coarse)
    assert torch.equal(gradient(float32_gradients=False), exact)
    assert torch.equal(gradient(trajectory="nuts"), exact)


@pytest.mark.slow
@pytest.mark.parametrize("trajectory", ["hmc", "nuts"])
def test_either_trajectory_has_it_and_other_data_have_another(trajectory):
    oracle = linear_gaussian()
    draws = run(oracle.problem, dgm.LiftedHMC(trajectory=trajectory, metric="identity"))
    assert_agrees(oracle, draws)
    assert_refuted(linear_gaussian(model=linear_gaussian_model(sd=0.7)), draws)


def bent(y, mask) -> Oracle:
    """All inputs of :class:`Bent`, noise of a width that depends on u1, by a sum over a grid of u1."""
    model, seen = Bent(), mask.nonzero()[:, 0]
    side = torch.linspace(-6, 6, 600, dtype=FLOAT)
    u1 = torch.cartesian_prod(side, side)
    mean, sd = torch.tanh(u1 @ model.weight.mT)[:, seen], 0.3 * torch.exp(0.2 * u1[:, :1])
    u2 = (y[seen] - mean) / sd
    weight = (-0.5 * (u1.square().sum(-1) + u2.square().sum(-1)) - len(seen) * sd[:, 0].log()).softmax(0)

    def statistics(u):
        return torch.cat([u, u.square(), u[..., :2] * u[..., -2:]], -1)

    fibre = dgm.condition(model, y, observe=dgm.pixels(mask))
    return Oracle(fibre, statistics, weight @ statistics(torch.cat([u1, u2], -1)))


@pytest.mark.slow
def test_noise_of_a_varying_width_has_its_exact_posterior():
    y = torch.tensor([0.5, -0.3, 0.8, 0.0, -0.6], dtype=FLOAT)
    mask = torch.tensor([True, True, True, False, False])
    oracle = bent(y, mask)
    draws = run(oracle.problem, chains=200)
    assert_agrees(oracle, draws)
    assert_refuted(bent(y + 0.2, mask), draws)


def test_hidden_outputs_and_completions_are_generated():
    model = linear_gaussian_model()
    y, mask = outputs(6), torch.arange(6) < 3
    fibre = dgm.condition(model, y, observe=dgm.pixels(mask))
    draws = run(fibre, chains=50, draws=20)
    assert draws.latents.keys() == {"z"}
    x = draws.generate(seed=2)
    assert torch.equal(x[..., :3], y[:3].expand(50, 20, 3))
    noise = x[..., 3:] - draws.latents["z"] @ model.weight[3:].mT - model.bias[3:]
    assert (noise.std() - 0.5).abs() < 0.05


def test_on_an_auto_encoder_it_is_the_posterior_of_the_latents():
    vae, _weight = linear_vae()
    x = outputs(4)
    fibre = dgm.condition(vae, x)
    z = torch.randn(6, 2, generator=torch.Generator().manual_seed(4), dtype=FLOAT)
    latent = generators.LatentPosterior(vae.decoder.double(), x, dgm.StandardNormal(2))
    assert fibre.marginal is not None
    difference = fibre.marginal.energy(z) - latent.energy(z)
    torch.testing.assert_close(difference, difference[:1].expand(6))


class Cliff(dgm.WithNoise):
    """Has the declared noise only below 1.5, beyond which it is cubed: no prior draw of the test goes there."""

    def simulate(self, z, u2):
        return self.model.observed(z["u"]) + self.sd * torch.where(z["u"][..., :1] > 4.5, u2**3, u2)


class Line(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return u[..., :1] + u[..., 1:]


def test_where_the_noise_is_not_what_it_seemed_positions_are_rejected():
    fibre = dgm.condition(Cliff(Line(), 0.5), [9.0])
    kernel = dgm.LiftedHMC(0.4, n_steps=5)
    rng = torch.Generator().manual_seed(1)
    assert fibre.marginal is not None
    state = kernel.init(fibre, fibre.marginal.lift(torch.full((200, 2), 4.4, dtype=FLOAT), rng))
    failed = 0
    for _ in range(20):
        state, info = kernel.step(fibre, state, rng)
        failed += int((info.status == Status.PROJECTION_FAILED).sum())
        assert (state.position[..., 0] <= 4.5).all()
        assert (fibre.constraint_error(state.position) < 1e-12).all()
    assert failed > 0


def test_warm_up_tunes_step_length_and_metric_per_problem():
    oracle = linear_gaussian(masks=MASKS, problems=(2,))
    kernel: Any = run(oracle.problem, chains=8, draws=2).kernel
    assert kernel.step_size.shape == kernel.trajectory_length.shape == (2,)
    assert kernel.metric.factor.shape == (2, 3, 3)
    assert dgm.LiftedHMC(trajectory="nuts").tuning(oracle.problem).trajectory_length is False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgm.LiftedHMC(trajectory="line"), r"LiftedHMC\(trajectory='line'\)"),
        (lambda: dgm.LiftedHMC(trajectory="nuts", trajectory_length=1.0), "trajectory_length.*omit it"),
        (lambda: dgm.LiftedHMC(step_size=-1.0), r"LiftedHMC\(step_size=-1\)"),
        (lambda: dgm.LiftedHMC(tolerance=0.0), r"LiftedHMC\(tolerance=0"),
        (lambda: dgm.LiftedHMC(trajectory="nuts", float32_gradients=True), "trees need the energy of every point"),
        (lambda: dgm.LiftedHMC(float32_gradients=1), "float32_gradients=1"),
        (lambda: dgm.LiftedHMC(metric="bent"), "'low_rank' or 'curvature'"),
        (lambda: run(dgm.Target(lambda x: x.square().sum(-1), 2)), "not a Target: use HMC or NUTS"),
        (
            lambda: run(dgm.condition(Line(), [1.0])),
            "a Line does not have: use ConstrainedHMC, or give the model noise",
        ),
        (lambda: run(linear_gaussian().problem, dgm.LiftedHMC(torch.ones(3))), r"LiftedHMC\(step_size of shape \(3,\)"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        make()
