"""Mixtures of Gaussians whose denoiser, velocity and posterior under linear observations are known in closed form."""

import torch
from torch import Tensor, nn

import dgm_infer as dgm
from generators import FlowGenerator

__all__ = ["MixtureVelocity", "ObservedMixture"]


class MixtureVelocity(nn.Module):
    """``v(x, t) = E[x_1 - x_0 | x_t = x]`` on the linear path from N(0, I) to a mixture of isotropic Gaussians.

    Given component k, ``x_t ~ N(t m_k, v_k I)`` with ``v_k = t^2 s_k^2 + (1 - t)^2``, ``E[x_1] = m_k + t s_k^2 (x - t
    m_k) / v_k`` and ``E[x_0] = (1 - t) (x - t m_k) / v_k``.
    """

    means: Tensor
    sds: Tensor
    log_weights: Tensor

    def __init__(self, means: Tensor, sds: Tensor, weights: Tensor):
        super().__init__()
        self.register_buffer("means", means)
        self.register_buffer("sds", sds)
        self.register_buffer("log_weights", weights.log())

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = t.reshape(-1, 1)
        variance = t.square() * self.sds.square() + (1 - t).square()
        shares, distance = _shares(x, t.unsqueeze(-1) * self.means, variance, self.log_weights)
        slope = (t * self.sds.square() - (1 - t)) / variance
        return (shares.unsqueeze(-1) * (self.means + slope.unsqueeze(-1) * distance)).sum(-2)

    def denoised(self, x: Tensor, sd: Tensor) -> Tensor:
        """``E[x_1 | x_1 + sd n = x]``: rows ``[n, D]``, ``sd [n, 1]``."""
        variance = self.sds.square() + sd.square()
        shares, distance = _shares(x, self.means.expand(len(x), -1, -1), variance, self.log_weights)
        slope = self.sds.square() / variance
        return (shares.unsqueeze(-1) * (self.means + slope.unsqueeze(-1) * distance)).sum(-2)


def _shares(x: Tensor, means: Tensor, variance: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of the components ``[n, K]`` and distances from their means ``[n, K, D]``."""
    distance = x.unsqueeze(-2) - means
    logs = log_weights - distance.square().sum(-1) / (2 * variance) - x.shape[-1] / 2 * variance.log()
    return logs.softmax(-1), distance


class ObservedMixture:
    """A mixture of four components in D dimensions of which half of the entries are observed with noise.

    Two pairs of components, each of one mean in the observed half and two in the hidden half, so that posteriors have
    two modes, whose weights depend on the data.

    Args:
        dim: D, even.
        noise: standard deviation of the observed entries.
    """

    def __init__(self, dim: int, noise: float = 0.1):
        self.dim, self.noise, half = dim, noise, dim // 2
        rng = torch.Generator().manual_seed(dim)
        signs = torch.randint(0, 2, (2, half), generator=rng).double() * 2 - 1
        other = torch.randint(0, 2, (4, half), generator=rng).double() * 2 - 1
        # the modes of a pair are opposite, however few the entries
        other[1], other[3] = -other[0], -other[2]
        signs[1] = -signs[0]
        self.means = torch.cat([signs[[0, 0, 1, 1]], other], -1)
        # in few dimensions data tell one sd from another by little, in many by all: the ratio is that of 1.5 in two
        ratio = 1.5 ** (2 / dim) ** 0.5
        self.sds = 0.25 * torch.tensor([1.0, ratio, 1.0, ratio]).double()
        self.weights = torch.tensor([0.4, 0.2, 0.3, 0.1]).double()
        self.velocity = MixtureVelocity(self.means, self.sds, self.weights)
        self.mask = torch.arange(dim) < half

    def flow(self, steps: int) -> FlowGenerator:
        return FlowGenerator(self.velocity, self.dim, steps=steps, solver="heun")

    def draws(self, n: int, rng: torch.Generator) -> Tensor:
        """Exact draws of the mixture, ``[n, D]``."""
        k = torch.multinomial(self.weights, n, replacement=True, generator=rng)
        noise = torch.randn(n, self.dim, generator=rng, dtype=torch.float64)
        return self.means[k] + self.sds[k].unsqueeze(-1) * noise

    def data(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Observed halves with noise, ``[n, D / 2]``."""
        seen = x[:, self.mask]
        return seen + self.noise * torch.randn(seen.shape, generator=rng, dtype=torch.float64)

    def fibre(self, y: Tensor, steps: int, device: str = "cpu") -> dgm.Fibre:
        """The flow's posterior given data ``[P, D / 2]``."""
        images = torch.cat([y, y.new_full((len(y), self.dim - y.shape[-1]), torch.nan)], -1)
        seen = dgm.pixels(self.mask)
        return dgm.condition(self.flow(steps), images, observe=seen, noise=self.noise, device=device)  # type: ignore[return-value]

    def posterior_weights(self, y: Tensor) -> Tensor:
        """Probabilities of the components, ``[P, K]``."""
        variance = self.sds.square() + self.noise**2
        return _shares(y, self.means[:, self.mask], variance, self.weights.log())[0]

    def log_posterior(self, x: Tensor, y: Tensor) -> Tensor:
        """``log p(x | y)`` up to a constant of y: ``[S, P, D], [P, D / 2] -> [S, P]``."""
        distance = (x.unsqueeze(-2) - self.means).square().sum(-1)
        logs = self.weights.log() - distance / (2 * self.sds.square()) - self.dim * self.sds.log()
        return logs.logsumexp(-1) - (x[..., self.mask] - y).square().sum(-1) / (2 * self.noise**2)

    def shares(self, x: Tensor) -> Tensor:
        """Probability that draws ``[..., D]`` come from each component: ``[..., K]``."""
        distance = (x.unsqueeze(-2) - self.means).square().sum(-1)
        return (self.weights.log() - distance / (2 * self.sds.square()) - self.dim * self.sds.log()).softmax(-1)

    def exact(self, y: Tensor, n: int, rng: torch.Generator) -> Tensor:
        """Exact draws of the posteriors, ``[n, P, D]``."""
        k = torch.multinomial(self.posterior_weights(y), n, replacement=True, generator=rng).T
        noise = torch.randn(n, len(y), self.dim, generator=rng, dtype=torch.float64)
        mean, sd = self.means[k], self.sds[k].unsqueeze(-1)
        hidden = mean + sd * noise
        precision = sd**-2 + self.noise**-2
        seen = (mean[..., self.mask] * sd**-2 + y * self.noise**-2) / precision
        hidden[..., self.mask] = seen + noise[..., self.mask] / precision.sqrt()
        return hidden
