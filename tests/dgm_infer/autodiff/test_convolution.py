"""Rows of the Jacobian of a network in parts, and convolutions as linear functions of their inputs."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from dgm_infer.autodiff import jacobian_products as jacobian
from dgm_infer.autodiff.jacobian_products import pull_back
from dgm_infer.autodiff.layers import FixedConvolutions
from tests.oracles import FLOAT

LAYERS = {
    "plain": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "plain, sizes that strides leave": nn.Conv2d(4, 6, (3, 2), stride=(3, 2), dilation=(1, 2), bias=False),
    "groups": nn.Conv2d(4, 6, 3, padding=2, groups=2),
    "transposed": nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1),
    "transposed, more": nn.ConvTranspose2d(4, 6, 3, stride=3, padding=1, output_padding=2, dilation=2, groups=2),
    "reflected": nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "same": nn.Conv2d(4, 6, 3, padding="same"),
    "one dimension": nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 3, stride=2)),
    "three dimensions": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.ConvTranspose3d(2, 3, 3, stride=(1, 2, 2))),
}


def network(layer):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(5, 4 * 49), nn.Unflatten(1, (4, 7, 7)), nn.Softplus(), layer, nn.Tanh(), nn.Flatten())
    return net.to(FLOAT).requires_grad_(False)


def of_inputs(net, n_outputs=7):
    return lambda u: net(u)[:, :n_outputs]


def row_gradient(function, u):
    """The value, the rows, and the gradient of a fixed function of the rows."""
    u = u.clone().requires_grad_()
    value, rows = pull_back(function, u)
    weights = torch.linspace(-1, 1, rows.numel(), dtype=u.dtype).reshape(rows.shape)
    return value.detach(), rows.detach(), torch.autograd.grad((weights * rows).sum(), u)[0]


@pytest.fixture
def in_parts(monkeypatch):
    """Two rows of a Jacobian at once."""

    def set_to(net, u):
        sizes = []
        for module in net.modules():
            module.register_forward_hook(lambda _m, _x, y: sizes.append(y.numel()))
        net(u)
        monkeypatch.setattr(jacobian, "SETTINGS", jacobian.ProductSettings(at_once=2 * max(sizes)))

    return set_to


@pytest.mark.parametrize("name", LAYERS)
def test_rows_in_parts_are_those_of_one_pass_and_so_is_their_gradient(name, in_parts, monkeypatch):
    net = network(LAYERS[name])
    u = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    whole = row_gradient(of_inputs(net), u)
    in_parts(net, u)
    passes = []
    monkeypatch.setattr(jacobian, "_rows", counted(jacobian._rows, passes))
    parts = row_gradient(of_inputs(net), u)
    assert passes in ([1], [2])
    for mine, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
    # and without a gradient
    with torch.no_grad():
        value, rows = pull_back(of_inputs(net), u)
    torch.testing.assert_close((value, rows), whole[:2], rtol=1e-10, atol=1e-12)


def counted(function, calls):
    def call(x, function_of_x, fixed, at_once):
        calls.append(at_once)
        return function(x, function_of_x, fixed, at_once)

    return call


def test_off_by_one_switch_the_rows_are_the_same(monkeypatch):
    net = network(LAYERS["transposed"])
    u = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    mine, used = row_gradient(of_inputs(net), u), []
    monkeypatch.setattr(jacobian, "FixedConvolutions", lambda: used.append(1) or FixedConvolutions())
    monkeypatch.setattr(jacobian, "SETTINGS", jacobian.ProductSettings(fixed_convolutions=False))
    for own, expected in zip(mine, row_gradient(of_inputs(net), u), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)
    assert not used


def test_the_same_test_refuses_a_convolution_with_another_adjoint(in_parts, monkeypatch):
    net = network(LAYERS["transposed"])
    u = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    whole = row_gradient(of_inputs(net), u)
    in_parts(net, u)
    right = torch.convolution
    monkeypatch.setattr(torch, "convolution", lambda x, weight, *settings: right(x, weight.flip(-1), *settings))
    gradient = row_gradient(of_inputs(net), u)[2]
    assert not torch.allclose(gradient, whole[2], rtol=1e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_forward_derivatives_are_those_of_torch(name):
    net = network(LAYERS[name])
    u, t = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    # torch warns of its own scripts when forward mode is first used
    jacobian.load_forward_mode()
    expected = torch.func.jvp(net, (u,), (t,))
    with FixedConvolutions():
        mine = torch.func.jvp(net, (u,), (t,))
    torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_convolutions_that_are_trained_or_unbatched_stay_torch_s_own():
    layer = nn.Conv2d(4, 6, 3)
    x = torch.randn(2, 4, 7, 7)
    with FixedConvolutions():
        assert "ConvolutionBackward0" in layer(x).grad_fn.name()
        assert functional.conv2d(x[0], layer.weight.detach()).shape == (6, 5, 5)
