"""Convolutions with fixed weights whose second derivatives cost no more than they must."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import batch_norm, pad
from torch.overrides import TorchFunctionMode

from .pointwise import pointwise
from .products import Geometry, convolution

__all__ = ["Box", "FixedConvolutions", "Layer", "QuickConvolutions", "between"]

_PLAIN = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}

Box = tuple[tuple[int, int], ...]
"""First and last positions, the last excluded, in every dimension of an image."""


class FixedConvolutions(TorchFunctionMode):
    """While active, convolutions by weights that need no gradient are linear functions of their input, and batch
    normalisations by fixed statistics are affine ones.

    The derivative of torch's own backward of a convolution fills a zero gradient of the weights for every product,
    which takes several times the time of the products themselves (math 3.9).
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        layer = Layer.of(func, args, kwargs or {})
        if layer is not None:
            return layer(layer.input)
        return between(func, args, kwargs or {})


class QuickConvolutions(TorchFunctionMode):
    """While active, convolutions by fixed weights are computed the quickest way known, for values alone."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        layer = Layer.of(func, args, kwargs or {}) if func in _NAMES else None
        if layer is None:
            return func(*args, **(kwargs or {}))
        return layer.biased(convolution(layer.input, layer.weight, layer.geometry))


def between(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a function between convolutions, with derivatives that cost little where they are known."""
    output = _affine(function, args, kwargs)
    output = pointwise(function, args, kwargs) if output is None else output
    return function(*args, **kwargs) if output is None else output


_NORMALISED = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NORMALISED_DEFAULTS = {"weight": None, "bias": None, "training": False, "eps": 1e-5}


def _affine(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The output of a batch normalisation by fixed statistics, ``scale x + shift``, whose second derivative torch does
    not know to be zero; None for another function."""
    if function is not batch_norm:
        return None
    given = _NORMALISED_DEFAULTS | dict(zip(_NORMALISED, args, strict=False)) | kwargs
    x, mean, variance, weight, bias = (given[name] for name in _NORMALISED[:5])
    eps = given["eps"]
    if given["training"] or mean is None or any(t is not None and t.requires_grad for t in (weight, bias)):
        return None
    scale = (variance + eps).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    sides = (-1, *[1] * (x.ndim - 2))
    return x * scale.reshape(sides) + shift.reshape(sides)


_NAMES = {
    torch.conv1d: _PLAIN,
    torch.conv2d: _PLAIN,
    torch.conv3d: _PLAIN,
    torch.conv_transpose1d: _TRANSPOSED,
    torch.conv_transpose2d: _TRANSPOSED,
    torch.conv_transpose3d: _TRANSPOSED,
}


class Layer(NamedTuple):
    """A convolution by fixed weights, and the input it was called with."""

    input: Tensor
    """``[R, C, *grid]``."""
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Layer | None":
        """The convolution that a call makes; None for another function, and where weights or padding are not fixed."""
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
        return cls(x, weight, bias, geometry)

    def __call__(self, x: Tensor) -> Tensor:
        """The output for an input."""
        return self.biased(_Convolution.apply(x, self.weight, *self.geometry))

    def biased(self, y: Tensor) -> Tensor:
        """An output with the bias added."""
        return y if self.bias is None else y + self.bias.reshape(-1, *[1] * len(self.geometry.stride))

    def needs(self, box: Box, grid: Sequence[int]) -> Box:
        """The part of an input of this grid that a part of the output depends on."""
        ends = []
        for (first, last), n, s, (before, after) in zip(box, grid, self.geometry.stride, self._reach, strict=True):
            if self.geometry.transposed:
                # of the input's position i, the outputs i s - before to i s + after
                ends.append((max(0, -((after - first) // s)), min(n, (last - 1 + before) // s + 1)))
            else:
                ends.append((max(0, first * s - before), min(n, (last - 1) * s + after + 1)))
        return tuple((min(a, b), b) for a, b in ends)

    def part(self, x: Tensor, need: Box, box: Box) -> Tensor:
        """The part of the output in a box, of the part of the input that it needs."""
        pads: list[int] = []
        for (first, last), (a, b), s, (before, after) in zip(box, need, self.geometry.stride, self._reach, strict=True):
            if self.geometry.transposed:
                pads = [a * s - before - first, last - (b - 1) * s - after - 1, *pads]
            else:
                pads = [a - (first * s - before), (last - 1) * s + after + 1 - b, *pads]
        none = (0,) * len(self.geometry.stride)
        layer = self._replace(geometry=self.geometry._replace(padding=none, extra=none))
        return pad(layer(x), pads) if self.geometry.transposed else layer(pad(x, pads))

    def work(self, size: Sequence[int]) -> float:
        """Products for an output of this size, of one image."""
        here = math.prod(size) * self.weight.numel()
        # every entry of the weight meets every position of the coarser grid
        return here / math.prod(self.geometry.stride) if self.geometry.transposed else here

    @property
    def _reach(self) -> tuple[tuple[int, int], ...]:
        """How far the kernel reaches before and after its anchor, in every dimension."""
        sides = zip(self.geometry.padding, self.geometry.dilation, self.weight.shape[2:], strict=True)
        return tuple((p, d * (k - 1) - p) for p, d, k in sides)


class _Convolution(Function):
    """A convolution as a linear function of its input, whose adjoint is the transposed one, and so on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, *geometry):
        return convolution(x, weight, Geometry(*geometry))

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
