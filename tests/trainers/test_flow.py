"""Training of flows: objectives whose minimum is known, the moving average, latents, and what is refused."""

import math

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

import generators
from dgm_infer.errors import ArgumentError, CheckpointError
from generators import FlowGenerator, LatentFlow, VelocityMLP
from trainers import DigitsData, FlowMatching, MeanFlow

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")


def fitted(training, points, steps, rate=3e-3):
    """The module after gradient steps on fresh noise, outside of Lightning."""
    optimizer = torch.optim.Adam(training.trained.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = points(96)
        optimizer.zero_grad()
        training.loss(torch.randn_like(batch), batch).backward()
        optimizer.step()
        schedule.step()
    return training


def shifted(n):
    return 2 + 0.5 * torch.randn(n, 1)


@pytest.mark.parametrize("coupling", ["independent", "optimal"])
def test_a_trained_flow_makes_the_distribution_of_its_data(coupling):
    torch.manual_seed(0)
    flow = FlowGenerator(VelocityMLP(1, 32, 2), 1)
    module = fitted(FlowMatching(flow, coupling=coupling), shifted, 400)
    with torch.no_grad():
        x = module.trained(torch.randn(4000, 1))
    assert x.mean().item() == pytest.approx(2, abs=0.15)
    assert x.std().item() == pytest.approx(0.5, abs=0.12)


def test_the_loss_of_flow_matching_is_that_of_the_pair():
    flow = FlowGenerator(lambda x, t: 3 * x, 2)
    noise, points = torch.randn(5, 2), torch.randn(5, 2)
    torch.manual_seed(1)
    t = torch.rand(5, 1)
    expected = (3 * ((1 - t) * noise + t * points) - (points - noise)).square().mean()
    module = FlowMatching.__new__(FlowMatching)
    nn.Module.__init__(module)
    module.coupling, module.trained = "independent", flow
    torch.manual_seed(1)
    torch.testing.assert_close(module.loss(noise, points), expected)


def test_the_optimal_coupling_pairs_neighbours():
    seen = []

    class Seen(nn.Module):
        def forward(self, x, t):
            seen.append(x.clone())
            return x

    module = FlowMatching.__new__(FlowMatching)
    nn.Module.__init__(module)
    module.coupling, module.trained = "optimal", FlowGenerator(Seen(), 1)
    noise = torch.tensor([[0.0], [10.0], [20.0]])
    seen.clear()
    loss = module.loss(noise, torch.tensor([[20.0], [0.0], [10.0]]))
    # every pair is at the same place: the path does not move, and the loss is the square of that place
    torch.testing.assert_close(seen[0], noise)
    torch.testing.assert_close(loss, torch.tensor(500 / 3))


class Average(nn.Module):
    """The average velocity of data N(2, 1/4), with ``error`` times a function that is not constant.

    The flow is ``x_s = 2 s + r(s) (x - 2 t) / r(t)``, ``r(t)^2 = (1 - t)^2 + t^2 / 4``.
    """

    def __init__(self, error):
        super().__init__()
        self.error = nn.Parameter(torch.tensor(error, dtype=torch.float64))

    def forward(self, x, t, s):
        t, s = t.unsqueeze(-1), s.unsqueeze(-1)
        late = s + 1e-3  # an interval of s = t has a limit, not a quotient

        def spread(time):
            return ((1 - time).square() + time.square() / 4).sqrt()

        exact = (2 * late + spread(late) * (x - 2 * t) / spread(t) - x) / (late - t)
        return exact + self.error * (x - 2 * t) * (1 + s)


def slopes(error, n=400):
    """The derivative of MeanFlow's loss in the error, of batches."""
    torch.manual_seed(0)
    module = MeanFlow.__new__(MeanFlow)
    nn.Module.__init__(module)
    module.share, module.trained = 0.5, FlowGenerator(Average(error), 1, steps=1, solver="average")
    found = []
    for _ in range(n):
        points = 2 + 0.5 * torch.randn(128, 1, dtype=torch.float64)
        loss = module.loss(torch.randn_like(points), points)
        found.append(torch.autograd.grad(loss, module.trained.velocity.error)[0])
    found = torch.stack(found)
    return found.mean().item(), found.std().item() / n**0.5


def test_the_true_average_velocity_is_where_mean_flow_ends():
    """Its expected gradient is zero there, up to the short interval's 1e-3, and not elsewhere."""
    mean, error = slopes(0.0)
    assert abs(mean) < 5 * error + 3e-3
    assert error < 0.01
    mean, error = slopes(0.1)
    assert mean > 10 * error


def trainer(folder, epochs=1):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(accelerator="cpu", max_epochs=epochs, default_root_dir=folder, **quiet)


def latent_flow():
    torch.manual_seed(0)
    vae = generators.GaussianVAE(2, (8, 8), (16,), sd=0.2)
    return LatentFlow(vae, FlowGenerator(VelocityMLP(2, 16, 1), 2, steps=2))


@pytest.mark.parametrize("latent", [False, True])
def test_a_run_moves_the_average_and_leaves_the_vae(latent, tmp_path):
    torch.manual_seed(0)
    model = latent_flow() if latent else FlowGenerator(VelocityMLP(64, 16, 1), (8, 8), steps=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module, run = FlowMatching(model, decay=0.9), trainer(tmp_path)
    run.fit(module, datamodule=DigitsData(batch_size=100))
    assert math.isfinite(run.callback_metrics["val/energy_distance"])
    after = model.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved
    assert all("velocity" in name for name in moved)
    # a moving average lags behind
    assert not torch.equal(module.trained.velocity.last.weight, module.flow.velocity.last.weight)
    path = tmp_path / "run.ckpt"
    run.save_checkpoint(path)
    loaded = generators.load(path)
    assert type(loaded) is type(model)
    assert all(torch.equal(value, after[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FlowMatching(generators.GAN(2, (8, 8))), ArgumentError, "must be a FlowGenerator or a LatentFlow"),
        (lambda: FlowMatching(latent_flow(), coupling="best"), ArgumentError, "coupling='best'"),
        (lambda: FlowMatching(latent_flow(), decay=1), ArgumentError, "decay=1"),
        (lambda: MeanFlow(latent_flow()), ArgumentError, "must be 'average'"),
        (lambda: MeanFlow(average(), share=0), ArgumentError, "share=0"),
        (lambda: FlowMatching(average()), ArgumentError, "trained by MeanFlow"),
        (lambda: FlowMatching(FlowGenerator(lambda x, t: x, 2)), CheckpointError, "cannot be stored"),
    ],
    ids=range(7),
)
def test_what_cannot_be_trained_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def average():
    return FlowGenerator(VelocityMLP(2, 8, 1, times=2), 2, steps=1, solver="average")
