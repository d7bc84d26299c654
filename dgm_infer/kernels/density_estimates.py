"""Unbiased estimates of likelihoods with latent variables, from standard normal noise (math 8.13)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..arguments import function, whole_number

__all__ = ["ImportanceEstimate", "LaplaceEstimate", "ParticleFilter"]

# Newton iterations towards the mode of the latent variables, and the longest step in any of them.
_NEWTON, _LONGEST = 25, 5.0


class ImportanceEstimate:
    """``log mean_n p(y, z_n | x)/q(z_n | x)``, ``z_n = m(x) + s(x) u_n`` (math 8.13).

    Args:
        log_joint: ``log p(y, z | x)``: ``[..., Dx], [..., Dz] -> [...]``.
        proposal: mean and standard deviations of q: ``[..., Dx] -> ([..., Dz], [..., Dz])``.
        n_latents: Dz.
        samples: N; the noise has ``N Dz`` coordinates.
    """

    def __init__(
        self,
        log_joint: Callable[[Tensor, Tensor], Tensor],
        proposal: Callable[[Tensor], tuple[Tensor, Tensor]],
        n_latents: int,
        samples: int = 1,
    ):
        self.log_joint = function("ImportanceEstimate", "log_joint", log_joint, "lambda x, z: ...")
        self.proposal = function("ImportanceEstimate", "proposal", proposal, "lambda x: (mean, sd)")
        self.n_latents = whole_number("ImportanceEstimate", "n_latents", n_latents)
        self.samples = whole_number("ImportanceEstimate", "samples", samples)
        self.noise_dim = self.n_latents * self.samples

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        mean, sd = self.proposal(x)
        factor = sd.expand(*x.shape[:-1], -1).diag_embed()
        return _log_mean_weight(self.log_joint, x, u, mean, factor, self.samples)


class LaplaceEstimate:
    """The same with the Laplace approximation of ``p(z | y, x)`` as the proposal (math 8.13).

    Its mode is found by Newton's method with steps of bounded length, without a gradient through it: one factorisation
    of ``[Dz, Dz]`` per iteration and point.

    Args:
        log_joint: as of :class:`ImportanceEstimate`, twice differentiable in z; log-concave for a reliable mode.
        n_latents: Dz.
        samples: N.
    """

    def __init__(self, log_joint: Callable[[Tensor, Tensor], Tensor], n_latents: int, samples: int = 1):
        self.log_joint = function("LaplaceEstimate", "log_joint", log_joint, "lambda x, z: ...")
        self.n_latents = whole_number("LaplaceEstimate", "n_latents", n_latents)
        self.samples = whole_number("LaplaceEstimate", "samples", samples)
        self.noise_dim = self.n_latents * self.samples

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        mode, factor = self.laplace(x)
        return _log_mean_weight(self.log_joint, x, u, mode, factor, self.samples)

    @torch.no_grad()
    def laplace(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mode ``[..., Dz]`` and a factor of the covariance ``[..., Dz, Dz]``."""
        flat = x.reshape(-1, x.shape[-1])
        z = flat.new_zeros(len(flat), self.n_latents)
        slope = torch.func.vmap(torch.func.grad(lambda z, x: -self.log_joint(x, z)))
        curvature = torch.func.vmap(torch.func.jacrev(torch.func.grad(lambda z, x: -self.log_joint(x, z))))
        for _ in range(_NEWTON):
            step = torch.cholesky_solve(slope(z, flat).unsqueeze(-1), _factor(curvature(z, flat))).squeeze(-1)
            longest = step.abs().amax(-1, keepdim=True).clamp_min(_LONGEST)
            z = z - step * (_LONGEST / longest)
            if (longest == _LONGEST).all() and step.abs().amax() < torch.finfo(z.dtype).eps ** 0.5:
                break
        precision = _factor(curvature(z, flat))
        identity = torch.eye(self.n_latents, dtype=z.dtype, device=z.device).expand_as(precision)
        covariance_factor = torch.linalg.solve_triangular(precision, identity, upper=False).mT
        return z.reshape(*x.shape[:-1], -1), covariance_factor.reshape(*x.shape[:-1], *precision.shape[-2:])


def _factor(matrix: Tensor) -> Tensor:
    """Cholesky factors, of the identity where a matrix is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where((failed == 0)[..., None, None], factor, identity)


def _log_mean_weight(log_joint, x: Tensor, u: Tensor, mean: Tensor, factor: Tensor, samples: int) -> Tensor:
    """``log mean_n p(y, z_n | x)/N(z_n | mean, factor factor^T)`` at ``z_n = mean + factor u_n``."""
    n = u.unflatten(-1, (samples, -1))
    z = mean.unsqueeze(-2) + (factor.unsqueeze(-3) @ n.unsqueeze(-1)).squeeze(-1)
    log_det = factor.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1, keepdim=True)
    log_q = -0.5 * n.square().sum(-1) - log_det - 0.5 * n.shape[-1] * math.log(2 * math.pi)
    log_p = log_joint(x.unsqueeze(-2).expand(*x.shape[:-1], samples, -1), z)
    return torch.logsumexp(log_p - log_q, -1) - math.log(samples)


class ParticleFilter:
    """The bootstrap particle filter's estimate of ``log p(y_1, ..., y_T | x)`` (math 8.13).

    Particles are resampled systematically before every step but the first, by the normal distribution function of one
    noise coordinate per step. The estimate jumps where ancestors change: it has no useful gradient.

    Args:
        step: state after one step from the previous one (None before the first), given standard normal noise:
            ``step(t, x, previous, n)``, ``[..., N, S]`` for ``n [..., N, step_noise]`` and ``x [..., 1, Dx]``.
        log_observation: ``log p(y_t | state, x)``: ``log_observation(t, x, state) -> [..., N]``.
        n_steps: T.
        step_noise: noise coordinates per particle and step.
        particles: N; the noise has ``T (N step_noise + 1)`` coordinates.
    """

    def __init__(
        self,
        step: Callable[[int, Tensor, Tensor | None, Tensor], Tensor],
        log_observation: Callable[[int, Tensor, Tensor], Tensor],
        n_steps: int,
        step_noise: int,
        particles: int = 100,
    ):
        self.step = function("ParticleFilter", "step", step, "lambda t, x, previous, n: ...")
        example = "lambda t, x, state: ..."
        self.log_observation = function("ParticleFilter", "log_observation", log_observation, example)
        self.n_steps = whole_number("ParticleFilter", "n_steps", n_steps)
        self.step_noise = whole_number("ParticleFilter", "step_noise", step_noise)
        self.particles = whole_number("ParticleFilter", "particles", particles)
        self.noise_dim = self.n_steps * (self.particles * self.step_noise + 1)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.unflatten(-1, (self.n_steps, -1))
        x = x.unsqueeze(-2)
        state, log_weight, total = None, None, torch.zeros_like(u[..., 0, 0])
        for t in range(self.n_steps):
            noise = u[..., t, 1:].unflatten(-1, (self.particles, -1))
            if state is not None and log_weight is not None:
                state = self._resampled(state, log_weight, torch.special.ndtr(u[..., t, :1]))
            state = self.step(t, x, state, noise)
            log_weight = self.log_observation(t, x, state)
            total = total + torch.logsumexp(log_weight, -1) - math.log(self.particles)
        return total

    def _resampled(self, state: Tensor, log_weight: Tensor, uniform: Tensor) -> Tensor:
        # where all weights are 0 the estimate is too, whatever follows
        lost = log_weight.isneginf().all(-1, keepdim=True)
        cumulative = torch.where(lost, 0.0, log_weight).softmax(-1).cumsum(-1)
        points = torch.arange(self.particles, dtype=uniform.dtype, device=uniform.device)
        ancestors = torch.searchsorted(cumulative.contiguous(), (points + uniform) / self.particles)
        ancestors = ancestors.clamp_max(self.particles - 1)
        return state.gather(-2, ancestors.unsqueeze(-1).expand(*ancestors.shape, state.shape[-1]))
