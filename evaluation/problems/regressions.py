"""Logistic regressions, plain and with random effects (math 12.8)."""

import math
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dgm_infer import StandardNormal, Target
from dgm_infer.arguments import finite
from dgm_infer.errors import ArgumentError

__all__ = ["LogisticRegression", "Seeds"]


class LogisticRegression(Target):
    """``w ~ N(0, I)``, ``y_i ~ Bernoulli(sigmoid(x_i^T w))``; the features have mean 0, variance 1, and a one in front.

    Args:
        features: ``[N, D - 1]``; columns that do not vary are left out.
        labels: y, ``[N]``, 0 or 1.
    """

    standardised = True
    log_z = None

    def __init__(self, features: Tensor, labels: Tensor):
        features = finite("LogisticRegression", "features", features, torch.float64)
        labels = finite("LogisticRegression", "labels", labels, torch.float64)
        if features.ndim != 2 or labels.shape != features.shape[:1] or not ((labels == 0) | (labels == 1)).all():
            raise ArgumentError(
                f"LogisticRegression(features {tuple(features.shape)}, labels {tuple(labels.shape)}): expected [N, D] "
                "and [N], labels 0 or 1"
            )
        sd = features.std(0, correction=0)
        features = ((features - features.mean(0)) / sd)[:, sd > 0]
        design = torch.cat([torch.ones(len(features), 1, dtype=torch.float64), features], -1)
        super().__init__(None, design.shape[1])
        self.prior = StandardNormal(self.dim)
        self.labels, self.design = labels, design

    @classmethod
    def simulated(cls, n: int, features: int, seed: int) -> Self:
        """Independent normal features, and labels drawn from the model itself."""
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(n, features, generator=rng, dtype=torch.float64)
        w = torch.randn(features, generator=rng, dtype=torch.float64)
        return cls(x, torch.bernoulli(torch.sigmoid(x @ w), generator=rng))

    def energy(self, x: Tensor) -> Tensor:
        logits = x @ self.design.to(x).mT
        log_likelihood = (self.labels.to(x) * logits - F.softplus(logits)).sum(-1)
        return 0.5 * x.square().sum(-1) + 0.5 * self.dim * math.log(2 * math.pi) - log_likelihood


# Crowder 1978, table 3: germinated seeds of every plate, all of its seeds, its kind and its extract.
_GERMINATED = (10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3)
_SOWN = (39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7)
_KIND = (0,) * 11 + (1,) * 10
_EXTRACT = (0,) * 5 + (1,) * 6 + (0,) * 5 + (1,) * 5
# shape and rate of the precision of the plates' effects
_GAMMA = 0.01
_SD = 10.0


class Seeds(Target):
    """``r_i ~ Binomial(n_i, sigmoid(a_0 + a_1 x_i + a_2 w_i + a_3 x_i w_i + b_i))`` on 21 plates (Crowder 1978).

    ``b_i ~ N(0, 1/tau)``, ``tau ~ Gamma(0.01, 0.01)``, ``a ~ N(0, 100)``; coordinates ``log tau, a, b``, 26.
    """

    log_z = None

    def __init__(self):
        super().__init__(None, 1 + 4 + len(_SOWN))
        r, n, x, w = (torch.tensor(column, dtype=torch.float64) for column in (_GERMINATED, _SOWN, _KIND, _EXTRACT))
        self.germinated, self.sown = r, n
        self.design = torch.stack([torch.ones_like(x), x, w, x * w], -1)
        self.log_choices = float((torch.lgamma(n + 1) - torch.lgamma(r + 1) - torch.lgamma(n - r + 1)).sum())

    def energy(self, x: Tensor) -> Tensor:
        log_tau, a, b = x[..., 0], x[..., 1:5], x[..., 5:]
        logits = a @ self.design.to(x).mT + b
        likelihood = (self.germinated.to(x) * logits - self.sown.to(x) * F.softplus(logits)).sum(-1)
        half_log = 0.5 * math.log(2 * math.pi)
        effects = 0.5 * b.shape[-1] * log_tau - 0.5 * log_tau.exp() * b.square().sum(-1) - b.shape[-1] * half_log
        slopes = -0.5 * (a / _SD).square().sum(-1) - 4 * (math.log(_SD) + half_log)
        # of log tau, whence one power of tau more
        precision = _GAMMA * log_tau - _GAMMA * log_tau.exp() + _GAMMA * math.log(_GAMMA) - math.lgamma(_GAMMA)
        return -(likelihood + self.log_choices + effects + slopes + precision)
