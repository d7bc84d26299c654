"""Control variables of continuous tempering: real numbers t with a temperature ``beta(t)`` (T 5.3, T 5.4)."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["Control", "Plateaus", "Sigmoid", "Temperature"]

# Half the period of a control with plateaus: the middle nine tenths of a logistic variable are as long.
_HALF = 3.0
# Nodes of the integral over a ramp.
_NODES = 64


class Temperature(NamedTuple):
    """A temperature and its derivative by the control, each ``[...]``."""

    beta: Tensor
    rest: Tensor
    """``1 - beta``, without cancellation."""
    slope: Tensor
    """``d beta/d t``."""


class Control(Protocol):
    """A control variable: beta, the prior energy of t, and what follows for the ends."""

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

    def log_ends(self, delta: Tensor) -> tuple[Tensor, Tensor] | None:
        """Logs of ``p(beta = 1 | x)`` and ``p(beta = 0 | x)`` up to one constant; None for those of a uniform beta."""
        ...


class Sigmoid:
    """``beta = sigmoid(t)``, uniform on (0, 1): ``p(t) = beta (1 - beta)`` (T (5.22))."""

    def temperature(self, t: Tensor) -> Temperature:
        beta, rest = t.sigmoid(), (-t).sigmoid()
        return Temperature(beta, rest, beta * rest)

    def energy(self, t: Tensor) -> Tensor:
        return softplus(t) + softplus(-t)

    def force(self, t: Tensor, at: Temperature) -> Tensor:
        return at.beta - at.rest

    def inverse(self, beta: Tensor) -> Tensor:
        return torch.logit(beta.clamp(1e-4, 1 - 1e-4))

    def log_ends(self, delta: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Plateaus:
    """The extended Hamiltonian: beta is 1 on a plateau of t, 0 on another, and smooth between (T (5.19), math 6.20).

    t is uniform on a circle of length ``2 H``. With ``s = |t|/H`` on [0, 1], beta is 1 for ``s <= share``, 0 for
    ``s >= 1 - share`` and ``3 r^2 - 2 r^3`` between, r falling from 1 to 0 along a straight line.

    Args:
        share: of the circle, of each plateau; between 0 and 1/2.
    """

    share: float

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

    def log_ends(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """``share exp(-Delta)/I`` and ``share/I`` with ``I = share (1 + exp(-Delta)) + (1 - 2 share) E_r[..]``."""
        beta, log_weight = (torch.as_tensor(part).to(delta) for part in _nodes())
        log_share, log_rest = np.log(self.share), np.log1p(-2 * self.share)
        ramp = (log_rest + log_weight - delta.unsqueeze(-1) * beta).logsumexp(-1)
        log_sum = torch.stack([ramp, log_share - delta, torch.full_like(delta, log_share)]).logsumexp(0)
        return log_share - delta - log_sum, log_share - log_sum


def _ramp(r: Tensor) -> Tensor:
    return r.square() * (3 - 2 * r)


@cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Temperatures at nodes along a ramp, and the logs of their weights.

    Those of Gauss and Legendre in x, with ``r = 3 x^2 - 2 x^3``: they are dense at the ends, where ``exp(-beta Delta)``
    changes over a length of ``Delta^(-1/2)``.
    """
    x, weight = np.polynomial.legendre.leggauss(_NODES)
    x = 0.5 * (1 + x)
    r = x**2 * (3 - 2 * x)
    return r**2 * (3 - 2 * r), np.log(3 * x * (1 - x) * weight)
