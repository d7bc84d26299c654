"""Parameters and data in NumPy archives."""

from pathlib import Path

import torch
from torch import Tensor

from dgm_infer import files
from dgm_infer.errors import ArgumentError

__all__ = ["read_arrays"]


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The numerical arrays of an ``.npz`` file by name; nothing in the file is executed.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError, OSError, EOFError, zipfile.BadZipFile: it is damaged, or its arrays need more memory than there is.
    """
    try:
        values = files.read_arrays(path)
    except (MemoryError, ArgumentError) as error:
        raise ValueError(str(error)) from error
    return {key: torch.from_numpy(value) for key, value in values.items() if value.dtype.kind in "biuf"}
