"""Objectives of generators and their critics, as functions of the critic's scores, and a distance to select epochs.

Scores are ``[n]``, higher for images that look real.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

__all__ = [
    "Objective",
    "average_towards",
    "critic_loss",
    "energy_distance",
    "generator_loss",
    "gradient_penalty",
]

Objective = Literal["non_saturating", "wasserstein"]


def critic_loss(objective: Objective, real: Tensor, fake: Tensor) -> Tensor:
    """The critic's loss, with scores a.

    Non-saturating: ``-E log sigmoid(a(x)) - E log(1 - sigmoid(a(g(z))))`` (Goodfellow et al. 2014, (1)).
    Wasserstein: ``E a(g(z)) - E a(x)`` (Arjovsky et al. 2017).
    """
    if objective == "wasserstein":
        return fake.mean() - real.mean()
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(objective: Objective, fake: Tensor) -> Tensor:
    """The generator's loss: ``-E log sigmoid(a(g(z)))``, or ``-E a(g(z))``."""
    return -fake.mean() if objective == "wasserstein" else F.softplus(-fake).mean()


def gradient_penalty(objective: Objective, critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor) -> Tensor:
    """Penalty that bounds the critic's slope ``s = da/dx``, for images ``[n, *shape]``.

    Wasserstein: ``E (|s| - 1)^2`` at points uniform between real and generated images (Gulrajani et al. 2017, (3)).
    Non-saturating: ``E |s|^2 / 2`` at real images (Mescheder et al. 2018, (9)).
    """
    if objective == "wasserstein":
        share = torch.rand(len(real), *[1] * (real.ndim - 1), dtype=real.dtype, device=real.device)
        points = torch.lerp(fake.detach().to(real), real, share).requires_grad_()
    else:
        points = real.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(critic(points).float().sum(), points, create_graph=True)
    squared = slope.flatten(1).square().sum(-1)
    if objective == "wasserstein":
        # the derivative of the root is infinite at zero
        return ((squared + 1e-12).sqrt() - 1).square().mean()
    return squared.mean() / 2


@torch.no_grad()
def average_towards(average: nn.Module, source: nn.Module, decay: float, updates: int) -> None:
    """Exponential moving average of parameters and running statistics: ``a <- d a + (1 - d) s``.

    Early on ``d = min(decay, (1 + updates)/(10 + updates))``, so that the initial weights are soon forgotten.

    Args:
        average: changed in place; of the same class as the source.
        source: the trained module.
        decay: decay of a long run, in [0, 1).
        updates: number of previous updates.
    """
    state, moving, new = source.state_dict(), [], []
    for name, value in average.state_dict().items():
        if value.is_floating_point():
            moving.append(value)
            new.append(state[name].to(value))
        else:
            value.copy_(state[name])
    get_ema_multi_avg_fn(min(decay, (1 + updates) / (10 + updates)))(moving, new, updates)


def energy_distance(x: Tensor, y: Tensor) -> Tensor:
    """Unbiased estimate of ``2 E|x - y| - E|x - x'| - E|y - y'|`` from two samples (Székely and Rizzo 2013).

    The distance is zero only between equal distributions; estimates can be slightly negative.

    Args:
        x: ``[n, D]``, n at least 2.
        y: ``[m, D]``, m at least 2.
    """
    return 2 * torch.cdist(x, y).mean() - _spread(x) - _spread(y)


def _spread(x: Tensor) -> Tensor:
    """Mean distance between two different points of a sample."""
    n = len(x)
    return torch.cdist(x, x).sum() / (n * (n - 1))
