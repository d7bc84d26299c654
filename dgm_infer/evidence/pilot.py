"""The pilot: a short annealing run that tunes step sizes and schedules; its draws are discarded."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..progress import Progress
from .estimators import finite_or_zero, log_mean
from .path import AnnealedPath, Point
from .schedules import sigmoid

__all__ = ["Pilot", "StepSizes", "anneal_pilot"]

# Change of the log step size per unit of error in the mean acceptance.
_GAIN = 0.4


class StepSizes(NamedTuple):
    """Step sizes per problem as a function of the inverse temperature: log-linear between knots."""

    knots: Tensor
    """``[R]``, rising from 0 to 1."""
    log_step: Tensor
    """``[R, *batch]``."""

    @classmethod
    def constant(cls, step_size: float | Tensor, batch_shape: torch.Size, like: Tensor) -> "StepSizes":
        """The same step size at all temperatures.

        Raises:
            ArgumentError: the shape does not fit the batch.
        """
        step = torch.as_tensor(step_size, dtype=like.dtype, device=like.device)
        try:
            step = step.expand(batch_shape)
        except RuntimeError:
            raise ArgumentError(
                f"step_size of shape {tuple(step.shape)} does not fit the problems, {tuple(batch_shape)}: give a "
                "number, or one per problem"
            ) from None
        knots = torch.tensor([0.0, 1.0], dtype=like.dtype, device=like.device)
        return cls(knots, step.log().expand(2, *batch_shape))

    def at(self, beta: Tensor) -> Tensor:
        """Step sizes at ``beta``: ``[..., *batch] -> [..., *batch]``."""
        batch = self.log_step.shape[1:]
        lead = beta.shape[: beta.ndim - len(batch)]
        flat = beta.to(self.knots).reshape(-1, *batch).contiguous()
        right = torch.bucketize(flat, self.knots).clamp(1, len(self.knots) - 1)
        low, high = self.knots[right - 1], self.knots[right]
        fraction = ((flat - low) / (high - low).clamp_min(1e-30)).clamp(0, 1)
        a, b = self.log_step.gather(0, right - 1), self.log_step.gather(0, right)
        return torch.lerp(a, b, fraction).exp().reshape(*lead, *batch)


class Pilot(NamedTuple):
    """Result of a pilot run."""

    step_sizes: StepSizes
    betas: Tensor
    """``[J + 1]``."""
    variances: Tensor
    """Variance of Delta over chains at every temperature, ``[J + 1, *batch]``."""
    rates: Tensor
    """Half the mean difference of Delta between two chains at every temperature, the speed of the communication barrier
    (math 6.12), ``[J + 1, *batch]``."""
    log_weights: Tensor
    """Log weights of the pilot itself, ``[chains, *batch]``; biased, since the steps were adapted on the way."""
    point: Point
    """States of its chains at temperatures spread evenly over [0, 1], one per chain."""
    log_z_path: Tensor
    """Estimates of ``log Z(beta)`` at every temperature, ``[J + 1, *batch]``, from 0 to ``log_z``."""

    @property
    def log_z(self) -> Tensor:
        """Estimate of log Z, ``[*batch]``."""
        return log_mean(self.log_weights).log_z


def anneal_pilot(
    path: AnnealedPath,
    chains: int,
    rng: torch.Generator,
    *,
    temperatures: int,
    n_steps: int,
    target_acceptance: float,
    step_size: float | Tensor | None = None,
    regions: int = 12,
    progress: Progress,
) -> Pilot:
    """Anneal once along the sigmoid schedule; if ``step_size`` is None, adapt it to the acceptance on the way."""
    betas = sigmoid(temperatures).to(path.base.mean.device)
    point = path.at(path.draws(chains, rng))
    like = point.v
    start = 1.2 * path.base.dim**-0.25 if step_size is None else step_size
    log_step = StepSizes.constant(start, path.batch_shape, like).log_step[0].clone()
    log_weights = torch.zeros(point.energy.shape, dtype=torch.float64, device=like.device)
    kept, keep_at = point, _spread(point.energy, rng)
    differences, log_steps = [path.difference(point)], [log_step]
    log_z_path = [torch.zeros_like(log_weights[0])]
    for k in range(temperatures):
        log_weights -= (betas[k + 1] - betas[k]) * path.difference(point)
        log_z_path.append(log_mean(finite_or_zero(log_weights)).log_z)
        # adapt the step size at the first temperature, before the path leaves the base
        for _ in range(8 if k == 0 and step_size is None else 1):
            move = path.move(point, betas[k + 1].expand(point.energy.shape), log_step.exp(), n_steps, rng)
            point = move.point
            if step_size is None:
                error = move.acceptance.mean(0).to(like.dtype) - target_acceptance
                log_step = (log_step + _GAIN * error).clamp(-10, math.log(2))
        if k == 0:
            log_steps[0] = log_step
        log_steps.append(log_step)
        differences.append(path.difference(point))
        kept = point.where((keep_at > betas[k]) & (keep_at <= betas[k + 1]), kept)
        progress.update("pilot")
    return Pilot(
        _smooth(betas.to(like.dtype), torch.stack(log_steps), regions),
        betas,
        _smooth_rows(torch.stack([_variance(each) for each in differences])),
        _smooth_rows(torch.stack([_mean_gap(each) for each in differences])),
        finite_or_zero(log_weights),
        kept,
        torch.stack(log_z_path),
    )


def _spread(like: Tensor, rng: torch.Generator) -> Tensor:
    """Stratified uniform numbers in [0, 1], one per chain: ``[chains, *batch]``."""
    chains = like.shape[0]
    part = torch.arange(chains, device=like.device).reshape(-1, *[1] * (like.ndim - 1))
    return (part + torch.rand(like.shape, generator=rng, dtype=torch.float64, device=like.device)) / chains


def _variance(difference: Tensor) -> Tensor:
    """Variance over the chains of non-zero weight, ``[*batch]``."""
    finite = difference.isfinite()
    n = finite.sum(0)
    mean = torch.where(finite, difference, 0).sum(0) / n.clamp_min(1)
    return torch.where(finite, (difference - mean).square(), 0).sum(0) / (n - 1).clamp_min(1)


def _mean_gap(difference: Tensor) -> Tensor:
    """``E|d - d'|/2`` over pairs of chains of non-zero weight, ``[*batch]``.

    With ``d_1 <= ... <= d_n`` it is ``sum_i (2 i - n - 1) d_i/(n (n - 1))``.
    """
    finite = difference.isfinite()
    n = finite.sum(0)
    # what is not finite comes last
    ordered = torch.where(finite, difference, math.inf).sort(0).values
    rank = torch.arange(1, len(difference) + 1, device=difference.device).reshape(-1, *[1] * (difference.ndim - 1))
    terms = torch.where(rank <= n, (2 * rank - n - 1) * ordered, 0.0)
    return terms.sum(0) / (n * (n - 1)).clamp_min(1)


def _smooth_rows(values: Tensor, half: int = 3) -> Tensor:
    """Running means over neighbouring rows: variances over few chains are noisy."""
    n = len(values)
    sums = torch.cat([torch.zeros_like(values[:1]), values.cumsum(0)])
    index = torch.arange(n, device=values.device)
    low, high = (index - half).clamp_min(0), (index + half + 1).clamp_max(n)
    return (sums[high] - sums[low]) / (high - low).reshape(-1, *[1] * (values.ndim - 1))


def _smooth(betas: Tensor, log_steps: Tensor, regions: int) -> StepSizes:
    """Means over regions of equally many temperatures; the ends take the nearest region's mean."""
    regions = min(regions, len(betas))
    parts = [torch.stack([p.mean(0) for p in x.tensor_split(regions)]) for x in (betas, log_steps)]
    knots, means = parts
    ends = betas.new_tensor([0.0, 1.0])
    if regions == 1:
        return StepSizes(ends, means.expand(2, *means.shape[1:]))
    return StepSizes(torch.cat([ends[:1], knots, ends[1:]]), torch.cat([means[:1], means, means[-1:]]))
