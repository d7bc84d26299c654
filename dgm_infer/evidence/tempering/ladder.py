"""Discrete temperatures with prior weights, and exact draws of the temperature given x (math 6.8, math 6.9)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..path import AnnealedPath, Point
from ..pilot import StepSizes
from .record import TemperedState
from .tempering import draw_beta

__all__ = ["EvenLadder", "Ladder", "LadderChain", "ListedLadder", "Rung", "even_knots", "interpolated", "is_even"]

# Maximum probabilities held at once: 8 MB, part of which stays in the CPU's caches.
_AT_ONCE = 2**20


class Rung(NamedTuple):
    """A draw of the temperature given x, each ``[chains, *batch]``, float64."""

    beta: Tensor
    """The draw."""
    log_p1: Tensor
    """Log probability of ``beta = 1``."""
    log_p0: Tensor
    """Log probability of ``beta = 0``."""


class Ladder(Protocol):
    """Temperatures ``beta_0 = 0`` to ``beta_K = 1`` with prior weights ``exp(h_k)``, ``h_0 = 0``."""

    def draw(self, difference: Tensor, rng: torch.Generator) -> Rung:
        """An exact draw of ``p(k | x) ~ exp(h_k - beta_k d)``, ``d = phi - psi`` at x: ``[chains, *batch]``."""
        ...

    @property
    def log_prior(self) -> Callable[[Tensor], Tensor] | None:
        """``h_k`` at temperatures of the ladder, ``[..., *batch]``; None if they are continuous."""
        ...


class EvenLadder:
    """Temperatures ``k/K`` whose ``h`` is linear in k between knots: ``O(R)`` numbers per draw, for any K.

    Within a segment of n temperatures ``p(k | x)`` is a truncated geometric distribution with ratio ``exp(r)``,
    ``r = slope - d/K``: its sum is ``expm1(n r)/expm1(r)``, and the integer part of n times an exponential variable
    of rate ``-n r`` truncated to [0, 1] has this distribution. The last temperature is its own segment.

    Args:
        n: K.
        knots: increasing integers ``[R + 1]``, from 0 to K.
        h: values of ``h`` at the knots, ``[R + 1, *batch]``, float64.
    """

    def __init__(self, n: int, knots: Tensor, h: Tensor):
        self.n = n
        column = (-1, *[1] * h.ndim)
        widths = knots.diff()
        # [R + 1, 1, *batch]: one row per segment, the last with a single temperature
        self.first, self.h = knots.reshape(column).double(), h.unsqueeze(1)
        self.widths = torch.cat([widths, widths.new_ones(1)]).reshape(column).double()
        slopes = h.diff(dim=0).unsqueeze(1) / self.widths[:-1]
        self.slopes = torch.cat([slopes, torch.zeros_like(slopes[:1])])

    def draw(self, difference: Tensor, rng: torch.Generator) -> Rung:
        rate = self.slopes - difference / self.n
        start = self.h - self.first * (difference / self.n)
        log_sums = start + _log_geometric_sum(rate, self.widths)
        log_total = log_sums.logsumexp(0)
        uniform = torch.rand(difference.shape, generator=rng, dtype=difference.dtype, device=difference.device)
        below = (log_sums - log_total).exp().cumsum(0)
        # rounding may leave the last sum below one
        segment = (below <= uniform * below[-1]).sum(0, keepdim=True).clamp_max(len(self.widths) - 1)
        shape = (len(self.widths), *difference.shape)
        width, first = (x.expand(shape).gather(0, segment)[0] for x in (self.widths, self.first))
        part = (draw_beta(-width * rate.gather(0, segment)[0], rng) * width).floor()
        beta = (first + torch.minimum(part, width - 1)) / self.n
        return Rung(beta, self.h[-1] - difference - log_total, -log_total)

    def log_prior(self, beta):
        k = (beta.double() * self.n).round()
        segment = (torch.searchsorted(self.first.flatten(), k.contiguous(), right=True) - 1).unsqueeze(0)
        shape = (len(self.widths), *beta.shape)
        column = self.h.ndim - 2
        h, slope, first = (
            x.reshape(len(x), *[1] * (beta.ndim - column), *x.shape[2:]).expand(shape).gather(0, segment)[0]
            for x in (self.h, self.slopes, self.first)
        )
        return h + slope * (k - first)


def _log_geometric_sum(rate: Tensor, n: Tensor) -> Tensor:
    """``log sum_{i<n} exp(i r)``: with ``a = |r|``, the terms fall from the larger end as ``exp(-i a)``."""
    a = rate.abs()
    falling = torch.expm1(-n * a).neg().log() - torch.expm1(-a).neg().log()
    return torch.where(a < 1e-12, n.log(), falling) + (n - 1) * rate.clamp_min(0)


class ListedLadder:
    """Any temperatures and weights, by inverting the cumulative sum: ``O(K)`` numbers per draw.

    They are computed in chunks of about a million, to bound the memory.

    Args:
        betas: ``[K + 1]``, or ``[K + 1, *batch]`` for temperatures of every problem's own, float64.
        h: ``[K + 1, *batch]``, float64.
    """

    def __init__(self, betas: Tensor, h: Tensor):
        self.batch = h.shape[1:]
        # [problems or 1, K + 1]
        self.betas = betas.flatten(1).mT.contiguous() if betas.ndim > 1 else betas[None]
        # [problems, K + 1]: a cumulative sum runs along contiguous memory
        self.h = h.flatten(1).mT.contiguous() if h.ndim > 1 else h[None]

    def draw(self, difference: Tensor, rng: torch.Generator) -> Rung:
        d = difference.reshape(len(difference), -1)
        uniform = torch.rand(d.shape, generator=rng, dtype=d.dtype, device=d.device)
        chosen, log_total = torch.empty_like(d, dtype=torch.int64), torch.empty_like(d)
        betas = self.betas.expand(d.shape[1], -1)
        problems = max(1, _AT_ONCE // betas.shape[1])
        chains = max(1, problems // d.shape[1])
        for i in range(0, d.shape[0], chains):
            for j in range(0, d.shape[1], problems):
                part = slice(i, i + chains), slice(j, j + problems)
                chosen[part], log_total[part] = self._part(d[part], betas[part[1]], self.h[part[1]], uniform[part])
        shape = difference.shape
        log_total = log_total.reshape(shape)
        last = self.h[:, -1].reshape(self.batch)
        return Rung(betas.gather(1, chosen.mT).mT.reshape(shape), last - difference - log_total, -log_total)

    def log_prior(self, beta):
        # the nearest, since temperatures are recorded in single precision
        middle = 0.5 * (self.betas[:, 1:] + self.betas[:, :-1]).expand(len(self.h), -1)
        k = torch.searchsorted(middle.contiguous(), beta.double().reshape(-1, len(self.h)).mT.contiguous())
        return self.h.gather(1, k).mT.reshape(beta.shape)

    def _part(self, d: Tensor, betas: Tensor, h: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.addcmul(h, d.unsqueeze(-1), betas, value=-1.0)
        largest = logits.amax(-1, keepdim=True)
        below = logits.sub_(largest).exp_().cumsum_(-1)
        total = below[..., -1:]
        # right=True: a temperature of zero weight is never drawn
        chosen = torch.searchsorted(below, uniform.unsqueeze(-1) * total, right=True)
        return chosen.squeeze(-1).clamp_max(betas.shape[1] - 1), (largest + total.log()).squeeze(-1)


class LadderChain:
    """Chains that alternate a Hamiltonian move of x with an exact draw of its temperature."""

    def __init__(
        self,
        path: AnnealedPath,
        step_sizes: StepSizes,
        ladder: Ladder,
        point: Point,
        rng: torch.Generator,
        n_steps: int,
    ):
        self.path, self.step_sizes, self.ladder, self.rng, self.n_steps = path, step_sizes, ladder, rng, n_steps
        self.point, self.log_prior = point, ladder.log_prior
        self.beta = ladder.draw(path.difference(point), rng).beta

    def step(self) -> TemperedState:
        step_size = self.step_sizes.at(self.beta)
        self.point, acceptance = self.path.move(self.point, self.beta, step_size, self.n_steps, self.rng)
        rung = self.ladder.draw(self.path.difference(self.point), self.rng)
        self.beta = rung.beta
        return TemperedState(self.point, rung.beta, acceptance, (rung.log_p1, rung.log_p0))

    def warm(self) -> None:
        self.step()

    def freeze(self) -> None:
        pass


def even_knots(n: int, betas: Tensor, most: int) -> Tensor:
    """Integers from 0 to n, at most ``most + 1`` of them, spaced like the temperatures ``betas``."""
    every = betas[torch.linspace(0, len(betas) - 1, most + 1, device=betas.device).round().long()]
    return (every * n).round().long().unique()


def interpolated(at: Tensor, betas: Tensor, values: Tensor) -> Tensor:
    """Linear interpolation at ``at [R]`` of values ``[J + 1, *batch]`` known at increasing ``betas [J + 1]``."""
    right = torch.searchsorted(betas, at).clamp(1, len(betas) - 1)
    low, high = betas[right - 1], betas[right]
    fraction = ((at - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
    return torch.lerp(values[right - 1], values[right], fraction.reshape(-1, *[1] * (values.ndim - 1)))


def is_even(betas: Tensor) -> bool:
    """Whether temperatures ``[K + 1]`` are ``k/K``."""
    n = len(betas) - 1
    return bool(torch.allclose(betas * n, torch.arange(n + 1, dtype=betas.dtype, device=betas.device), atol=1e-9))
