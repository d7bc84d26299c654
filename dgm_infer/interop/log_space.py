"""Functions of logarithms that do not round where their arguments do."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["log_cosh", "log_cosh_sums", "log_one_minus_exp", "log_simplex", "log_softplus", "sum_last"]


def log_simplex(x: Tensor) -> Tensor:
    """``log z`` of the stick-breaking bijection, ``[..., K - 1] -> [..., K]``."""
    left = torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device)
    t = x - left.log()
    rest = F.logsigmoid(-t).cumsum(-1)
    zero = torch.zeros_like(x[..., :1])
    return torch.cat([F.logsigmoid(t), zero], -1) + torch.cat([zero, rest], -1)


def log_cosh(x: Tensor) -> Tensor:
    return x.abs() + F.softplus(-2 * x.abs()) - math.log(2)


def log_cosh_sums(x: Tensor) -> Tensor:
    """Sums of ``log cosh`` up to each column of a matrix whose entries below the diagonal are x, ``[..., n, n]``."""
    n = math.isqrt(2 * x.shape[-1]) + 1
    rows = iter(log_cosh(x).split(list(range(1, n)), -1))
    zero = x.new_zeros(*x.shape[:-1], n)
    each = [zero] + [torch.cat([row, zero[..., : n - row.shape[-1]]], -1) for row in rows]
    return torch.stack(each, -2).cumsum(-1)


def log_softplus(x: Tensor) -> Tensor:
    """``log log(1 + exp(x))``, which is x far below 0."""
    near = x.clamp_min(-30)
    return torch.where(x < -30, x, F.softplus(near).log())


def log_one_minus_exp(t: Tensor) -> Tensor:
    """``log(1 - exp(-exp(t)))``, which is t far below 0."""
    near = t.clamp(-30, 30)
    return torch.where(t < -30, t, torch.log(-torch.expm1(-near.exp())))


def sum_last(each: Tensor, n: int) -> Tensor:
    return each.sum(tuple(range(-n, 0))) if n > 0 else each
