"""Layers whose higher derivatives are slow, wrong or missing in torch: convolutions, normalisations, attention."""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.backends import cuda
from torch.nn import functional
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


_LAYER = ("input", "normalized_shape", "weight", "bias", "eps")
_INSTANCE = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
_OF_NORMS = {"weight": None, "bias": None, "eps": 1e-5, "running_mean": None, "running_var": None}


class PlainNormalisations(TorchFunctionMode):
    """While active, ``layer_norm`` and ``instance_norm`` are means, variances and products.

    The derivatives of torch's own (2.14.1) of the second order, by forward mode or through the double backward, are
    those of another function, without a word, or not there.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func in (functional.layer_norm, torch.layer_norm):
            return _layer(**dict(zip(_LAYER, args, strict=False)), **given)
        if func in (functional.instance_norm, torch.instance_norm):
            options = _OF_NORMS | {"use_input_stats": True} | dict(zip(_INSTANCE, args, strict=False)) | given
            if options["use_input_stats"]:
                return _instance(options)
        return func(*args, **given)


def _layer(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    y = _standardised(input, dims, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _instance(given: dict[str, Any]) -> Tensor:
    x, sides = given["input"], (-1, *[1] * (given["input"].ndim - 2))
    y = _standardised(x, tuple(range(2, x.ndim)), given["eps"])
    y = y if given["weight"] is None else y * given["weight"].reshape(sides)
    return y if given["bias"] is None else y + given["bias"].reshape(sides)


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


P = ParamSpec("P")
R = TypeVar("R")
# All fused kernels, also those of the CPU: whether they are on, and how they are switched.
_FUSED = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
_LOCK = threading.Lock()
_depth = 0
_before: list[bool] = []


def differentiable_attention(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose calls of ``scaled_dot_product_attention`` are made by its mathematical kernel.

    The switches are torch's own, of the whole process: they are set while any such function runs, and set back after.
    """

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        _enter()
        try:
            return function(*args, **kwargs)
        finally:
            _leave()

    return plain


def _enter() -> None:
    global _depth
    with _LOCK:
        _depth += 1
        if _depth == 1:
            _before[:] = [enabled() for enabled, _ in _FUSED]
            for _, switch in _FUSED:
                switch(False)


def _leave() -> None:
    global _depth
    with _LOCK:
        _depth -= 1
        if _depth == 0:
            for (_, switch), value in zip(_FUSED, _before, strict=True):
                switch(value)
