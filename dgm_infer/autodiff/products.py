"""Convolutions as products of matrices, where that is faster than what a CPU has for them."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import fold, pad

__all__ = ["Geometry", "convolution", "quicker"]

# Positions of the coarser grid up to which few positions meet many channels: in float32, and in float64, for which
# torch multiplies matrices image by image.
_FEW = {torch.float32: 9, torch.float64: 64}
# Channels that are many.
_MANY = 64
# Output channels of a transposed convolution up to which the library's own blocks stay empty.
_THIN = 4


class Geometry(NamedTuple):
    """How a convolution's kernel meets its input."""

    transposed: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    extra: tuple[int, ...]
    groups: int


def convolution(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """``torch.convolution`` without bias, by the quickest way known: ``[R, C, *grid] -> [R, C', *grid']``."""
    g = geometry
    if g.groups == 1 and set(g.dilation) == {1} and x.ndim == 4 and x.device.type == "cpu":
        kernel = weight.shape[2:]
        coarse = x.shape[2:] if g.transposed else _coarse(x.shape[2:], kernel, g.stride, g.padding)
        positions, few = coarse.numel(), _FEW.get(x.dtype, 0)
        if positions <= few and (positions <= _FEW[torch.float32] or weight.shape[0] >= _MANY):
            return _spread(x, weight, g) if g.transposed else _gathered(x, weight, g, coarse)
        if g.transposed and weight.shape[1] <= _THIN and x.dtype == torch.float32:
            return fold(weight.flatten(1).mT @ x.flatten(2), _size(x, weight, g), kernel, 1, g.padding, g.stride)
    return torch.convolution(x, weight, None, g.stride, g.padding, g.dilation, g.transposed, g.extra, g.groups)


def quicker(layer: nn.Module) -> set[torch.dtype]:
    """The types in which :func:`convolution` may know a quicker way for a layer than torch."""
    if not isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        return set()
    thin = isinstance(layer, nn.ConvTranspose2d) and layer.weight.shape[1] <= _THIN
    many = layer.weight.shape[0] >= _MANY
    return {dtype for dtype, so in ((torch.float32, thin), (torch.float64, many)) if so}


def _coarse(grid: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> torch.Size:
    """The size of a plain convolution's output."""
    sides = zip(grid, kernel, stride, padding, strict=True)
    return torch.Size((n + 2 * p - k) // s + 1 for n, k, s, p in sides)


def _size(x: Tensor, weight: Tensor, g: Geometry) -> tuple[int, ...]:
    """The size of a transposed convolution's output."""
    sides = zip(x.shape[2:], weight.shape[2:], g.stride, g.padding, g.extra, strict=True)
    return tuple((n - 1) * s - 2 * p + k + more for n, k, s, p, more in sides)


def _gathered(x: Tensor, weight: Tensor, g: Geometry, coarse: torch.Size) -> Tensor:
    """A plain convolution as one product of all patches."""
    (h, w), (up, left) = weight.shape[2:], g.padding
    patches = pad(x, (left, left, up, up)).unfold(2, h, g.stride[0]).unfold(3, w, g.stride[1])
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(len(x) * coarse.numel(), -1)
    return (rows @ weight.flatten(1).mT).unflatten(0, (len(x), *coarse)).movedim(-1, 1)


def _spread(x: Tensor, weight: Tensor, g: Geometry) -> Tensor:
    """A transposed convolution as one product, whose patches are added where they overlap."""
    _, channels, h, w = weight.shape
    by_entry = weight.permute(0, 2, 3, 1).flatten(1)
    patches = (x.movedim(1, -1).reshape(-1, x.shape[1]) @ by_entry).view(len(x), *x.shape[2:], h, w, channels)
    down, across = _size(x, weight, g)
    # [R, H, W, h, w, C] -> [R, H', W, w, C] -> [R, H', W', C]
    patches = _added(patches, 1, 3, down, g.stride[0], g.padding[0])
    return _added(patches, 2, 3, across, g.stride[1], g.padding[1]).movedim(-1, 1)


def _added(patches: Tensor, along: int, entry: int, size: int, stride: int, padding: int) -> Tensor:
    """Entry k of the patch at position i, added to position ``stride i + k - padding``; dimension ``entry`` goes."""
    n, kernel = patches.shape[along], patches.shape[entry]
    n_out = math.ceil(size / stride)
    shape = [*patches.shape[:along], n_out, *patches.select(entry, 0).shape[along + 1 :]]
    phases = []
    for phase in range(stride):
        parts = []
        for k in range((phase + padding) % stride, kernel, stride):
            # output stride i + phase has entry k of the patch at i + shift
            shift = (phase + padding - k) // stride
            first, last = max(0, -shift), min(n_out, n - shift)
            if first < last:
                part = patches.select(entry, k).narrow(along, first + shift, last - first)
                parts.append(pad(part, [0, 0] * (part.ndim - along - 1) + [first, n_out - last]))
        phases.append(functools.reduce(torch.add, parts) if parts else patches.new_zeros(shape))
    return torch.stack(phases, along + 1).flatten(along, along + 1).narrow(along, 0, size)
