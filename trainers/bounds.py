"""Lower bounds of log p(x) of an auto-encoder, as functions of its parameters.

An auto-encoder is a generator with an ``encoder`` and a ``decoder`` that return distributions, and a standard normal
prior of its latents. Images are ``[n, *output_shape]``.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Independent, Normal, kl_divergence
from torch.nn.functional import softplus

from generators import BernoulliVAE, GaussianVAE

__all__ = ["AutoEncoder", "ElboTerms", "Gradient", "elbo_terms", "importance_weighted", "log_weights"]

AutoEncoder = GaussianVAE | BernoulliVAE
Gradient = Literal["plain", "doubly_reparameterised"]


class ElboTerms(NamedTuple):
    """The evidence lower bound of each image is the first less the second."""

    log_likelihood: Tensor
    """``E_q(z|x)[log p(x | z)]``, estimated: ``[n]``."""
    divergence: Tensor
    """``KL(q(z | x) || N(0, I))``, in closed form: ``[n]``."""


def elbo_terms(model: AutoEncoder, images: Tensor, samples: int = 1) -> ElboTerms:
    """The two parts of the evidence lower bound, the first from ``samples`` draws of z an image."""
    x = images.flatten(-len(model.output_shape))
    posterior = model.encoder(x)
    z = posterior.rsample(torch.Size([samples]))
    return ElboTerms(_log_likelihood(model.decoder(z), x).mean(0), kl_divergence(posterior, _standard_normal(z[0])))


def log_weights(model: AutoEncoder, images: Tensor, k: int, gradient: Gradient = "plain") -> Tensor:
    """``log w_i = log p(x | z_i) + log p(z_i) - log q(z_i | x)`` of k draws ``z_i ~ q(z | x)``: ``[k, n]``.

    Their mean over the draws is the evidence lower bound, the logarithm of the weights' mean the importance-weighted
    one (Burda, Grosse and Salakhutdinov 2016, (8)). With weights ``v_i = w_i / sum_j w_j`` the latter's gradient is
    ``sum_i v_i d log w_i``. In the encoder's parameters phi, z_i = z(e_i, phi), the part of it that comes from q itself
    has expectation

        ``E[sum_i v_i (-d log q(z_i) / d phi)] = E[sum_i (v_i^2 - v_i) (d log w_i / d z_i) (d z_i / d phi)]``

    so that ``sum_i v_i^2 (d log w_i / d z_i) (d z_i / d phi)`` is unbiased too, and its signal does not vanish as k
    grows (Tucker et al. 2019, (8)). ``"doubly_reparameterised"`` gives the weights this gradient when they enter the
    importance-weighted bound; the decoder's is unchanged.

    Args:
        model: an auto-encoder.
        images: ``[n, *output_shape]``.
        k: draws an image.
        gradient: of the importance-weighted bound in the encoder's parameters.
    """
    x = images.flatten(-len(model.output_shape))
    posterior = model.encoder(x)
    z = posterior.rsample(torch.Size([k]))
    twice = gradient == "doubly_reparameterised" and z.requires_grad
    if twice:
        q = posterior.base_dist
        posterior = Independent(Normal(q.loc.detach(), q.scale.detach(), validate_args=False), 1, validate_args=False)
    weights = _log_likelihood(model.decoder(z), x) + _standard_normal(z).log_prob(z) - posterior.log_prob(z)
    if twice:
        # the bound multiplies what comes back by v_i; the second factor for what goes on to the encoder is here
        share = weights.detach().softmax(0).unsqueeze(-1)
        z.register_hook(lambda slope: slope * share)
    return weights


def importance_weighted(weights: Tensor) -> Tensor:
    """``log 1/k sum_i w_i`` of log weights: ``[k, n] -> [n]``."""
    return weights.logsumexp(0) - math.log(weights.shape[0])


def _log_likelihood(likelihood: Independent, x: Tensor) -> Tensor:
    """``log p(x | z)``, ``[k, n]``; of binary pixels ``sum_i x_i a_i - log(1 + exp(a_i))`` of logits a."""
    pixels = likelihood.base_dist
    if isinstance(pixels, Bernoulli) and likelihood.reinterpreted_batch_ndims == 1:
        # with fewer passes over all draws and pixels than the distribution's own
        return (pixels.logits * x).sum(-1) - softplus(pixels.logits).sum(-1)
    return likelihood.log_prob(x)


def _standard_normal(like: Tensor) -> Independent:
    return Independent(Normal(torch.zeros_like(like), torch.ones_like(like), validate_args=False), 1)
