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
