"""Networks that ``copy.deepcopy`` refuses are conditioned as plain ones are, and stay as they were."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import dgm_infer as dgm
from dgm_infer.errors import ModelError
from dgm_infer.models import copied, evaluation_copy
from generators import LatentPosterior, from_module
from tests.quick import cases


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


class Stores(nn.Module):
    """The plain network, with something else in an attribute."""

    def __init__(self, value):
        super().__init__()
        self.network, self.value = plain(), value

    def forward(self, z):
        return self.network(z)


class Caches(Stores):
    """Keeps its last output, with the history of its computation, by itself and in a list."""

    def forward(self, z):
        x = self.network(z)
        self.last, self.value = x, [x]
        return x


class Holds:
    """An object whose lock cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()


def normed(norm):
    """A network whose first weight a hook computes, after a call that recorded derivatives."""
    network = plain()
    norm(network[0])
    network.train()(torch.ones(4, 2))
    network.eval()(torch.ones(4, 2))
    return network


def cached():
    network = Caches(None)
    network(torch.ones(4, 2))
    return network


def in_torchscript(make):
    with warnings.catch_warnings():
        # torch's advice against it
        warnings.simplefilter("ignore")
        return make(plain())


NETWORKS = {
    "scripted": lambda: in_torchscript(torch.jit.script),
    "traced": lambda: in_torchscript(lambda network: torch.jit.trace(network, torch.ones(2, 2))),
    "spectral_norm": lambda: normed(nn.utils.spectral_norm),
    "weight_norm": lambda: in_torchscript(lambda network: normed(nn.utils.weight_norm)),
    "a cached output": cached,
    "a lock": lambda: Stores(threading.Lock()),
    "a lock in an object": lambda: Stores(Holds()),
    "a generator": lambda: Stores(i for i in range(3)),
}


class Decoder(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, z):
        return Independent(Normal(self.network(z), 0.5), 1)


@pytest.fixture(params=cases(NETWORKS, NETWORKS))
def network(request):
    return request.param()


def test_it_is_conditioned_as_it_computes(network):
    z = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = network(z)
    fibre = dgm.condition(from_module(network, 2), expected[0, :1], observe=lambda x: x[..., :1])
    torch.testing.assert_close(fibre.model.observed(z.double()), expected.double(), rtol=1e-5, atol=1e-6)
    draws = dgm.sample(fibre, dgm.ConstrainedHMC(step_size=0.1), chains=2, warmup=0, draws=3, seed=1, progress=False)
    assert draws.stats["constraint_error"].max() < 1e-8
    with torch.no_grad():
        found = network(draws.inputs[:, -1].float())[:, 0]
    torch.testing.assert_close(found, expected[0, :1].expand(2), rtol=0, atol=1e-5)


def test_the_posterior_of_its_latents_is_that_of_its_outputs(network):
    images = torch.tensor([[0.1, 0.2, -0.3], [0.0, 0.5, 0.1]])
    target = LatentPosterior(Decoder(network), images, dgm.StandardNormal(2))
    z = torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        likelihood = Normal(network(z.flatten(0, 1)).unflatten(0, (4, 2)), 0.5).log_prob(images).sum(-1)
    expected = -likelihood - Normal(0.0, 1.0).log_prob(z).sum(-1)
    torch.testing.assert_close(target.energy(z), expected)


def test_the_network_stays_as_it_is_and_shares_no_weights(network):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    other = copied(network)
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in network.parameters()]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    evaluation_copy(network).double()
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.requires_grad and p.dtype == torch.float32 for p in network.parameters())


class GroupNorm32(nn.GroupNorm):
    """Computes in float32 whatever it is given, as copied by many repositories."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


SINGLE = {
    "a layer of float32": lambda: nn.Sequential(nn.Linear(2, 8), GroupNorm32(2, 8), nn.Linear(8, 3)).eval(),
    "frozen TorchScript": lambda: in_torchscript(lambda network: torch.jit.freeze(torch.jit.script(network))),
}


@pytest.mark.parametrize("make", cases(SINGLE, SINGLE))
def test_what_computes_in_float32_alone_is_told_so_and_works_in_it(make):
    model, y = from_module(make(), 2, noise=0.3), torch.tensor([0.1, 0.2, -0.1])
    with pytest.raises(ModelError, match=r"dgm\.condition\(\.\.\., dtype=torch\.float32\)") as caught:
        dgm.condition(model, y)
    assert "\n" not in str(caught.value)
    fibre = dgm.condition(model, y, dtype=torch.float32)
    kernel = dgm.ConstrainedHMC(step_size=0.1)
    draws = dgm.sample(fibre, kernel, chains=2, warmup=0, draws=3, seed=1, progress=False)
    assert draws.stats["constraint_error"].max() < 1e-4
