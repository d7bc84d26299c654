"""Constrained HMC on a device: nothing is mixed with the host, and the host seldom waits. The device is a double."""

import pytest
import torch

import dgm_infer as dgm
from tests.devices import DEVICE, Device, Generator, from_device, to_device
from tests.models import Bent
from tests.oracles import FLOAT
from tests.quick import some

PROBLEMS = {
    "units": (Bent, torch.linspace(-0.8, 0.8, 5, dtype=FLOAT)),
    "dense": (lambda: Bent("dense"), torch.linspace(-0.8, 0.8, 5, dtype=FLOAT)),
}
KERNEL = dgm.ConstrainedHMC(0.2, n_steps=4, n_geodesic=2)


@pytest.fixture(autouse=True)
def generators_of_the_device(monkeypatch):
    monkeypatch.setattr(torch, "Generator", Generator)


def transition(problem, u, rng):
    """The position after a transition, and what was said of it."""
    state, info = KERNEL.step(problem, KERNEL.init(problem, u), rng)
    return state.position, info


@pytest.mark.parametrize("name", some(PROBLEMS, []))
def test_a_transition_on_a_device_makes_the_host_wait_less_than_ten_times(name):
    model, y = PROBLEMS[name]
    here = dgm.condition(model(), y)
    start = here.start(6, torch.Generator().manual_seed(1), tolerance=1e-12)
    expected, _ = transition(here, start, torch.Generator().manual_seed(2))
    with Device() as device:
        there = dgm.condition(to_device(model()), to_device(y))
        u = to_device(start)
        device.waits.clear()
        found, info = transition(there, u, Generator(DEVICE).manual_seed(2))
        assert device.waits.total() < 10
        assert from_device(info.status).eq(0).all()
    # the same draws, by masks instead of compaction
    torch.testing.assert_close(from_device(found), expected, rtol=0, atol=1e-6)
    assert (expected - start).abs().max() > 0.1


def test_control_the_double_refuses_tensors_of_the_host_and_counts_waits():
    with Device() as device:
        x = to_device(torch.arange(3.0))
        with pytest.raises(RuntimeError, match="on the host"):
            _ = x + torch.ones(3)
        # as on a device, a number of the host may be used
        assert (x + torch.tensor(1.0)).device == x.device
        assert device.waits.total() == 0
        assert bool((x > 1).any())
        assert len(x[x > 0]) == 2
        x.cpu()
        assert device.waits.total() == 3
