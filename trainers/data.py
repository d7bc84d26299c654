"""Data sets, split once and for all into training, validation and held-out images."""

from abc import ABC, abstractmethod
from functools import cache, cached_property
from typing import Literal, NamedTuple, get_args

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dgm_infer.errors import ArgumentError

from .augmentation import Augmentation

__all__ = ["Binarise", "DigitsData", "ImageData", "Labelled", "Split"]

Binarise = Literal["dynamic", "static"]

# Never to change: what is held out here was never looked at when the shipped generator's recipe was chosen.
SPLIT_SEED = 20240
# Likewise of the draws that make pixels 0 or 1.
BINARISATION_SEED = 20250


class Labelled(NamedTuple):
    """Images ``[n, H, W]`` in [0, 1] and their labels ``[n]``."""

    images: Tensor
    labels: Tensor


class Split(NamedTuple):
    """The parts of a data set; no image is in two of them."""

    training: Labelled
    validation: Labelled
    held_out: Labelled


class Rows(Dataset):
    """Tensors fetched a batch at a time: one index operation takes the place of a loop and a collation."""

    def __init__(self, rows: Labelled):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.images)

    def __getitem__(self, index: int) -> Labelled:
        return Labelled(self.rows.images[index], self.rows.labels[index])

    def __getitems__(self, indices: list[int]) -> Labelled:
        chosen = torch.tensor(indices)
        return Labelled(self.rows.images[chosen], self.rows.labels[chosen])


class ImageData(LightningDataModule, ABC):
    """Labelled images held in memory: batches for training and validation, and images kept back.

    Batches are (images ``[batch, *output_shape]``, labels ``[batch]``). A subclass says how the parts are read.

    Binary pixels are 1 with their grey level as the probability (Salakhutdinov and Murray 2008): ``"static"`` draws
    them once, ``"dynamic"`` anew for every training batch, after the augmentation. Images for validation and held-out
    ones are the same draws in every run.

    Args:
        batch_size: images a batch; the last of an epoch may be smaller.
        augmentation: random changes to training batches; null for none.
        binarise: how pixels become 0 or 1: dynamic, static, or null for grey levels.

    Raises:
        ArgumentError: a batch size below 1, or an augmentation of images that are binary already.
    """

    output_shape: tuple[int, ...]

    def __init__(
        self, batch_size: int = 128, augmentation: Augmentation | None = None, binarise: Binarise | None = None
    ):
        super().__init__()
        if batch_size < 1:
            raise ArgumentError(f"{type(self).__name__}(batch_size={batch_size}): must be 1 or more")
        if binarise is not None and binarise not in get_args(Binarise):
            raise ArgumentError(f"{type(self).__name__}(binarise={binarise!r}): must be dynamic, static or None")
        if binarise == "static" and augmentation is not None:
            raise ArgumentError(
                f"{type(self).__name__}(binarise='static'): augmentation would make binary pixels grey again; choose "
                "dynamic, or no augmentation"
            )
        self.batch_size = batch_size
        self.augmentation = augmentation
        self.binarise = binarise

    @abstractmethod
    def read(self) -> Split:
        """All images, grey levels in [0, 1]."""

    @cached_property
    def split(self) -> Split:
        """All images, read on first use; binary where they are the same in every epoch."""
        parts = self.read()
        if self.binarise is None:
            return parts
        rng = torch.Generator().manual_seed(BINARISATION_SEED)
        # training last: the others are the same draws, dynamic or static
        validation, held_out, training = (
            Labelled(torch.bernoulli(part.images, generator=rng), part.labels)
            for part in (parts.validation, parts.held_out, parts.training)
        )
        return Split(parts.training if self.binarise == "dynamic" else training, validation, held_out)

    @property
    def training(self) -> Labelled:
        return self.split.training

    @property
    def validation(self) -> Labelled:
        return self.split.validation

    def held_out(self, n: int | None = None) -> Tensor:
        """The first ``n`` held-out images, all for None: ``[n, *output_shape]``."""
        return self._held_out(n).images.clone()

    def held_out_labels(self, n: int | None = None) -> Tensor:
        """What :meth:`held_out` shows: ``[n]``."""
        return self._held_out(n).labels.clone()

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.training, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.validation)

    def on_after_batch_transfer(self, batch, dataloader_idx: int):
        """Augments and binarises training batches, all images at once and on the device."""
        trainer = self.trainer
        if trainer is None or not trainer.training or (self.augmentation is None and self.binarise != "dynamic"):
            return batch
        images, labels = batch
        if self.augmentation is not None:
            images = self.augmentation(images)
        if self.binarise == "dynamic":
            # noise may leave [0, 1]
            images = torch.bernoulli(images if self.augmentation is None else images.clamp(0, 1))
        return Labelled(images, labels)

    def _loader(self, rows: Labelled, shuffle: bool = False) -> DataLoader:
        return DataLoader(Rows(rows), self.batch_size, shuffle=shuffle, collate_fn=_as_fetched)

    def _held_out(self, n: int | None) -> Labelled:
        images, labels = self.split.held_out
        if n is not None and not 0 < n <= len(images):
            raise ArgumentError(f"held_out(n={n}): {type(self).__name__} has 1 to {len(images)} held-out images")
        return Labelled(images[:n], labels[:n])


class DigitsData(ImageData):
    """The 1797 handwritten digits of ``sklearn.datasets.load_digits``: 8 x 8 pixels, 17 grey levels over [0, 1].

    1400 images for training, 197 for validation, 200 held out, by a permutation that no seed changes. Batches are
    (images ``[batch, 8, 8]``, labels ``[batch]``); nothing is downloaded.

    Args:
        batch_size: images a batch; the last of an epoch may be smaller.
        augmentation: random changes to training batches; null for none.
        binarise: how pixels become 0 or 1: dynamic, static, or null for grey levels.

    Raises:
        ArgumentError: a value outside its range.
    """

    output_shape = (8, 8)

    def __init__(
        self, batch_size: int = 128, augmentation: Augmentation | None = None, binarise: Binarise | None = None
    ):
        super().__init__(batch_size, augmentation, binarise)

    def read(self) -> Split:
        return _digits()


@cache
def _digits() -> Split:
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(SPLIT_SEED))
    images = torch.from_numpy(pixels / 16).float().unflatten(1, DigitsData.output_shape)[order]
    labels = torch.from_numpy(targets)[order]
    sizes = [1400, 197, 200]
    return Split(*(Labelled(*part) for part in zip(images.split(sizes), labels.split(sizes), strict=True)))


def _as_fetched(batch):
    return batch
