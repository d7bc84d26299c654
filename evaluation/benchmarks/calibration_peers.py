"""Samplers of posteriors under a diffusion or flow prior that others use, beside which calibration is measured.

DPS, DDRM and DiffPIR are those of deepinv, given the exact denoiser of the mixture; N-HMC's acceptance is made from its
description (arXiv 2604.16919): a rejected proposal is tried again and not counted.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dgm_infer import Target
from dgm_infer.errors import extra

from ..problems.gaussian_mixture_flow import ObservedMixture

__all__ = ["DEEPINV", "from_deepinv", "retried_hmc"]

DEEPINV = ("dps", "ddrm", "diffpir")

# The data as pictures in [0, 1]: x = _LOW + _WIDTH p.
_LOW, _WIDTH = -2.5, 5.0


class _Denoiser(nn.Module):
    """``E[p | p + sd n]`` of pixels p, as deepinv calls it: ``[n, 1, 1, D]`` and a standard deviation."""

    def __init__(self, problem: ObservedMixture):
        super().__init__()
        self.velocity, self.dim, self.calls = problem.velocity, problem.dim, 0

    def forward(self, x: Tensor, sigma: Any, **others: Any) -> Tensor:
        self.calls += 1
        rows = x.reshape(-1, self.dim).double()
        sd = torch.as_tensor(sigma, dtype=torch.float64).reshape(-1, 1).expand(len(rows), 1)
        found = self.velocity.denoised(_LOW + _WIDTH * rows, _WIDTH * sd)
        return ((found - _LOW) / _WIDTH).reshape(x.shape).to(x.dtype)


def from_deepinv(
    name: str, problem: ObservedMixture, y: Tensor, draws: int, steps: int, seed: int
) -> tuple[Tensor, float]:
    """Draws ``[S, P, D]`` of one of :data:`DEEPINV`, at its defaults but for steps and guidance of DPS; and the
    evaluations of the denoiser that each took."""
    with extra("deepinv"):
        import deepinv

    peers: Any = deepinv
    dim, n = problem.dim, draws * len(y)
    pixels = torch.zeros(len(y), dim, dtype=torch.float64)
    pixels[:, problem.mask] = (y - _LOW) / _WIDTH
    pictures = pixels.expand(draws, -1, -1).reshape(n, 1, 1, dim).float()
    mask = problem.mask.float().reshape(1, 1, dim)
    noise = peers.physics.GaussianNoise(problem.noise / _WIDTH)
    physics = peers.physics.Inpainting(img_size=(1, 1, dim), mask=mask, noise_model=noise)
    denoiser, fidelity = _Denoiser(problem), peers.optim.data_fidelity.L2()
    torch.manual_seed(seed)
    if name == "dps":
        # at its default weight, tuned for large images, its draws hardly follow the data
        options = {"guidance": "annealed", "dtype": torch.float32, "rng": torch.Generator()}
        sampler = peers.sampling.DPS(denoiser, num_steps=steps, **options)
        found = sampler(pictures, physics, seed=seed)
    elif name == "ddrm":
        with torch.no_grad():
            found = peers.sampling.DDRM(denoiser)(pictures, physics)
    else:
        with torch.no_grad():
            found = peers.sampling.DiffPIR(denoiser, fidelity)(pictures, physics)
    assert isinstance(found, Tensor)
    return _LOW + _WIDTH * found.detach().double().reshape(draws, len(y), dim), float(denoiser.calls)


def retried_hmc(
    target: Target, start: Tensor, step_size: float, n_steps: int, draws: int, rng: torch.Generator, *, most: int = 10
) -> tuple[Tensor, float]:
    """HMC whose rejected proposals are retried with new momentum and not counted: draws ``[S, *start.shape]``, and
    the share of proposals that were accepted.

    A state that is hard to leave is then counted once, not as often as it is proposed from: the draws are not those of
    the target.

    Args:
        target: an energy.
        start: ``[*, D]``.
        step_size: of the leapfrog steps.
        n_steps: leapfrog steps of a proposal.
        draws: draws per chain.
        rng: generator of momenta and decisions.
        most: proposals per draw; after them the state is kept.
    """

    def drawn(of: Callable[..., Tensor], shape: torch.Size) -> Tensor:
        return of(shape, generator=rng, dtype=x.dtype).to(x.device)

    x, found, tried, taken = start, [], 0, 0
    energy, gradient = target.energy_and_gradient(x)
    for _ in range(draws):
        waiting = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        for _ in range(most):
            p = drawn(torch.randn, x.shape)
            end, slope, momentum, new = _leapfrog(target.energy_and_gradient, x, gradient, p, step_size, n_steps)
            change = new - energy + (momentum.square() - p.square()).sum(-1) / 2
            accepted = waiting & (drawn(torch.rand, change.shape).log() < -change.nan_to_num(math.inf))
            tried, taken = tried + int(waiting.sum()), taken + int(accepted.sum())
            each = accepted.unsqueeze(-1)
            x, gradient = torch.where(each, end, x), torch.where(each, slope, gradient)
            energy, waiting = torch.where(accepted, new, energy), waiting & ~accepted
            if not waiting.any():
                break
        found.append(x)
    return torch.stack(found), taken / tried


def _leapfrog(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, gradient: Tensor, p: Tensor, h: float, n: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    energy = gradient.new_zeros(())
    for _ in range(n):
        p = p - h / 2 * gradient
        x = x + h * p
        energy, gradient = slope(x)
        p = p - h / 2 * gradient
    return x, gradient, p, energy
