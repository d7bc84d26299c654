"""Outputs that models make of inputs from their density."""

import pytest
import torch
from torch import nn

import dgm_infer as dgm
from generators import from_module


@pytest.mark.parametrize("noise", [None, 0.5])
def test_images_from_the_prior(noise):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Unflatten(-1, (2, 4))).double().eval()
    model = from_module(net, 3, noise=noise)
    images, inputs = model.generate(200, seed=1)
    assert images.shape == (200, 2, 4)
    assert images.dtype == inputs.dtype == torch.float64
    torch.testing.assert_close(model.observed(inputs).reshape(200, 2, 4), images)
    assert torch.equal(images, model.generate(200, seed=1).images)
    assert not torch.equal(images, model.generate(200, seed=2).images)
    left = images - net(inputs[:, :3])
    assert left.square().mean().sqrt().item() == pytest.approx(noise or 0, rel=0.1, abs=1e-12)
    assert not images.requires_grad
    with pytest.raises(dgm.errors.ArgumentError, match="n"):
        model.generate(0, seed=1)


def test_a_network_in_training_mode_generates_as_it_is_conditioned():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
    net(torch.randn(50, 3))
    before = [buffer.clone() for buffer in net.buffers()]
    model = from_module(net, 3).train()
    images, inputs = model.generate(20, seed=1)
    image, single = model.generate(1, seed=1)
    assert all(map(torch.equal, net.buffers(), before))
    assert model.training
    torch.testing.assert_close(images, net.eval()(inputs))
    torch.testing.assert_close(image, net(single))
    # control: in training mode the network makes something else of these inputs
    assert not torch.allclose(net.train()(inputs), images)
