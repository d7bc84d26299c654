"""Picture files as tensors, and the values that stand for black and white in a generator's images."""

import math
import os
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dgm_infer import WithNoise
from dgm_infer.errors import ConfigError, cause
from dgm_infer.extras import extra

with extra("train"):
    from PIL import Image, ImageOps

__all__ = ["ENDINGS", "PixelScale", "read_picture"]

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
"""Endings of the picture files that are looked for in a folder."""

# Modes of 8 bits per channel; Pillow would clip values of others.
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")

# Share of a scale by which a declared range may differ from it and still be that scale.
_SLACK = 0.1


class PixelScale(NamedTuple):
    """What black and white are in a generator's images: ``x = black + (white - black) p`` for pixels p in [0, 1]."""

    black: float = 0.0
    white: float = 1.0

    @classmethod
    def of(cls, model: nn.Module) -> "PixelScale":
        """The scale of a generator's images: its ``output_range``; [0, 1] if it declares none that is finite.

        A range that differs a little from [0, 1] or [-1, 1], such as (-0.05, 1.05), which lets black and white be
        conditioned on, is that scale.
        """
        while isinstance(model, WithNoise):
            model = model.model
        declared = getattr(model, "output_range", None)
        if declared is None or not all(map(math.isfinite, declared)):
            return cls()
        low, high = map(float, declared)
        for scale in (cls(), cls(-1.0, 1.0)):
            if max(abs(low - scale.black), abs(high - scale.white)) <= _SLACK * (scale.white - scale.black):
                return scale
        return cls(low, high)

    def from_unit(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] as the generator makes them."""
        return pixels if self == PixelScale() else self.black + (self.white - self.black) * pixels

    def to_unit(self, images: Tensor) -> Tensor:
        """The generator's images as pixels in [0, 1]."""
        return images if self == PixelScale() else (images - self.black) / (self.white - self.black)


def read_picture(path: str | os.PathLike, *, colour: bool) -> Tensor:
    """A picture in 8 bits, honouring EXIF orientation: ``[3, H, W]`` in colour, else ``[H, W]``.

    Transparency is dropped.

    Raises:
        ConfigError: the file is not a readable picture, is too large to unpack, or has more than 8 bits per channel.
    """
    try:
        with Image.open(path) as opened:
            mode = opened.mode
            picture = ImageOps.exif_transpose(opened).convert("RGB" if colour else "L")
    # Pillow refuses huge pictures by an error of its own, and on damaged ones raises whatever its decoders run into
    except Exception as error:
        raise ConfigError(f"{path} is not a readable picture: {cause(error)}") from error
    if mode not in _MODES:
        raise ConfigError(f"{path} has pixels of more than 8 bits (mode {mode}): convert it to 8 bits")
    pixels = torch.from_numpy(np.array(picture))
    return pixels.permute(2, 0, 1) if colour else pixels
