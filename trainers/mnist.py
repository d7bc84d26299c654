"""MNIST (LeCun, Cortes and Burges 1998)."""

import os
from pathlib import Path

import torch
from torchvision.datasets import MNIST

from dgm_infer.errors import ConfigError

from .augmentation import Augmentation
from .data import Binarise, ImageData, Labelled, Split

__all__ = ["MNISTData"]

# Folder of the reference data, of which mnist_10k is a part.
REFERENCE_DATA = "DGM_INFER_REFERENCE_DATA"
# The last images of the training files. Never to change: no generator was trained on them.
N_VALIDATION = 500


class MNISTData(ImageData):
    """Handwritten digits in torchvision's layout: 28 x 28 pixels, 256 grey levels over [0, 1].

    The training files but for their last 500 images are for training, those 500 for validation, the test files held
    out: 59 500, 500 and 10 000 images of MNIST itself, 8 500, 500 and 1 000 of the reference data's ``mnist_10k``.
    Batches are (images ``[batch, 28, 28]``, labels ``[batch]``). The files are read on first use.

    Args:
        root: folder that holds ``MNIST/raw/*-ubyte``; null for ``mnist_10k`` in the folder that the environment
            variable ``DGM_INFER_REFERENCE_DATA`` names, and for ``data`` where it is not set.
        download: get files that are missing, 12 MB.
        batch_size: images a batch; the last of an epoch may be smaller.
        augmentation: random changes to training batches; null for none.
        binarise: how pixels become 0 or 1: dynamic, static, or null for grey levels.

    Raises:
        ArgumentError: a value outside its range.
        ConfigError: on first use, the files are not there, damaged, or cannot be downloaded.
    """

    output_shape = (28, 28)

    def __init__(
        self,
        root: str | os.PathLike | None = None,
        download: bool = False,
        batch_size: int = 128,
        augmentation: Augmentation | None = None,
        binarise: Binarise | None = None,
    ):
        super().__init__(batch_size, augmentation, binarise)
        self.root = Path(root) if root is not None else _default_root()
        self.download = download

    def prepare_data(self) -> None:
        """Downloads what is missing, in one process, and fails before training where it cannot."""
        self._read(train=True)

    def read(self) -> Split:
        images, labels = self._read(train=True)
        n = len(images) - N_VALIDATION
        if n < 1:
            raise ConfigError(f"{self.root} has {len(images)} training images: {N_VALIDATION} are kept for validation")
        return Split(Labelled(images[:n], labels[:n]), Labelled(images[n:], labels[n:]), self._read(train=False))

    def _read(self, train: bool) -> Labelled:
        raw = self.root / MNIST.__name__ / "raw"
        try:
            data = MNIST(self.root, train=train, download=self.download)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if self.download:
                raise ConfigError(f"MNIST could not be downloaded to {raw}: {reason}") from error
            if "not found" in reason:
                raise ConfigError(
                    f"no MNIST files in {raw}: put the four *-ubyte files there, name another root, or set "
                    "download=true where there is a network"
                ) from error
            raise ConfigError(f"the MNIST files in {raw} are damaged: {reason}") from error
        images = data.data
        if tuple(images.shape[1:]) != self.output_shape or len(images) != len(data.targets):
            raise ConfigError(
                f"{raw} holds images of shape {tuple(images.shape)} and {len(data.targets)} labels: not MNIST"
            )
        return Labelled(images.float() / 255, data.targets.to(torch.int64))


def _default_root() -> Path:
    reference = os.environ.get(REFERENCE_DATA)
    return Path(reference) / "mnist_10k" if reference else Path("data")
