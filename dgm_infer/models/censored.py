"""Normal variables that are cut off at the edges of [0, 1], as the pixels of most images are."""

import math

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.utils import broadcast_all
from torch.special import log_ndtr, ndtr

_NO_SHAPE = torch.Size()


class CensoredNormal(Distribution):
    """``x = min(max(loc + scale n, 0), 1)``, ``n ~ N(0, 1)``: a density within (0, 1), and masses at 0 and 1.

    Images have pixels that are exactly black or white, which no density describes: this is the tobit model (Tobin
    1958) of both edges. ``log_prob`` is that of a mass at 0 and 1, ``log Phi(-loc / scale)`` and ``log Phi((loc - 1) /
    scale)``, and the normal's between them; a mixed measure's, so that evidences compare among such models.

    Args:
        loc: mean before it is cut off, ``[...]``.
        scale: standard deviation before, positive, ``[...]``.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # type: ignore[assignment]
    support = constraints.unit_interval  # type: ignore[assignment]
    has_rsample = True

    def __init__(self, loc: Tensor | float, scale: Tensor | float, validate_args: bool | None = None):
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        z = (value - self.loc) / self.scale
        within = -z.square() / 2 - self.scale.log() - math.log(2 * math.pi) / 2
        # one call for both edges: whichever is not there has another value that is finite
        edge = log_ndtr(torch.where(value <= 0, z, -z))
        return torch.where((value <= 0) | (value >= 1), edge, within)

    def rsample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = _NO_SHAPE) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return (self.loc + self.scale * noise).clamp(0, 1)

    @property
    def mean(self) -> Tensor:
        """``E[x] = m (Phi(b) - Phi(a)) + s (phi(a) - phi(b)) + 1 - Phi(b)``, ``a = -m / s``, ``b = (1 - m) / s``."""
        low, high = -self.loc / self.scale, (1 - self.loc) / self.scale
        inner = self.loc * (ndtr(high) - ndtr(low)) + self.scale * (_phi(low) - _phi(high))
        return inner + ndtr(-high)

    @property
    def variance(self) -> Tensor:
        low, high = -self.loc / self.scale, (1 - self.loc) / self.scale
        between, down, up = ndtr(high) - ndtr(low), _phi(low), _phi(high)
        # E[(loc + scale n)^2 1(within)]
        second = (self.loc.square() + self.scale.square()) * between
        second = second + 2 * self.loc * self.scale * (down - up) + self.scale.square() * (low * down - high * up)
        return (second + ndtr(-high) - self.mean.square()).clamp_min(0)


def _phi(z: Tensor) -> Tensor:
    return (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
