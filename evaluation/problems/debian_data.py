"""Data sets that Debian's packages of R hold: ``python -m evaluation.problems.debian_data FOLDER`` fetches them.

The command needs ``apt-get`` and ``dpkg-deb``, and installs nothing. Files of the same names from elsewhere do as well.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from dgm_infer.errors import CheckpointError, cause

from .r_data import read_frame

__all__ = ["FILES", "credit", "fetch", "ionosphere", "pines", "sonar"]

_LIBRARY = "usr/lib/R/site-library"
# file -> package, path in it
FILES = {
    "Sonar.rda": ("r-cran-mlbench", f"{_LIBRARY}/mlbench/data/Sonar.rda"),
    "Ionosphere.rda": ("r-cran-mlbench", f"{_LIBRARY}/mlbench/data/Ionosphere.rda"),
    "GermanCredit.RData": ("r-cran-caret", f"{_LIBRARY}/caret/data/GermanCredit.RData"),
    "finpines.txt": ("r-cran-spatstat.data", f"{_LIBRARY}/spatstat.data/rawdata/finpines/finpines.txt"),
}
"""The files, each with its package and its path there."""


def fetch(folder: Path) -> None:
    """Download Debian's packages and copy the files of :data:`FILES` from them to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        packages = sorted({package for package, _ in FILES.values()})
        subprocess.run(["apt-get", "download", *packages], cwd=work, check=True)
        for archive in Path(work).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=work, check=True)
        for name, (_, path) in FILES.items():
            shutil.copyfile(Path(work) / path, folder / name)


def sonar(folder: Path) -> tuple[Tensor, Tensor]:
    """Features ``[208, 60]`` and labels of sonar returns from metal or rock (Gorman and Sejnowski 1988)."""
    return _labelled(folder / "Sonar.rda", "Class")


def ionosphere(folder: Path) -> tuple[Tensor, Tensor]:
    """Features ``[351, 34]`` and labels of radar returns (Sigillito et al. 1989)."""
    return _labelled(folder / "Ionosphere.rda", "Class")


def credit(folder: Path) -> tuple[Tensor, Tensor]:
    """Features ``[1000, 61]`` and labels of the German credit data, its categories as indicators (Hofmann 1994)."""
    return _labelled(folder / "GermanCredit.RData", "Class")


def pines(folder: Path) -> Tensor:
    """Places of 126 Finnish pine saplings, ``[126, 2]``, on the unit square (Penttinen, Stoyan and Henttonen 1992)."""
    path = folder / "finpines.txt"
    try:
        rows = [[float(cell) for cell in line.split()[:2]] for line in path.read_text().splitlines()[1:] if line]
        places = torch.tensor(rows, dtype=torch.float64)
        if places.shape != (126, 2):
            raise ValueError(f"{len(rows)} rows instead of 126")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} does not hold the saplings: {cause(error)}") from error
    # of the square [-5, 5] x [-8, 2] metres
    return (places + torch.tensor([5.0, 8.0], dtype=torch.float64)) / 10


def _labelled(path: Path, label: str) -> tuple[Tensor, Tensor]:
    columns = read_frame(path)
    if label not in columns:
        raise CheckpointError(f"{path} has no column {label}")
    features = [values for name, values in columns.items() if name != label]
    return torch.stack(features, -1), columns[label]


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
