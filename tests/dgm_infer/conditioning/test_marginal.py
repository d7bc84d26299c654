"""The density of the global inputs with additive normal noise integrated out, and the noise given them."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.conditioning.marginal import NoiseMarginal
from dgm_infer.sampling.annealed_starts import AnnealedPosterior
from tests.models import Bent, BentPairs, FreeWalk, Stretched, Walk
from tests.oracles import FLOAT, Ellipse, LinearPairs, LinearWalk, linear_gaussian_model, linear_posterior

NORMAL = torch.distributions.Normal(0.0, 1.0)
SUMS = torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 0]], dtype=FLOAT)
OVERLAPPING = torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0.5]], dtype=FLOAT)
FIRST_THREE = torch.eye(6, dtype=FLOAT)[:3]
A_STATE = torch.eye(8, dtype=FLOAT)[2:4]
# a linear model, the matrix that is observed of its outputs, and the sizes (U, m, k) of the noise
LINEAR = {
    "everything": (linear_gaussian_model, None, (6, 1, 1)),
    "some outputs": (linear_gaussian_model, FIRST_THREE, (3, 1, 1)),
    "sums": (linear_gaussian_model, SUMS, (2, 1, 2)),
    "sums that overlap": (linear_gaussian_model, OVERLAPPING, (1, 2, 6)),
    "pairs": (LinearPairs, None, (4, 2, 2)),
    "a walk": (LinearWalk, None, (4, 2, 2)),
    "a state of a walk": (LinearWalk, A_STATE, (1, 2, 8)),
}


def draws(*shape, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def observe(operator):
    if operator is FIRST_THREE:
        return dgm.pixels(torch.arange(6) < 3)
    return None if operator is None else dgm.linear(operator)


def conditioned(make, operator):
    model = make()
    y = draws(model.output_shape[0])
    values = y if operator is None or operator is FIRST_THREE else operator @ y
    return dgm.condition(model, values, observe=observe(operator)), linear_posterior(model, y, operator)


@pytest.mark.parametrize("name", LINEAR)
def test_the_marginal_of_a_linear_model_is_its_posterior(name):
    make, operator, sizes = LINEAR[name]
    problem, (mean, covariance) = conditioned(make, operator)
    marginal = problem.marginal
    assert marginal._blocks.shape == sizes
    z = mean + draws(7, len(mean))
    expected = 0.5 * ((z - mean) @ torch.linalg.inv(covariance) * (z - mean)).sum(-1)
    torch.testing.assert_close(marginal.energy(z) - marginal.energy(mean), expected)
    # and its integral the density of the values, whatever these are measured in: of jointly normal outputs J u + b
    dim, outputs = problem.dim, problem.observed.outputs
    zero = torch.zeros(dim, dtype=FLOAT)
    root = torch.func.jacrev(outputs)(zero)
    exact = torch.distributions.MultivariateNormal(outputs(zero), root @ root.mT).log_prob(problem.values)
    units = torch.linspace(0.5, 2, len(problem.values), dtype=FLOAT)
    for observed in (problem.observed, problem.observed.measured_in(units)):
        energy = NoiseMarginal.of(observed, problem.values).energy(mean)
        volume = 0.5 * (len(mean) * math.log(2 * math.pi) + torch.linalg.slogdet(covariance)[1])
        torch.testing.assert_close(volume - energy, exact)


def masks(different):
    """Two pixels of six observed, of three problems: the same of each, or not."""
    first = torch.tensor([0, 1, 2] if different else [1, 1, 1])
    return torch.nn.functional.one_hot(first, 6).bool() | torch.nn.functional.one_hot(first + 3, 6).bool()


@pytest.mark.parametrize("different", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_marginals_of_some_problems_are_those_of_all(different, dtype):
    model, y = linear_gaussian_model(), draws(3, 6)
    problem = dgm.condition(model, y, observe=dgm.pixels(masks(different)))
    whole = (problem.computed(float32=True) if dtype == torch.float32 else problem).marginal
    rows = torch.tensor([2, 0, 2, 1])
    part = whole.take(rows)
    assert part.batch_shape == (4,)
    u = draws(4, whole.dim)
    everything = u[:, None].expand(-1, 3, -1)
    for mine, all_of_them in (
        (part.energy(u), whole.energy(everything)),
        (part.gradient(u), whole.gradient(everything)),
        (part.energy_and_gradient(u)[1], whole.energy_and_gradient(everything)[1]),
    ):
        rounding = 100 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine, all_of_them[torch.arange(4), rows], rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", LINEAR)
def test_the_noise_of_a_lifted_position_has_its_conditional_distribution(name):
    make, operator, _ = LINEAR[name]
    problem, _ = conditioned(make, operator)
    marginal = problem.marginal
    u1 = draws(marginal.dim).expand(20_000, -1)
    u = marginal.lift(u1, torch.Generator().manual_seed(1))
    assert problem.constraint_error(u).max() < 1e-13
    assert torch.equal(u[..., : marginal.dim], u1)
    # u2 ~ N(-D^+ r, I - D^+ D)
    origin = torch.cat([u1[0], torch.zeros(u.shape[-1] - marginal.dim, dtype=FLOAT)])
    matrix = torch.func.jacrev(problem.constraint)(origin)[:, marginal.dim :]
    inverse = torch.linalg.pinv(matrix)
    error = u[:, marginal.dim :] + inverse @ problem.constraint(origin)
    covariance = torch.eye(len(inverse), dtype=FLOAT) - inverse @ matrix
    assert error.mean(0).abs().max() < 5 / math.sqrt(len(u))
    assert (error.mT @ error / len(u) - covariance).abs().max() < 5 * math.sqrt(2 / len(u))


def normal_log_density(u1, y):
    """``log p(u1) + log N(y | ...)`` of :class:`Bent`."""
    mean = torch.tanh(u1 @ Bent().weight.mT)
    sd = (0.3 * torch.exp(0.2 * u1[..., :1])).expand_as(mean)
    return torch.distributions.Normal(mean, sd).log_prob(y).sum(-1) - 0.5 * u1.square().sum(-1)


def test_noise_whose_width_depends_on_the_global_inputs_is_integrated_out_too():
    y, u1 = draws(3, 5), draws(4, 3, 2)
    marginal = dgm.condition(Bent(), y).marginal
    assert marginal is not None
    assert marginal._blocks is None
    energy = marginal.energy(u1)
    expected = -normal_log_density(u1, y)
    torch.testing.assert_close(energy - energy[:1], expected - expected[:1])
    # of a fixed width only the residual is differentiated: the same gradient
    for problem in (dgm.condition(linear_gaussian_model(), draws(3, 6)), dgm.condition(LinearPairs(), draws(3, 8))):
        marginal = problem.marginal
        assert marginal is not None
        assert marginal._blocks is not None
        u1 = draws(4, 3, 3)
        mine, theirs = marginal.energy_and_gradient(u1), dgm.Target.energy_and_gradient(marginal, u1)
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("make", [linear_gaussian_model, LinearPairs, Bent])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_annealed_densities_are_those_of_wider_noise_and_their_slope_in_its_width_is_the_misfit(make, dtype):
    model = make()
    y = draws(3, model.output_shape[0]).to(dtype)
    problem = dgm.condition(model, y, dtype=dtype)
    beta, u1 = torch.tensor([0.01, 0.3, 1.0], dtype=dtype), draws(4, 3, problem.marginal.dim).to(dtype)
    annealed = AnnealedPosterior(problem.marginal)
    x = torch.cat([u1, beta.expand(4, 3).unsqueeze(-1)], -1)
    energy, gradient = annealed.energy_and_gradient(x)
    # noise 1 / sqrt(beta) times as wide
    wider = NoiseMarginal.of(problem.observed.with_noise_scale(beta.rsqrt()), problem.values)
    assert wider is not None
    expected, slope = wider.energy_and_gradient(u1)
    tolerance = {"rtol": 1e-10, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(energy - energy[:1], expected - expected[:1], **tolerance)
    torch.testing.assert_close(gradient[..., :-1], slope, **tolerance)
    # of one noise a value, the noise that explains it is all there is
    if make is linear_gaussian_model:
        noise = problem.marginal.lift(u1, None)[..., problem.marginal.dim :]
        torch.testing.assert_close(gradient[..., -1], 0.5 * noise.square().sum(-1), **tolerance)


def test_control_the_width_is_not_forgotten():
    y, u1 = draws(3, 5), draws(4, 3, 2)
    marginal = dgm.condition(Bent(), y).marginal
    assert marginal is not None
    energy = marginal.energy(u1) - 5 * 0.2 * u1[..., 0]
    expected = -normal_log_density(u1, y)
    assert (energy - energy[:1] - expected + expected[:1]).abs().max() > 0.1


class Factored(dgm.WithNoise):
    """Has a factor of its global inputs, and with ``of_noise`` one of its noise."""

    of_noise = False

    def log_factor(self, u):
        return u[..., -1] if self.of_noise else u[..., 0]

    @property
    def has_log_factor(self):
        return True


class FactoredNoise(Factored):
    of_noise = True


def test_a_factor_of_the_global_inputs_belongs_to_their_density():
    fibre = dgm.condition(Factored(Ellipse(), 0.5), [2.0])
    plain = dgm.condition(dgm.WithNoise(Ellipse(), 0.5), [2.0])
    u1 = draws(6, 2)
    assert fibre.marginal is not None
    assert plain.marginal is not None
    torch.testing.assert_close(fibre.marginal.energy(u1), plain.marginal.energy(u1) - u1[..., 0])


class Clipped(dgm.WithNoise):
    """The noise is cut off where it is large."""

    def simulate(self, z, u2):
        return super().simulate(z, u2.clamp(-0.5, 0.5))


@pytest.mark.parametrize(
    "model",
    [
        Ellipse(),
        Stretched(),
        BentPairs(),
        Walk(),
        FreeWalk(),
        FactoredNoise(Ellipse(), 0.5),
        Clipped(Ellipse(), 0.5),
    ],
    ids=lambda model: type(model).__name__,
)
def test_other_noise_does_not_integrate_out(model):
    fibre = dgm.condition(model, model(draws(model.input_density.dim)))
    assert fibre.marginal is None
    with pytest.raises(
        dgm.errors.ArgumentError, match=f"additive normal noise, which this one of a {type(model).__name__}"
    ):
        dgm.LiftedHMC().check(fibre)


def three_draws(a, b):
    return a + 0.5 * b + 0.5 * torch.randn(1)


@pytest.mark.parametrize("known", [True, False])
def test_one_output_of_three_draws_has_noise_only_where_two_are_latents(known):
    if known:
        model = dgm.from_simulator(lambda z: three_draws(z["a"], z["b"]), {"a": NORMAL, "b": NORMAL})
    else:
        model = dgm.from_simulator(lambda: three_draws(torch.randn(1), torch.randn(1)), None)
    fibre = dgm.condition(model, [1.5])
    if known:
        assert fibre.marginal is not None
        assert fibre.marginal.dim == 2
    else:
        # everything is local
        assert fibre.units is not None
        assert fibre.units.n_global == 0
        assert fibre.marginal is None
    draws = dgm.sample(fibre, chains=64, warmup=20, draws=20, seed=1, progress=False)
    assert draws.inputs is not None
    found = draws.inputs[..., 0]
    # a | y is normal with mean y / 1.5 and variance 1/3
    means = found.mean(1)
    assert abs(means.mean() - 1) < 5 * means.std() / 8
    assert found.std() == pytest.approx(3**-0.5, rel=0.1)


class Validated(dgm.WithNoise):
    """Raises where its mean is not a number, as distributions that validate their parameters do."""

    def simulate(self, z, u2):
        x = super().simulate(z, u2)
        if x.isnan().any():
            raise ValueError("not a number")
        return x


def test_a_trajectory_that_diverged_is_not_an_exception():
    marginal = dgm.condition(Validated(Ellipse(), 0.5), [2.0]).marginal
    assert marginal is not None
    energy, gradient = marginal.energy_and_gradient(torch.tensor([[0.5, 0.2], [math.nan, 1.0]], dtype=FLOAT))
    assert energy.isnan().tolist() == [False, True]
    assert gradient[0].isfinite().all()


def test_a_nonlinear_observation_of_noise_does_not_integrate_out():
    fibre = dgm.condition(linear_gaussian_model(), [2.0], observe=lambda x: x.square().sum(-1, keepdim=True))
    assert fibre.marginal is None


def test_the_test_of_the_noise_leaves_random_numbers_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    _ = dgm.condition(linear_gaussian_model(), draws(6)).marginal
    assert torch.equal(torch.get_rng_state(), before)
