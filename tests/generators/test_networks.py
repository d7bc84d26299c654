"""Bodies of the networks: shapes of any image, leading dimensions, derivatives in both modes."""

import pytest
import torch
from torch import nn

from dgm_infer.errors import ArgumentError
from generators.networks import image_channels, to_image, to_vector

SHAPES = [(8, 8), (28, 28), (3, 7, 5), (1, 1, 9), (2, 64, 33)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels", [None, [6], [6, 4, 5]])
def test_images_of_any_size_go_there_and_back(shape, channels):
    n = torch.Size(shape).numel()
    towards, back = to_vector(shape, 3, [5], channels), to_image(3, shape, [5], channels)
    for leading in [(), (4,), (2, 3)]:
        assert towards(torch.rand(*leading, n)).shape == (*leading, 3)
        assert back(torch.randn(*leading, 3)).shape == (*leading, n)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pixel_and_every_input_count(shape):
    n = torch.Size(shape).numel()
    torch.manual_seed(0)
    x = torch.rand(n, requires_grad=True)
    to_vector(shape, 3, [], [6, 4])(x).sum().backward()
    assert x.grad is not None
    assert x.grad.ne(0).all()
    z = torch.randn(3)
    network = to_image(3, shape, [], [6, 4])
    assert torch.func.jacrev(network)(z).ne(0).any(1).all()


def test_a_small_convolutional_network_is_the_convolution_written_out():
    torch.manual_seed(0)
    network = to_vector((4, 4), 1, [], [1])
    convolution, last = network[0], network[-1]
    x = torch.rand(4, 4)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    patches = torch.stack([padded[i : i + 4, j : j + 4] for i in (0, 2) for j in (0, 2)])
    features = (patches * convolution.weight[0, 0]).sum((-1, -2)) + convolution.bias
    expected = nn.functional.silu(features) @ last.weight[0] + last.bias
    torch.testing.assert_close(network(x.flatten()), expected)


# PyTorch's own rules for forward mode are loaded by a function that it deprecates
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize("normalisation", ["none", "batch", "group", "spectral"])
def test_in_evaluation_mode_both_modes_of_differentiation_agree_and_images_are_independent(normalisation):
    torch.manual_seed(0)
    network = to_image(3, (5, 6), [4], [8, 4], normalisation).double()
    for _ in range(3):
        # running statistics that are not the initial ones
        network(3 * torch.randn(50, 3, dtype=torch.float64) + 1)
    network.eval()
    z = torch.randn(7, 3, dtype=torch.float64)
    reverse, forward = (torch.func.vmap(jacobian(network))(z) for jacobian in (torch.func.jacrev, torch.func.jacfwd))
    torch.testing.assert_close(reverse, forward)
    torch.testing.assert_close(network(z)[2], network(z[2]))


def test_control_batch_statistics_tie_images_together():
    torch.manual_seed(0)
    network = to_image(3, (5, 6), [4], [8, 4], "batch")
    z = torch.randn(7, 3)
    assert not torch.allclose(network(z)[2], network(z[:4])[2])


def test_illegal_networks_are_named():
    with pytest.raises(ArgumentError, match=r"\(H, W\) or \(C, H, W\), not \(20,\)"):
        to_vector((20,), 3, [], [4])
    with pytest.raises(ArgumentError, match=r"channels=\[\]"):
        to_image(3, (4, 4), [], [])
    with pytest.raises(ArgumentError, match="normalisation='layer'"):
        to_image(3, (4, 4), [], [2], "layer")  # type: ignore[arg-type]
    assert image_channels((4, 5)) == (1, 4, 5)
