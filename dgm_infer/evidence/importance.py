"""Bounds from draws of the base: the evidence lower bound and the importance-weighted bound."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import whole_number
from ..progress import Progress
from ..settings import Settings
from .estimators import Estimate, finite_or_zero, log_mean, mean_of_chains, weight_ess
from .method import EstimateStatus, Outcome, check_held
from .path import AnnealedPath

__all__ = ["Elbo", "ImportanceSampling", "importance_log_z", "largest_share"]

# Maximum points per evaluation of a target's energy.
_POINTS = 8192


@dataclass(frozen=True, eq=False)
class ImportanceSampling(Settings):
    """The importance-weighted bound ``E[log 1/S sum_s p(x_s)/q(x_s)] <= log Z``, one per chain (math 7.8).

    The mean over chains estimates the bound without bias. The diagnostic ``log_z_pooled`` pools the draws of all
    chains into one sample, a tighter bound; ``bias``, per chain, is ``-(S/ESS - 1)/(2 (S - 1))``.

    Args:
        samples: S, draws per chain.
    """

    samples: int = 100

    @property
    def status(self) -> EstimateStatus:
        return "lower"

    def __post_init__(self):
        whole_number("ImportanceSampling", "samples", self.samples)

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        draws, log_weights, interrupted = _weighted(self, path, chains, rng, progress)
        each = log_mean(log_weights.movedim(1, 0))
        pooled = log_weights.flatten(0, 1)
        estimate = mean_of_chains(each.log_z)._replace(bias=each.bias.mean(0))
        diagnostics = {
            "ess": weight_ess(pooled),
            "max_weight_share": largest_share(pooled),
            "log_z_pooled": log_mean(pooled).log_z,
        }
        return Outcome(estimate, draws, log_weights, diagnostics, interrupted=interrupted)


@dataclass(frozen=True, eq=False)
class Elbo(Settings):
    """The evidence lower bound ``E_q[log p(x)/q(x)] <= log Z``; the gap is unknown.

    Args:
        samples: draws per chain.
    """

    samples: int = 100

    @property
    def status(self) -> EstimateStatus:
        return "lower"

    def __post_init__(self):
        whole_number("Elbo", "samples", self.samples)

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        draws, log_weights, interrupted = _weighted(self, path, chains, rng, progress)
        pooled = log_weights.flatten(0, 1)
        diagnostics = {"ess": weight_ess(pooled), "max_weight_share": largest_share(pooled)}
        return Outcome(_mean(log_weights.mean(1)), draws, log_weights, diagnostics, interrupted=interrupted)


def importance_log_z(path: AnnealedPath, samples: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Log of the mean of ``samples`` weights, and the share of draws with zero density, each ``[*batch]``."""
    log_weights = -path.differences(path.draws(samples, rng))
    return log_mean(log_weights).log_z, log_weights.isneginf().double().mean(0)


def largest_share(log_weights: Tensor) -> Tensor:
    """The largest of the weights ``[N, *batch]`` over their sum; NaN if all are zero."""
    return (log_weights.amax(0) - log_weights.logsumexp(0)).exp()


def _mean(values: Tensor) -> Estimate:
    estimate = mean_of_chains(values)
    # one infinite energy makes the bound and its error infinite
    return estimate._replace(std_error=torch.where(estimate.log_z.isneginf(), math.inf, estimate.std_error))


@torch.no_grad()
def _weighted(
    method: ImportanceSampling | Elbo, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress
) -> tuple[Tensor, Tensor, bool]:
    """Draws of the base ``[chains, samples, *batch, D]``, their log weights, and whether an interrupt left fewer."""
    samples = method.samples
    check_held(method, path, samples=chains * samples * path.base.mean.numel())
    at_once = max(1, _POINTS // (chains * path.batch_shape.numel()))
    progress.expect(-(-samples // at_once))
    mean = path.base.mean
    draws = mean.new_empty(chains, samples, *mean.shape)
    log_weights = torch.empty(draws.shape[:-1], dtype=torch.float64, device=mean.device)
    made = 0
    try:
        while made < samples:
            n = min(at_once, samples - made)
            v = path.draws(chains * n, rng)
            draws[:, made : made + n] = path.base.unwhiten(v).unflatten(0, (chains, n))
            log_weights[:, made : made + n] = -path.differences(v).unflatten(0, (chains, n))
            made += n
            done = log_weights[:, :made]
            progress.update("importance", lambda done=done: log_mean(done.flatten(0, 1)).log_z)
    except KeyboardInterrupt:
        if made == 0:
            raise
    return draws[:, :made], finite_or_zero(log_weights[:, :made]), made < samples
