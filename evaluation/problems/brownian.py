"""Brownian motion seen through noise, its middle missing, both scales unknown (math 12.8)."""

import math

import torch
from torch import Tensor

from dgm_infer import Target

__all__ = ["Brownian"]

# What the Inference Gym of TensorFlow Probability checks in as BrownianMotionUnknownScalesMissingMiddleObservations:
# simulated there with scales of 0.1 and 0.15.
_FIRST = (0.21592641, 0.118771404, -0.07945447, 0.037677474, -0.27885845,
          -0.1484156, -0.3250906, -0.22957903, -0.44110894, -0.09830782)  # fmt: skip
_LAST = (-0.8786016, -0.83736074, -0.7384849, -0.8939254, -0.7774566,
         -0.70238715, -0.87771565, -0.51853573, -0.6948214, -0.6202789)  # fmt: skip
_STEPS = 30
# standard deviation of both log scales
_PRIOR_SD = 2.0


class Brownian(Target):
    """``log s, log e ~ N(0, 4)``, ``x_t ~ N(x_{t-1}, s^2)``, ``y_t ~ N(x_t, e^2)`` for 20 of 30 steps, ``x_0 = 0``.

    Coordinates: ``log s, log e, x_1, ..., x_30`` (Sountsov et al. 2020). Given the scales all is
    Gaussian, so that log Z is an integral over the two of them, a sum on an even grid.
    """

    def __init__(self):
        super().__init__(None, _STEPS + 2)
        self.seen = torch.tensor([*range(10), *range(20, 30)])
        self.observed = torch.tensor([*_FIRST, *_LAST], dtype=torch.float64)
        self.log_z = self._log_z()

    def energy(self, x: Tensor) -> Tensor:
        scales, path = x[..., :2], x[..., 2:]
        prior = 0.5 * (scales / _PRIOR_SD).square().sum(-1) + 2 * math.log(_PRIOR_SD)
        moves = torch.cat([path[..., :1], path.diff(dim=-1)], -1)
        missed = path[..., self.seen] - self.observed.to(x)
        moved, seen = ((-2 * scales).exp() * torch.stack([_squares(moves), _squares(missed)], -1)).unbind(-1)
        n = len(self.seen)
        constant = 0.5 * (2 + _STEPS + n) * math.log(2 * math.pi)
        return prior + 0.5 * (moved + seen) + _STEPS * scales[..., 0] + n * scales[..., 1] + constant

    def _log_z(self, width: float = 12.0, nodes: int = 481) -> float:
        """``log int N(a) N(b) N(y; 0, exp(2a) A + exp(2b) I) da db`` with ``A_tt' = min(t, t')``."""
        t = (self.seen + 1).double()
        values, vectors = torch.linalg.eigh(torch.minimum(t[:, None], t))
        squares = (vectors.mT @ self.observed).square()
        a = torch.linspace(-width, width, nodes, dtype=torch.float64)
        spread = (2 * a).exp()[:, None, None] * values + (2 * a).exp()[None, :, None]
        log_likelihood = -0.5 * (spread.log() + squares / spread + math.log(2 * math.pi)).sum(-1)
        log_prior = -0.5 * (a / _PRIOR_SD).square() - math.log(_PRIOR_SD) - 0.5 * math.log(2 * math.pi)
        cell = 2 * float((a[1] - a[0]).log())
        return float((log_likelihood + log_prior[:, None] + log_prior).logsumexp((0, 1))) + cell


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(-1)
