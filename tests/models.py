"""Small models that tests share: of every structure, images of a network, auto-encoders of known posterior."""

from typing import Any

import torch
from torch import nn

import dgm_infer as dgm
import generators
from tests.oracles import FLOAT


def fixed(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


class Bent(dgm.DirectedModel):
    """Five outputs, each a wave of two global inputs plus a stretched noise of its own."""

    structure = "independent"

    def __init__(self, structure="independent"):
        super().__init__()
        self.structure = structure
        self.global_density = dgm.StandardNormal(2)
        self.local_density = dgm.StandardNormal(5)
        self.register_buffer("weight", fixed(5, 2, seed=30))

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        return torch.tanh(z["z"] @ self.weight.mT) + 0.3 * torch.exp(0.2 * z["z"][..., :1]) * u2


class Stretched(Bent):
    """The same of inputs that are not normal."""

    def __init__(self):
        super().__init__()
        self.global_density, self.local_density = dgm.Logistic(2), dgm.Logistic(5)


class BentPairs(dgm.DirectedModel):
    """Three pairs of outputs, each a wave of two global inputs plus bent noises that the pair shares."""

    structure = "independent"
    unit_outputs = 2

    def __init__(self, structure="independent", n_inputs=2):
        super().__init__()
        self.structure, self.unit_inputs = structure, n_inputs
        self.global_density = dgm.StandardNormal(2)
        self.local_density = dgm.StandardNormal(3 * n_inputs)
        self.register_buffer("weight", fixed(6, 2, seed=31))
        self.register_buffer("mix", fixed(3, 2, n_inputs, seed=32))

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        z = z["z"]
        own = u2.unflatten(-1, (3, -1)) * torch.exp(0.2 * z[..., None, :1])
        noise = (self.mix @ (own + 0.3 * torch.tanh(own)).unsqueeze(-1)).squeeze(-1)
        return torch.tanh(z @ self.weight.mT) + 0.3 * noise.flatten(-2)


class Walk(dgm.DirectedModel):
    """A walk in the plane, turned back by z: the noise of its coordinates is mixed by where it is."""

    structure = "markov"
    step_inputs = 2

    def __init__(self, structure="markov", n_steps=4):
        super().__init__()
        self.structure = structure
        self.global_density = dgm.StandardNormal(2)
        self.local_density = dgm.StandardNormal(2 * n_steps)

    def global_latents(self, u1):
        return {"rate": torch.sigmoid(u1[..., 0]), "origin": u1[..., 1]}

    def initial(self, z):
        return torch.stack([z["origin"], 0.5 * z["origin"]], -1)

    def transition(self, previous, z, u2_t):
        mean = previous - z["rate"].unsqueeze(-1) * torch.sin(previous.flip(-1))
        a, b = u2_t.unbind(-1)
        turn = 0.8 * torch.tanh(previous[..., 0])
        noise = torch.stack([a + turn * b, b - turn * a + 0.1 * a * b], -1)
        return mean + 0.4 * noise


class FreeWalk(Walk):
    """The same with a noise of its own for either coordinate: a unit is one of them."""

    unit_inputs = unit_outputs = 1

    def transition(self, previous, z, u2_t):
        mean = previous - z["rate"].unsqueeze(-1) * torch.sin(previous.flip(-1))
        return mean + 0.4 * torch.exp(0.3 * torch.tanh(previous.flip(-1))) * torch.sinh(u2_t)


class Images(dgm.DirectedModel):
    """Two-by-three images of two latents, by a network with everything that a careless cast or mode would change."""

    structure = "independent"
    output_shape = (2, 3)

    def __init__(self):
        super().__init__()
        self.global_density = dgm.StandardNormal(2)
        self.local_density = dgm.StandardNormal(6)
        generator_state = torch.get_rng_state()
        torch.manual_seed(70)
        self.network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 6))
        torch.set_rng_state(generator_state)
        self.network[0].weight.requires_grad_(False)

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        flat = z["z"].reshape(-1, 2)
        return self.network(flat).reshape(*z["z"].shape[:-1], 6) + 0.2 * u2


MASK = torch.tensor([[True, True, False], [True, False, False]])


def image(*batch):
    return torch.randn(*batch, 2, 3, generator=torch.Generator().manual_seed(71))


def layer(network: nn.Module, index: int) -> nn.Linear:
    """One layer of a sequence, which is linear."""
    found = network.get_submodule(str(index % len(list(network.children()))))
    assert isinstance(found, nn.Linear)
    return found


def linear_vae(sd: float = 0.5) -> tuple[generators.GaussianVAE, torch.Tensor]:
    """A VAE without hidden layers whose columns of W are orthogonal: its posterior has a diagonal covariance."""
    vae = generators.GaussianVAE(2, (4,), hidden=(), sd=sd)
    weight = torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.5, 0.5], [0.5, -0.5]])
    with torch.no_grad():
        layer(vae.decoder.network, 0).weight.copy_(weight)
        layer(vae.decoder.network, 0).bias.zero_()
        # posterior N(M^-1 W^T x, sd^2 M^-1), M = W^T W + sd^2 I
        precision = weight.square().sum(0) + sd**2
        layer(vae.encoder.network, 0).weight.copy_(torch.cat([weight.T / precision[:, None], torch.zeros(2, 4)]))
        layer(vae.encoder.network, 0).bias.copy_(torch.cat([torch.zeros(2), (sd**2 / precision).sqrt().log()]))
    return vae, weight


class Network(dgm.GenerativeModel):
    """Five tanh outputs of three inputs, with layers of the caller's after the first."""

    output_range = (-1.0, 1.0)

    def __init__(self, *layers: nn.Module, n_inputs: int = 3, n_outputs: int = 5):
        super().__init__()
        self.input_density = dgm.StandardNormal(n_inputs)
        self.output_shape = (n_outputs,)
        self.first, self.last = nn.Linear(n_inputs, 6), nn.Linear(6, n_outputs)
        self.layers = nn.Sequential(*layers)
        with torch.no_grad():
            for i, parameter in enumerate((*self.first.parameters(), *self.last.parameters())):
                parameter.copy_(fixed(*parameter.shape, seed=90 + i))

    def observed(self, u):
        flat = u.reshape(-1, u.shape[-1])
        hidden = self.layers(torch.tanh(self.first(self.prepare(flat))))
        return self.finish(torch.tanh(self.last(hidden))).reshape(*u.shape[:-1], -1)

    def prepare(self, u):
        return u

    def finish(self, x):
        return x


class Function(dgm.GenerativeModel):
    """Any function of standard normal inputs."""

    function: Any

    def __init__(self, function, dim):
        super().__init__()
        self.function, self.input_density = function, dgm.StandardNormal(dim)

    def observed(self, u):
        return self.function(u)
