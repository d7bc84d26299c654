"""Picture files as tensors."""

import os

import numpy as np
import torch
from torch import Tensor

from dgm_infer.errors import ConfigError, cause
from dgm_infer.extras import extra

with extra("train"):
    from PIL import Image, ImageOps

__all__ = ["read_picture"]

# Modes of 8 bits per channel; Pillow would clip values of others.
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


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
