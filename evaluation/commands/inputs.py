"""What commands are given: generators, images and masks, by name, by class path or in files."""

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

import dgm_infer as dgm
import generators
from dgm_infer import GenerativeModel
from dgm_infer.conditioning.observations import Blur, Downsample, Linear, Pixels
from dgm_infer.conditioning.pictures import ENDINGS, PixelScale, picture_data
from dgm_infer.errors import ArgumentError, CheckpointError, ConfigError, DgmInferError, ModelError, cause
from dgm_infer.models import LatentVariableModel

from .answers import shipped_path

__all__ = [
    "HeldOutImages",
    "binarised",
    "moved",
    "read_generator",
    "read_images",
    "read_mask",
    "read_observation",
]

_UNIT = PixelScale()
Observed = Pixels | Downsample | Blur | Linear
_FILES = (".safetensors", ".ckpt", ".npz", ".json", ".pt", ".pth")
MASKS = tuple(f"{side}_{share}" for share in ("half", "quarter") for side in ("top", "bottom", "left", "right"))


@runtime_checkable
class HeldOutImages(Protocol):
    """A data set that keeps images no generator was trained on."""

    def held_out(self, n: int | None = None) -> Tensor:
        """The first ``n`` held-out images, ``[n, *shape]``."""
        ...


def read_generator(generator: nn.Module | str) -> nn.Module:
    """A shipped generator by name, one by the path to its weights, or the model itself; in evaluation mode.

    Raises:
        CheckpointError: the generator does not exist.
        ModelError: the model is not one that can be conditioned.
    """
    if not isinstance(generator, str):
        if not isinstance(generator, GenerativeModel) and LatentVariableModel.find(generator) is None:
            name = type(generator).__name__
            raise ModelError(
                f"generator: a {name} is neither a GenerativeModel nor a module with a prior and a decoder: write "
                "`model = generators.from_module(net.eval(), latent=D)` in a file, mymodel.py, and name mymodel.model"
            )
        return generator.eval()
    if generator.endswith(".py"):
        name = Path(generator).stem
        raise ConfigError(f"generator: {generator} is code: name the model in it, as {name}.model for `model = ...`")
    module, _, name = generator.rpartition(".")
    if module.isidentifier() and Path(generator).suffix not in _FILES:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"generator: class path {generator}: there is no module {module!r}, in this folder or installed"
            )
        raise ConfigError(f"generator: class path {generator}: {module}.py has no {name!r}")
    try:
        return generators.load(generator)
    except CheckpointError as error:
        raise CheckpointError(
            f"generator: {error}; or name one of your own, as mymodel.model for a line `model = ...` of mymodel.py"
        ) from error


def moved(model: nn.Module, device: str | None) -> nn.Module:
    """The model, moved to a device; None leaves it where it is.

    Raises:
        ArgumentError: the device is not available.
    """
    if device is None:
        return model
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device={device}: not available, leave it out: {cause(error, 120)}") from error


def _colours(found: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """What to do with colour images where grey ones are wanted."""
    height, width = shape[-2:]
    if len(shape) == 3 and shape[0] > 1:
        return ""
    if found[-3:] in ((height, width, 3), (height, width, 4)):
        return ": colour images for a grey generator, save images[..., :3].mean(-1)"
    if found[-3:] in ((3, height, width), (4, height, width)):
        return ": colour images for a grey generator, save images[..., :3, :, :].mean(-3)"
    return ""


def read_images(
    source: HeldOutImages | str, n: int, shape: tuple[int, ...], scale: PixelScale = _UNIT, resize: bool = False
) -> Tensor:
    """The first ``n`` images, ``[n, *shape]``, on the scale of a generator's images.

    Pictures, values of 1 or 8 bits, and a data set's images in [0, 1] are mapped to the scale; other values are taken
    as they are.

    Args:
        source: a data set, or the path of a picture, of a folder of pictures, taken by name, or of an ``.npy`` file.
        n: number of images.
        shape: shape of one image.
        scale: black and white of the generator.
        resize: cut and scale pictures to the shape.

    Raises:
        ConfigError: the file is missing or unreadable, or holds fewer images.
    """
    if n < 1:
        raise ConfigError(f"n_images = {n}: must be >= 1")
    if not isinstance(source, str):
        images = _unit(source.held_out(n))
        return scale.from_unit(images) if _within_unit(images) else images
    path = Path(shipped_path(source))
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in ENDINGS)
        if len(files) < n:
            raise ConfigError(
                f"images: the folder {source} holds {len(files)} pictures ({', '.join(ENDINGS)}), n_images = {n}: say "
                f"--n_images {len(files)}"
            )
        return torch.cat([_read_picture(file, shape, scale, resize) for file in files[:n]])
    if not path.is_file():
        raise ConfigError(
            f"images: {source} is neither a file, a folder, nor a class path: name a .npy file, a picture, a folder of "
            "pictures, or a class with held_out(n)"
        )
    if path.suffix == ".npy":
        return _read_array(path, n, shape, scale)
    return _read_picture(path, shape, scale, resize)


def _read_picture(path: Path, shape: tuple[int, ...], scale: PixelScale, resize: bool) -> Tensor:
    """One picture, ``[1, *shape]``."""
    try:
        return picture_data(path, shape, scale, resize=resize).unsqueeze(0)
    except DgmInferError as error:
        raise ConfigError(
            f"images: {error}".replace("dgm.image(..., like=model, resize=True)", "--resize true")
        ) from error


def _read_array(path: Path, n: int, shape: tuple[int, ...], scale: PixelScale) -> Tensor:
    images = torch.from_numpy(_load_array(path))
    if tuple(images.shape) == shape:
        images = images.unsqueeze(0)
    if tuple(images.shape[1:]) != shape:
        raise ConfigError(
            f"images: {path} has shape {tuple(images.shape)}, expected {('n', *shape)}".replace("'", "")
            + _colours(tuple(images.shape), shape)
        )
    if len(images) < n:
        raise ConfigError(f"images: {path} holds {len(images)} images, n_images = {n}: say --n_images {len(images)}")
    images = images[:n]
    if images.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise ConfigError(f"images: {path} has values of {images.dtype}: convert to 8 bits, or to numbers in [0, 1]")
    if images.dtype in (torch.uint8, torch.bool):
        return scale.from_unit(_unit(images))
    if scale != _UNIT and _within_unit(images):
        warnings.warn(
            f"images: {path} has values in [0, 1], taken as they are, and black and white of the generator are "
            f"{scale.black:g} and {scale.white:g}: save {scale.black:g} + {scale.white - scale.black:g} * images if "
            "those of the file are 0 and 1",
            stacklevel=2,
        )
    return images


def _unit(images: Tensor) -> Tensor:
    if images.dtype == torch.bool:
        return images.to(torch.get_default_dtype())
    return images / 255 if images.dtype == torch.uint8 else images


def _within_unit(images: Tensor) -> bool:
    return bool(((images >= 0) & (images <= 1)).all())


def binarised(x: Tensor, threshold: float | None) -> Tensor:
    """1 above the threshold, 0 below; None leaves the values."""
    return x if threshold is None else (x > threshold).to(torch.get_default_dtype())


def read_observation(observe: str | None, mask: str | None, shape: tuple[int, ...]) -> Observed:
    """What is observed of images of ``shape``: named parts and operators as in the command's help.

    Raises:
        ConfigError: neither a known name nor a readable file.
        ObservationError: the operator does not suit images.
    """
    if mask is not None:
        if observe is not None:
            raise ConfigError("mask and observe are both given: give one of them")
        if not Path(mask).is_file():
            raise ConfigError(f"mask: {mask} does not exist")
        return dgm.pixels(_mask_array(mask) if mask.endswith(".npy") else mask)
    kind, _, value = (observe or "top_half").replace("_", ":").partition(":")
    if kind == "downsample" and re.fullmatch(r"[1-9]\d*", value):
        return dgm.downsample(int(value))
    if kind == "blur" and re.fullmatch(r"\d*\.?\d+", value):
        return dgm.blur(float(value))
    operator, _, file = (observe or "").partition(":")
    if operator in ("blur", "linear") and file.endswith(".npy"):
        if not Path(file).is_file():
            raise ConfigError(f"observe: {file} does not exist")
        matrix = torch.from_numpy(_load_array(Path(file)))
        return dgm.blur(matrix) if operator == "blur" else dgm.linear(matrix)
    return dgm.pixels(read_mask(observe or "top_half", shape))


def read_mask(observe: str, shape: tuple[int, ...]) -> Tensor:
    """A boolean mask of ``shape``, True = observed; named halves and grids are of the last two dimensions (H, W).

    Raises:
        ConfigError: neither a known name nor a readable ``.npy`` file.
    """
    if observe.endswith(".npy"):
        if not Path(observe).is_file():
            raise ConfigError(f"observe: {observe} does not exist")
        return _mask_array(observe)
    spacing = re.fullmatch(r"grid[_:]([1-9]\d*)", observe)
    if observe not in MASKS and spacing is None:
        raise ConfigError(
            f"observe: {observe!r} is not one of {', '.join(MASKS)}, grid:K, downsample:K, blur:SD, blur:FILE.npy, "
            "linear:FILE.npy, nor a .npy file; --mask takes pictures"
        )
    if len(shape) < 2:
        raise ConfigError(f"observe: {observe} needs an image of two dimensions, the generator's output is {shape}")
    height, width = shape[-2:]
    mask = torch.zeros(shape, dtype=torch.bool)
    if spacing is not None:
        k = int(spacing[1])
        if k > min(height, width):
            raise ConfigError(f"observe: {observe} observes nothing of images of {height} x {width} pixels")
        # about the middle of blocks of k x k
        mask[..., k // 2 :: k, k // 2 :: k] = True
        return mask
    side, share = observe.split("_")
    n = 2 if share == "half" else 4
    part = {
        "top": (slice(0, height // n), slice(None)),
        "bottom": (slice((n - 1) * height // n, None), slice(None)),
        "left": (slice(None), slice(0, width // n)),
        "right": (slice(None), slice((n - 1) * width // n, None)),
    }[side]
    mask[(..., *part)] = True
    return mask


def _mask_array(path: str) -> Tensor:
    """A mask in a file, whose two values may be numbers of 8 bits, as of a picture."""
    mask = torch.from_numpy(_load_array(Path(path)))
    both = mask.dtype == torch.uint8 and bool(((mask == 0) | (mask == mask.max())).all())
    return mask.bool() if both else mask


def _load_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"its values are {array.dtype}, not numbers")
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    except (ValueError, OSError, EOFError, AttributeError, MemoryError) as error:
        raise ConfigError(f"{path} is not a readable .npy array: {cause(error)}") from error
