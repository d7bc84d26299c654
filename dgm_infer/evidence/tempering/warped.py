"""Continuous temperatures whose density follows a pilot, as the ladders of simulated tempering do (math 6.21)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..estimators import log_weights_at_ends
from ..pilot import Pilot
from ..plan import tuned_betas
from .barrier import interpolated_rows
from .controls import Temperature
from .ladder import Rung
from .tempering import draw_beta

__all__ = ["Warped"]

# Straight pieces that the temperatures are made of.
_PIECES = 16


class Warped:
    """``beta = b(s)`` for a uniform s: straight lines between temperatures that a pilot puts at equal distances.

    ``p(x, s) ~ exp(-b(s) (phi + log zeta) - (1 - b(s)) psi - c(b(s)))``, c the pilot's ``log Z(beta)`` less the
    straight line to its end, so that all s are visited about equally often. It is a control variable,
    ``s = sigmoid(t)``, and a ladder of infinitely many temperatures.

    Args:
        schedule: ``"equalised"`` or ``"barrier"``.
        pilot: its variances or rates, and its curve of log Z.
        log_zeta: ``[*batch]``, float64.
    """

    log_prior = None

    def __init__(self, schedule: str, pilot: Pilot, log_zeta: Tensor):
        betas = tuned_betas(schedule, _PIECES, pilot)
        shape = (_PIECES + 1, *log_zeta.shape)
        betas = betas.reshape(len(betas), *[1] * (len(shape) - betas.ndim), *betas.shape[1:]).expand(shape)
        curve = pilot.log_z_path.double().nan_to_num(0.0, 0.0, 0.0)
        at = pilot.betas.double().reshape(-1, *[1] * log_zeta.ndim).expand_as(curve).contiguous()
        excess = interpolated_rows(betas.contiguous(), at, (curve - at * curve[-1]).contiguous())
        self.low, self.width = betas[:-1].contiguous(), betas.diff(dim=0)
        self.excess, self.rise = excess[:-1].contiguous(), excess.diff(dim=0)
        self.betas, self.log_zeta = betas.contiguous(), log_zeta

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
        even = even.reshape(-1, *[1] * (beta.ndim - 1)).expand_as(self.betas).contiguous()
        return torch.logit(interpolated_rows(beta, self.betas, even).clamp(1e-4, 1 - 1e-4))

    def log_ends(self, delta: Tensor) -> tuple[Tensor, Tensor]:
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
