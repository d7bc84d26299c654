"""Pictures as whole files."""

import io
import os
from pathlib import Path

from matplotlib.figure import Figure

from dgm_infer.files import writable_folder, write_file

__all__ = ["save_picture"]


def save_picture(path: str | os.PathLike, figure: Figure, dpi: int, *, tight: bool = False) -> None:
    """Write a figure on white as PNG, into a folder that is made if need be; ``tight`` cuts the margins off.

    Raises:
        ArgumentError: the file cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi, facecolor="white", bbox_inches="tight" if tight else None)
    writable_folder(Path(path).parent)
    write_file(path, picture)
