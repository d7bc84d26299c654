"""Convolutions with fixed weights whose second derivatives cost no more than they must."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

__all__ = ["FixedConvolutions"]

_PLAIN = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}


class FixedConvolutions(TorchFunctionMode):
    """While active, convolutions by weights that need no gradient are linear functions of their input.

    The derivative of torch's own backward of a convolution fills a zero gradient of the weights for every product,
    which takes several times the time of the products themselves (math 3.9).
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        names = _NAMES.get(func)
        if names is not None:
            given = _DEFAULTS | dict(zip(names, args, strict=False)) | (kwargs or {})
            if _applies(given):
                return _convolve(given, transposed=names is _TRANSPOSED)
        return func(*args, **(kwargs or {}))


_NAMES = {
    torch.conv1d: _PLAIN,
    torch.conv2d: _PLAIN,
    torch.conv3d: _PLAIN,
    torch.conv_transpose1d: _TRANSPOSED,
    torch.conv_transpose2d: _TRANSPOSED,
    torch.conv_transpose3d: _TRANSPOSED,
}


def _applies(given: dict[str, Any]) -> bool:
    """Whether it is one of a batch by fixed weights, with its padding in numbers."""
    x, weight, bias = given["input"], given["weight"], given["bias"]
    fixed = not weight.requires_grad and (bias is None or not bias.requires_grad)
    return fixed and x.ndim == weight.ndim and not isinstance(given["padding"], str)


def _convolve(given: dict[str, Any], transposed: bool) -> Tensor:
    weight, bias = given["weight"], given["bias"]
    dims = weight.ndim - 2
    stride, padding, dilation, extra = (
        (value,) * dims if isinstance(value, int) else (tuple(value) * dims)[:dims]
        for value in (given[name] for name in ("stride", "padding", "dilation", "output_padding"))
    )
    y = _Convolution.apply(given["input"], weight, transposed, stride, padding, dilation, extra, given["groups"])
    return y if bias is None else y + bias.reshape(-1, *[1] * dims)


class _Convolution(Function):
    """A convolution as a linear function of its input, whose adjoint is the transposed one, and so on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, transposed, stride, padding, dilation, extra, groups):
        return torch.convolution(x, weight, None, stride, padding, dilation, transposed, extra, groups)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, *ctx.settings = inputs
        ctx.save_for_backward(weight)
        ctx.save_for_forward(weight)
        ctx.size = x.shape[2:]

    @staticmethod
    def backward(ctx, *grad_outputs):
        (g,), (weight,) = grad_outputs, ctx.saved_tensors
        transposed, stride, padding, dilation, _, groups = ctx.settings
        extra = (0,) * len(stride)
        if not transposed:
            # entries of the input beyond those that the last stride begins at
            sides = zip(ctx.size, g.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
            extra = tuple(n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sides)
        adjoint = _Convolution.apply(g, weight, not transposed, stride, padding, dilation, extra, groups)
        return adjoint, *[None] * 7

    @staticmethod
    def jvp(ctx, *grad_inputs):
        (weight,) = ctx.saved_tensors
        return _Convolution.apply(grad_inputs[0], weight, *ctx.settings)
