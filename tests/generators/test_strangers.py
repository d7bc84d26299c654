"""A hundred networks as strangers write them: each is conditioned, with the posterior of quadrature, or refused."""

import math
import warnings

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import DgmInferError
from tests.generators.strangers import TABLE, Stranger
from tests.quick import cases

# Those whose posteriors are also looked at in the quick run, one of a kind.
QUICK = {
    "Tanh",
    "spectral norm, old, used",
    "MultiheadAttention",
    "GroupNorm32 in 32 bits",
    "sparse",
    "lock and logger",
}
SD = 0.5
WORKING = {name: row for name, row in TABLE.items() if row.refused is None}
REFUSED = {name: row for name, row in TABLE.items() if row.refused is not None}


def conditioned(stranger: Stranger):
    """The fibre of a network's outputs near one of its own, with noise, and its function ``[n, 2] -> [n, Dx]``."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # TorchScript and old hooks are deprecated; torch says so, and that it is slow
        warnings.simplefilter("ignore")
        net = stranger.make().eval()
        model = generators.from_module(net, stranger.latent, **stranger.options)
        assert isinstance(model, generators.NetworkGenerator)
        y = model.prior_images(2)[0] + 0.2
        return dgm.condition(model, y, noise=SD, dtype=stranger.dtype), model, y


def quadrature(model, y):
    """Mean of the two latents ``[2]``, in the network's own type."""
    like = next(iter((*model.parameters(), *model.buffers())), torch.empty(0))
    dtype = like.dtype if like.is_floating_point() else torch.float32
    axis = torch.linspace(-6, 6, 161, dtype=torch.float64)
    z = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        x = torch.cat([model.observed(part).double() for part in z.to(dtype).split(4096)])
    log_p = -0.5 * z.square().sum(-1) - 0.5 * ((x - y.reshape(-1).double()) / SD).square().sum(-1)
    return log_p.softmax(0) @ z


@pytest.mark.parametrize("stranger", cases(WORKING, QUICK))
def test_the_posterior_of_a_network_is_that_of_quadrature(stranger):
    fibre, model, y = conditioned(stranger)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = dgm.sample(fibre, dgm.LiftedHMC(), chains=64, warmup=40, draws=30, seed=1, progress=False)
    z = draws.inputs[..., :2].double()
    of_chains = z.mean(1)
    error = of_chains.std(0) / math.sqrt(len(of_chains))
    assert (error < 0.2).all()
    assert ((of_chains.mean(0) - quadrature(model, y)).abs() <= 5 * error).all()


def test_control_another_network_has_another_posterior():
    fibre, _, y = conditioned(TABLE["Tanh"])
    _, other, _ = conditioned(TABLE["SiLU"])
    draws = dgm.sample(fibre, dgm.LiftedHMC(), chains=64, warmup=40, draws=30, seed=1, progress=False)
    of_chains = draws.inputs[..., :2].mean(1)
    error = of_chains.std(0) / math.sqrt(len(of_chains))
    assert ((of_chains.mean(0) - quadrature(other, y)).abs() > 5 * error).any()


@pytest.mark.parametrize("stranger", REFUSED.values(), ids=REFUSED.keys())
def test_a_network_that_cannot_be_conditioned_is_refused_in_one_line(stranger):
    with pytest.raises(DgmInferError) as caught:
        conditioned(stranger)
    message = str(caught.value)
    assert stranger.refused in message
    assert "\n" not in message
    assert len(message) < 400


def test_there_are_a_hundred():
    assert len(TABLE) > 100
    assert len(WORKING) > 100
