"""ABC posterior of a quantile distribution whose uniforms are integrated out, by bisection (McVinish 2012, J 10.1)."""

import torch
from torch import Tensor

from dgm_infer import Target
from dgm_infer.models.densities import STANDARD_LOGISTIC
from generators import GeneralisedLambda

__all__ = ["QuantileIntervals"]

# Logits between which the uniforms lie: exp(-40) is far below what data of any size resolve.
_LOGIT = 40.0


class QuantileIntervals(Target):
    """Parameters under a uniform kernel on the cube ``max_n |x_n - y_n| <= eps`` (math 2.8, J (92)).

    ``p(u1) prod_n (F(y_n + eps | z) - F(y_n - eps | z))``, with F the inverse of the quantile function by bisection.

    McVinish redraws every uniform within the interval of it that bisection finds, and accepts by the ratio of the
    products of lengths: his chain of parameters is a random walk on this density.

    Args:
        model: the distribution, as generator.
        observed: y, ``[N]``.
        tolerance: eps.
        bisections: halvings of the logits -40 to 40, in which the uniforms are sought.
    """

    def __init__(self, model: GeneralisedLambda, observed: Tensor, tolerance: float, bisections: int = 24):
        super().__init__(None, model.global_density.dim)
        self.model, self.tolerance, self.bisections = model, tolerance, bisections
        self._ends = torch.cat([observed - tolerance, observed + tolerance])

    def energy(self, x):
        below, above = self.distribution(self._ends, self.model.global_latents(x)).chunk(2, -1)
        return -self.model.global_density.log_prob(x) - (above - below).log().sum(-1)

    def distribution(self, y: Tensor, z: dict[str, Tensor]) -> Tensor:
        """F at ``y [K]`` for parameters ``[...]``: ``[..., K]``."""
        low = y.new_full((*z["z1"].shape, len(y)), -_LOGIT)
        high = -low
        for _ in range(self.bisections):
            middle = 0.5 * (low + high)
            under = self.model.simulate(z, middle / STANDARD_LOGISTIC) < y
            low, high = torch.where(under, middle, low), torch.where(under, high, middle)
        return torch.sigmoid(0.5 * (low + high))

    def latents(self, x):
        return self.model.global_latents(x)

    def initial_draws(self, n, rng):
        return self.model.global_density.sample((n,), generator=rng).to(self._ends)
