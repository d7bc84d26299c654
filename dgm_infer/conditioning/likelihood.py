"""``log p(x | z)`` for families with a known derivative in the decoder's outputs, in few passes over the pixels."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Normal
from torch.nn import functional as F

__all__ = ["KnownSlope", "bernoulli_log_prob", "known_slope"]


class KnownSlope(NamedTuple):
    """Result of one pass over the pixels, for a batch of images."""

    misfit: Tensor
    """``-log p(x | z)``, ``[...]``, detached."""
    slope: Tensor
    """Its derivative in the outputs, ``[..., Dx]``, detached."""
    outputs: Tensor
    """The outputs of the network, ``[..., Dx]``, with their graph; the slope is the derivative in them."""


def known_slope(base: Distribution, x: Tensor) -> KnownSlope | None:
    """The slope of ``-log p(x | z)`` for independent flat pixels; None for families other than these two.

    Bernoulli: ``sigmoid(logits) - x``. Normal of a fixed standard deviation: ``(mean - x)/sd^2``.
    """
    with torch.no_grad():
        if isinstance(base, Bernoulli):
            logits = base.logits.detach()
            p = torch.sigmoid(logits)
            return KnownSlope(_bernoulli_energy(logits, p, x), p.sub_(x), base.logits)
        if isinstance(base, Normal) and not base.scale.requires_grad:
            residual, sd = base.loc.detach() - x, base.scale
            scaled = residual / sd
            constant = 0.5 * math.log(2 * math.pi) * residual.shape[-1] + sd.log().sum(-1)
            return KnownSlope(0.5 * torch.linalg.vecdot(scaled, scaled) + constant, scaled / sd, base.loc)
    return None


def bernoulli_log_prob(logits: Tensor, x: Tensor) -> Tensor:
    """``sum_i x_i a_i - log(1 + exp(a_i))`` of logits a, ``[..., D] -> [...]``, without a saturating sigmoid."""
    if torch.is_grad_enabled():
        return torch.linalg.vecdot(logits, x) - F.softplus(logits).sum(-1)
    return -_bernoulli_energy(logits, torch.sigmoid(logits), x)


def _bernoulli_energy(logits: Tensor, p: Tensor, x: Tensor) -> Tensor:
    """``sum_i log(1 + exp(a_i)) - x_i a_i`` of logits a and ``p = sigmoid(a)``, ``[..., D] -> [...]``.

    ``log(1 + exp(a)) = max(a, 0) - log max(p, 1 - p)``. These factors are at least a half, so that up to a hundred of
    them are multiplied before taking a logarithm.
    """
    factors = torch.maximum(p, 1 - p)
    n = factors.shape[-1]
    group = max(size for size in range(1, 101) if n % size == 0)
    log_factors = factors.unflatten(-1, (n // group, group)).prod(-1).log_().sum(-1)
    return logits.relu().sum(-1) - torch.linalg.vecdot(logits, x) - log_factors
