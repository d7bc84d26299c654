"""Pseudo-marginal sampling: densities known by unbiased estimates alone (math 8.13)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..arguments import fraction, function, optional_positive, whole_number
from ..arguments.shown import shown
from ..errors import ArgumentError, cause
from ..settings import Settings
from ..target import Block, Density, Target
from .hamiltonian import draw_momentum, given_step_size
from .kernel import Info, Trial
from .metrics import Metric, check_metric, metric_in_use, open_metric
from .points import Point, metropolis, point_at
from .tuning import Tuning

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
            if isinstance(density, type) or not isinstance(density, Density):
                example = "StandardNormal(2)"
                raise ArgumentError(f"PseudoMarginal({name}={shown(density)}): must be a density, such as {example}")
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
        return torch.cat([_draw(d, (n, *self.batch_shape), rng) for d in (self.x_prior, self.noise)], -1)

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


def _draw(density: Density, lead: tuple[int, ...], rng: torch.Generator) -> Tensor:
    # a density per problem draws for all of them
    own = getattr(density, "batch_shape", ())
    return density.sample(lead[: len(lead) - len(own)], generator=rng)


@dataclass(frozen=True, eq=False)
class PseudoMarginalMH(Settings):
    """Pseudo-marginal Metropolis-Hastings: a random walk of x with fresh noise for every proposal (math 8.13).

    The estimate at the present point is kept. Chains stick where it is by chance far too large: an estimate whose log
    has a standard deviation near 1 is about best.

    Args:
        step_size: standard deviation of the walk, a positive number or tensor ``[*batch]``; None adapts it in warm-up.
        metric: covariance of the walk, as of :class:`RandomWalk`.
        target_acceptance: mean acceptance probability that the step size is adapted to, whatever ``sample()`` is given;
            less than a random walk's, since noise alone rejects proposals too.
    """

    step_size: float | Tensor | None = None
    metric: str | Metric = "low_rank"
    target_acceptance: float = 0.15

    def __post_init__(self):
        optional_positive("PseudoMarginalMH", "step_size", self.step_size)
        check_metric("PseudoMarginalMH", self.metric)
        fraction("PseudoMarginalMH", "target_acceptance", self.target_acceptance)

    def check(self, problem) -> None:
        if not isinstance(problem, PseudoMarginal):
            raise ArgumentError(
                f"PseudoMarginalMH samples a PseudoMarginal, not a {type(problem).__name__}: use RandomWalk"
            )
        self.check_batch(problem.batch_shape, "step_size")
        metric_in_use(self.metric).check("PseudoMarginalMH", problem.batch_shape, problem.x_prior.dim)

    def tuning(self, problem: PseudoMarginal) -> Tuning:
        return Tuning(
            step_size=self.step_size is None,
            metric=open_metric(self.metric),
            target_acceptance=self.target_acceptance,
        )

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        return self.replace(step_size=step_size)

    def init(self, problem: PseudoMarginal, position: Tensor) -> Point:
        return point_at(problem, position)

    def step(self, problem: PseudoMarginal, state: Point, rng: torch.Generator) -> tuple[Point, Info]:
        x, u = problem.split(state.position)
        step_size = given_step_size(self.step_size, state.energy)
        moved = x + step_size.unsqueeze(-1) * metric_in_use(self.metric).velocity(draw_momentum(x, rng))
        fresh = _draw(problem.noise, tuple(x.shape[:-1]), rng).to(x)
        there = point_at(problem, torch.cat([moved, fresh], -1))
        log_hastings = problem.noise.log_prob(u) - problem.noise.log_prob(fresh)
        point, probability, status = metropolis(state, there, log_hastings, rng)
        tuning = Trial(step_size, position=problem.split(point.position)[0])
        return point, Info(probability, status, point.energy, stats={"step_size": step_size}, tuning=tuning)
