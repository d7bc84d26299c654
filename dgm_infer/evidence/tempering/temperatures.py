"""Laws of a temperature: control variables, discrete ladders, and exact draws given x (T 5.3, T 5.4, math 6.8)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..estimators import log_weights_at_ends
from ..plan import Pilot, interpolated

# Half the period of a control with plateaus: the middle nine tenths of a logistic variable are as long.
_HALF = 3.0
# Nodes of the integral over a ramp.
_NODES = 64


def draw_beta(delta: Tensor, rng: torch.Generator) -> Tensor:
    """An exact draw of ``beta`` given x: exponential with rate Delta, truncated to [0, 1].

    With ``a = |Delta|``, ``t = -log1p(U expm1(-a))/a`` (``t = U`` when a < 1e-8), and beta is t where Delta >= 0, else
    ``1 - t``.
    """
    uniform = torch.rand(delta.shape, generator=rng, dtype=delta.dtype, device=delta.device)
    a = delta.abs()
    t = torch.where(a < 1e-8, uniform, -(uniform * torch.expm1(-a)).log1p() / a.clamp_min(1e-8))
    return torch.where(delta >= 0, t, 1 - t)


class Temperature(NamedTuple):
    """A temperature and its derivative by the control, each ``[...]``."""

    beta: Tensor
    rest: Tensor
    """``1 - beta``, without cancellation."""
    slope: Tensor
    """``d beta/d t``."""


class Control(Protocol):
    """A control variable: beta, the prior energy of t, and what follows for the ends."""

    @property
    def log_zeta(self) -> Any:
        """Guess of log Z, ``[*batch]``."""
        ...

    def temperature(self, t: Tensor) -> Temperature: ...
    def energy(self, t: Tensor) -> Tensor:
        """``-log p(t)`` of the law of t under equal energies at all temperatures, up to a constant."""
        ...

    def force(self, t: Tensor, at: Temperature) -> Tensor:
        """Its derivative."""
        ...

    def inverse(self, beta: Tensor) -> Tensor:
        """A t of this temperature."""
        ...

    def log_ends(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        """Logs of ``p(beta = 1 | x)`` and ``p(beta = 0 | x)`` up to one constant, for ``phi - psi`` at x."""
        ...


@dataclass(frozen=True, eq=False)
class Sigmoid:
    """``beta = sigmoid(t)``, uniform on (0, 1): ``p(t) = beta (1 - beta)`` (T (5.22)).

    Args:
        log_zeta: guess of log Z, ``[*batch]``.
    """

    log_zeta: Tensor | float = 0.0
    log_prior = None

    def temperature(self, t: Tensor) -> Temperature:
        beta, rest = t.sigmoid(), (-t).sigmoid()
        return Temperature(beta, rest, beta * rest)

    def energy(self, t: Tensor) -> Tensor:
        return softplus(t) + softplus(-t)

    def force(self, t: Tensor, at: Temperature) -> Tensor:
        return at.beta - at.rest

    def inverse(self, beta: Tensor) -> Tensor:
        return torch.logit(beta.clamp(1e-4, 1 - 1e-4))

    def log_ends(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        return log_weights_at_ends(difference + self.log_zeta)

    def draw(self, difference: Tensor, rng: torch.Generator) -> "Rung":
        """An exact draw of beta given x."""
        return Rung(draw_beta(difference + self.log_zeta, rng), *self.log_ends(difference))


@dataclass(frozen=True, eq=False)
class Plateaus:
    """The extended Hamiltonian: beta is 1 on a plateau of t, 0 on another, and smooth between (T (5.19), math 6.18).

    t is uniform on a circle of length ``2 H``. With ``s = |t|/H`` on [0, 1], beta is 1 for ``s <= share``, 0 for
    ``s >= 1 - share`` and ``3 r^2 - 2 r^3`` between, r falling from 1 to 0 along a straight line.

    Args:
        share: of the circle, of each plateau; between 0 and 1/2.
        log_zeta: as of :class:`Sigmoid`.
    """

    share: float
    log_zeta: Tensor | float = 0.0

    def temperature(self, t: Tensor) -> Temperature:
        wrapped = torch.remainder(t + _HALF, 2 * _HALF) - _HALF
        length = 1 - 2 * self.share
        r = ((1 - self.share - wrapped.abs() / _HALF) / length).clamp(0, 1)
        slope = -6 * r * (1 - r) * wrapped.sign() / (_HALF * length)
        return Temperature(_ramp(r), _ramp(1 - r), slope)

    def energy(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def force(self, t: Tensor, at: Temperature) -> Tensor:
        return torch.zeros_like(t)

    def inverse(self, beta: Tensor) -> Tensor:
        r = 0.5 - ((1 - 2 * beta.clamp(0, 1)).asin() / 3).sin()
        return _HALF * (1 - self.share - (1 - 2 * self.share) * r)

    def log_ends(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        """``share exp(-Delta)/I`` and ``share/I`` with ``I = share (1 + exp(-Delta)) + (1 - 2 share) E_r[..]``."""
        delta = difference + self.log_zeta
        beta, log_weight = (torch.as_tensor(part).to(delta) for part in _nodes())
        log_share, log_rest = np.log(self.share), np.log1p(-2 * self.share)
        ramp = (log_rest + log_weight - delta.unsqueeze(-1) * beta).logsumexp(-1)
        log_sum = torch.stack([ramp, log_share - delta, torch.full_like(delta, log_share)]).logsumexp(0)
        return log_share - delta - log_sum, log_share - log_sum


def _ramp(r: Any) -> Any:
    return r**2 * (3 - 2 * r)


@cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Temperatures at nodes along a ramp, and the logs of their weights.

    Those of Gauss and Legendre in x, with ``r = 3 x^2 - 2 x^3``: they are dense at the ends, where ``exp(-beta Delta)``
    changes over a length of ``Delta^(-1/2)``.
    """
    x, weight = np.polynomial.legendre.leggauss(_NODES)
    x = 0.5 * (1 + x)
    return _ramp(_ramp(x)), np.log(3 * x * (1 - x) * weight)


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


# Straight pieces that warped temperatures are made of.
_PIECES = 16


class Warped:
    """``beta = b(s)`` for a uniform s: straight lines between temperatures that a pilot puts at equal distances.

    ``p(x, s) ~ exp(-b(s) (phi + log zeta) - (1 - b(s)) psi - c(b(s)))``, c the pilot's ``log Z(beta)`` less the
    straight line to its end, so that all s are visited about equally often. It is a control variable,
    ``s = sigmoid(t)``, and a ladder of infinitely many temperatures.

    Args:
        pilot: its measure of the barrier, and its curve of log Z.
        log_zeta: ``[*batch]``, float64.
    """

    log_prior = None

    def __init__(self, pilot: Pilot, log_zeta: Tensor):
        betas = pilot.barrier(_PIECES)
        curve = pilot.log_z_path.double().nan_to_num(0.0, 0.0, 0.0)
        excess = interpolated(betas, pilot.columns, curve - pilot.columns * curve[-1])
        self.low, self.width = betas[:-1], betas.diff(dim=0)
        self.excess, self.rise = excess[:-1], excess.diff(dim=0)
        self.betas, self.log_zeta = betas, log_zeta

    def _piece(self, t: Tensor) -> tuple[Tensor, ...]:
        """s, ``1 - s``, the part of its piece behind it, and what belongs to the piece, each like t."""
        s, rest = t.sigmoid(), (-t).sigmoid()
        k = (s * _PIECES).long().clamp_max(_PIECES - 1)
        part = s * _PIECES - k
        return s, rest, part, *(x.to(t).gather(0, k) for x in (self.low, self.width, self.excess, self.rise))

    def temperature(self, t: Tensor) -> Temperature:
        s, rest, part, low, width, _, _ = self._piece(t)
        beta = low + part * width
        return Temperature(beta, 1 - beta, _PIECES * width * s * rest)

    def energy(self, t: Tensor) -> Tensor:
        _, _, part, _, _, excess, rise = self._piece(t)
        return softplus(t) + softplus(-t) + excess + part * rise

    def force(self, t: Tensor, at: Temperature) -> Tensor:
        s, rest, *_, rise = self._piece(t)
        return s - rest + _PIECES * rise * s * rest

    def inverse(self, beta: Tensor) -> Tensor:
        even = torch.linspace(0, 1, _PIECES + 1, dtype=beta.dtype, device=beta.device)
        even = even.reshape(-1, *[1] * (beta.ndim - 1)).expand_as(self.betas)
        return torch.logit(interpolated(beta, self.betas, even).clamp(1e-4, 1 - 1e-4))

    def log_ends(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        delta = difference + self.log_zeta
        log_sum = self._log_parts(delta)[0].logsumexp(0)
        return -delta - log_sum, -log_sum

    def draw(self, difference: Tensor, rng: torch.Generator) -> Rung:
        """An exact draw of beta given x: a piece, and an exponential truncated to it."""
        delta = difference + self.log_zeta
        log_parts, rate = self._log_parts(delta)
        uniform = torch.rand(delta.shape, generator=rng, dtype=delta.dtype, device=delta.device)
        log_sum = log_parts.logsumexp(0)
        below = (log_parts - log_sum).exp().cumsum(0)
        k = (below <= uniform * below[-1]).sum(0, keepdim=True).clamp_max(_PIECES - 1)
        part = draw_beta(rate.gather(0, k)[0], rng)
        beta = self.low.gather(0, k[0]) + part * self.width.gather(0, k[0])
        return Rung(beta, -delta - log_sum, -log_sum)

    def _log_parts(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Logs of ``p(piece | x)`` up to a constant, and rates along the pieces, ``[pieces, chains, *batch]``.

        Along a piece ``p(s | x) ~ exp(-a f)`` with f from 0 to 1, whose integral is ``1/w0`` of math 6.4.
        """
        low, width, excess, rise = (x.unsqueeze(1) for x in (self.low, self.width, self.excess, self.rise))
        rate = width * delta + rise
        return -low * delta - excess - log_weights_at_ends(rate)[1] - math.log(_PIECES), rate
