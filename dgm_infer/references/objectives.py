"""Objectives of fits by weighted draws: the thermodynamic objective and the evidence upper bound (math 11.12)."""

import math
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["OBJECTIVES", "Objective", "score_weights"]

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
