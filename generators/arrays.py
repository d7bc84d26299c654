"""Parameters and data in NumPy archives."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["read_arrays"]


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The numerical arrays of an ``.npz`` file by name; nothing in the file is executed.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError, OSError, EOFError, zipfile.BadZipFile: it is damaged, or its arrays need more memory than there is.
    """
    # opened here: NumPy leaves a damaged file open
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        try:
            values = {key: arrays[key] for key in arrays}
        except MemoryError as error:
            raise ValueError(str(error)) from error
    return {key: torch.from_numpy(value) for key, value in values.items() if value.dtype.kind in "biuf"}
