"""MNIST and the data sets in its format."""

import gzip
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch
from torchvision import datasets

from dgm_infer.files import REFERENCE_DATA

from .torchvision_data import N_VALIDATION, TorchvisionData

__all__ = ["N_VALIDATION", "FashionMNISTData", "MNISTData"]

# Where Debian's package dataset-fashion-mnist has its files.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


class MNISTData(TorchvisionData):
    """MNIST (LeCun, Cortes and Burges 1998): handwritten digits, 28 x 28 pixels, 256 grey levels over [0, 1].

    The last 500 images of the training files are for validation, the others for training, and the test files are held
    out: 59 500, 500 and 10 000 images of MNIST itself, 8 500, 500 and 1 000 of the reference data's ``mnist_10k``.
    Batches are (images ``[batch, 28, 28]``, labels ``[batch]``).

    The root contains ``MNIST/raw/*-ubyte``, or ``*-ubyte.gz`` as they are published; null for ``mnist_10k`` in the
    folder named by the environment variable ``DGM_INFER_REFERENCE_DATA``, or for ``data`` if it is not set.
    """

    output_shape = (28, 28)
    folder = "MNIST/raw"
    download_size = "12 MB"
    reader: ClassVar[type[datasets.MNIST]] = datasets.MNIST

    def default_root(self) -> Path:
        reference = os.environ.get(REFERENCE_DATA)
        return Path(reference) / "mnist_10k" if reference else super().default_root()

    def dataset(self, part):
        if part == "validation":
            return None
        raw, packed = self.root / self.folder, []
        if not (self.download or any(raw.glob("*-ubyte"))):
            packed = [*self.root.glob("*-ubyte.gz"), *raw.glob("*-ubyte.gz")]
        if not packed:
            return self.reader(self.root, part == "training", download=self.download)
        # read into memory at once, by torchvision, which reads unpacked files only
        with TemporaryDirectory() as unpacked:
            raw = Path(unpacked) / self.folder
            raw.mkdir(parents=True)
            for file in packed:
                with gzip.open(file) as source:
                    (raw / file.stem).write_bytes(source.read())
            return self.reader(unpacked, part == "training")

    def _tensors(self, data):
        return data.data.float() / 255, data.targets.to(torch.int64)


class FashionMNISTData(MNISTData):
    """Fashion-MNIST (Xiao, Rasul and Vollgraf 2017): clothes, 28 x 28 pixels, 256 grey levels over [0, 1].

    59 500 images for training, 500 for validation, 10 000 held out. Batches are (images ``[batch, 28, 28]``, labels
    ``[batch]``). The root contains ``FashionMNIST/raw/*-ubyte``, or ``*-ubyte.gz`` as they are published; null for the
    files of Debian's package ``dataset-fashion-mnist``, or for ``data`` if it is not installed.
    """

    folder = "FashionMNIST/raw"
    download_size = "31 MB"
    reader = datasets.FashionMNIST

    package = "dataset-fashion-mnist"

    def default_root(self):
        return DEBIAN if DEBIAN.is_dir() else TorchvisionData.default_root(self)
