"""Picture files as tensors."""

import os

import numpy as np
import torch
from torch import Tensor

from dgm_infer.errors import ConfigError
from dgm_infer.extras import extra

with extra("train"):
    from PIL import Image, ImageOps

__all__ = ["read_picture"]

# Modes of 8 bits per channel: Pillow would cut off what does not fit into them.
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


def read_picture(path: str | os.PathLike, *, colour: bool) -> Tensor:
    """A picture the way up that it was taken, in 8 bits: ``[3, H, W]`` in colour, else ``[H, W]``.

    Transparency is left out.

    Raises:
        ConfigError: the file is not a readable picture, or one of more than 8 bits per channel.
    """
    try:
        with Image.open(path) as opened:
            mode = opened.mode
            picture = ImageOps.exif_transpose(opened).convert("RGB" if colour else "L")
    except OSError as error:
        raise ConfigError(f"{path} is not a readable picture: {error}") from error
    if mode not in _MODES:
        raise ConfigError(f"{path} has pixels of more than 8 bits (mode {mode}): convert it to 8 bits")
    pixels = torch.from_numpy(np.array(picture))
    return pixels.permute(2, 0, 1) if colour else pixels
