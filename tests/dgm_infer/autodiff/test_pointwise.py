"""Slopes computed once for all rows: first and second derivatives of activations and fixed normalisations."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from dgm_infer.autodiff import jacobian_products as jacobian
from dgm_infer.autodiff import pointwise
from dgm_infer.autodiff.convolution import FixedConvolutions
from dgm_infer.autodiff.jacobian_products import pull_back
from tests.oracles import FLOAT

BETWEEN = {
    "softplus": nn.Softplus(),
    "steep softplus": nn.Softplus(beta=10, threshold=5),
    "silu": nn.SiLU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "batch statistics": nn.BatchNorm2d(3),
    "no weights": nn.BatchNorm2d(3, affine=False),
    "gelu, which is torch's own": nn.GELU(),
    "in place, which is torch's own": nn.Sequential(nn.Conv2d(3, 3, 1), nn.SiLU(inplace=True)),
}


def network(layer):
    torch.manual_seed(2)
    convolution = nn.Conv2d(3, 4, 2)
    net = nn.Sequential(nn.Linear(4, 3 * 16), nn.Unflatten(1, (3, 4, 4)), layer, convolution, nn.Tanh(), nn.Flatten())
    net = net.to(FLOAT).eval().requires_grad_(False)
    if isinstance(layer, nn.BatchNorm2d):
        layer.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
        layer.running_var.copy_(torch.tensor([0.5, 2.0, 3.0]))
        if layer.affine:
            layer.weight.copy_(torch.tensor([1.5, -1.0, 0.2]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, -2.0]))
    return net


def derivatives(function, u):
    """The value, the rows, and the gradient of a fixed function of the rows."""
    u = u.clone().requires_grad_()
    value, rows = pull_back(function, u)
    weights = torch.linspace(-1, 1, rows.numel(), dtype=u.dtype).reshape(rows.shape)
    return value.detach(), rows.detach(), torch.autograd.grad((weights * rows).sum(), u)[0]


def inputs():
    return 2 * torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=FLOAT)


@pytest.mark.parametrize("name", BETWEEN)
def test_derivatives_are_those_of_torch(name, monkeypatch):
    net = network(BETWEEN[name])
    mine = derivatives(net, inputs())
    monkeypatch.setattr(jacobian, "_seen", lambda value: (1, False))
    for a, b in zip(mine, derivatives(net, inputs()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["softplus", "silu", "tanh", "sigmoid", "batch statistics"])
def test_forward_derivatives_are_those_of_torch(name):
    net, u = network(BETWEEN[name]), inputs()
    jacobian._load_forward_mode()
    expected = torch.func.jvp(net, (u,), (torch.ones_like(u),))
    with FixedConvolutions():
        mine = torch.func.jvp(net, (u,), (torch.ones_like(u),))
    torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_the_same_test_refuses_another_slope(monkeypatch):
    net = network(nn.Tanh())
    right = derivatives(net, inputs())
    names, _ = pointwise._SLOPES[torch.tanh]
    monkeypatch.setitem(pointwise._SLOPES, torch.tanh, (names, lambda x: 1 - x.tanh().abs()))
    wrong = derivatives(net, inputs())
    torch.testing.assert_close(wrong[0], right[0])
    assert not torch.allclose(wrong[1], right[1], rtol=1e-3)


def test_what_is_trained_or_has_no_statistics_stays_torch_s_own():
    x = torch.randn(3, 3, 4, 4)
    layer = nn.BatchNorm2d(3)
    with FixedConvolutions():
        assert "BatchNorm" in layer(x).grad_fn.name()
        assert "BatchNorm" in layer.eval()(x).grad_fn.name()
        torch.testing.assert_close(functional.batch_norm(x, None, None, training=True).mean(), torch.tensor(0.0))
        # whole numbers
        assert torch.tanh(torch.arange(3)).dtype == torch.float32
