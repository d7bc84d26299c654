"""Functions of single numbers whose slopes are computed once for all rows of a Jacobian (math 3.9)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

__all__ = ["pointwise"]


def pointwise(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The output of a call of a function that :data:`_SLOPES` knows; None for another one."""
    known = _SLOPES.get(function)
    if known is None:
        return None
    names, slope = known
    given = dict(zip(names, args, strict=False)) | kwargs
    x = given.pop("input", None)
    if not isinstance(x, Tensor) or not x.is_floating_point() or given.pop("inplace", False) or set(given) - set(names):
        return None
    return _Pointwise.apply(x, function, slope, given)


class _Pointwise(Function):
    """``f(x)`` with the derivative ``g f'(x)``: torch's own takes the slope of every row again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, function, slope, given):
        return function(x, **given)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, ctx.slope, ctx.given = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (g,), (x,) = grad_outputs, ctx.saved_tensors
        return g * ctx.slope(x, **ctx.given), None, None, None

    @staticmethod
    def jvp(ctx, *grad_inputs):
        (x,) = ctx.saved_tensors
        return grad_inputs[0] * ctx.slope(x, **ctx.given)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return torch.where(beta * x > threshold, 1.0, (beta * x).sigmoid())


def _silu(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _tanh(x: Tensor) -> Tensor:
    return 1 - x.tanh().square()


def _sigmoid(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 - s)


_SLOPES: dict[Any, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    functional.softplus: (("input", "beta", "threshold"), _softplus),
    functional.silu: (("input", "inplace"), _silu),
    torch.tanh: (("input",), _tanh),
    Tensor.tanh: (("input",), _tanh),
    torch.sigmoid: (("input",), _sigmoid),
    Tensor.sigmoid: (("input",), _sigmoid),
}
"""Names of the arguments, and ``f'(x)``."""
