"""Diffusions as functions of noise: steps against closed forms and the packages they come from, and what is refused."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError
from generators import from_diffusion

MEAN, SD = 0.2, 0.3


def cosine(t):
    angle = torch.as_tensor(t) * 0.999 * math.pi / 2
    return angle.cos(), angle.sin()


def predictor(kind):
    """The exact prediction for data N(MEAN, SD^2) on the cosine schedule."""

    def predict(x, t):
        alpha, sigma = (part.unsqueeze(-1) for part in cosine(t))
        total = alpha**2 * SD**2 + sigma**2
        data = MEAN + alpha * SD**2 / total * (x - alpha * MEAN)
        noise = (x - alpha * data) / sigma.clamp_min(1e-12)
        return {"data": data, "noise": noise, "velocity": alpha * noise - sigma * data}[kind]

    return predict


@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("heun", 2)])
def test_steps_tend_to_the_flow_of_the_data_at_their_order(solver, order):
    """The flow keeps the standardised value: u ends in MEAN + SD u, up to the schedule's first level."""
    u = torch.tensor([[-1.3], [0.4], [2.0]], dtype=torch.float64)
    alpha, sigma = cosine(torch.tensor(1.0, dtype=torch.float64))
    start = (u - alpha * MEAN) / (alpha**2 * SD**2 + sigma**2).sqrt()

    def error(steps):
        flow = from_diffusion(predictor("noise"), cosine, steps, shape=1, solver=solver)
        return (flow(u) - MEAN - SD * start).abs().max().item()

    assert error(160) / error(320) == pytest.approx(2**order, rel=0.25)
    assert error(320) < 0.01


@pytest.mark.parametrize("solver", ["ddim", "heun"])
def test_three_predictions_of_one_network_make_one_map(solver):
    u = torch.randn(5, 2, dtype=torch.float64)
    made = [
        from_diffusion(predictor(kind), cosine, 7, shape=2, solver=solver, prediction=kind)(u)
        for kind in ("noise", "data", "velocity")
    ]
    torch.testing.assert_close(made[1], made[0])
    torch.testing.assert_close(made[2], made[0])


def test_the_density_is_that_of_the_linear_map():
    """Of Gaussian data every step is linear: the density is normal, of the map's own mean and sd."""
    flow = from_diffusion(predictor("noise"), cosine, 5, shape=2)
    zero, one = flow(torch.zeros(2).double()), flow(torch.ones(2).double())
    x = flow(torch.randn(6, 2, dtype=torch.float64))
    expected = torch.distributions.Normal(zero, one - zero).log_prob(x).sum(-1)
    torch.testing.assert_close(flow.log_prob(x), expected, rtol=0, atol=1e-8)


def test_a_network_read_as_another_prediction_is_implausible():
    right = from_diffusion(predictor("noise"), cosine, 6, shape=4)
    assert dgm.check(right).codes == ()
    # a prediction of noise read as a velocity makes images within the range, which no look at them tells
    for made, read in [("noise", "data"), ("data", "noise"), ("velocity", "noise")]:
        found = dgm.check(from_diffusion(predictor(made), cosine, 6, shape=4, prediction=read))
        assert "implausible" in found.codes, (made, read)
        assert f"something else than {read!r}" in str(found)


class Guided(nn.Module):
    """A network with labels, of whole timesteps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.labels, self.times = nn.Embedding(11, 3), nn.Embedding(100, 3)

    def forward(self, x, t, label):
        return 0.1 * x + self.labels(label) + self.times(t)


ALPHAS = torch.linspace(0.999, 0.02, 100).double()
LABEL, NULL = {"label": torch.tensor(3)}, {"label": torch.tensor(10)}


def test_guidance_moves_from_the_null_label_through_the_label():
    net = Guided().double()
    u = torch.randn(4, 3, dtype=torch.float64)

    def made(**options):
        return from_diffusion(net, ALPHAS, 4, shape=3, **options)(u)

    one = made(arguments=LABEL)
    torch.testing.assert_close(made(arguments=LABEL, guidance=1.0 + 1e-9, null=NULL), one)
    torch.testing.assert_close(made(arguments=LABEL, guidance=0.0, null=NULL), made(arguments=NULL))
    twice = made(arguments=LABEL, guidance=2.0, null=NULL)
    torch.testing.assert_close(twice - one, one - made(arguments=NULL))


def scheduler(name="DDIMScheduler", **config: Any):
    """What from_diffusion looks at of a scheduler of diffusers."""
    defaults = {"clip_sample": False, "thresholding": False, "prediction_type": "epsilon"}
    made = {"set_timesteps": lambda self, n: None, "config": SimpleNamespace(**{**defaults, **config})}
    return type(name, (), made)()


class Sampler:
    denoiser = None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedule": scheduler("DDPMScheduler")}, ArgumentError, "noise that is not an input"),
        ({"schedule": scheduler("EulerAncestralDiscreteScheduler")}, ArgumentError, "DDIMScheduler.from_config"),
        ({"schedule": scheduler(clip_sample=True)}, ArgumentError, "clip_sample=False"),
        ({"schedule": scheduler(prediction_type="flow")}, ArgumentError, "'flow' is unknown"),
        ({"denoiser": Sampler()}, ArgumentError, "pass its denoiser"),
        ({"denoiser": Guided().half(), "arguments": LABEL}, ArgumentError, r"16 bits.*denoiser.float\(\)"),
        ({"arguments": LABEL, "guidance": 3.0}, ArgumentError, "guidance=3.*null="),
        ({"schedule": None}, ArgumentError, "Guided has no schedule"),
        (
            {"schedule": lambda t: (1 - 0.99 * t, t), "arguments": LABEL},
            ModelError,
            r"times in \[0, 1\].*whole timesteps",
        ),
        ({"schedule": lambda t: (1 - t, t), "arguments": LABEL}, ArgumentError, "alpha 0.*'velocity'"),
        ({"schedule": lambda t: (t, 1 - t), "arguments": LABEL}, ArgumentError, "must be noise at 1"),
        ({"schedule": ALPHAS.flip(0), "arguments": LABEL}, ArgumentError, "that fall"),
        ({"steps": 101, "arguments": LABEL}, ArgumentError, "100 timesteps"),
        ({"prediction": "score", "arguments": LABEL}, ArgumentError, "prediction='score'"),
        ({}, ModelError, r"missing 1 required.*labels are arguments"),
    ],
    ids=range(15),
)
def test_what_does_not_fit_is_named(options, error, message):
    options = {"denoiser": Guided(), "schedule": ALPHAS, "steps": 4, "shape": 3, **options}
    with pytest.raises(error, match=message) as raised:
        from_diffusion(options.pop("denoiser"), options.pop("schedule"), options.pop("steps"), **options)
    assert len(str(raised.value)) < 400


@pytest.fixture
def unet():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        attention_head_dim=4, num_class_embeds=11, **blocks,
    ).eval()  # fmt: skip


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_a_unet_of_diffusers_makes_what_its_own_scheduler_makes(unet, prediction, spacing):
    DDIMScheduler = pytest.importorskip("diffusers").DDIMScheduler
    own = DDIMScheduler(clip_sample=False, prediction_type=prediction, timestep_spacing=spacing)
    # in 64 bits: the first steps divide by alpha, 0.06
    own.alphas_cumprod, unet = own.alphas_cumprod.double(), unet.double()
    flow = from_diffusion(unet, own, 5, shape=(1, 8, 8), arguments={"class_labels": torch.tensor(3)})
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    made = flow(x.flatten(1))
    own.set_timesteps(5)
    with torch.no_grad():
        for t in own.timesteps:
            x = own.step(unet(x, t, class_labels=torch.tensor([3, 3])).sample, t, x).prev_sample
    torch.testing.assert_close(made, x.flatten(1), rtol=1e-9, atol=1e-9)


def test_a_unet_of_diffusers_is_conditioned(unet):
    diffusers = pytest.importorskip("diffusers")
    DDIMPipeline, DDIMScheduler = diffusers.DDIMPipeline, diffusers.DDIMScheduler
    pipeline = DDIMPipeline(unet, DDIMScheduler(clip_sample=False))
    flow = from_diffusion(pipeline, steps=2, shape=(1, 8, 8), arguments={"class_labels": torch.tensor(3)})
    image = flow.generate(1, seed=0).images[0]
    report = dgm.check(flow, image, dgm.pixels(torch.arange(64).reshape(1, 8, 8) < 6), noise=0.1)
    assert report.ok
    # random weights make no images
    assert "implausible" in report.codes
    clipped = DDIMPipeline(unet, DDIMScheduler())
    with pytest.raises(ArgumentError, match="clip_sample=False"):
        from_diffusion(clipped, steps=2, shape=(1, 8, 8))


@pytest.mark.parametrize("name", ["VPSchedule", "CosineSchedule", "RectifiedSchedule", "VESchedule"])
def test_a_denoiser_of_azula_makes_what_its_own_sampler_makes(name):
    denoise, noise, sample = (pytest.importorskip(f"azula.{part}") for part in ("denoise", "noise", "sample"))
    torch.manual_seed(0)

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 5))

        def forward(self, x, t):
            return self.net(torch.cat([x, t.reshape(-1, 1).expand(len(x), 1)], -1))

    denoiser = denoise.KarrasDenoiser(Backbone(), getattr(noise, name)()).double().eval()
    flow = from_diffusion(denoiser, steps=6, shape=5)
    u = torch.randn(3, 5, dtype=torch.float64)
    own = sample.DDIMSampler(denoiser, steps=6, silent=True, dtype=torch.float64)
    expected = own(flow.spread * u)
    torch.testing.assert_close(flow(u), expected)
    with pytest.raises(ArgumentError, match="pass its denoiser"):
        from_diffusion(sample.DDPMSampler(denoiser), steps=6, shape=5)
