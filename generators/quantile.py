"""Quantile distributions: independent data given by their quantile function, without a closed-form density (J 10.1)."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dgm_infer import DirectedModel, Logistic, Product, StandardNormal
from dgm_infer.arguments import whole_number
from dgm_infer.models.densities import STANDARD_LOGISTIC

__all__ = ["GAndK", "GeneralisedLambda"]


class GeneralisedLambda(DirectedModel):
    """Independent draws of the generalised lambda distribution, ``x_i = q(p_i)`` (math 12.1, J (89) corrected).

    ``q(p) = z1 + ((p^z3 - 1)/z3 - ((1 - p)^z4 - 1)/z4)/z2``, increasing in p.

    Inputs ``u = [u1, u2]``. ``u1 = (v1, v3, v4, v2)`` gives the latents ``z1, z3, z4 = v1, v3, v4 ~ N(0, 1)`` and
    ``z2 = softplus(pi/sqrt(3) v2) ~ Exp(1)`` of a unit-variance logistic v2; ``u2``, also unit-variance logistic,
    gives ``p = sigmoid(pi/sqrt(3) u2)``. The latents ``z1`` to ``z4`` have shape ``[...]``, the outputs ``[..., n]``.

    Args:
        n: number of draws N, at least 1.
    """

    structure = "independent"

    def __init__(self, n: int = 250):
        super().__init__()
        self.output_shape = (whole_number(type(self).__name__, "n", n),)
        self.global_density = Product(StandardNormal(3), Logistic(1))
        self.local_density = Logistic(n)

    @classmethod
    def published_observations(cls) -> tuple[Tensor, Tensor]:
        """The 250 observations of J 10.1 and the parameters ``z1, ..., z4`` that generated them: ``[250]``, ``[4]``.

        Regenerated from their recipe (math 10.1), the same to rounding.
        """
        z = torch.tensor([5.0, 1.0, 0.4, -0.1], dtype=torch.float64)
        p = torch.from_numpy(np.random.RandomState(1234).uniform(size=250))
        latents = {f"z{i + 1}": value for i, value in enumerate(z)}
        return cls(250).simulate(latents, torch.logit(p) / STANDARD_LOGISTIC), z

    def global_latents(self, u1):
        v1, v3, v4, v2 = u1.unbind(-1)
        # softplus's own default threshold would cut z2 off at eight digits
        z2 = F.softplus(STANDARD_LOGISTIC * v2, threshold=40)
        return {"z1": v1, "z2": z2, "z3": v3, "z4": v4}

    def simulate(self, z, u2):
        z1, z2, z3, z4 = (z[name].unsqueeze(-1) for name in ("z1", "z2", "z3", "z4"))
        a = STANDARD_LOGISTIC * u2
        # log p = a - softplus(a), log(1 - p) = -softplus(a): the four transcendental functions of a unit are the two
        # of softplus and one expm1 each for p^z3 and (1 - p)^z4
        minus_log_q = F.softplus(a, threshold=40)
        x = _add_power(z1, a - minus_log_q, z3, 1 / z2)
        return _add_power(x, minus_log_q, -z4, 1 / z2)


class GAndK(DirectedModel):
    """Independent draws of the g-and-k distribution, a transformed standard normal r (math 12.2).

    ``x_i = a + b (1 + 0.8 tanh(g r_i/2)) (1 + r_i^2)^k r_i``, increasing in r for ``k >= 0``.

    Inputs ``u = [u1, r]``. The unit-variance logistic ``u1`` gives the latents ``z1, z2, z3, z4 = a, b, g, k``,
    uniform on (0, 10) as in the paper cited: ``z = 10 sigmoid(pi/sqrt(3) u1)``; ``r ~ N(0, I)``. The latents have
    shape ``[...]``, the outputs ``[..., n]``.

    Args:
        n: number of draws N, at least 1.
    """

    structure = "independent"

    def __init__(self, n: int = 250):
        super().__init__()
        self.output_shape = (whole_number(type(self).__name__, "n", n),)
        self.global_density = Logistic(4)
        self.local_density = StandardNormal(n)

    def global_latents(self, u1):
        z = 10 * torch.sigmoid(STANDARD_LOGISTIC * u1)
        return {f"z{i + 1}": value for i, value in enumerate(z.unbind(-1))}

    def simulate(self, z, u2):
        a, b, g, k = (z[name].unsqueeze(-1) for name in ("z1", "z2", "z3", "z4"))
        skew = 1 + 0.8 * torch.tanh((0.5 * g) * u2)
        tails = torch.exp(k * torch.log1p(u2.square()))
        return a + b * skew * tails * u2


# Exponent below which the power is a series. Here the truncation error of the series about equals what second
# derivatives of the quotient lose by cancellation (tests/generators/test_quantile.py).
_SMALL = 5e-5


def _add_power(x: Tensor, log_p: Tensor, z: Tensor, scale: Tensor) -> Tensor:
    """``x + scale (p^z - 1)/z`` from ``log p``, with derivatives that are accurate at and near ``z = 0`` too.

    ``(p^z - 1)/z = a expm1(z log p) + log p (b + log p (c + log p (d + e log p)))``, where ``a = 1/z`` and the others
    are 0, or for small z ``a = 0`` and ``(b, c, d, e) = (1, z/2, z^2/6, z^3/24)``. Making the choice per parameter
    ``[..., 1]`` and not per unit ``[..., n]`` keeps it cheap.
    """
    small = z.abs() < _SMALL
    # where() alone would differentiate the branch not taken, giving NaN
    large_z, small_z = torch.where(small, 1.0, z), torch.where(small, z, 0.0)
    a, b = torch.where(small, 0.0, scale / large_z), torch.where(small, scale, 0.0)
    c = b * small_z / 2
    d = c * small_z / 3
    e = d * small_z / 4
    series = torch.addcmul(b, log_p, torch.addcmul(c, log_p, torch.addcmul(d, log_p, e)))
    return torch.addcmul(torch.addcmul(x, torch.expm1(large_z * log_p), a), log_p, series)
