"""Simulators that explode at draws of their prior."""

import pytest
import torch
from torch import distributions as td

import dgm_infer as dgm
from dgm_infer.errors import ModelError
from tests.recorded import inputs_of

NORMAL = td.Normal(0.0, 1.0)


def explodes(z):
    """Decays for rates below zero."""
    x = torch.tensor(100.0)
    for _ in range(30):
        x = td.Normal(x + 0.001 * z * x * x, 1.0).rsample()
    return x.reshape(1)


def test_a_prior_may_reach_where_a_simulator_explodes():
    model = dgm.from_simulator(explodes, td.Normal(-10.0, 5.0))
    finite = model.observed(inputs_of(model, 200)).isfinite()
    assert 0 < finite.sum() < 200
    with pytest.warns(UserWarning, match=r"finite outputs in fewer than 2 of 3003 runs.*explodes"):
        dgm.from_simulator(lambda z: explodes(1 + z.exp()), NORMAL)
    with pytest.raises(ModelError, match=r"parameters that are not valid, at line .*td.Normal\(z, -1.0\)"):
        dgm.from_simulator(lambda z: td.Normal(z, -1.0).rsample((2,)), NORMAL)
