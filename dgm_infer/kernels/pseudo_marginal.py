"""Pseudo-marginal sampling: densities known by unbiased estimates alone (math 8.13)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import function, whole_number
from ..errors import ArgumentError, cause
from ..target import Block, Density, Target, check_density
from .metropolis import RandomWalk, drawn

__all__ = ["PseudoMarginal", "PseudoMarginalMH", "Uniform"]

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
        inside = ((u >= 0) & (u <= 1)).all(-1)
        return torch.where(inside, 0.0, -torch.inf).to(u.dtype)

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws, ``[*shape, D]``."""
        device = None if generator is None else generator.device
        return torch.rand(*shape, self.dim, generator=generator, device=device)


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
