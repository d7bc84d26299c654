"""Tensors of a sampling run as ArviZ's groups, and the check of a file of them. The only user of ArviZ."""

import io
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..arguments import numbers
from ..errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    import arviz
    import h5py
    import pandas
    import xarray
    from matplotlib.figure import Figure


# Bytes that a stored byte may stand for, more than compression reaches, where there are more than a few.
_DENSEST, _SMALL = 2000, 2**12


def inference_data(
    posterior: Mapping[str, Tensor],
    sample_stats: Mapping[str, Tensor],
    n_batch: int,
    *,
    inputs: Tensor | None = None,
    predictive: Mapping[str, Tensor] | None = None,
    observed: Mapping[str, Tensor] | None = None,
) -> "arviz.InferenceData":
    """ArviZ's data of one run; groups without variables are left out.

    Args:
        posterior: latents by name, each ``[chains, draws, *batch, *shape]``.
        sample_stats: statistics by name, each ``[chains, draws, *batch]``.
        n_batch: number of dimensions of the batch of problems.
        inputs: ``[chains, draws, *batch, Du]``, the group ``unconstrained_posterior``.
        predictive: ``[chains, n, *batch, *shape]`` by name, the group ``posterior_predictive``.
        observed: ``[*batch, *shape]`` by name, the group ``observed_data``. Names that no file can hold are left out.

    Raises:
        ArgumentError: a variable is named like a dimension, or predictive values have another shape.
    """
    predictive, observed = predictive or {}, observed or {}
    predictive = {name: numbers("to_arviz", f"predictive[{name!r}]", value) for name, value in predictive.items()}
    for kind, variables in (("latent", posterior), ("predictive value", predictive)):
        taken = [name for name in variables if names_dimension(name)]
        if taken:
            raise ArgumentError(f"a {kind} is named {taken[0]!r}, like a dimension of the draws: rename it")
    # draws must not be lost for the name of what is known anyway
    observed = {
        name: value
        for name, value in observed.items()
        if not (names_dimension(name) or name in ("", ".") or "/" in name or "\0" in name)
    }
    chains, _, *problems = next(iter(sample_stats.values())).shape
    for name, value in predictive.items():
        if value.ndim < 2 or (len(value), *value.shape[2 : 2 + n_batch]) != (chains, *problems):
            raise ArgumentError(
                f"to_arviz(predictive[{name!r}] of shape {tuple(value.shape)}): must be [chains, n, *batch, *shape], "
                f"with {chains} chains and batch {tuple(problems)}"
            )
    batch = ["problem"] if n_batch == 1 else [f"problem_{i}" for i in range(n_batch)]

    def dataset(variables: Mapping[str, Tensor], *lead: str) -> "xarray.Dataset":
        import xarray

        values, sizes = {}, {}
        for name, value in variables.items():
            dims = [*lead, *batch, *(f"{name}_dim_{i}" for i in range(value.ndim - len(lead) - n_batch))]
            values[name] = dims, _array(value)
            sizes |= zip(dims, value.shape, strict=True)
        return xarray.Dataset(values, coords={dim: range(n) for dim, n in sizes.items()})

    groups = {
        "posterior": dataset(posterior, "chain", "draw"),
        "sample_stats": dataset(sample_stats, "chain", "draw"),
        "posterior_predictive": dataset(predictive, "chain", "draw"),
        "observed_data": dataset(observed),
        "unconstrained_posterior": dataset({} if inputs is None else {"inputs": inputs}, "chain", "draw"),
    }
    return _data({name: group for name, group in groups.items() if group})


def _data(groups: Mapping[str, "xarray.Dataset"]) -> Any:
    """What ArviZ takes: its own class up to version 0.23, a tree of xarray from version 1 on."""
    import xarray

    az: Any = import_arviz()
    return xarray.DataTree.from_dict(dict(groups)) if _is_of_trees() else az.InferenceData(**groups)


def _array(value: Tensor) -> np.ndarray:
    # which NumPy does not know
    return (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().numpy()


@cache
def import_arviz():
    """ArviZ, imported when it is first needed and without its notice about version 1."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="\nArviZ is undergoing", category=FutureWarning)
        import arviz
    return arviz


def _is_of_trees() -> bool:
    """Whether it is ArviZ 1 or newer, whose data are trees of xarray."""
    return int(import_arviz().__version__.split(".")[0]) >= 1


# ArviZ's names since version 1, for an interval of 94 %.
_RENAMED = {"hdi94_lb": "hdi_3%", "hdi94_ub": "hdi_97%"}
_COLUMNS = ["mean", "sd", "hdi_3%", "hdi_97%", "mcse_mean", "mcse_sd", "ess_bulk", "ess_tail", "r_hat"]

# R-hat above which chains differ within themselves by rounding alone.
_ROUNDING = 1e6


def summarised(data: Any, names: Any) -> "pandas.DataFrame":
    """ArviZ's table of latents, one row each, with the same columns of any version."""
    az: Any = import_arviz()
    own = {"ci_kind": "hdi", "ci_prob": 0.94} if _is_of_trees() else {}
    with warnings.catch_warnings():
        # a constant column gives 0/0, which the table shows as NaN
        warnings.filterwarnings("ignore", message="invalid value encountered", category=RuntimeWarning)
        table = az.summary(data, group="posterior", var_names=names, kind="all", round_to="none", **own)
    table = table.rename(columns=_RENAMED)[_COLUMNS]
    return table.assign(r_hat=table["r_hat"].where(~(table["r_hat"] > _ROUNDING), np.inf))


_KINDS = {"trace": "trace_dist", "posterior": "dist"}


def plotted(kind: str, data: Any) -> "Figure":
    """The figure of ``arviz.plot_<kind>``; from version 1 on traces and posteriors go by other names."""
    az: Any = import_arviz()
    if not _is_of_trees():
        options: dict[str, Any] = {"compact": False, "divergences": None} if kind == "trace" else {}
        figure = np.asarray(getattr(az, f"plot_{kind}")(data, **options)).flat[0].figure
        figure.tight_layout()
        return figure
    return getattr(az, f"plot_{_KINDS.get(kind, kind)}")(data, backend="matplotlib").viz["figure"].item()


def r_hat(values: Tensor) -> Tensor:
    """Rank-normalised split R-hat of ``[chains, draws, ...]``, ``[...]``; NaN where all values are equal, and infinite
    where each chain has one value, but for rounding."""
    rates = _of_columns(import_arviz().rhat, values)
    return torch.where(rates > _ROUNDING, torch.inf, rates)


def effective_draws(values: Tensor, kind: Literal["bulk", "tail", "mean"]) -> Tensor:
    """Effective sample size of ``[chains, draws, ...]``, all chains together, ``[...]``."""
    # version 1 asks for the quantiles, which are those of version 0
    own = {"prob": (0.05, 0.95)} if kind == "tail" else {}
    return _of_columns(partial(import_arviz().ess, method=kind, **own), values)


def _of_columns(statistic: Callable[[np.ndarray], float], values: Tensor) -> Tensor:
    columns = values.detach().double().cpu().flatten(2).permute(2, 0, 1).numpy()
    with warnings.catch_warnings():
        # a constant column gives 0/0
        warnings.simplefilter("ignore", RuntimeWarning)
        found = [float(statistic(column)) for column in columns]
    return torch.tensor(found, dtype=torch.float64).reshape(values.shape[2:])


def names_dimension(name: str) -> bool:
    """Whether a latent's name is that of a dimension of :meth:`Draws.to_arviz`."""
    return name in ("chain", "draw") or name.startswith("problem")


def write_draws(path: Path, data: "arviz.InferenceData", constant: Mapping[str, np.ndarray]) -> None:
    """Write ArviZ's groups as netCDF, with ``constant`` as the group ``constant_data``."""
    import xarray

    tree: Any = data.to_datatree() if hasattr(data, "to_datatree") else data
    if constant:
        dims = {name: [f"{name}_dim_{i}" for i in range(value.ndim)] for name, value in constant.items()}
        values = {name: (dims[name], value) for name, value in constant.items()}
        tree["constant_data"] = xarray.DataTree(xarray.Dataset(values))
    compressed = {node.path: {name: {"zlib": True} for name in node.variables} for node in tree.subtree}
    # in memory first: HDF5 ends the process when its disk is full
    file = io.BytesIO()
    tree.to_netcdf(file, engine="h5netcdf", encoding={path: by for path, by in compressed.items() if by})
    with file.getbuffer() as written:
        path.write_bytes(written)


def read_draws(path: Path, written_as: str) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The attributes of a file of draws, and its groups of tensors.

    Raises:
        CheckpointError: it is of another format, or promises what it does not hold.
        OSError, LookupError, ValueError, TypeError, AttributeError, MemoryError: it is damaged.
    """
    import h5py
    import xarray

    with h5py.File(path, "r") as file:
        refuse_what_is_not_there(path, file)
    with xarray.open_datatree(os.fspath(path), engine="h5netcdf") as tree:
        attributes = {str(name): value for name, value in tree.attrs.items()}
        if attributes.get("format") != written_as:
            raise CheckpointError(f"{path} was not written by Draws.save (format {attributes.get('format')!r})")
        groups = {
            str(name): {str(key): torch.from_numpy(array.values.copy()) for key, array in group.data_vars.items()}
            for name, group in tree.children.items()
        }
    return attributes, groups


def refuse_what_is_not_there(path: os.PathLike, group: "h5py.Group") -> None:
    """Raise CheckpointError where HDF5 would read what the file does not hold: from other files, or out of nothing."""
    import h5py

    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise CheckpointError(f"{path} links to elsewhere at {name!r}: Draws.save writes no such file")
        item = group[name]
        if isinstance(item, h5py.Group):
            if group.name != "/":
                # a group may hold itself
                raise CheckpointError(f"{path} has groups within groups, at {item.name!r}: Draws.save writes none")
            refuse_what_is_not_there(path, item)
        elif isinstance(item, h5py.Dataset) and (item.external or item.is_virtual):
            raise CheckpointError(f"{path} takes {name!r} from another file: Draws.save writes no such file")
        elif isinstance(item, h5py.Dataset) and item.nbytes > _DENSEST * max(item.id.get_storage_size(), _SMALL):
            raise CheckpointError(
                f"{path} promises {item.nbytes / 2**30:.3g} GiB of {name!r}, far more than it holds: it is damaged"
            )
