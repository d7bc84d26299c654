"""Convolutions with fixed weights whose second derivatives cost no more than they must (math 3.9)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode

_PLAIN = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
_NAMES = {
    torch.conv1d: _PLAIN,
    torch.conv2d: _PLAIN,
    torch.conv3d: _PLAIN,
    torch.conv_transpose1d: _TRANSPOSED,
    torch.conv_transpose2d: _TRANSPOSED,
    torch.conv_transpose3d: _TRANSPOSED,
}
_NORMALISED = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NORMALISED_DEFAULTS = {"weight": None, "bias": None, "training": False, "eps": 1e-5}


class FixedConvolutions(TorchFunctionMode):
    """While active, convolutions by weights that need no gradient are linear functions of their input, and batch
    normalisations by fixed statistics are affine ones.

    The derivative of torch's own backward of a convolution fills a zero gradient of the weights for every product,
    which takes several times the time of the products themselves.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        output = _convolved(func, args, given)
        output = _normalised(func, args, given) if output is None else output
        return func(*args, **given) if output is None else output


class Geometry(NamedTuple):
    """How a convolution's kernel meets its input."""

    transposed: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    extra: tuple[int, ...]
    groups: int


def _convolved(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The output of a convolution; None for another function, and where weights or padding are not fixed."""
    names = _NAMES.get(function)
    if names is None:
        return None
    given = _DEFAULTS | dict(zip(names, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given["bias"]
    fixed = not weight.requires_grad and (bias is None or not bias.requires_grad)
    if not fixed or x.ndim != weight.ndim or isinstance(given["padding"], str):
        return None
    dims = weight.ndim - 2
    stride, padding, dilation, extra = (
        (value,) * dims if isinstance(value, int) else (tuple(value) * dims)[:dims]
        for value in (given[name] for name in ("stride", "padding", "dilation", "output_padding"))
    )
    geometry = Geometry(names is _TRANSPOSED, stride, padding, dilation, extra, given["groups"])
    y = _Convolution.apply(x, weight, *geometry)
    return y if bias is None else y + bias.reshape(-1, *[1] * dims)


def _normalised(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The output of a batch normalisation by fixed statistics, ``scale x + shift``, whose second derivative torch does
    not know to be zero; None for another function."""
    if function is not batch_norm:
        return None
    given = _NORMALISED_DEFAULTS | dict(zip(_NORMALISED, args, strict=False)) | kwargs
    x, mean, variance, weight, bias = (given[name] for name in _NORMALISED[:5])
    if given["training"] or mean is None or any(t is not None and t.requires_grad for t in (weight, bias)):
        return None
    scale = (variance + given["eps"]).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    sides = (-1, *[1] * (x.ndim - 2))
    return x * scale.reshape(sides) + shift.reshape(sides)


class _Convolution(Function):
    """A convolution as a linear function of its input, whose adjoint is the transposed one, and so on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, *geometry):
        g = Geometry(*geometry)
        return torch.convolution(x, weight, None, g.stride, g.padding, g.dilation, g.transposed, g.extra, g.groups)

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
