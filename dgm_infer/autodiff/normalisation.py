"""Normalisations of layers as torch's plain operations: its fused ones have wrong derivatives of higher order."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_LAYER = ("input", "normalized_shape", "weight", "bias", "eps")
_INSTANCE = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "eps": 1e-5, "running_mean": None, "running_var": None}


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
            options = _DEFAULTS | {"use_input_stats": True} | dict(zip(_INSTANCE, args, strict=False)) | given
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
    y = _normalised(input, dims, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _instance(given: dict[str, Any]) -> Tensor:
    x, sides = given["input"], (-1, *[1] * (given["input"].ndim - 2))
    y = _normalised(x, tuple(range(2, x.ndim)), given["eps"])
    y = y if given["weight"] is None else y * given["weight"].reshape(sides)
    return y if given["bias"] is None else y + given["bias"].reshape(sides)


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
