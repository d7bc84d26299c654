"""Data sets with a fixed split into training, validation and held-out images."""

import math
from abc import ABC, abstractmethod
from functools import cache, cached_property
from typing import Literal, NamedTuple, get_args

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dgm_infer.arguments import choice, flag, whole_number
from dgm_infer.errors import ArgumentError, extra

from .augmentation import Augmentation

__all__ = ["Binarise", "DigitsData", "ImageData", "Labelled", "Split"]

Binarise = Literal["dynamic", "static"]

# Must not change: the images held out here were never used to choose the shipped generator's recipe.
SPLIT_SEED = 20240
# Seed of the draws that binarise pixels; must not change either.
BINARISATION_SEED = 20250


class Labelled(NamedTuple):
    """Images ``[n, *output_shape]`` in [0, 1], or in 8 bits up to 255, and their labels ``[n]``."""

    images: Tensor
    labels: Tensor


class Split(NamedTuple):
    """The parts of a data set; no image is in two of them."""

    training: Labelled
    validation: Labelled
    held_out: Labelled


class Rows(Dataset):
    """Tensors fetched per batch: one index operation replaces a loop and a collation."""

    def __init__(self, rows: Labelled):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.images)

    def __getitem__(self, index: int) -> Labelled:
        return Labelled(_unit(self.rows.images[index]), self.rows.labels[index])

    def __getitems__(self, indices: list[int]) -> Labelled:
        chosen = torch.tensor(indices)
        return Labelled(_unit(self.rows.images[chosen]), self.rows.labels[chosen])


class ImageData(LightningDataModule, ABC):
    """Labelled images in memory: batches for training and validation, and held-out images.

    Batches are (images ``[batch, *output_shape]``, labels ``[batch]``). A subclass defines how the parts are read.

    Binary pixels are 1 with their grey level as the probability (Salakhutdinov and Murray 2008): ``"static"`` draws
    them once, ``"dynamic"`` again for every training batch, after the augmentation. Dequantised pixels are spread
    evenly over the cells of their grey levels, ``(k + U) / levels`` for k from 0 to ``levels - 1`` (Uria et al. 2013),
    again for every training batch; see :attr:`log_density_correction`. Validation and held-out images are the same
    draws in every run.

    Args:
        batch_size: images per batch; the last of an epoch may be smaller, and is dropped if it is a single image.
        augmentation: random changes to training batches; null for none.
        binarise: how pixels become 0 or 1: dynamic, static, or null for grey levels.
        dequantise: whether uniform noise makes the grey levels continuous, in (0, 1).

    Raises:
        ArgumentError: a batch size below 1, an augmentation of static binary images, or dequantised binary pixels.
    """

    output_shape: tuple[int, ...]
    levels: int = 256
    """Grey levels of the data, evenly spaced over [0, 1]."""

    def __init__(
        self,
        batch_size: int = 128,
        augmentation: Augmentation | None = None,
        binarise: Binarise | None = None,
        dequantise: bool = False,
    ):
        super().__init__()
        name = type(self).__name__
        whole_number(name, "batch_size", batch_size)
        choice(name, "binarise", binarise, (*get_args(Binarise), None))
        flag(name, "dequantise", dequantise)
        if binarise == "static" and augmentation is not None:
            raise ArgumentError(
                f"{name}(binarise='static'): augmentation would make binary pixels grey again; choose "
                "dynamic, or no augmentation"
            )
        if binarise is not None and dequantise:
            raise ArgumentError(f"{name}(binarise={binarise!r}, dequantise=True): binary pixels have no grey levels")
        self.batch_size = batch_size
        self.augmentation = augmentation
        self.binarise = binarise
        self.dequantise = dequantise

    @abstractmethod
    def read(self) -> Split:
        """All images, grey levels in [0, 1] or 8 bits."""

    @cached_property
    def split(self) -> Split:
        """All images, read on first use; already binary or dequantised if that is the same in every epoch."""
        parts = self.read()
        if self.binarise is None and not self.dequantise:
            return parts
        rng = torch.Generator().manual_seed(BINARISATION_SEED)
        # training last: the others get the same draws, dynamic or static
        validation, held_out = (
            Labelled(self._drawn(part.images, rng), part.labels) for part in (parts.validation, parts.held_out)
        )
        if self.binarise != "static":
            return Split(parts.training, validation, held_out)
        training = Labelled(self._drawn(parts.training.images, rng), parts.training.labels)
        return Split(training, validation, held_out)

    @property
    def log_density_correction(self) -> float:
        """Term that turns log densities of dequantised images into bounds on log probabilities: ``-Dx log levels``.

        ``log P(k) = log E_U[p((k + U) / levels)] - Dx log levels >= E_U[log p(x)] - Dx log levels`` (Theis, van den
        Oord and Bethge 2016). 0 without dequantisation.
        """
        return -torch.Size(self.output_shape).numel() * math.log(self.levels) if self.dequantise else 0.0

    @property
    def training(self) -> Labelled:
        return Labelled(_unit(self.split.training.images), self.split.training.labels)

    @property
    def validation(self) -> Labelled:
        return Labelled(_unit(self.split.validation.images), self.split.validation.labels)

    def held_out(self, n: int | None = None) -> Tensor:
        """The first ``n`` held-out images, or all if None: ``[n, *output_shape]``."""
        return self._held_out(n).images.clone()

    def held_out_labels(self, n: int | None = None) -> Tensor:
        """Labels of :meth:`held_out`: ``[n]``."""
        return self._held_out(n).labels.clone()

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.split.training, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.split.validation)

    def transfer_batch_to_device(self, batch, device: torch.device, dataloader_idx: int):
        """Like Lightning's, without its search of the batch for tensors, which takes as long as a small step."""
        if isinstance(batch, Labelled):
            return Labelled(*(part.to(device, non_blocking=True) for part in batch))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx: int):
        """Augment, and binarise or dequantise, training batches, all images at once and on the device."""
        trainer, drawn = self.trainer, self.binarise == "dynamic" or self.dequantise
        if trainer is None or not trainer.training or (self.augmentation is None and not drawn):
            return batch
        images, labels = batch
        if self.augmentation is not None:
            images = self.augmentation(images)
            # its noise may leave [0, 1]
            images = images.clamp(0, 1) if drawn else images
        return Labelled(self._drawn(images) if drawn else images, labels)

    def _drawn(self, images: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Binary or dequantised pixels."""
        x = _unit(images)
        if self.binarise is not None:
            return torch.bernoulli(x, generator=rng)
        noise = torch.rand(x.shape, generator=rng, dtype=x.dtype, device=x.device)
        # rounding may reach the edges, where a logit is infinite
        eps = torch.finfo(x.dtype).eps
        return (((self.levels - 1) * x + noise) / self.levels).clamp(eps, 1 - eps)

    def _loader(self, rows: Labelled, shuffle: bool = False) -> DataLoader:
        # a single image has no batch statistics
        alone = shuffle and self.batch_size > 1 and len(rows.images) > 1 and len(rows.images) % self.batch_size == 1
        return DataLoader(Rows(rows), self.batch_size, shuffle=shuffle, drop_last=alone, collate_fn=_as_fetched)

    def _held_out(self, n: int | None) -> Labelled:
        images, labels = self.split.held_out
        if n is not None:
            n = whole_number(f"{type(self).__name__}.held_out", "n", n, 1, len(images))
        return Labelled(_unit(images[:n]), labels[:n])


class DigitsData(ImageData):
    """The 1797 handwritten digits of ``sklearn.datasets.load_digits``: 8 x 8 pixels, 17 grey levels over [0, 1].

    1400 images for training, 197 for validation, 200 held out, by a permutation that no seed changes. Batches are
    (images ``[batch, 8, 8]``, labels ``[batch]``); nothing is downloaded.

    Args:
        batch_size: images per batch; the last of an epoch may be smaller.
        augmentation: random changes to training batches; null for none.
        binarise: how pixels become 0 or 1: dynamic, static, or null for grey levels.
        dequantise: whether uniform noise makes the grey levels continuous, in (0, 1).

    Raises:
        ArgumentError: a value outside its range.
    """

    output_shape = (8, 8)
    levels = 17

    def read(self) -> Split:
        return _digits()


@cache
def _digits() -> Split:
    with extra("train"):
        from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(SPLIT_SEED))
    images = torch.from_numpy(pixels / 16).float().unflatten(1, DigitsData.output_shape)[order]
    labels = torch.from_numpy(targets)[order]
    sizes = [1400, 197, 200]
    return Split(*(Labelled(*part) for part in zip(images.split(sizes), labels.split(sizes), strict=True)))


def _unit(images: Tensor) -> Tensor:
    """Grey levels in [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def _as_fetched(batch):
    return batch
