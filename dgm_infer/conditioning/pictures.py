"""Pictures as data: files and arrays, grey or in colour; black and white in a generator's images."""

import math
import os
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..arguments import array, flag
from ..arguments.values import shown
from ..errors import ConfigError, ObservationError, cause, reported_as, warn
from ..models import LatentVariableModel, WithNoise

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
"""Endings of the picture files that are looked for in a folder."""

# Characters of a path that is named in full.
_LONGEST = 200
# Modes of 8 bits per channel; Pillow would clip values of others.
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")

COLOURS = ((3,), (4,))
"""Numbers of colours of a picture, the last of four its transparency."""

# Correlation between images from which they may be the colours of one.
_ALIKE = 0.8

# Weights of red, green and blue in grey, those of Pillow (ITU-R 601-2).
_LUMA = (0.299, 0.587, 0.114)

# Numbers of channels that a picture may have.
_CHANNELS = (1, 3, 4)

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


def is_picture(source: Any) -> bool:
    """Whether it is the path of a file, or a picture of Pillow, which is not imported for it."""
    return isinstance(source, str | os.PathLike) or hasattr(source, "getbands")


def read_picture(source: Any, *, colour: bool | None) -> Tensor:
    """A picture in 8 bits, honouring EXIF orientation: ``[3, H, W]`` in colour, else ``[H, W]``.

    Transparency is dropped.

    Args:
        source: the path of a file, or a picture of Pillow.
        colour: whether to read it in colour; None for as it is.

    Raises:
        ConfigError: it is not a readable picture, is too large to unpack, or has more than 8 bits per channel.
    """
    from PIL import Image, ImageOps

    name = str(source) if isinstance(source, str | os.PathLike) else f"a picture of mode {source.mode}"
    try:
        opened = Image.open(source) if isinstance(source, str | os.PathLike) else source
        mode = opened.mode
        picture = ImageOps.exif_transpose(opened).convert("L" if colour is False else "RGB")
    # Pillow refuses huge pictures by an error of its own, and on damaged ones raises whatever its decoders run into
    except Exception as error:
        name = name if len(name) < _LONGEST else shown(name)
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"{name}: there is no such picture") from error
        raise ConfigError(f"{name} is not a readable picture: {cause(error).replace(str(source), '...')}") from error
    if mode not in _MODES:
        raise ConfigError(f"{name} has pixels of more than 8 bits (mode {mode}): convert it to 8 bits")
    pixels = torch.from_numpy(np.array(picture))
    if pixels.ndim == 2:
        return pixels
    same = (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 0] == pixels[..., 2]).all()
    return pixels[..., 0] if colour is None and same else pixels.permute(2, 0, 1)


def image(source, like: nn.Module | None = None, *, resize: bool = False) -> Tensor:
    """A picture as the data of a model: ``dgm.condition(model, dgm.image("face.png", like=model))``.

    Values of 8 bits, those of files among them, are mapped to the model's ``output_range``; others are taken as they
    are. Channels that come last are permuted to the front, never reshaped.

    Args:
        source: the path of a PNG, JPEG or other picture, a picture of Pillow, or an array ``[H, W]``, ``[H, W, C]`` or
            ``[C, H, W]``, grey or in colour.
        like: the model that the picture is data of, whose images have the shape ``[H, W]`` or ``[C, H, W]``; a colour
            picture is made grey for a grey model, and a grey one given three equal channels. None for the picture as
            it is, ``[H, W]`` or ``[3, H, W]`` in [0, 1].
        resize: cut the longer side about the middle, and scale to the model's size.

    Returns:
        ``[*output_shape]`` of the model.

    Raises:
        ConfigError: the file is not a readable picture of 8 bits.
        ObservationError: the picture has another size than the model's images, or is not a picture.
        ModelError: the model makes no images.

    Example:
        >>> import numpy as np
        >>> dgm.image(np.zeros((8, 8, 3), dtype=np.uint8)).shape
        torch.Size([3, 8, 8])
    """
    with reported_as(ObservationError):
        flag("image", "resize", resize)
    if like is None:
        return picture_data(source, None, PixelScale(), resize=False)
    return picture_data(source, image_shape(like), PixelScale.of(like), resize=resize)


def image_shape(model: nn.Module) -> tuple[int, ...]:
    """The shape of one image of a generator."""
    shape = getattr(model, "output_shape", None)
    return LatentVariableModel.of(model).output_shape if shape is None else tuple(shape)  # type: ignore[arg-type]


def picture_data(source: Any, shape: tuple[int, ...] | None, scale: PixelScale, *, resize: bool) -> Tensor:
    """A picture in the shape and on the scale of a generator's images: see :func:`image`."""
    name = str(source) if isinstance(source, str | os.PathLike) else "the picture"
    if shape is not None and len(shape) not in (2, 3):
        raise ObservationError(f"image(like=): the model's outputs of shape {shape} are not images")
    if is_picture(source):
        pixels = read_picture(source, colour=None)
    else:
        with reported_as(ObservationError):
            pixels = _channels_first(array("image", "source", source), shape)
    if shape is not None and not resize and pixels.shape[-2:] != shape[-2:]:
        height, width = pixels.shape[-2:]
        raise ObservationError(
            f"{name} has {height} x {width} pixels, the generator's images the shape {shape}: resize it, as "
            "dgm.image(..., like=model, resize=True) does"
        )
    if is_picture(source) and pixels.ndim == 3 and shape is not None and (len(shape) == 2 or shape[0] == 1):
        _warn_of_grey(name)
        # Pillow's own rounding
        pixels = read_picture(source, colour=False)
    if pixels.dtype in (torch.uint8, torch.bool):
        pixels = scale.from_unit(pixels.to(torch.get_default_dtype()) / (255 if pixels.dtype == torch.uint8 else 1))
    elif not pixels.is_floating_point():
        kind = str(pixels.dtype).removeprefix("torch.")
        raise ObservationError(f"image: values of {kind}: convert to 8 bits, or to numbers on the model's scale")
    if shape is None:
        return pixels
    pixels = _in_channels(pixels, None if len(shape) == 2 else shape[0], name)
    return (_resized(pixels, shape[-2:]) if pixels.shape[-2:] != shape[-2:] else pixels).reshape(shape)


def _channels_first(values: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """``[H, W]`` or ``[C, H, W]`` of an array, whose channels may come last.

    Raises:
        ObservationError: it has other dimensions.
    """
    if values.ndim == 3:
        first, last = (values.shape[i] in (*_CHANNELS, *(shape or ())[:-2]) for i in (0, -1))
        if shape is not None and tuple(values.shape) == shape:
            return values
        if last and (not first or values.shape[1:] != (shape or values.shape)[-2:]):
            return values.movedim(-1, 0)
        if first:
            return values
    if values.ndim == 2:
        return values
    raise ObservationError(f"image(source={shown(values)}): must be one picture, [H, W], [H, W, C] or [C, H, W]")


def _warn_of_grey(name: str) -> None:
    warn(f"{name} is in colour and read as grey, as the generator's images are")


def _in_channels(pixels: Tensor, wanted: int | None, name: str) -> Tensor:
    """A picture ``[H, W]`` or ``[C, H, W]`` with as many channels as a generator's images, None for none."""
    if pixels.ndim == 3 and len(pixels) == 4:
        pixels = pixels[:3]
    if pixels.ndim == 3 and len(pixels) == 1:
        pixels = pixels[0]
    grey = wanted in (None, 1)
    if pixels.ndim == 3 and len(pixels) == 3 and grey:
        _warn_of_grey(name)
        pixels = (pixels * pixels.new_tensor(_LUMA)[:, None, None]).sum(0)
    if pixels.ndim == 2 and not grey:
        pixels = pixels.expand(wanted or 1, *pixels.shape)
    if not grey and len(pixels) != wanted:
        raise ObservationError(f"{name} has {len(pixels)} channels, the generator's images {wanted}")
    return pixels


def _resized(pixels: Tensor, size: tuple[int, ...]) -> Tensor:
    """The middle of a picture, of the proportions of ``size``, scaled to it."""
    height, width = pixels.shape[-2:]
    share = min(height / size[0], width / size[1])
    rows, columns = (max(1, round(share * n)) for n in size)
    top, left = (height - rows) // 2, (width - columns) // 2
    middle = pixels[..., top : top + rows, left : left + columns]
    lead = middle.shape[:-2]
    scaled = functional.interpolate(
        middle.reshape(1, -1, rows, columns), size=tuple(size), mode="bilinear", antialias=True, align_corners=False
    )
    return scaled.reshape(*lead, *size)


def batch_shape(y: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of data before those of one observation, ``shape``.

    Raises:
        ObservationError: the data do not end in that shape.
    """
    lead = y.ndim - len(shape)
    if lead >= 0 and tuple(y.shape[lead:]) == tuple(shape):
        return tuple(y.shape[:lead])
    plain = tuple(n for n in y.shape if n != 1)
    colour = len(shape) == 2 and y.shape[-1:] in COLOURS and tuple(y.shape[-3:-1]) == tuple(shape)
    found = tuple(y.shape[-len(shape) :])
    if colour:
        remedy = "a colour image for grey outputs, take image[..., :3].mean(-1)"
    elif sorted(found) == sorted(shape):
        remedy = permutation("image", found, tuple(shape))
    elif plain == tuple(n for n in shape if n != 1):
        remedy = f"reshape it, image.reshape({', '.join(map(str, shape))})"
    elif (last := _last_dimensions(y, torch.Size(shape).numel())) is not None:
        if len(shape) == 1:
            remedy = f"flatten the data, data.flatten({-last}), or give the model pictures as outputs"
        else:
            remedy = "reshape the data; of a picture, dgm.image(image, like=model)"
    elif len(shape) == 1 and y.ndim == 1 and len(y) < shape[0]:
        remedy = "give all of an output, of which what observe= leaves out is ignored"
    else:
        remedy = (
            "the sizes differ, so that no reshape helps; dgm.image(image, like=model, resize=True) scales a picture"
        )
    raise ObservationError(
        f"observed has shape {tuple(y.shape)}; the model's output has shape {tuple(shape)}, after any batch "
        f"dimensions: {remedy}"
    )


def _last_dimensions(y: Tensor, size: int) -> int | None:
    """How many of the last dimensions of data have that size together; None if none do."""
    return next((k for k in range(1, y.ndim + 1) if y.shape[-k:].numel() == size), None)


def permutation(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """How to put dimensions in another order, which a reshape would scramble."""
    if len(shape) == 3 and found == (*shape[1:], shape[0]):
        door = f", as dgm.image({name}, like=model) does" if name == "image" else ""
        return f"channels come last, permute them: {name}.movedim(-1, -3){door}"
    if found == shape[::-1] and len(shape) == 2:
        return f"height and width are exchanged, permute them: {name}.mT"
    return f"its dimensions are in another order, permute them: {name}.permute(...)"


def warn_of_colours(images: Tensor) -> None:
    """Name the colours of one picture, ``[3, H, W]`` or ``[4, H, W]``, that would be as many grey images.

    Different images are less alike than the colours of one.
    """
    colours = images[:3].flatten(1).nan_to_num()
    centred = colours - colours.mean(-1, keepdim=True)
    size = centred.norm(dim=-1, keepdim=True)
    if (size > 0).all() and ((centred / size) @ (centred / size).mT).min() > _ALIKE:
        warn(
            f"observed of shape {tuple(images.shape)} is taken as {len(images)} grey images that are nearly equal; if "
            "they are the colours of one image, give their mean, image[:3].mean(0)",
        )
