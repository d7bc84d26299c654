"""Velocity networks v(x, t): fully connected ones for vectors, U-Nets for images."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from dgm_infer.arguments import allocatable, flag, sizes, whole_number

from .networks import image_channels
from .registry import register

__all__ = ["VelocityMLP", "VelocityUNet"]


class _Times(nn.Module):
    """One or two times in [0, 1], each ``[n]``, as vectors ``[n, width]``: waves of periods 2, 1, 1/2 and so on."""

    waves: Tensor

    def __init__(self, times: int, frequencies: int, width: int):
        super().__init__()
        self.register_buffer("waves", math.pi * 2.0 ** torch.arange(frequencies), persistent=False)
        self.network = nn.Sequential(
            nn.Linear(times * (2 * frequencies + 1), width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )

    def forward(self, *times: Tensor) -> Tensor:
        parts = []
        for t in times:
            t = t.unsqueeze(-1)
            waves = t * self.waves
            parts += [t, waves.sin(), waves.cos()]
        return self.network(torch.cat(parts, -1))


@register
class VelocityMLP(nn.Module):
    """A residual network of vectors, ``v(x, t)``: ``[n, *shape], [n] -> [n, *shape]``.

    Args:
        dim: D, entries of x.
        width: width of the hidden layers.
        blocks: residual blocks of two layers; the time enters each.
        frequencies: waves that describe the time.
        times: 1 for a velocity; 2 for an average velocity between two times, of ``trainers.MeanFlow``.
        gain: whether to add x times a factor per entry and time: noise of more entries than ``width`` is then removed
            without passing through the hidden layers, which have no room for it.

    Raises:
        ArgumentError: a number below 1.
    """

    def __init__(
        self, dim: int, width: int = 128, blocks: int = 3, frequencies: int = 4, times: int = 1, gain: bool = False
    ):
        super().__init__()
        for name, value in (("dim", dim), ("width", width), ("blocks", blocks), ("frequencies", frequencies)):
            whole_number("VelocityMLP", name, value)
        # a layer is an object of kilobytes, however narrow
        flag("VelocityMLP", "gain", gain)
        n_weights = (2 + gain) * dim * width + blocks * (3 * width**2 + 2**11) + 2 * frequencies * width
        allocatable("VelocityMLP", "width", width, n_weights, "use fewer and narrower layers", like=torch.empty(0))
        self.config = {
            "dim": dim,
            "width": width,
            "blocks": blocks,
            "frequencies": frequencies,
            "times": times,
            "gain": gain,
        }
        self.times = whole_number("VelocityMLP", "times", times, 1, 2)
        self.time = _Times(times, frequencies, width)
        self.first = nn.Linear(dim, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.shifts = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, dim)
        nn.init.zeros_(self.last.weight)
        self.gain = nn.Linear(width, dim) if gain else None

    def forward(self, x: Tensor, *t: Tensor) -> Tensor:
        time = self.time(*t)
        h = self.first(x.flatten(1))
        for block, shift in zip(self.blocks, self.shifts, strict=True):
            h = h + block(h + shift(time))
        v = self.last(torch.nn.functional.silu(h))
        if self.gain is not None:
            v = v + self.gain(time) * x.flatten(1)
        return v.reshape(x.shape)


@register
class VelocityUNet(nn.Module):
    """A small U-Net of images, ``v(x, t)``: ``[n, *shape], [n] -> [n, *shape]``; smooth, without normalisation.

    Each level halves height and width (rounded up); the coarsest is followed by a fully connected residual block, which
    sees the whole image.

    Args:
        shape: shape of an image, (H, W) or (C, H, W).
        channels: channels per level, from fine to coarse.
        middle: width of the fully connected block.
        width: width of the time's description.
        frequencies: waves that describe the time.
        times: 1 for a velocity; 2 for an average velocity between two times, of ``trainers.MeanFlow``.

    Raises:
        ArgumentError: a number below 1, or a shape that is not an image's.
    """

    def __init__(
        self,
        shape: Sequence[int],
        channels: Sequence[int] = (16, 32, 64),
        middle: int = 128,
        width: int = 64,
        frequencies: int = 4,
        times: int = 1,
    ):
        super().__init__()
        shape, channels = sizes("VelocityUNet", "shape", shape), sizes("VelocityUNet", "channels", channels)
        for name, value in (("middle", middle), ("width", width), ("frequencies", frequencies)):
            whole_number("VelocityUNet", name, value)
        n_weights = middle * math.prod(shape) + width * sum(channels) + width**2 + 2 * frequencies * width
        allocatable("VelocityUNet", "middle", middle, n_weights, "use fewer and narrower layers", like=torch.empty(0))
        self.times = whole_number("VelocityUNet", "times", times, 1, 2)
        self.config = {
            "shape": list(shape),
            "channels": list(channels),
            "middle": middle,
            "width": width,
            "frequencies": frequencies,
            "times": times,
        }
        self.image_shape = image_channels(shape)
        self.time = _Times(times, frequencies, width)
        self.first = nn.Conv2d(self.image_shape[0], channels[0], 3, padding=1)
        self.down = nn.ModuleList(_Block(n, n, width) for n in channels)
        self.coarser = nn.ModuleList(
            nn.Conv2d(fine, coarse, 3, stride=2, padding=1) for fine, coarse in pairwise(channels)
        )
        height, width_ = self.image_shape[1:]
        for _ in channels[1:]:
            height, width_ = (height + 1) // 2, (width_ + 1) // 2
        n = channels[-1] * height * width_
        self.middle = nn.Sequential(nn.SiLU(), nn.Linear(n, middle), nn.SiLU(), nn.Linear(middle, n))
        self.up = nn.ModuleList(_Block(fine + coarse, fine, width) for fine, coarse in pairwise(channels))
        self.last = nn.Conv2d(channels[0], self.image_shape[0], 3, padding=1)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, *t: Tensor) -> Tensor:
        time = self.time(*t)
        h, levels = self.first(x.reshape(-1, *self.image_shape)), []
        for k, block in enumerate(self.down):
            h = block(h if k == 0 else self.coarser[k - 1](h), time)
            levels.append(h)
        h = h + self.middle(h.flatten(1)).reshape(h.shape)
        for block, fine in zip(reversed(self.up), reversed(levels[:-1]), strict=True):
            h = block(torch.cat([fine, interpolate(h, size=fine.shape[-2:], mode="nearest")], 1), time)
        return self.last(torch.nn.functional.silu(h)).reshape(x.shape)


class _Block(nn.Module):
    """Two convolutions beside a shortcut; the time scales and shifts the channels between them."""

    def __init__(self, n_in: int, n_out: int, width: int):
        super().__init__()
        self.first = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.time = nn.Linear(width, 2 * n_out)
        self.second = nn.Conv2d(n_out, n_out, 3, padding=1)
        self.shortcut = nn.Identity() if n_in == n_out else nn.Conv2d(n_in, n_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[..., None, None].chunk(2, 1)
        h = self.first(torch.nn.functional.silu(x)) * (1 + scale) + shift
        return self.shortcut(x) + self.second(torch.nn.functional.silu(h))
