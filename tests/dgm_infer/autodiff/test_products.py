"""Convolutions as products of matrices are torch's own."""

import itertools

import pytest
import torch
from torch import nn

from dgm_infer.autodiff import products
from dgm_infer.autodiff.convolution import QuickConvolutions
from dgm_infer.autodiff.products import Geometry, convolution, quicker

FLOAT = torch.float64
KERNELS = [(4, 4), (3, 2), (1, 1), (5, 3)]
STRIDES = [(1, 1), (2, 2), (1, 3)]
PADDINGS = [(0, 0), (1, 1), (2, 0)]


def same(x, weight, geometry, found):
    expected = torch.convolution(x, weight, None, *geometry[1:4], *geometry[:1], *geometry[4:])
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("transposed", [True, False])
def test_few_positions_and_many_channels(transposed, monkeypatch):
    monkeypatch.setattr(products, "_MANY", 1)
    done = 0
    for kernel, stride, padding in itertools.product(KERNELS, STRIDES, PADDINGS):
        geometry = Geometry(transposed, stride, padding, (1, 1), (0, 0), 1)
        x, weight = torch.randn(2, 3, 6, 5, dtype=FLOAT), torch.randn(*((3, 4) if transposed else (4, 3)), *kernel)
        try:
            torch.convolution(x, weight.double(), None, stride, padding, (1, 1), transposed, (0, 0), 1)
        except RuntimeError:
            # no output is left
            continue
        same(x, weight.double(), geometry, convolution(x, weight.double(), geometry))
        done += 1
    assert done > 25


def test_an_output_with_an_edge_of_its_own():
    geometry = Geometry(True, (2, 2), (1, 1), (1, 1), (1, 0), 1)
    x, weight = torch.randn(2, 64, 4, 4, dtype=FLOAT), torch.randn(64, 5, 3, 3, dtype=FLOAT)
    same(x, weight, geometry, convolution(x, weight, geometry))


def test_few_channels_of_a_transposed_convolution_in_float32():
    geometry = Geometry(True, (2, 2), (1, 1), (1, 1), (0, 1), 1)
    x, weight = torch.randn(2, 8, 14, 14), torch.randn(8, 3, 4, 4)
    same(x, weight, geometry, convolution(x, weight, geometry))


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.thin = nn.ConvTranspose2d(70, 20, 4, 2, 1), nn.ConvTranspose2d(20, 3, 4, 2, 1)

    def forward(self, x):
        return self.thin(self.wide(x).tanh())


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
def test_a_network_gives_the_same_images_in_the_mode(dtype):
    net = Painter().to(dtype).requires_grad_(False)
    x = torch.randn(2, 70, 5, 5, dtype=dtype)
    with QuickConvolutions():
        found = net(x)
    torch.testing.assert_close(found, net(x))
    assert set().union(*map(quicker, net.modules())) == {torch.float32, FLOAT}


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv1d(80, 80, 3), nn.Conv2d(8, 8, 3)])
def test_other_layers_are_left_to_torch(layer):
    assert quicker(layer) == set()
