"""Constrained HMC on a device: nothing is mixed with the host, and the host seldom waits. The device is a double."""

import pytest
import torch

import dgm_infer as dgm
from tests.devices import DEVICE, Device, Generator, on_device
from tests.models import Bent
from tests.oracles import FLOAT, Ellipse

PROBLEMS = {
    "units": (lambda: Bent().to(FLOAT), torch.linspace(-0.8, 0.8, 5, dtype=FLOAT)),
    "dense": (lambda: Ellipse().to(FLOAT), torch.tensor([2.0], dtype=FLOAT)),
}
KERNEL = dgm.ConstrainedHMC(0.4, n_steps=4, n_geodesic=2)
