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

# Draws of a chain over which its energy is averaged, and draws of all chains that are followed to their modes.
_AVERAGED, _FOLLOWED = 50, 16
# Steps of Adam, and the learning rate that they begin with, which falls to nothing along a cosine; Newton's steps.
_STEPS, _RATE, _NEWTON = 400, 0.03, 10
# Points, the lowest of an image, that Newton's steps finish, and their lengths that are tried.
_FINISHED, _LENGTHS = 6, (1.0, 0.3, 0.1, 0.0)


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
    """Per image: mean energy in the second half of the draws, and the log mass of the best mode visited.

    The mass is Laplace's, ``-E + D/2 log 2 pi - log det H / 2`` at the minimum E to which a draw descends; NaN where no
    descent arrives at a minimum.

    Args:
        given: with output noise.
        chains: latents ``[chains, draws, n * Dz]`` of every process.

    Returns:
        ``energy`` and ``mass``, a number per image.
    """
    n, dim = len(given.images), int(np.prod(given.latent))
    draws = [torch.from_numpy(np.asarray(part, np.float64)).unflatten(-1, (n, dim)) for part in chains]
    half = torch.cat(
        [part[:, torch.linspace(part.shape[1] // 2, part.shape[1] - 1, _AVERAGED).long()] for part in draws]
    )
    energy = latent_energy(given)
    with torch.no_grad():
        energies = energy(half)
    some = torch.linspace(0, _AVERAGED * len(half) - 1, _FOLLOWED).long()
    # alternately of all chains
    points = _descended(energy, half.swapaxes(0, 1).flatten(0, 1)[some])
    with torch.no_grad():
        lowest = energy(points).argsort(0)[:_FINISHED]
    points = torch.take_along_dim(points, lowest.unsqueeze(-1), 0)
    masses = torch.stack([_mass(energy, point) for point in points])
    best = masses.nan_to_num(-math.inf).max(0).values
    found = torch.where(best > -math.inf, best, math.nan)
    return {"energy": energies.mean((0, 1)).tolist(), "mass": found.tolist()}


def _descended(energy: Energy, z: Tensor) -> Tensor:
    """Nearly local minima, ``[k, n, Dz]``."""
    z = z.clone().requires_grad_()
    descent = torch.optim.Adam([z], lr=_RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(descent, _STEPS)
    for _ in range(_STEPS):
        descent.zero_grad()
        energy(z).sum().backward()
        descent.step()
        falling.step()
    return z.detach()


def _mass(energy: Energy, z: Tensor) -> Tensor:
    """Laplace's log masses at the minima near a point of every image, ``[n, Dz] -> [n]``; NaN where there is none."""
    for _ in range(_NEWTON):
        slope, curvatures, axes = _expansion(energy, z)
        ahead = (axes @ ((axes.mT @ slope.unsqueeze(-1)) / curvatures.abs().clamp_min(1e-3).unsqueeze(-1))).squeeze(-1)
        tried = torch.stack([z - length * ahead for length in _LENGTHS])
        with torch.no_grad():
            lowest = energy(tried).argmin(0)
        z = tried[lowest, torch.arange(len(z))]
    slope, curvatures, _ = _expansion(energy, z)
    arrived = (slope.norm(dim=-1) < 1e-3) & (curvatures > 0).all(-1)
    with torch.no_grad():
        masses = -energy(z) + 0.5 * z.shape[-1] * math.log(2 * math.pi) - 0.5 * curvatures.clamp_min(0).log().sum(-1)
    return torch.where(arrived, masses, math.nan)


def _expansion(energy: Energy, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient ``[n, Dz]``, and eigenvalues and vectors of the Hessian of every image."""

    def total(z: Tensor) -> Tensor:
        return energy(z).sum()

    hessian: Any = torch.func.jacrev(torch.func.grad(total))(z)
    own = torch.stack([hessian[i, :, i] for i in range(len(z))]).detach()
    slope: Any = torch.func.grad(total)(z)
    return slope.detach(), *torch.linalg.eigh(own)
