"""Images in a user's folder."""

import os
from pathlib import Path

import torch
from torchvision.transforms import v2

from dgm_infer.arguments import file_path, flag, fraction, sizes
from dgm_infer.conditioning.pictures import ENDINGS, read_picture
from dgm_infer.errors import ArgumentError, ConfigError

from .augmentation import Augmentation
from .data import SPLIT_SEED, Binarise, ImageData, Labelled, Split

__all__ = ["FolderData"]


class FolderData(ImageData):
    """All pictures in a folder and its subfolders, resized to one size and cropped about the centre.

    The split is a permutation that does not depend on the seed; adding pictures changes it. Batches are (images
    ``[batch, *output_shape]``, labels ``[batch]``: the index of the subfolder of the root, in alphabetical order).
    Pictures are read on first use and kept in memory in 8 bits.

    Args:
        root: folder of the pictures.
        size: height and width.
        grey: images ``[H, W]`` instead of ``[3, H, W]``.
        validation: fraction of the images.
        held_out: fraction of the images.
        batch_size: images per batch; the last of an epoch may be smaller.
        augmentation: random changes to training batches; null for none.
        binarise: how pixels become 0 or 1: dynamic, static, or null for grey levels.
        dequantise: whether uniform noise makes the grey levels continuous, in (0, 1).

    Raises:
        ArgumentError: a value outside its range.
        ConfigError: on first use, the folder does not exist, or has too few pictures or an unreadable one.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        size: tuple[int, int],
        grey: bool = False,
        validation: float = 0.1,
        held_out: float = 0.1,
        batch_size: int = 128,
        augmentation: Augmentation | None = None,
        binarise: Binarise | None = None,
        dequantise: bool = False,
    ):
        super().__init__(batch_size, augmentation, binarise, dequantise)
        height_and_width = sizes("FolderData", "size", size)
        if len(height_and_width) != 2:
            raise ArgumentError(f"FolderData(size={size!r}): must be height and width")
        flag("FolderData", "grey", grey)
        fraction("FolderData", "validation", validation)
        fraction("FolderData", "held_out", held_out)
        if validation + held_out >= 1:
            raise ArgumentError(
                f"FolderData(validation={validation:g}, held_out={held_out:g}): nothing is left to train"
            )
        self.root = file_path("FolderData", "root", root)
        self.grey = grey
        self.fractions = (validation, held_out)
        self.output_shape = height_and_width if grey else (3, *height_and_width)

    def prepare_data(self) -> None:
        """Fail before training if there are no pictures."""
        self._files()

    def read(self) -> Split:
        files = self._files()
        n = len(files)
        n_validation, n_held_out = (max(1, round(fraction * n)) for fraction in self.fractions)
        if n - n_validation - n_held_out < 1:
            raise ConfigError(f"{self.root} holds {n} pictures: too few for training, validation and held-out images")
        folders = sorted({self._group(file) for file in files})
        images = torch.stack([self._image(file) for file in files])
        labels = torch.tensor([folders.index(self._group(file)) for file in files])
        order = torch.randperm(n, generator=torch.Generator().manual_seed(SPLIT_SEED))
        parts = order.split([n - n_validation - n_held_out, n_validation, n_held_out])
        return Split(*(Labelled(images[part], labels[part]) for part in parts))

    def _files(self) -> list[Path]:
        if not self.root.is_dir():
            raise ConfigError(f"{self.root} is not a folder: set root to the folder of the pictures")
        files = sorted(path for path in self.root.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
        if not files:
            raise ConfigError(f"{self.root} holds no pictures ({', '.join(ENDINGS)})")
        return files

    def _group(self, file: Path) -> str:
        parts = file.relative_to(self.root).parts
        return parts[0] if len(parts) > 1 else ""

    def _image(self, file: Path) -> torch.Tensor:
        picture = read_picture(file, colour=not self.grey)
        height, width = self.output_shape[-2:]
        # the shorter side fits, the longer one is cropped
        own_height, own_width = picture.shape[-2:]
        scale = max(height / own_height, width / own_width)
        resized = [max(height, round(scale * own_height)), max(width, round(scale * own_width))]
        image = v2.functional.resize(picture.reshape(-1, own_height, own_width), resized, antialias=True)
        return v2.functional.center_crop(image, [height, width]).reshape(self.output_shape)
