"""Where chains begin: fibres with wider noise, and the annealing of noise and of likelihoods."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import dgm_infer as dgm
from dgm_infer.kernels import Info
from dgm_infer.sampling import allocation, annealed_starts
from dgm_infer.sampling.annealed_starts import _next_beta, _survivors, anneal_noise
from generators import LatentPosterior
from tests.kernels import Place
from tests.models import Images

FLOAT = torch.float64


class FalseMode(dgm.GenerativeModel):
    """``x_i = z^3 - 3 z``: an output of 3 comes from z = 2.1 alone, but half the prior leads to -1, where it is 2."""

    input_density = dgm.StandardNormal(1)

    def observed(self, u):
        return (u.pow(3) - 3 * u).expand(*u.shape[:-1], 20)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def false_mode(sd=0.1):
    noise = torch.randn(20, generator=rng(8), dtype=FLOAT)
    return dgm.condition(dgm.WithNoise(FalseMode(), sd=sd), 3 + 0.1 * noise)


def test_a_fibre_with_scaled_noise_is_that_of_the_model_with_wider_noise():
    widened, wider = false_mode(sd=0.125).with_noise_scale(torch.tensor(4.0, dtype=FLOAT)), false_mode(sd=0.5)
    u = torch.randn(5, 21, generator=rng(), dtype=FLOAT)
    assert torch.allclose(widened.constraint(u), wider.constraint(u), atol=1e-12)
    for ours, theirs in zip(widened.linearise(u)[1:], wider.linearise(u)[1:], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10)


@pytest.mark.parametrize("observe", ["everything", "a mask a problem"])
def test_every_problem_has_its_own_noise_scale(observe):
    model = Images().eval()
    images = torch.rand(3, 2, 3, generator=rng())
    mask = torch.ones(2, 3, dtype=torch.bool)
    if observe != "everything":
        mask = torch.stack([mask.index_fill(1, torch.tensor(i), False) for i in range(3)])
    problem = dgm.condition(model, images, observe=dgm.pixels(mask))
    scale = torch.tensor([1.0, 2.0, 5.0], dtype=FLOAT)
    u = torch.randn(4, 3, problem.dim, generator=rng(), dtype=FLOAT)
    u1, u2 = model.split(u)
    scaled = torch.cat([u1, scale.unsqueeze(-1) * u2], -1)
    widened = problem.with_noise_scale(scale)
    assert torch.allclose(widened.constraint(u), problem.constraint(scaled), atol=1e-12)
    rows = widened.rows(4)
    assert torch.allclose(rows.constraint(u.flatten(0, 1)), problem.constraint(scaled).flatten(0, 1), atol=1e-12)
    assert problem.observed.noise_scale is None


def test_increments_leave_half_the_points_in_effect():
    square = torch.rand(64, 3, generator=rng(), dtype=FLOAT) * torch.tensor([1.0, 1e3, 1e12], dtype=FLOAT)
    beta = torch.zeros(3, dtype=FLOAT)
    nearer = _next_beta(beta, square)
    assert nearer[0] == 1
    weight = torch.softmax(-0.5 * nearer * square, 0)
    assert torch.allclose(1 / weight.square().sum(0)[1:], torch.tensor(32.0, dtype=FLOAT), rtol=1e-3)
    assert (_next_beta(nearer, square)[1:] > nearer[1:]).all()


def test_lost_points_go_on_from_others_and_the_rest_from_themselves():
    log_weight = torch.zeros(6, 2, dtype=FLOAT)
    log_weight[1, 0], log_weight[4, 0], log_weight[2, 0] = -60, torch.nan, -40
    source = _survivors(log_weight, rng())
    assert source[:, 1].tolist() == list(range(6))
    assert source[[0, 2, 3, 5], 0].tolist() == [0, 2, 3, 5]
    assert not {1, 4} & set(source[:, 0].tolist())


@pytest.mark.slow
def test_annealed_chains_leave_false_modes_and_others_stay_in_them():
    problem = false_mode()
    kernel = dgm.ConstrainedHMC(n_steps=3)
    warm = dgm.sample(problem, kernel, chains=32, warmup=20, draws=5, seed=3, progress=False)
    assert (warm.latents["u"] > 1.9).all()
    assert warm.ancestors is not None
    assert warm.ancestors.shape == (32,)
    # control: the same warm-up from the same prior draws
    start = problem.start(32, rng(3))
    cold = dgm.sample(problem, kernel, chains=32, warmup=20, draws=5, seed=3, initial=start, progress=False)
    assert 0.1 < (cold.latents["u"][:, -1] < 0).double().mean() < 0.9
    assert cold.ancestors is None


@pytest.mark.slow
def test_annealed_points_lie_on_the_fibre_where_its_bulk_is():
    problem = false_mode()
    kernel = dgm.ConstrainedHMC()
    start = anneal_noise(problem, kernel, 64, rng(), tolerance=1e-8, target_acceptance=0.8)
    assert (problem.constraint_error(start.position) < 3e-8).all()
    # 20 units of noise, and one input that they pin down
    square = start.position[:, 1:].square().sum(-1)
    expected = problem.values.sub(3).div(0.1).square().sum()
    assert abs(square.mean() - expected) < 5


def no_jacobians(*arguments):
    raise AssertionError("a Jacobian of the fibre")


def test_additive_noise_is_annealed_without_jacobians(monkeypatch):
    problem, settings = false_mode(), {"tolerance": 1e-8, "target_acceptance": 0.8}
    monkeypatch.setattr(dgm.Fibre, "jacobian", no_jacobians)
    monkeypatch.setattr(dgm.Fibre, "linearise", no_jacobians)
    start = anneal_noise(problem, dgm.ConstrainedHMC(), 4, rng(), **settings)
    assert (start.position[:, 0] > 1.9).all()
    # control: noise that is not additive, where the kernel's own moves are what there is
    problem.__dict__["marginal"] = None
    with pytest.raises(AssertionError, match="a Jacobian"):
        anneal_noise(problem, dgm.ConstrainedHMC(), 4, rng(), **settings)


@pytest.fixture(scope="module")
def annealed():
    """Draws of four chains, which begin where annealing left them."""
    return dgm.sample(false_mode(), chains=4, warmup=1, draws=4, seed=0, progress=False)


@pytest.mark.slow
def test_few_chains_are_annealed_among_more(annealed):
    assert annealed.shape == (4, 4)
    assert annealed.ancestors.shape == (4,)
    assert (annealed.latents["u"] > 1.9).all()


def test_without_a_warm_up_or_noise_starts_are_not_annealed():
    assert dgm.sample(false_mode(), chains=2, warmup=0, draws=1, seed=0, progress=False).ancestors is None
    noiseless = dgm.condition(FalseMode(), torch.full((20,), 3.0), tolerance=0.1)
    assert dgm.sample(noiseless, chains=2, warmup=5, draws=1, seed=0, progress=False).ancestors is None


class Still:
    """A kernel of a user's own on a fibre, with only what is required: its chains stay where they start."""

    def check(self, problem):
        assert isinstance(problem, dgm.Fibre)

    def init(self, problem, position):
        return Place(position, torch.zeros_like(position[..., 0]))

    def step(self, problem, state, rng):
        status = torch.zeros_like(state.energy, dtype=torch.int8)
        return state, Info(torch.ones_like(state.energy), status, state.energy)


class Guided(Still):
    """The same, which names its tolerance and a kernel that anneals its starts."""

    def relative_tolerance(self, dtype):
        return 1e-5

    def annealing(self):
        return dgm.ConstrainedHMC()


@pytest.mark.slow
def test_a_kernel_of_a_users_own_gets_starts_on_the_fibre_and_annealed_ones_if_it_says_how():
    problem = false_mode()
    still, guided = (
        dgm.sample(problem, kernel, chains=4, warmup=5, draws=1, seed=0, progress=False)
        for kernel in (Still(), Guided())
    )
    assert still.ancestors is None
    assert (problem.constraint_error(still.inputs) <= 1e-8 * problem.scale).all()
    assert guided.ancestors is not None
    assert (guided.latents["u"] > 1.9).all()


def test_ancestors_are_saved_with_the_draws(annealed, tmp_path):
    annealed.save(tmp_path / "draws.nc")
    assert torch.equal(dgm.Draws.load(tmp_path / "draws.nc").ancestors, annealed.ancestors)


class _Valley(nn.Module):
    """``x = exp(z) + exp(-3 z) / 4`` with noise: two latents for an image, of other masses than in the prior."""

    def forward(self, z):
        return Independent(Normal(z.exp() + 0.25 * (-3 * z).exp(), torch.full_like(z, 0.1)), 1)


def _shares(kernel, **options) -> tuple[Tensor, Tensor]:
    """The masses of the larger latents given two images, as sampled and by quadrature."""
    images = torch.tensor([[2.0], [1.7]], dtype=torch.float64)
    target = LatentPosterior(_Valley().double(), images, dgm.StandardNormal(1))
    grid = torch.linspace(-4, 4, 8001, dtype=torch.float64).view(-1, 1, 1).expand(-1, 2, 1)
    low = 0.25 * math.log(0.75)
    expected = (torch.softmax(-target.energy(grid), 0) * (grid[..., 0] > low)).sum(0)
    draws = dgm.sample(target, kernel, chains=256, warmup=60, draws=100, seed=3, progress=False, **options)
    assert draws.inputs is not None
    return (draws.inputs[..., 0] > low).double().mean((0, 1)), expected


@pytest.mark.filterwarnings("ignore:sample.*groups")
def test_posteriors_of_latents_are_annealed_from_the_prior_and_hold_their_modes_in_proportion():
    found, expected = _shares(None)
    # jumps make chains independent in some ten draws
    assert (found - expected).abs().max() < 0.02
    # without them a chain stays where it began, in proportion to Laplace's masses
    found, expected = _shares(dgm.HMC())
    assert (found - expected).abs().max() < 0.03


@pytest.mark.filterwarnings("ignore:sample.*(groups|moved)")
def test_control_chains_from_prior_draws_hold_the_modes_in_the_prior_s_proportion():
    x = torch.randn(256, 2, 1, generator=rng(), dtype=torch.float64)
    found, expected = _shares(dgm.HMC(), initial=x)
    assert (found - expected).abs().min() > 0.06


def test_a_large_batch_of_images_is_annealed_by_as_many_points_as_memory_holds(monkeypatch):
    target = LatentPosterior(_Valley().double(), torch.full((50, 1), 2.0, dtype=FLOAT), dgm.StandardNormal(1))
    rows, energy = [], LatentPosterior.tempered_energy

    def counted(self, u, beta):
        rows.append(u.shape[:-1].numel())
        return energy(self, u, beta)

    monkeypatch.setattr(LatentPosterior, "tempered_energy", counted)
    options = {"target_acceptance": None}
    annealed_starts.anneal_likelihood(target, dgm.HMC(compile=False), 4, rng(), **options)
    assert max(rows) == 16 * 50
    monkeypatch.setattr(allocation, "_SETTINGS", allocation.AllocationSettings(outputs=10 * 50))
    rows.clear()
    start = annealed_starts.anneal_likelihood(target, dgm.HMC(compile=False), 4, rng(), **options)
    assert max(rows) == 10 * 50
    assert start.position.shape == (4, 50, 1)
