"""Smooth copies of networks: the same function to the promised difference, without kinks, with fewer layers."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import generators
from dgm_infer.errors import ArgumentError, ModelError
from generators.smoothing import SmoothHardtanh, SmoothReLU, smooth_copy


def settled(net: nn.Module) -> nn.Module:
    """The network with parameters and running statistics that matter, in evaluation mode."""
    rng = torch.Generator().manual_seed(0)
    for name, tensor in net.state_dict().items():
        if tensor.is_floating_point():
            positive = "running_var" in name
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=rng) if positive else tensor + 0.3)
    return net.eval()


def images(channels=3):
    return settled(
        nn.Sequential(
            nn.ConvTranspose2d(5, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(True),
            nn.Conv2d(6, channels, 1),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.2),
        )
    )


ACTIVATIONS = {
    "relu": (nn.ReLU(), lambda x: x.relu()),
    "leaky": (nn.LeakyReLU(0.2), lambda x: functional.leaky_relu(x, 0.2)),
    "prelu": (nn.PReLU(3, 0.1), lambda x: functional.leaky_relu(x, 0.1)),
    "relu6": (nn.ReLU6(), lambda x: x.clamp(0, 6)),
    "hardtanh": (nn.Hardtanh(-2, 1), lambda x: x.clamp(-2, 1)),
    "hardsigmoid": (nn.Hardsigmoid(), functional.hardsigmoid),
    "hardswish": (nn.Hardswish(), functional.hardswish),
}


@pytest.mark.parametrize(("module", "exact"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_smooth_activations_tend_to_those_they_replace(module, exact):
    x = torch.linspace(-8, 8, 301, dtype=torch.float64).reshape(-1, 1).expand(-1, 3)
    for beta in (5.0, 50.0):
        smooth = smooth_copy(nn.Sequential(module), beta)[0].double()
        # a softplus is log(2) / beta above the ReLU at its kink, and nowhere further
        assert (smooth(x) - exact(x)).abs().max() <= math.log(2) / beta + 1e-12
        # the derivative has no jump: it changes by at most beta / 4 per unit, for each of at most two kinks
        inner = x[:, :1].expand(-1, 3).clone().requires_grad_()
        (slope,) = torch.autograd.grad(smooth(inner).sum(), inner)
        assert slope.diff(dim=0).abs().max() <= 0.5 * beta * (x[1, 0] - x[0, 0])


def test_batch_statistics_are_folded_exactly():
    net = images()
    z = torch.randn(4, 5, 2, 2, generator=torch.Generator().manual_seed(1))
    smooth, smoothing = smooth_copy(net, 10.0)
    assert (smoothing.activations, smoothing.folded) == (2, 2)
    assert not any(isinstance(module, nn.BatchNorm2d | nn.ReLU | nn.LeakyReLU) for module in smooth.modules())
    assert isinstance(net[1], nn.BatchNorm2d)
    reference = nn.Sequential(net[0], net[1], SmoothReLU(10.0), net[3], net[4], SmoothReLU(10.0, 0.2))
    torch.testing.assert_close(smooth(z), reference(z))


class Shared(nn.Module):
    """Normalises the output of one layer, used twice, and of another that something else takes as well."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.second, self.act = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.ReLU()

    def forward(self, z):
        x = self.act(self.first(self.twice(self.twice(z))))
        y = self.once(x)
        return self.second(y) + y


class Branching(Shared):
    def forward(self, z):
        return super().forward(z) if z.sum() > -1e9 else z


@pytest.mark.parametrize("kind", [Shared, Branching])
def test_statistics_that_cannot_be_folded_stay(kind):
    net = settled(kind())
    smooth, smoothing = smooth_copy(net, 1000.0)
    assert smoothing.folded == 0
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(smooth(z), net(z), atol=0.05, rtol=0)


def test_a_grouped_transposed_convolution_keeps_its_statistics():
    net = settled(nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2), nn.BatchNorm2d(4), nn.ReLU()))
    assert smooth_copy(net, 10.0)[1].folded == 0


def test_the_generator_is_smooth_and_says_how_much_its_images_change():
    net = images()
    rough, smooth, finer = (generators.from_module(net, (5, 2, 2), smooth=beta) for beta in (None, 10, 100))
    assert isinstance(rough, generators.NetworkGenerator)
    assert isinstance(smooth, generators.NetworkGenerator)
    assert isinstance(finer, generators.NetworkGenerator)
    assert smooth.smoothing is not None
    assert rough.smoothing is None
    difference = (rough.prior_images(16) - smooth.prior_images(16)).abs().max().item()
    assert smooth.smoothing.difference == pytest.approx(difference)
    assert 0 < difference < 0.5 * smooth.smoothing.spread
    assert f"{difference:.2g}" in str(smooth.smoothing)
    assert finer.smoothing is not None
    assert finer.smoothing.difference < 0.2 * difference
    noisy = generators.from_module(net, (5, 2, 2), smooth=10, noise=0.1)
    assert not noisy.training


def test_a_network_in_training_mode_is_smoothed_in_evaluation_mode():
    net = images().train()
    smooth = generators.from_module(net, (5, 2, 2), smooth=10)
    assert not smooth.training
    assert net.training


def test_what_cannot_be_smoothed_is_named():
    with pytest.raises(ModelError, match="has no ReLU"):
        generators.from_module(nn.Linear(2, 3), 2, smooth=10)
    with pytest.raises(ArgumentError, match="smooth=-1"):
        generators.from_module(images(), (5, 2, 2), smooth=-1)
    with pytest.raises(ArgumentError, match="function"):
        generators.from_module(torch.relu, 2, smooth=10)


def test_a_clamp_is_smooth_at_both_ends():
    x = torch.tensor([-30.0, 30.0])
    torch.testing.assert_close(SmoothHardtanh(10.0, -1, 1)(x), torch.tensor([-1.0, 1.0]))
