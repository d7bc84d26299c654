"""Flows as functions of noise: steps against closed forms, the inverse, densities, latents, and what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, CheckpointError, ModelError
from generators import FlowGenerator, LatentFlow, VelocityMLP, VelocityUNet
from tests.files import reference_folder
from trainers import MNISTData
from trainers.adversarial import energy_distance

SOLVERS = ["euler", "midpoint", "heun"]


def bent(dim=3, seed=0, times=1, spread=0.4):
    """A small network whose velocities are neither zero nor constant, in float64."""
    torch.manual_seed(seed)
    net = VelocityMLP(dim, 16, 2, times=times).double()
    nn.init.normal_(net.last.weight, std=spread)
    return net


def by_autograd(flow, u):
    """``log p(g(u))`` from the determinant of the whole map."""
    jacobian = torch.func.vmap(torch.func.jacrev(flow.observed))(u)
    return Normal(0.0, 1.0).log_prob(u).sum(-1) - torch.linalg.slogdet(jacobian).logabsdet


# growth of one step of size h of dy/dt = a y
GROWTH = {
    "euler": lambda z: 1 + z,
    "midpoint": lambda z: 1 + z + z**2 / 2,
    "heun": lambda z: 1 + z + z**2 / 2,
}


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_linear_velocity_grows_as_its_solver_has_it(solver):
    flow = FlowGenerator(lambda x, t: 0.7 * x, 2, steps=5, solver=solver, loc=1.0, scale=2.0)
    u = torch.randn(4, 2, dtype=torch.float64)
    torch.testing.assert_close(flow(u), 1 + 2 * GROWTH[solver](0.7 / 5) ** 5 * u)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2)])
def test_solvers_have_their_order(solver, order):
    """``dy/dt = t y`` from y(0) = 1 ends in exp(1/2)."""

    def error(steps):
        flow = FlowGenerator(lambda x, t: t.unsqueeze(-1) * x, 1, steps=steps, solver=solver)
        return abs(flow(torch.ones(1, dtype=torch.float64)).item() - math.exp(0.5))

    assert error(20) / error(40) == pytest.approx(2**order, rel=0.1)


def test_an_average_velocity_takes_one_step():
    """``w(x, t, s) = x (exp(s - t) - 1) / (s - t)`` is the average velocity of dy/dt = y."""

    def average(x, t, s):
        return x * (torch.expm1(s - t) / (s - t)).unsqueeze(-1)

    for steps in (1, 3):
        flow = FlowGenerator(average, 2, steps=steps, solver="average")
        torch.testing.assert_close(flow(torch.ones(2, dtype=torch.float64)), torch.full((2,), math.e).double())


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_density_is_that_of_autograds_determinant_and_the_inverse_returns(solver, steps):
    flow = FlowGenerator(bent(), 3, steps=steps, solver=solver, loc=0.3, scale=2.0)
    u = torch.randn(2, 5, 3, dtype=torch.float64)
    x = flow(u)
    torch.testing.assert_close(flow.inverse(x), u, rtol=0, atol=1e-9)
    found = flow.log_prob(x)
    assert found.shape == (2, 5)
    torch.testing.assert_close(found.flatten(), by_autograd(flow, u.flatten(0, 1)), rtol=0, atol=1e-8)


def test_control_the_density_of_another_number_of_steps_differs():
    """The map that is sampled, not the equation that it approximates."""
    four, eight = (FlowGenerator(bent(), 3, steps=steps, solver="euler") for steps in (4, 8))
    x = four(torch.randn(5, 3, dtype=torch.float64))
    assert ((four.log_prob(x) - eight.log_prob(x)).abs() > 1e-4).any()


def test_a_step_that_contracts_is_inverted_by_newton():
    """The last steps of a flow towards data divide distances: fixed points do not converge there."""
    flow = FlowGenerator(lambda x, t: -0.97 * x + 0.01 * x.sin(), 2, steps=1, solver="euler")
    u = torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(flow.inverse(flow(u)), u, rtol=0, atol=1e-8)


def test_images_that_no_noise_leads_to_are_named():
    flow = FlowGenerator(lambda x, t: x.tanh() - x, 2, steps=1, solver="euler")
    with pytest.raises(ModelError, match="no noise was found for which step 1 of 1 gives 1 of these 2 outputs"):
        flow.inverse(torch.tensor([[0.5, 0.0], [1.5, 0.0]], dtype=torch.float64))


def test_the_estimated_density_covers_the_exact_one():
    flow = FlowGenerator(bent(12), 12, steps=4)
    x = flow(torch.randn(40, 12, dtype=torch.float64))
    found = flow.estimated_log_prob(x, probes=8, seed=1)
    scores = (found.log_prob - flow.log_prob(x)) / found.std_error
    # t with 7 degrees of freedom: sd 1.18
    assert scores.abs().max() < 6
    assert scores.square().mean().sqrt() == pytest.approx(1.18, abs=0.4)
    assert (found.std_error < 1).all()


@pytest.mark.slow
def test_the_evidence_at_small_noise_is_the_density():
    """``log p(y)``, ``y = x + sd n``, differs from that of x by its curvature times sd^2 / 2: of the order of 1e-4."""
    flow = FlowGenerator(bent(2, spread=0.2), 2, steps=2)
    x = flow(torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).detach()
    estimate = dgm.log_evidence(dgm.condition(flow, x, noise=0.01), chains=8, seed=1, progress=False)
    assert (estimate.std_error < 0.05).all()
    exact = flow.log_prob(x)
    assert ((estimate.log_z - exact).abs() < 5 * estimate.std_error + 1e-3).all()
    # the density of another flow is told apart
    other = FlowGenerator(bent(2, spread=0.2), 2, steps=2, scale=1.2).log_prob(x)
    assert not ((estimate.log_z - other).abs() < 5 * estimate.std_error + 1e-3).all()


def test_flows_of_images_keep_their_shape():
    torch.manual_seed(0)
    net = VelocityUNet((5, 6), (4, 6), middle=8, width=8)
    nn.init.normal_(net.last.weight, std=0.1)
    flow = FlowGenerator(net, (5, 6), steps=2)
    u = torch.randn(3, 2, 30)
    assert flow(u).shape == (3, 2, 30)
    torch.testing.assert_close(flow(u)[1, 1], flow(u[1, 1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(flow.inverse(flow(u).unflatten(-1, (5, 6))), u, atol=1e-3, rtol=0)


def test_half_of_an_image_is_conditioned_on_exactly():
    flow = FlowGenerator(bent(4), 4, steps=2)
    x = flow(torch.randn(4, dtype=torch.float64)).detach()
    draws = dgm.sample(
        dgm.condition(flow, x, observe=dgm.pixels([True, True, False, False])), chains=4, warmup=50, draws=20, seed=1
    )
    torch.testing.assert_close(flow(draws.inputs)[..., :2].detach(), x[:2].expand(4, 20, 2), rtol=0, atol=1e-7)


def test_a_flow_is_stored_with_its_network(tmp_path):
    flow = FlowGenerator(VelocityUNet((4, 4), (4,), middle=4, width=4), (4, 4), steps=3, solver="heun", loc=0.5)
    nn.init.normal_(flow.velocity.last.weight)
    other = generators.load(generators.save(flow, tmp_path / "flow"))
    u = torch.randn(2, 16)
    assert torch.equal(other(u), flow(u))
    with pytest.raises(CheckpointError, match="a Timeless cannot be stored"):
        generators.save(FlowGenerator(Timeless(), 4), tmp_path / "other")


class Timeless(nn.Linear):
    """A velocity of another class than those that a file can describe."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, input, t):
        return super().forward(input)


def latent_flow(kind=generators.GaussianVAE):
    torch.manual_seed(0)
    vae = kind(2, (3, 4), (8,))
    return vae, LatentFlow(vae, FlowGenerator(bent(2).float(), 2, steps=3))


@pytest.mark.parametrize("kind", [generators.GaussianVAE, generators.BernoulliVAE, generators.CensoredVAE])
def test_a_latent_flow_is_the_decoder_after_the_flow(kind, tmp_path):
    vae, model = latent_flow(kind)
    u = torch.randn(5, 2)
    torch.testing.assert_close(model.decoder(u).mean, vae.decoder(model.flow(u)).mean)
    assert dgm.check(model)
    other = generators.load(generators.save(model, tmp_path / "flow"))
    assert isinstance(other, LatentFlow)
    assert torch.equal(other.decoder(u).mean, model.decoder(u).mean)
    images = model.generate(2, 1).images
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[:2] = True
    draws = dgm.sample(dgm.condition(model, images, observe=dgm.pixels(mask)), chains=2, warmup=5, draws=4, seed=1)
    assert torch.equal(draws.generate(seed=1)[..., mask], images[..., mask].expand(2, 4, 2, 8).to(draws.inputs.dtype))


@pytest.mark.parametrize(("gain", "rank"), [(False, 3), (True, 8)])
def test_a_gain_lets_a_narrow_network_remove_noise_of_all_entries(gain, rank):
    torch.manual_seed(0)
    net = VelocityMLP(8, 3, 1, gain=gain).double()
    torch.nn.init.normal_(net.last.weight)
    slopes = torch.func.jacrev(lambda x: net(x, torch.tensor([0.5]).double()))(torch.randn(1, 8).double())
    assert torch.linalg.matrix_rank(slopes[0, :, 0]) == rank  # type: ignore[index]


def test_the_shipped_flow_is_nearer_to_the_latents_of_images_than_the_prior_of_its_vae():
    reference_folder("mnist_10k")
    model = generators.load("mnist_latent_flow")
    assert isinstance(model, LatentFlow)
    images = MNISTData().training.images
    torch.manual_seed(0)
    with torch.no_grad():
        latents = model.encoded(images[torch.randperm(len(images))[:1000]].flatten(1))
        u = torch.randn(1000, model.prior.dim)
        distances = [energy_distance(latents, z).item() for z in (model.flow(u), u)]
    assert distances[0] < 0.5 * distances[1]


def _mixed(**options) -> float:
    """Largest R-hat of half a digit of 784 pixels under the shipped flow of 24 latents.

    Of 8 x 240 draws: of 60 it is 1.02 to 1.06 over seeds of chains that mix.
    """
    model = generators.load("mnist_latent_flow")
    mask = torch.zeros(28, 28, dtype=torch.bool)
    mask[:14] = True
    problem = dgm.condition(model, model.generate(1, seed=3).images[0], observe=dgm.pixels(mask))
    draws = dgm.sample(problem, **options, chains=8, draws=240, seed=1, progress=False)
    return draws.summary()["r_hat"].to_numpy(float).max()


@pytest.mark.slow
def test_half_a_digit_under_the_latent_flow_is_sampled_without_settings():
    assert _mixed() < 1.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_control_chains_from_prior_draws_do_not_mix_there():
    start = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))
    assert _mixed(kernel=dgm.HMC(n_steps=2), initial=start, warmup=80) > 1.2


def test_the_shipped_flow_in_pixels_is_nearer_to_digits_than_a_vae():
    reference_folder("mnist_10k")
    flow = generators.load("mnist_flow")
    assert isinstance(flow, FlowGenerator)
    real = MNISTData().validation.images.flatten(1)
    distances = [
        energy_distance(real, generators.load(name).generate(500, seed=1).images.flatten(1)).item()
        for name in ("mnist_flow", "mnist_vae")
    ]
    assert distances[0] < 0.8 * distances[1]
    x = flow.generate(3, seed=2).images
    torch.testing.assert_close(flow(flow.inverse(x)), x.flatten(1), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FlowGenerator(3, 2), ArgumentError, "velocity=3"),
        (lambda: FlowGenerator(bent(2), 2, steps=0), ArgumentError, "steps=0"),
        (lambda: FlowGenerator(bent(2), 2, solver="rk4"), ArgumentError, "solver='rk4'"),
        (lambda: FlowGenerator(bent(2), 2, scale=0.0), ArgumentError, "scale=0.0"),
        (lambda: FlowGenerator(bent(2).half(), 2), ArgumentError, r"16 bits, torch.float16.*velocity.float\(\)"),
        (lambda: FlowGenerator(lambda x, t: x * t, 2), ModelError, r"for x \(3, 2\) and t \(3,\).*t.view\(-1, 1\)"),
        (lambda: FlowGenerator(lambda x, t: x.sum(-1), 2), ModelError, "returns shape"),
        (lambda: FlowGenerator(lambda x, t: {"x": x}, 2), ModelError, "returns type dict"),
        (lambda: FlowGenerator(Indexed(), 2), ModelError, r"\(1000 \* t\).long\(\)"),
        (lambda: LatentFlow(latent_flow()[0], FlowGenerator(bent(3), 3)), ArgumentError, r"must be \(2,\)"),
        (lambda: LatentFlow(generators.GAN(2, (8, 8)), FlowGenerator(bent(2), 2)), ModelError, "has no decoder"),
        (lambda: FlowGenerator(bent(2), 2).inverse(torch.zeros(3)), ArgumentError, r"expected \[..., 2\]"),
    ],
    ids=range(12),
)
def test_what_does_not_fit_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Indexed(nn.Module):
    """A network of whole timesteps."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 2)

    def forward(self, x, t):
        return x + self.table(t)
