"""What energies and which modes a method's chains of images have reached."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .image_sampling import Conditioned

__all__ = ["latent_energy", "reached"]

Energy = Callable[[Tensor], Tensor]

# Draws over which the energy of chains is averaged, and chains whose last draws are followed to their modes.
_AVERAGED, _FOLLOWED = 50, 16
# Steps of the descents, and the learning rate that they begin with; it falls to nothing along a cosine.
_STEPS, _RATE = 400, 0.03


def latent_energy(given: Conditioned) -> Callable[[Tensor], Tensor]:
    """Minus ``log p(z, y)`` with output noise, float64, as a function ``[..., n, Dz] -> [..., n]``."""
    assert given.mask is not None
    assert given.sd is not None
    index, sd = given.mask.flatten().nonzero().squeeze(-1), given.sd
    y = given.images.flatten(1)[:, index].double()
    # a copy: a module is cast in place
    net = deepcopy(given.net).double()

    def energy(z: Tensor) -> Tensor:
        outputs = net(z.reshape(-1, *given.latent)).flatten(1)[:, index].reshape(*z.shape[:-1], len(index))
        constant = 0.5 * (z.shape[-1] + len(index)) * math.log(2 * math.pi) + len(index) * math.log(sd)
        return 0.5 * z.square().sum(-1) + 0.5 * ((outputs - y) / sd).square().sum(-1) + constant

    return energy


def reached(given: Conditioned, chains: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Of every image: mean energy in the second half of the draws, and the log mass of the best mode visited.

    The mass is Laplace's, ``-E + D/2 log 2 pi - log det H / 2`` at the minimum E to which a chain's last draw descends.

    Args:
        given: with output noise.
        chains: latents ``[chains, draws, n * Dz]`` of every process.

    Returns:
        ``energy`` and ``mass``, a number per image.
    """
    n, dim = len(given.images), int(np.prod(given.latent))
    draws = [torch.from_numpy(np.asarray(part, np.float64)).unflatten(-1, (n, dim)) for part in chains]
    half = [part[:, torch.linspace(part.shape[1] // 2, part.shape[1] - 1, _AVERAGED).long()] for part in draws]
    energy = latent_energy(given)
    with torch.no_grad():
        energies = torch.cat([energy(part).flatten(0, 1) for part in half])
    last = torch.cat([part[:, -1] for part in draws])[:_FOLLOWED]
    masses = _masses(energy, _descended(energy, last))
    return {"energy": energies.mean(0).tolist(), "mass": masses.max(0).values.tolist()}


def _descended(energy: Energy, z: Tensor) -> Tensor:
    """Local minima of the energy, ``[k, n, Dz]``."""
    z = z.clone().requires_grad_()
    descent = torch.optim.Adam([z], lr=_RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(descent, _STEPS)
    for _ in range(_STEPS):
        descent.zero_grad()
        energy(z).sum().backward()
        descent.step()
        falling.step()
    return z.detach()


def _masses(energy: Energy, z: Tensor) -> Tensor:
    """Laplace's log masses at minima, ``[k, n]``."""
    dim = z.shape[-1]

    rows = []
    for point in z:
        hessian: Any = torch.func.hessian(lambda z: energy(z).sum())(point)
        own = torch.stack([hessian[i, :, i] for i in range(len(point))])
        # at a minimum that is not quite reached, curvatures may be negative
        curvatures = torch.linalg.eigvalsh(own).clamp_min(1e-6)
        rows.append(-energy(point) + 0.5 * dim * math.log(2 * math.pi) - 0.5 * curvatures.log().sum(-1))
    return torch.stack(rows).detach()
