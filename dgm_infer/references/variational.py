"""Gaussian fits by stochastic optimisation of the evidence lower bound (ADVI: Kucukelbir et al. 2017), or others."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from ..errors import EvidenceError
from ..linear_maps import DiagonalMap, LowRankMap, Scale, TriangularMap
from ..progress import foretold

Objective = Literal["elbo", "tvo", "eubo"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

# Inverse temperatures of the thermodynamic objective: 0, then evenly spaced in their logarithms up to 1.
_BETAS = (0.0, *(10 ** (-1.5 + 0.3 * k) for k in range(6)))


def score_weights(objective: Objective, f: Tensor) -> Tensor:
    """c such that ``sum_s c_s grad log q(x_s)`` estimates the direction of a better q, from draws x of q.

    With ``w_b ~ exp(b f)`` normalised over the draws and means ``<.>_b`` in these weights: for ``"eubo"``, which is
    minimised, ``c = w_1``, the negative of its gradient; for ``"tvo"``, which is maximised,
    ``c = sum_k (b_{k+1} - b_k) w_{b_k} ((1 - b_k) (f - <f>_{b_k}) - 1)``, where the 1, whose mean is zero at ``b = 0``,
    is left out there (Masrani, Le and Wood 2019, arXiv:1907.00031).

    Args:
        f: ``log p(x_s)/q(x_s)``, p unnormalised, ``[S, *batch]``; what is not finite has no weight.
    """
    inside = f.isfinite()
    logs = torch.where(inside, f, -math.inf)
    # a problem whose draws are all outside the support has no direction
    logs = torch.where(inside.any(0), logs, 0.0)
    if objective == "eubo":
        return torch.where(inside, logs.softmax(0), 0.0)
    total = torch.zeros_like(f)
    finite = torch.where(inside, f, 0.0)
    for low, high in pairwise(_BETAS):
        weights = torch.where(inside, low * finite, torch.where(inside.any(0), -math.inf, 0.0)).softmax(0)
        mean = (weights * finite).sum(0)
        total += (high - low) * weights * ((1 - low) * (finite - mean) - float(low > 0))
    return torch.where(inside, total, 0.0)


class _Parameters:
    """Unconstrained parameters of a Gaussian, reparameterised: ``x = mean + L v``, or ``mean + diag(sd) v + F w``."""

    def __init__(self, mean: Tensor, sd: Tensor, kind: str, rank: int, rng: torch.Generator):
        self.kind = kind
        self.mean = mean.clone().requires_grad_()
        self.log_sd = sd.log().requires_grad_()
        self.all = [self.mean, self.log_sd]
        if kind == "full":
            # in units of the sd of its row, so that one learning rate suits all entries
            self.lower = mean.new_zeros(*mean.shape, mean.shape[-1]).requires_grad_()
            self.all.append(self.lower)
        elif kind == "low_rank":
            # not zero, which is a stationary point
            noise = torch.randn(*mean.shape, rank, generator=rng, dtype=mean.dtype, device=mean.device)
            self.factor = (0.1 / math.sqrt(rank) * noise).requires_grad_()
            self.all.append(self.factor)

    def scale(self) -> Scale:
        sd = self.log_sd.exp()
        if self.kind == "diagonal":
            return DiagonalMap(sd)
        if self.kind == "full":
            return TriangularMap(torch.diag_embed(sd) + sd.unsqueeze(-1) * self.lower.tril(-1))
        return LowRankMap.of(sd, sd.unsqueeze(-1) * self.factor)

    def sample(self, samples: int, rng: torch.Generator) -> Tensor:
        """Draws ``[samples, *batch, D]``, differentiable in the parameters."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(samples, *shape, generator=rng, dtype=self.mean.dtype, device=self.mean.device)

        v = normal(*self.mean.shape)
        if self.kind != "low_rank":
            return self.mean + self.scale().apply(v)
        # this way the draws need no eigenvalues, whose gradients are undefined where two coincide
        w = normal(*self.factor.shape[:-2], self.factor.shape[-1])
        return self.mean + self.log_sd.exp() * (v + (self.factor @ w.unsqueeze(-1)).squeeze(-1))

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density at ``x [samples, *batch, D]``, differentiable in the parameters: ``[samples, *batch]``."""
        if self.kind == "low_rank":
            # by the capacitance matrix, and not eigenvalues: see sample()
            sd = self.log_sd.exp()
            factor = sd.unsqueeze(-1) * self.factor
            return LowRankMultivariateNormal(self.mean, factor, sd.square(), validate_args=False).log_prob(x)
        scale = self.scale()
        squares = scale.solve(x - self.mean).square().sum(-1)
        return -0.5 * squares - scale.log_det() - 0.5 * x.shape[-1] * math.log(2 * math.pi)


def adam(parameters: Iterable[Tensor], steps: int, rate: float, what: str, memory: float = 0.99) -> Iterator[int]:
    """Steps of Adam, each taken once the caller has computed gradients; the rate falls to zero along a cosine.

    Args:
        what: as of :func:`foretold`.
        memory: decay of the mean of squared gradients.
    """
    optimiser = torch.optim.Adam(parameters, lr=rate, betas=(0.9, memory))
    for i in foretold(steps, what):
        for group in optimiser.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * i / steps))
        optimiser.zero_grad()
        yield i
        optimiser.step()


def maximise_elbo(
    target,
    mean: Tensor,
    sd: Tensor,
    *,
    kind: str,
    rank: int,
    steps: int,
    samples: int,
    rate: float,
    rng: torch.Generator,
    objective: Objective = "elbo",
) -> tuple[Tensor, Scale, Tensor]:
    """Mean and scale that maximise ``E_q[-energy(x) - log q(x)]`` for every problem, by Adam, or another objective.

    The gradient of the bound follows only the path of the draws (Roeder, Wu and Duvenaud 2017): unbiased, and without
    variance if q is the target. Those of the other objectives weight the scores of the draws (math 11.12), and take no
    gradients of the target. The learning rate falls to zero along a cosine.

    Args:
        target: energy on R^D.
        mean, sd: initial values, ``[*batch, D]``.

    Returns:
        mean, scale, and the noisy estimate of the bound at every step, ``[steps, *batch]``.

    Raises:
        EvidenceError: the optimisation diverged.
    """
    parameters = _Parameters(mean, sd, kind, rank, rng)
    trace = mean.new_empty(steps, *mean.shape[:-1])
    for i in adam(parameters.all, steps, rate, f"a fit of {steps} steps"):
        with torch.enable_grad():
            x = parameters.sample(samples, rng)
            if objective == "elbo":
                slope, bounds = _slope(target, parameters, x.detach())
                (slope * x).sum().div(samples).backward()
            else:
                log_q = parameters.log_prob(x.detach())
                with torch.no_grad():
                    bounds = -target.energy(x.detach()) - log_q
                (-score_weights(objective, bounds) * log_q).sum().backward()
            trace[i] = bounds.mean(0)
    mean = parameters.mean.detach()
    with torch.no_grad():
        scale = parameters.scale()
    finite = mean.isfinite().all(-1) & scale.log_det().isfinite()
    check_divergence(~finite, rate)
    return mean, scale, trace


def check_divergence(diverged: Tensor, rate: float) -> None:
    """Raise EvidenceError if a fit has diverged, ``[*batch]``."""
    if diverged.any():
        raise EvidenceError(
            f"the fit of a Gaussian diverged for {int(diverged.sum())} of {diverged.numel()} problems: use a rate "
            f"below {rate:g}, or start nearer to the target"
        )


def lower_bound(target, base, rng: torch.Generator) -> Tensor:
    """``E_q[-energy(x) - log q(x)]`` of a base q, ``[*batch]``, from 1000 fresh draws, fifty at once.

    Raises:
        EvidenceError: the energy is NaN at more than a tenth of a problem's draws.
    """
    samples, at_once = 1000, 50
    total = torch.zeros(base.batch_shape, dtype=torch.float64, device=base.mean.device)
    undefined = torch.zeros_like(total)
    with torch.no_grad():
        for _ in range(samples // at_once):
            x = base.sample((at_once,), rng)
            energy = target.energy(x)
            total += (base.energy(x) - energy).double().sum(0)
            undefined += energy.isnan().sum(0)
    bad = undefined > 0.1 * samples
    if bad.any():
        raise EvidenceError(
            f"the energy is NaN at {100 * undefined.max().item() / samples:.0f} % of the draws of the fitted base, for "
            f"{int(bad.sum())} of {bad.numel()} problems: it must be a number, or inf where the density is zero"
        )
    return total / samples


@torch.no_grad()
def _slope(target, parameters: _Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of ``energy(x) + log q(x)`` in x, zero for draws of zero density, and the negative of its value."""
    scale = parameters.scale()
    energy, gradient = target.energy_and_gradient(x)
    whitened = scale.solve(x - parameters.mean)
    slope = gradient - scale.solve_transpose(whitened)
    constant = scale.log_det() + 0.5 * x.shape[-1] * math.log(2 * math.pi)
    bounds = 0.5 * whitened.square().sum(-1) + constant - energy
    return torch.where(slope.isfinite().all(-1, keepdim=True), slope, 0), bounds
