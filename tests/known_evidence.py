"""Targets of known log evidence, with bases that do not match them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dgm_infer as dgm
from generators import LinearGaussian
from tests.oracles import FLOAT, linear_gaussian_model, linear_gaussian_posterior


@dataclass(frozen=True)
class KnownEvidence:
    """A target of exact log evidence, a base that does not match it, and exact draws."""

    target: Any
    base: dgm.Gaussian
    log_z: Tensor
    """``[*batch]``."""
    draw: Callable[[int, torch.Generator], Tensor]
    """Exact draws ``[n, *batch, D]``."""


class MixtureTarget(dgm.Target):
    """``exp(offset)`` times a mixture of Gaussians, the same for every problem of the batch.

    Args:
        weights, means, covariances: ``[K]``, ``[K, D]``, ``[K, D, D]``.
        offset: the log evidence.
    """

    def __init__(self, weights: Tensor, means: Tensor, covariances: Tensor, offset: float, batch_shape=()):
        super().__init__(None, means.shape[-1], batch_shape)
        self.parts = weights, means, covariances
        self.offset = offset
        self.factors = torch.linalg.cholesky(covariances)
        self.whitening = torch.linalg.inv(self.factors)
        log_det = self.factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self.log_parts = weights.log() - log_det - 0.5 * self.dim * math.log(2 * math.pi) + offset

    def energy(self, x):
        whitening, log_parts = self.whitening.to(x.dtype), self.log_parts.to(x.dtype)
        parts = [
            c - 0.5 * ((x - m.to(x.dtype)) @ w.mT).square().sum(-1)
            for c, m, w in zip(log_parts, self.parts[1], whitening, strict=True)
        ]
        return -torch.logsumexp(torch.stack(parts), 0)

    def take(self, problems):
        return MixtureTarget(*self.parts, self.offset, (len(problems),))

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        weights, means, _ = self.parts
        shape = (n, *self.batch_shape)
        part = torch.multinomial(weights, math.prod(shape), replacement=True, generator=rng)
        noise = torch.randn(len(part), self.dim, generator=rng, dtype=FLOAT)
        x = means[part] + (self.factors[part] @ noise.unsqueeze(-1)).squeeze(-1)
        return x.reshape(*shape, self.dim)


def known_gaussian(dim: int, problems: tuple[int, ...] = (), *, offset: float = -3.0) -> KnownEvidence:
    """A correlated Gaussian under a diagonal base that is off in mean and too wide."""
    rng = torch.Generator().manual_seed(30 + dim)
    mixing = torch.randn(dim, dim, generator=rng, dtype=FLOAT) / math.sqrt(dim)
    covariance = 0.5 * (mixing @ mixing.mT) + 0.5 * torch.eye(dim, dtype=FLOAT)
    mean = torch.randn(dim, generator=rng, dtype=FLOAT)
    target = MixtureTarget(torch.ones(1, dtype=FLOAT), mean[None], covariance[None], offset, problems)
    sd = 1.2 * covariance.diagonal().sqrt()
    shift = 0.5 / math.sqrt(dim) * torch.ones(dim, dtype=FLOAT)
    base = dgm.Gaussian((mean + shift).expand(*problems, dim), sd.expand(*problems, dim))
    return KnownEvidence(target, base, torch.full(problems, offset, dtype=FLOAT), target.draw)


def known_bimodal(problems: tuple[int, ...] = (), *, offset: float = 1.5) -> KnownEvidence:
    """Two modes in the plane, of weights 0.35 and 0.65, eight of their standard deviations apart, under a wide base."""
    means = torch.tensor([[-2.0, -1.0], [1.5, 1.0]], dtype=FLOAT)
    covariances = torch.diag_embed(torch.tensor([[0.25, 0.3], [0.2, 0.25]], dtype=FLOAT))
    weights = torch.tensor([0.35, 0.65], dtype=FLOAT)
    target = MixtureTarget(weights, means, covariances, offset, problems)
    base = dgm.Gaussian(torch.zeros(*problems, 2, dtype=FLOAT), 2.0)
    return KnownEvidence(target, base, torch.full(problems, offset, dtype=FLOAT), target.draw)


class LinearGaussianPosterior(dgm.Target):
    """``z | x`` of a :class:`LinearGaussian`, whose log evidence is ``log N(x; b, W W^T + sd^2 I)``."""

    def __init__(self, model: LinearGaussian, x: Tensor):
        super().__init__(None, model.weight.shape[1], tuple(x.shape[:-1]))
        self.model, self.x = model, x

    def energy(self, x):
        model = self.model
        residual = (self.x - x @ model.weight.mT - model.bias) / model.sd
        n_outputs, n_latents = model.weight.shape
        constant = 0.5 * (n_outputs + n_latents) * math.log(2 * math.pi) + n_outputs * model.sd.log()
        return 0.5 * residual.square().sum(-1) + 0.5 * x.square().sum(-1) + constant

    def take(self, problems):
        return LinearGaussianPosterior(self.model, self.x.reshape(-1, self.x.shape[-1])[problems])


def known_linear_gaussian(problems: tuple[int, ...] = (3,), *, widen: float = 1.3) -> KnownEvidence:
    """The latents of probabilistic principal components, every problem an output of its own."""
    model = linear_gaussian_model()
    rng = torch.Generator().manual_seed(23)
    n_outputs = model.weight.shape[0]
    x = 1.5 * torch.randn(*problems, n_outputs, generator=rng, dtype=FLOAT)
    identity = torch.eye(n_outputs, dtype=FLOAT)
    answers = [linear_gaussian_posterior(model, row, identity) for row in x.reshape(-1, n_outputs)]
    mean = torch.stack([a[0] for a in answers]).reshape(*problems, -1)
    covariance = answers[0][1]
    marginal = torch.distributions.MultivariateNormal(
        model.bias, model.weight @ model.weight.mT + model.sd.square() * identity
    )
    posterior = torch.distributions.MultivariateNormal(mean, covariance)

    def draw(n: int, rng: torch.Generator) -> Tensor:
        noise = torch.randn(n, *mean.shape, generator=rng, dtype=FLOAT)
        return posterior.loc + noise @ torch.linalg.cholesky(covariance).mT

    base = dgm.Gaussian(mean + 0.2, widen * covariance.diagonal().sqrt().expand_as(mean))
    return KnownEvidence(LinearGaussianPosterior(model, x), base, marginal.log_prob(x), draw)
