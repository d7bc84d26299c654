"""Data files: the reference data, and small ones in the published layouts, made on the spot."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from dgm_infer.files import REFERENCE_DATA


def reference_folder(part: str) -> Path:
    """The folder of the reference data; the test that asks is skipped if this file or folder of it is missing."""
    folder = os.environ.get(REFERENCE_DATA)
    if not folder:
        pytest.skip(f"{REFERENCE_DATA} names no folder")
    if not (Path(folder) / part).exists():
        pytest.skip(f"{REFERENCE_DATA} names a folder without {part}")
    return Path(folder)


def arviz_groups(data) -> set[str]:
    """The names of the groups of ArviZ's data, of its own class or, since version 1, of a tree."""
    return set(data.groups() if callable(data.groups) else data.children)


def write_idx(path: Path, values: torch.Tensor) -> None:
    """A file of bytes in the format of MNIST's authors."""
    header = struct.pack(f">I{values.ndim}I", 0x0800 + values.ndim, *values.shape)
    path.write_bytes(header + values.to(torch.uint8).numpy().tobytes())


def write_mnist(root: Path, n_train: int, n_test: int, size: int = 28) -> Path:
    """Images whose first pixel is their number, modulo 256, and whose label is that modulo 10."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, n in (("train", n_train), ("t10k", n_test)):
        number = torch.arange(n)
        images = torch.zeros(n, size, size, dtype=torch.uint8)
        images[:, 0, 0] = number % 256
        write_idx(raw / f"{name}-images-idx3-ubyte", images)
        write_idx(raw / f"{name}-labels-idx1-ubyte", number % 10)
    return raw


def write_fashion(folder: Path) -> None:
    """200 images for training, 500 for validation and two held out, all of grey level 0.2."""
    for name, n in (("train", 700), ("t10k", 2)):
        write_idx(folder / f"{name}-images-idx3-ubyte", torch.full((n, 28, 28), 51))
        write_idx(folder / f"{name}-labels-idx1-ubyte", torch.arange(n) % 10)


def write_iwae(folder: Path, *, sizes=(3, 7, 6, 16), seed=0) -> dict[str, dict[str, np.ndarray]]:
    """Files of the published layout for a small network, which act from the right."""
    rng = np.random.default_rng(seed)
    latent, first, second, outputs = sizes

    def layer(i, n_in, n_out):
        return {f"W{i}": rng.normal(size=(n_in, n_out)).astype("f4"), f"b{i}": rng.normal(size=(1, n_out)).astype("f4")}

    parts = {
        "decoder": layer(0, latent, first) | layer(2, first, second) | layer(4, second, outputs),
        "encoder_h": layer(0, outputs, second) | layer(2, second, first),
        "encoder_mean": layer(0, first, latent),
        "encoder_std": layer(0, first, latent),
    }
    for name, arrays in parts.items():
        np.savez(folder / f"{name}.npz", layers=np.array(["nnet.Linear"]), **arrays)
    return parts
