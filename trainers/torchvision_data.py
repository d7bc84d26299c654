"""Data sets read by torchvision, with one way of finding, splitting and rejecting their files."""

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from dgm_infer.arguments import file_path, flag, whole_number
from dgm_infer.errors import ConfigError, cause

from .augmentation import Augmentation
from .data import SPLIT_SEED, Binarise, ImageData, Labelled, Split

__all__ = ["N_VALIDATION", "CelebAData", "OmniglotData", "TorchvisionData"]

# Training images kept for validation if the data set has none of its own. Must not change: no generator was trained on
# them.
N_VALIDATION = 500

Part = Literal["training", "validation", "held_out"]


class TorchvisionData(ImageData):
    """Images of a ``torchvision.datasets`` class, named by the subclass and read on first use.

    If the data set has no validation images, these are 500 of the training images.

    Args:
        root: folder of the files in torchvision's layout; null for ``data`` in the working directory.
        download: download missing files.
        batch_size: images per batch; the last of an epoch may be smaller.
        augmentation: random changes to training batches; null for none.
        binarise: how pixels become 0 or 1: dynamic, static, or null for grey levels.
        dequantise: whether uniform noise makes the grey levels continuous, in (0, 1).

    Raises:
        ArgumentError: a value outside its range.
        ConfigError: on first use, the files are missing, damaged, or cannot be downloaded.
    """

    folder: ClassVar[str]
    """Folder of the files, within the root."""
    download_size: ClassVar[str]
    package: ClassVar[str | None] = None
    """Debian's package of the files."""
    shuffled: ClassVar[bool] = True
    """Whether the images are already in random order; otherwise a fixed permutation is applied."""

    def __init__(
        self,
        root: str | os.PathLike | None = None,
        download: bool = False,
        batch_size: int = 128,
        augmentation: Augmentation | None = None,
        binarise: Binarise | None = None,
        dequantise: bool = False,
    ):
        super().__init__(batch_size, augmentation, binarise, dequantise)
        name = type(self).__name__
        self.root = file_path(name, "root", root) if root is not None else self.default_root()
        self.download = flag(name, "download", download)

    def default_root(self) -> Path:
        return Path("data")

    @abstractmethod
    def dataset(self, part: Part) -> Any:
        """torchvision's data set of a part; None if validation images are taken from training."""

    def prepare_data(self) -> None:
        """Download what is missing, in one process, and fail before training if that is impossible."""
        self._open("training")

    def read(self) -> Split:
        training, validation, held_out = (self._read(part) for part in ("training", "validation", "held_out"))
        assert training is not None
        assert held_out is not None
        if validation is not None:
            return Split(training, validation, held_out)
        images, labels = training
        n = len(images) - N_VALIDATION
        if n < 1:
            raise ConfigError(f"{self.root} has {len(images)} training images: {N_VALIDATION} are kept for validation")
        if not self.shuffled:
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
            images, labels = images[order], labels[order]
        return Split(Labelled(images[:n], labels[:n]), Labelled(images[n:], labels[n:]), held_out)

    def _open(self, part: Part) -> Any:
        name, folder = type(self).__name__.removesuffix("Data"), self.root / self.folder
        try:
            return self.dataset(part)
        except Exception as error:
            reason = cause(error)
            if self.download:
                raise ConfigError(f"{name} could not be downloaded to {folder}: {reason}") from error
            if "not found" in reason:
                package = f"install Debian's package {self.package}, " if self.package else ""
                raise ConfigError(
                    f"no {name} files in {folder}: {package}put them there in torchvision's layout, name another root, "
                    f"or set download=true if there is a network ({self.download_size})"
                ) from error
            raise ConfigError(f"the {name} files in {folder} are damaged: {reason}") from error

    def _read(self, part: Part) -> Labelled | None:
        data = self._open(part)
        if data is None:
            return None
        images, labels = self._tensors(data)
        if tuple(images.shape[1:]) != self.output_shape or len(images) != len(labels):
            name = type(self).__name__.removesuffix("Data")
            raise ConfigError(
                f"{self.root / self.folder} holds images of shape {tuple(images.shape)} and {len(labels)} labels: not "
                f"{name}"
            )
        return Labelled(images, labels)

    def _tensors(self, data: Any) -> tuple[Tensor, Tensor]:
        """Images and labels; pictures are decoded one by one, once, and kept in 8 bits."""
        images = torch.empty(len(data), *self.output_shape, dtype=torch.uint8)
        labels = torch.zeros(len(data), dtype=torch.int64)
        for i in range(len(data)):
            try:
                picture, label = data[i]
            except Exception as error:
                raise ConfigError(f"{self.root / self.folder}: image {i} is damaged: {error}") from error
            images[i], labels[i] = picture.reshape(self.output_shape), int(label)
        return images, labels


class OmniglotData(TorchvisionData):
    """Omniglot (Lake, Salakhutdinov and Tenenbaum 2015): characters of 50 alphabets, white on black, 28 x 28 pixels.

    18 780 images of the background set for training, 500 for validation by a fixed permutation; 13 180 of other
    alphabets held out. Batches are (images ``[batch, 28, 28]``, labels ``[batch]``: the character). The root contains
    ``omniglot-py``; null for ``data``.
    """

    output_shape = (28, 28)
    folder = "omniglot-py"
    download_size = "14 MB"
    shuffled = False

    def dataset(self, part):
        if part == "validation":
            return None
        transform = v2.Compose([v2.PILToTensor(), v2.Resize(list(self.output_shape), antialias=True), _inverted])
        return datasets.Omniglot(self.root, part == "training", transform=transform, download=self.download)


class CelebAData(TorchvisionData):
    """CelebA (Liu et al. 2015): faces in colour, cropped to 148 x 148 pixels about the centre and resized.

    162 770 images for training, 19 867 for validation, 19 962 held out, kept in memory in 8 bits: 2.3 GiB at 64 x 64.
    Batches are (images ``[batch, 3, size, size]``, labels ``[batch]``: the identity). The root contains ``celeba``;
    null for ``data``.

    Args:
        size: height and width of the images, pixels.
        root: folder of the files in torchvision's layout; null for ``data`` in the working directory.
        download: download missing files.
        batch_size: images per batch; the last of an epoch may be smaller.
        augmentation: random changes to training batches; null for none.
        binarise: how pixels become 0 or 1: dynamic, static, or null for grey levels.
        dequantise: whether uniform noise makes the grey levels continuous, in (0, 1).

    Raises:
        ArgumentError: a value outside its range.
        ConfigError: on first use, the files are missing, damaged, or cannot be downloaded.
    """

    folder = "celeba"
    download_size = "1.4 GB"

    def __init__(
        self,
        size: int = 64,
        root: str | os.PathLike | None = None,
        download: bool = False,
        batch_size: int = 128,
        augmentation: Augmentation | None = None,
        binarise: Binarise | None = None,
        dequantise: bool = False,
    ):
        super().__init__(root, download, batch_size, augmentation, binarise, dequantise)
        whole_number("CelebAData", "size", size)
        self.output_shape = (3, size, size)

    def dataset(self, part):
        split = {"training": "train", "validation": "valid", "held_out": "test"}[part]
        resize = v2.Resize(list(self.output_shape[1:]), antialias=True)
        transform = v2.Compose([v2.CenterCrop(148), v2.PILToTensor(), resize])
        return datasets.CelebA(self.root, split, "identity", transform, download=self.download)


def _inverted(image: Tensor) -> Tensor:
    return 255 - image
