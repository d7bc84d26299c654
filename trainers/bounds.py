"""Lower bounds of log p(x) as functions of the parameters of an encoder and a decoder.

The model is any module with the parts of a :class:`dgm_infer.models.LatentVariableModel`: prior, decoder and encoder.
Images are ``[n, *output_shape]``.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal, kl_divergence
from torch.nn.functional import softplus

from dgm_infer.errors import ModelError
from dgm_infer.models import InputDensity, LatentVariableModel, base_distribution

__all__ = ["ElboTerms", "Gradient", "elbo_terms", "importance_weighted", "log_weights"]

Gradient = Literal["plain", "doubly_reparameterised"]


class ElboTerms(NamedTuple):
    """The evidence lower bound per image is the first term minus the second."""

    log_likelihood: Tensor
    """``E_q(z|x)[log p(x | z)]``, estimated: ``[n]``."""
    divergence: Tensor
    """``KL(q(z | x) || p(z))``, ``[n]``: in closed form for a normal encoder and prior, else estimated."""


def elbo_terms(model: nn.Module, images: Tensor, samples: int = 1) -> ElboTerms:
    """The two terms of the evidence lower bound, the first from ``samples`` draws of z per image.

    Raises:
        ModelError: the model has no encoder, decoder or prior.
    """
    parts = LatentVariableModel.of(model)
    x = images.flatten(-len(parts.output_shape))
    posterior = parts.encode(x)
    z = posterior.rsample(torch.Size([samples]))
    return ElboTerms(_log_likelihood(parts.decoder(z), x).mean(0), _divergence(posterior, z, parts.prior))


def log_weights(model: nn.Module, images: Tensor, k: int, gradient: Gradient = "plain") -> Tensor:
    """``log w_i = log p(x | z_i) + log p(z_i) - log q(z_i | x)`` of k draws ``z_i ~ q(z | x)``: ``[k, n]``.

    Their mean over draws is the evidence lower bound; the logarithm of the mean weight is the importance-weighted
    bound (Burda, Grosse and Salakhutdinov 2016, (8)). With weights ``v_i = w_i / sum_j w_j`` its gradient is
    ``sum_i v_i d log w_i``. In the encoder's parameters phi, z_i = z(e_i, phi), the part of it that comes from q itself
    has expectation

        ``E[sum_i v_i (-d log q(z_i) / d phi)] = E[sum_i (v_i^2 - v_i) (d log w_i / d z_i) (d z_i / d phi)]``

    so that ``sum_i v_i^2 (d log w_i / d z_i) (d z_i / d phi)`` is unbiased too, and its signal does not vanish as k
    grows (Tucker et al. 2019, (8)). ``"doubly_reparameterised"`` gives the weights this gradient when they enter the
    importance-weighted bound; the decoder's is unchanged.

    Args:
        model: a module with prior, decoder and encoder.
        images: ``[n, *output_shape]``.
        k: draws per image.
        gradient: gradient of the importance-weighted bound in the encoder's parameters.

    Raises:
        ModelError: the model has no encoder, decoder or prior, or the gradient needs an encoder of independent normal
            latents.
    """
    parts = LatentVariableModel.of(model)
    x = images.flatten(-len(parts.output_shape))
    posterior = parts.encode(x)
    z = posterior.rsample(torch.Size([k]))
    twice = gradient == "doubly_reparameterised" and z.requires_grad
    if twice:
        q = base_distribution(posterior)
        if not isinstance(q, Normal):
            raise ModelError(
                f"the encoder of this {type(model).__name__} returns a {type(q).__name__}: a doubly reparameterised "
                "gradient needs independent normal latents; choose the plain gradient"
            )
        posterior = Independent(Normal(q.loc.detach(), q.scale.detach(), validate_args=False), 1, validate_args=False)
    weights = _log_likelihood(parts.decoder(z), x) + parts.prior.log_prob(z) - posterior.log_prob(z)
    if twice:
        # the bound multiplies the gradient by v_i; this is the second factor, for the part that reaches the encoder
        share = weights.detach().softmax(0).unsqueeze(-1)
        z.register_hook(lambda slope: slope * share)
    return weights


def importance_weighted(weights: Tensor) -> Tensor:
    """``log 1/k sum_i w_i`` of log weights: ``[k, n] -> [n]``."""
    return weights.logsumexp(0) - math.log(weights.shape[0])


def _log_likelihood(likelihood: Distribution, x: Tensor) -> Tensor:
    """``log p(x | z)``, ``[k, n]``; for binary pixels ``sum_i x_i a_i - log(1 + exp(a_i))`` with logits a."""
    pixels = base_distribution(likelihood)
    if isinstance(pixels, Bernoulli) and len(likelihood.event_shape) == 1:
        # fewer passes over all draws and pixels than the distribution's own log_prob
        return (pixels.logits * x).sum(-1) - softplus(pixels.logits).sum(-1)
    return likelihood.log_prob(x.reshape(*x.shape[:-1], *likelihood.event_shape))


def _divergence(posterior: Distribution, z: Tensor, prior: InputDensity) -> Tensor:
    """``KL(q || p)`` of each image, ``[n]``, for draws ``z [k, n, Dz]`` of q."""
    if prior.is_standard_normal and isinstance(base_distribution(posterior), Normal):
        like = z[0]
        normal = Normal(torch.zeros_like(like), torch.ones_like(like), validate_args=False)
        return kl_divergence(posterior, Independent(normal, 1))
    return (posterior.log_prob(z) - prior.log_prob(z)).mean(0)
