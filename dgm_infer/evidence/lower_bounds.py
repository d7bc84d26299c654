"""Bounds from draws of the base: plain, importance-weighted, and moved by a learned Hamiltonian flow."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import positive, whole_number
from ..errors import EvidenceError
from ..progress import Progress
from ..references.variational import adam
from ..settings import Settings
from .estimators import Estimate, finite_or_zero, largest_share, log_mean, mean_of_chains, weight_ess
from .method import EstimateStatus, Outcome, check_held
from .path import AnnealedPath

# Maximum points per evaluation of a target's energy.
_POINTS = 8192

# For so many rows of chains: positions ``[rows, *batch, D]`` in whitened coordinates, and their log weights.
Draw = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class LowerBound(Settings):
    """Base of the lower bounds: independent weighted draws, ``samples`` per chain."""

    samples: int = 100

    @property
    def status(self) -> EstimateStatus:
        return "lower"

    def __post_init__(self):
        whole_number(type(self).__name__, "samples", self.samples)

    def _draw(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Draw:
        """Draws of the base, unless a method knows better ones."""

        def of_base(rows: int) -> tuple[Tensor, Tensor]:
            v = path.draws(rows, rng)
            return v, -path.differences(v)

        return of_base

    def _estimate(self, log_weights: Tensor) -> Estimate:
        """The bound by log weights ``[chains, samples, *batch]``: the mean of them all, unless it is another."""
        estimate = mean_of_chains(log_weights.mean(1))
        # one infinite energy makes the bound and its error infinite
        return estimate._replace(std_error=torch.where(estimate.log_z.isneginf(), math.inf, estimate.std_error))

    @torch.no_grad()
    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        mean = path.base.mean
        check_held(self, path, samples=chains * self.samples * mean.numel())
        at_once = max(1, _POINTS // (chains * path.batch_shape.numel()))
        progress.expect(-(-self.samples // at_once))
        draw = self._draw(path, chains, rng, progress)
        spent = path.evaluations
        draws = mean.new_empty(chains, self.samples, *mean.shape)
        at = SimpleNamespace(
            draws=draws,
            log_weights=torch.empty(draws.shape[:-1], dtype=torch.float64, device=mean.device),
            made=0,
        )

        def estimate() -> Estimate:
            return self._estimate(finite_or_zero(at.log_weights[:, : at.made]))

        try:
            for _ in progress.steps("draws", lambda: at.made < self.samples, (at, path, rng), estimate):
                n = min(at_once, self.samples - at.made)
                v, new = draw(chains * n)
                at.draws[:, at.made : at.made + n] = path.base.unwhiten(v).unflatten(0, (chains, n))
                at.log_weights[:, at.made : at.made + n] = new.unflatten(0, (chains, n))
                at.made += n
        except KeyboardInterrupt:
            if at.made == 0:
                raise
        made = at.made
        log_weights = finite_or_zero(at.log_weights[:, :made])
        pooled = log_weights.flatten(0, 1)
        diagnostics = {
            "ess": weight_ess(pooled),
            "max_weight_share": largest_share(pooled),
            "log_z_pooled": log_mean(pooled).log_z,
        }
        found = self._estimate(log_weights)
        return Outcome(found, at.draws[:, :made], log_weights, diagnostics, spent, made < self.samples)


@dataclass(frozen=True, eq=False)
class ImportanceSampling(LowerBound):
    """The importance-weighted bound ``E[log 1/S sum_s p(x_s)/q(x_s)] <= log Z``, one per chain (math 7.8).

    The mean over chains estimates the bound without bias. The diagnostic ``log_z_pooled`` pools the draws of all
    chains into one sample, a tighter bound; ``bias``, per chain, is ``-(S/ESS - 1)/(2 (S - 1))``.

    Args:
        samples: S, draws per chain.
    """

    def _estimate(self, log_weights: Tensor) -> Estimate:
        each = log_mean(log_weights.movedim(1, 0))
        return mean_of_chains(each.log_z)._replace(bias=each.bias.mean(0))


@dataclass(frozen=True, eq=False)
class Elbo(LowerBound):
    """The evidence lower bound ``E_q[log p(x)/q(x)] <= log Z``; the gap is unknown.

    Args:
        samples: draws per chain.
    """


# Length of the flow and beta_0 before learning.
_LENGTH, _BETA = 0.2, 0.95
# Share of a step in the running mean of the bound, and what a bound counts that is not finite.
_NEW, _FAR = 0.05, 1e6


@dataclass(frozen=True, eq=False)
class HamiltonianElbo(LowerBound):
    """The evidence lower bound of draws of the base that a short Hamiltonian flow has moved towards the target.

    ``E[-phi(x_K) - |p_K|^2/2 + psi(x) + sum log s + |g|^2/2] <= log Z`` over draws x of the base and standard normal g.
    In whitened coordinates a draw starts at ``v_0 = m + s v`` with momentum ``p_0 = g/sqrt(beta_0)`` and takes K
    leapfrog steps of the target, after each of which the momentum is scaled by ``sqrt(beta_{k-1}/beta_k)``, up to
    ``beta_K = 1`` (Caterini, Doucet and Sejdinovic 2018, arXiv:1805.11328; Salimans, Kingma and Welling 2015).

    The step sizes of every step, m and s, by coordinate and problem, and beta_0 are learned by ascent of the bound on
    draws that are discarded, and then frozen: the bound holds whatever was learned; with m = 0, s = 1 and steps of
    length zero it is that of :class:`Elbo`. The draws are the ends of the flow, with valid importance weights;
    ``log_z_pooled`` is the bound of their pooled mean.

    Learning differentiates the target's gradient, so that the energy must be twice differentiable; such a gradient
    counts as two.

    Args:
        samples: draws per chain.
        n_steps: K, leapfrog steps.
        fit_steps: steps of Adam.
        fit_samples: draws per problem and step.
        rate: initial learning rate, which falls to zero along a cosine.
    """

    n_steps: int = 4
    fit_steps: int = 150
    fit_samples: int = 32
    rate: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        for field in ("n_steps", "fit_steps", "fit_samples"):
            whole_number("HamiltonianElbo", field, getattr(self, field))
        positive("HamiltonianElbo", "rate", self.rate)

    def _draw(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Draw:
        progress.expect(self.fit_steps)
        flow = self._learned(path, rng, progress)
        # all problems' draws of a step, shared among the chains
        path.evaluations = -(-self.fit_steps * self.fit_samples * 2 * (self.n_steps + 1) // chains)

        def of_flow(rows: int) -> tuple[Tensor, Tensor]:
            end = _fly(path, flow, path.draws(rows, rng), path.normal(rows, rng), _evaluated)
            # path.at counts a batch as one gradient per chain
            path.evaluations += (rows // chains - 1) * (self.n_steps + 1)
            return end.v, end.log_weights

        return of_flow

    def _learned(self, path: AnnealedPath, rng: torch.Generator, progress: Progress) -> "_Flow":
        """Step sizes and temperings that maximise the bound for every problem, by Adam.

        Raises:
            EvidenceError: the energy is not twice differentiable.
        """
        flow = _Flow.still(path.base.mean, self.n_steps)
        parameters = [part.requires_grad_() for part in flow.parameters]
        best, score, smooth = [part.detach().clone() for part in parameters], None, None
        for i in adam(parameters, self.fit_steps, self.rate, f"learning a flow, {self.fit_steps} steps"):
            v, momentum = path.draws(self.fit_samples, rng), path.normal(self.fit_samples, rng)
            try:
                with torch.enable_grad():
                    bound = _fly(path, flow, v, momentum, _differentiable).log_weights
                    # a draw that leaves the support pulls nowhere
                    inside = bound.isfinite()
                    (-torch.where(inside, bound, 0.0).sum() / self.fit_samples).backward()
            except RuntimeError as error:
                raise EvidenceError(
                    f"HamiltonianElbo(): the energy has no second derivatives, by which steps are learned ({error}); "
                    "use Elbo or HamiltonianAIS"
                ) from error
            # steps that grow too long are left behind: kept is the best of the running means
            now = torch.where(inside.all(0), bound.detach().mean(0), -_FAR)
            smooth = now if smooth is None else torch.lerp(smooth, now, _NEW)
            # a mean of few steps is noise
            if score is None or i * _NEW < 1:
                score = torch.full_like(smooth, -math.inf)
            better = smooth > score
            score = torch.where(better, smooth, score)
            for k, part in enumerate(parameters):
                row = better.unsqueeze(-1) if part.ndim > better.ndim else better
                best[k] = torch.where(row, part.detach(), best[k])
                if part.grad is not None:
                    part.grad.nan_to_num_(0.0, 0.0, 0.0)
            progress.update("learning")
        return _Flow(*best, n_steps=self.n_steps)


class _Flow(NamedTuple):
    """What is learned, in whitened coordinates."""

    log_step: Tensor
    """``[K, *batch, D]``."""
    shift: Tensor
    """``[*batch, D]``: draws v of the base start at ``shift + exp(log_widen) v``."""
    log_widen: Tensor
    """``[*batch, D]``."""
    logit_beta: Tensor
    """At beta_0, ``[*batch]``."""
    n_steps: int

    @classmethod
    def still(cls, mean: Tensor, n_steps: int) -> "_Flow":
        """A flow that hardly moves what the base draws."""
        zero = torch.zeros_like(mean)
        beta = torch.full_like(mean[..., 0], math.log(_BETA / (1 - _BETA)))
        steps = math.log(_LENGTH / n_steps) + zero.repeat(n_steps, *[1] * zero.ndim)
        return cls(steps, zero.clone(), zero.clone(), beta, n_steps)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.log_step, self.shift, self.log_widen, self.logit_beta]

    def scales(self) -> list[Tensor]:
        """``1/sqrt(beta_k)`` for k from 0 to K, ``[*batch, 1]``: quadratic in k, as published."""
        first = self.logit_beta.sigmoid().rsqrt().unsqueeze(-1)
        return [first + (1 - first) * (k / self.n_steps) ** 2 for k in range(self.n_steps + 1)]


class _End(NamedTuple):
    v: Tensor
    log_weights: Tensor
    """``[rows, *batch]``, float64."""


def _fly(path: AnnealedPath, flow: _Flow, v: Tensor, noise: Tensor, evaluate) -> _End:
    """The ends of flows from whitened draws of the base, with their log weights."""
    start = path.base.energy(path.base.unwhiten(v)).double() + 0.5 * noise.double().square().sum(-1)
    start = start + flow.log_widen.double().sum(-1)
    v = flow.shift + flow.log_widen.exp() * v
    steps, scales = flow.log_step.exp(), flow.scales()
    p = scales[0] * noise
    energy, gradient = evaluate(path, v)
    for step, before, after in zip(steps, scales[:-1], scales[1:], strict=True):
        p = p - 0.5 * step * gradient
        v = v + step * p
        energy, gradient = evaluate(path, v)
        p = (p - 0.5 * step * gradient) * (after / before)
    return _End(v, start - energy.double() - 0.5 * p.double().square().sum(-1))


def _evaluated(path: AnnealedPath, v: Tensor) -> tuple[Tensor, Tensor]:
    """Energy of the target and its gradient in v."""
    point = path.at(v)
    return point.energy, point.gradient


def _differentiable(path: AnnealedPath, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same, to be differentiated."""
    if not v.requires_grad:
        v = v.detach().requires_grad_()
    energy = path.target.energy(path.base.unwhiten(v))
    (gradient,) = torch.autograd.grad(energy.sum(), v, create_graph=True)
    return energy, gradient
