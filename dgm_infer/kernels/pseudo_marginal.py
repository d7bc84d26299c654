"""Pseudo-marginal sampling: densities known by unbiased estimates alone, and such estimates (math 8.13)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import default_type, function, lead_shape, points, whole_number
from ..errors import ArgumentError, cause
from ..target import Block, Density, Target, check_density
from .metropolis import RandomWalk, drawn

# Newton iterations towards the mode of the latent variables, and the longest step in any of them.
_NEWTON, _LONGEST = 25, 5.0


class _Estimate:
    """``log mean_n p(y, z_n | x)/q(z_n | x)``, ``z_n = m(x) + L(x) u_n``."""

    def __init__(self, log_joint: Callable[[Tensor, Tensor], Tensor], n_latents: int, samples: int = 1):
        name = type(self).__name__
        self.log_joint = function(name, "log_joint", log_joint, "lambda x, z: ...")
        self.n_latents = whole_number(name, "n_latents", n_latents)
        self.samples = whole_number(name, "samples", samples)
        self.noise_dim = self.n_latents * self.samples

    def approximation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """m ``[..., Dz]`` and L ``[..., Dz, Dz]`` of the normal proposal q."""
        raise NotImplementedError

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        mean, factor = self.approximation(x)
        n = u.unflatten(-1, (self.samples, -1))
        z = mean.unsqueeze(-2) + (factor.unsqueeze(-3) @ n.unsqueeze(-1)).squeeze(-1)
        log_det = factor.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1, keepdim=True)
        log_q = -0.5 * n.square().sum(-1) - log_det - 0.5 * n.shape[-1] * math.log(2 * math.pi)
        log_p = self.log_joint(x.unsqueeze(-2).expand(*x.shape[:-1], self.samples, -1), z)
        return torch.logsumexp(log_p - log_q, -1) - math.log(self.samples)


class ImportanceEstimate(_Estimate):
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
        super().__init__(log_joint, n_latents, samples)
        self.proposal = function("ImportanceEstimate", "proposal", proposal, "lambda x: (mean, sd)")

    def approximation(self, x):
        mean, sd = self.proposal(x)
        return mean, sd.expand(*x.shape[:-1], -1).diag_embed()


class LaplaceEstimate(_Estimate):
    """The same with the Laplace approximation of ``p(z | y, x)`` as the proposal (math 8.13).

    Its mode is found by Newton's method with steps of bounded length, without a gradient through it: one factorisation
    of ``[Dz, Dz]`` per iteration and point.

    Args:
        log_joint: as of :class:`ImportanceEstimate`, twice differentiable in z; log-concave for a reliable mode.
        n_latents: Dz.
        samples: N.
    """

    @torch.no_grad()
    def approximation(self, x):
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


# Prior draws at which an estimator is tried before a run.
_PROBES = 16


@dataclass(frozen=True)
class Uniform:
    """The uniform density on the unit cube, for the noise of an estimator."""

    dim: int

    def __post_init__(self):
        whole_number("Uniform", "dim", self.dim)

    def log_prob(self, u: Tensor) -> Tensor:
        """0 inside the cube, minus infinity outside: ``[..., D] -> [...]``."""
        points("Uniform.log_prob", "u", u, self.dim)
        inside = ((u >= 0) & (u <= 1)).all(-1)
        return torch.where(inside, 0.0, -torch.inf).to(u.dtype)

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws, ``[*shape, D]``."""
        lead = lead_shape("Uniform.sample", shape, self.dim, generator=generator)
        device = None if generator is None else generator.device
        return torch.rand(*lead, self.dim, generator=generator, dtype=default_type(), device=device)


class PseudoMarginal(Target):
    """``p(x) p(u) exp(log_estimate(x, u))``: its marginal of x is the prior times the expected estimate (math 8.13).

    A position is ``[x, u]``; the blocks are ``"target"``, x, and ``"noise"``, u. :class:`PseudoMarginalMH` and
    :class:`Alternating` sample it; so does every other kernel where the estimate is smooth.

    Args:
        log_estimate: log of an unbiased estimate of a likelihood that ``u ~ noise`` makes random, minus infinity where
            it is 0: ``[..., *batch, Dx], [..., *batch, Du] -> [..., *batch]``.
        prior: density of x.
        noise: density of u: ``StandardNormal(n)`` or :class:`Uniform`.
        batch_shape: shape of the batch of independent problems.

    Raises:
        ArgumentError: the estimate fails at draws of the prior, or is NaN or plus infinity there.
    """

    def __init__(
        self,
        log_estimate: Callable[[Tensor, Tensor], Tensor],
        prior: Density,
        noise: Density,
        batch_shape: tuple[int, ...] = (),
    ):
        function("PseudoMarginal", "log_estimate", log_estimate, "lambda x, u: log_likelihood(x, u)")
        for name, density in (("prior", prior), ("noise", noise)):
            check_density("PseudoMarginal", name, density)
        super().__init__(None, prior.dim + noise.dim, batch_shape)
        self.log_estimate, self.x_prior, self.noise = log_estimate, prior, noise
        self._check_estimates()

    @property
    def blocks(self):
        n = self.x_prior.dim
        return {"target": Block(0, n, self.x_prior), "noise": Block(n, self.dim, self.noise)}

    def split(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """x and u."""
        return position[..., : self.x_prior.dim], position[..., self.x_prior.dim :]

    def energy(self, x):
        x, u = self.split(x)
        log_noise = self.noise.log_prob(u)
        log_prior = self.x_prior.log_prob(x) + log_noise
        # where the noise has no density there is no estimate
        estimate = self.log_estimate(x, u.nan_to_num())
        return torch.where(log_noise.isneginf(), torch.inf, -log_prior - estimate)

    def latents(self, x):
        return {"x": self.split(x)[0]}

    def initial_draws(self, n, rng):
        """Draws of the prior and of the noise."""
        return torch.cat([drawn(d, (n, *self.batch_shape), rng) for d in (self.x_prior, self.noise)], -1)

    def _check_estimates(self) -> None:
        points = self.initial_draws(_PROBES, torch.Generator().manual_seed(0))
        try:
            with torch.no_grad():
                estimate = self.log_estimate(*self.split(points))
        except Exception as error:
            raise ArgumentError(f"PseudoMarginal(log_estimate): fails at prior draws: {cause(error)}") from error
        shape = (_PROBES, *self.batch_shape)
        if not isinstance(estimate, Tensor) or tuple(estimate.shape) != shape:
            what = f"shape {tuple(estimate.shape)}" if isinstance(estimate, Tensor) else f"a {type(estimate).__name__}"
            raise ArgumentError(f"PseudoMarginal(log_estimate): gives {what}: must be one value per point, {shape}")
        for name, bad in (("NaN", estimate.isnan()), ("plus infinity", estimate.isposinf())):
            if bad.any():
                raise ArgumentError(
                    f"PseudoMarginal(log_estimate): is {name} at {int(bad.sum())} of {bad.numel()} prior draws: it is "
                    "the log of an estimate that is not negative; return -inf where that is 0"
                )


@dataclass(frozen=True, eq=False)
class PseudoMarginalMH(RandomWalk):
    """Pseudo-marginal Metropolis-Hastings: a random walk of x with fresh noise for every proposal (math 8.13).

    The estimate at the present point is kept. Chains stick where it is by chance far too large: an estimate whose log
    has a standard deviation near 1 is about best.

    Args:
        step_size: standard deviation of the walk, a positive number or tensor ``[*batch]``; None adapts it in warm-up.
        metric: covariance of the walk, as of :class:`RandomWalk`.
        target_acceptance: mean acceptance probability that the step size is adapted to, whatever ``sample()`` is given;
            less than a random walk's, since noise alone rejects proposals too.
    """

    target_acceptance: float = 0.15

    def check(self, problem) -> None:
        if not isinstance(problem, PseudoMarginal):
            raise ArgumentError(
                f"PseudoMarginalMH samples a PseudoMarginal, not a {type(problem).__name__}: use RandomWalk"
            )
        self._check_walk(problem, problem.x_prior.dim)

    def _propose(self, problem: Any, x, step_size, rng):
        x, u = problem.split(x)
        moved, _ = super()._propose(problem, x, step_size, rng)
        fresh = drawn(problem.noise, tuple(x.shape[:-1]), rng).to(x)
        return torch.cat([moved, fresh], -1), problem.noise.log_prob(u) - problem.noise.log_prob(fresh)

    def _walking(self, problem: Any, x):
        return problem.split(x)[0]
