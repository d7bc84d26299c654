"""Indoor radon in 85 counties: a hierarchical regression as a Pyro program (math 10.7, T 5.6.3, T fig. 5.5)."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

import dgm_infer as dgm
from dgm_infer.errors import CheckpointError, cause, extra
from generators.arrays import read_arrays

__all__ = ["Radon", "radon_target", "read_radon"]


class Radon(NamedTuple):
    """919 measurements, float64."""

    county: Tensor
    """``[919]``, from 0."""
    floor: Tensor
    """``[919]``, 0 for a basement and 1 for the first floor."""
    log_uranium: Tensor
    """``[919]``, of the county's soil."""
    log_radon: Tensor
    """``[919]``, what is explained."""
    n_counties: int


def read_radon(folder: Path) -> Radon:
    """The data of the published experiment.

    Args:
        folder: with ``radon.npz``, in itself or in its subfolder ``radon``.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    inner = folder / "radon"
    path = (inner if inner.is_dir() else folder) / "radon.npz"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: the reference data has it in its folder radon")
    try:
        arrays = read_arrays(path)
        floor, log_uranium, log_radon = (arrays[name].double() for name in ("floor", "log_uranium", "log_radon"))
        return Radon(arrays["county"].long(), floor, log_uranium, log_radon, int(arrays["n_counties"]))
    except (LookupError, ValueError, OSError, EOFError) as error:
        raise CheckpointError(f"{path} holds no radon measurements: {cause(error)}") from error


def regression(data: Radon) -> None:
    """``y ~ N(a[county] + b_0 floor + b_1 log_uranium, eps)`` with 92 latent variables, as a Pyro program.

    ``a = mu_a + sigma_a n_a`` (85), ``b = mu_b + sigma_b n_b`` (2), non-centred; ``mu ~ N(0, 1)`` and
    ``sigma_a, sigma_b, eps ~ HalfCauchy(2.5)``.
    """
    with extra("pyro"):
        import pyro
        from pyro import distributions as dist

    zero = data.log_radon.new_zeros(())

    def normal(name: str) -> Tensor:
        return pyro.sample(name, dist.Normal(zero, 1 + zero))

    def normals(name: str, n: int) -> Tensor:
        return pyro.sample(name, dist.Normal(zero.expand(n), 1 + zero).to_event(1))

    def scale(name: str) -> Tensor:
        return pyro.sample(name, dist.HalfCauchy(2.5 + zero))

    a = normal("mu_a") + scale("sigma_a") * normals("n_a", data.n_counties)
    b = normal("mu_b") + scale("sigma_b") * normals("n_b", 2)
    mean = a[data.county] + b[0] * data.floor + b[1] * data.log_uranium
    pyro.sample("y", dist.Normal(mean, scale("eps")).to_event(1), obs=data.log_radon)


def radon_target(data: Radon) -> dgm.Target:
    """The posterior of :func:`regression` on R^92; ``exp(-energy)`` integrates to the evidence of the data."""
    return dgm.target_from_pyro(regression, data)
