"""``Draws``: positions and statistics of a sampling run, its diagnostics and its file. The only user of ArviZ."""

import hashlib
import io
import json
import os
import warnings
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import allocatable, file_path, random_seed, whole_number
from ..conditioning.fibre import Fibre
from ..errors import ArgumentError, CheckpointError, cause
from ..files import complete_file
from ..kernels import Kernel
from ..kernels.stored import UnknownKernel, from_json, to_json
from ..target import Target, as_target, reference
from .components import chain_groups, looks, side_by_side

if TYPE_CHECKING:
    import arviz
    import h5py
    import pandas

__all__ = ["Draws", "longest_run", "names_dimension"]

# Constraint error over the scale of the data, or difference of energies over their size, below which draws are those of
# a problem, unless the tolerance of a fibre was larger.
_NEAR = 1e-3
# Bytes that a stored byte may stand for, more than compression reaches, where there are more than a few.
_DENSEST, _SMALL = 2000, 2**12
_FORMAT = "dgm-infer draws 1"
_UNKNOWN = "its kernel {} is not available here; import the module that defines it before loading"


class Draws:
    """Result of :func:`sample`.

    Attributes:
        inputs: ``[chains, draws, *batch, Du]``, or None if only latents were kept.
        stats: per-draw statistics, each ``[chains, draws, *batch]``: ``acceptance_rate``, ``diverging``,
            ``n_steps``, ``step_size``, ``energy``; on a fibre also ``constraint_error``, ``projection_failed``,
            ``reversal_failed``, ``solver_iterations``.
        kernel: the frozen, adapted kernel.
        seed: seed of the run.
        interrupted: whether the run was stopped before its last draw, by Ctrl-C or by an exception of the model.
        problem: the problem that was sampled; None after :meth:`load` without it.
        ancestors: ``[chains, *batch]``, if starts were annealed: the index of the prior draw that each chain descends
            from. Chains with the same index share their start, so that R-hat compares fewer starts.
    """

    def __init__(
        self,
        *,
        inputs: Tensor | None,
        latents: dict[str, Tensor] | None,
        stats: dict[str, Tensor],
        kernel: Kernel,
        seed: int,
        problem: Any = None,
        interrupted: bool = False,
        ancestors: Tensor | None = None,
    ):
        self.inputs = inputs
        self.stats = stats
        self.kernel = kernel
        self.seed = seed
        self.problem = problem
        self.interrupted = interrupted
        self.ancestors = ancestors
        self._latents = latents
        self._last_energy: Tensor | None = None

    @cached_property
    def latents(self) -> dict[str, Tensor]:
        """Latent variables by name, each ``[chains, draws, *batch, *shape]``."""
        if self._latents is not None:
            return self._latents
        with torch.no_grad():
            return self.problem.latents(self.inputs)

    @property
    def shape(self) -> torch.Size:
        """``(chains, draws, *batch)``."""
        return self.stats["acceptance_rate"].shape

    @property
    def longest_stay(self) -> Tensor:
        """Longest run of draws over which a chain did not move, ``[chains, *batch]``: how long it stuck."""
        same = torch.ones_like(self.stats["acceptance_rate"][:, 1:], dtype=torch.bool)
        kept = self.latents if self.inputs is None else {"inputs": self.inputs}
        for value in kept.values():
            same &= (value[:, 1:] == value[:, :-1]).reshape(*same.shape, -1).all(-1)
        return longest_run(same)

    @cached_property
    def components(self) -> Tensor:
        """Group of each chain, by its latents, ``[chains, *batch]``; -1 where it cannot be told (math 5.7).

        Chains of different groups never overlap. How many chains a group has comes from the starting points, and is not
        its posterior weight: summarise the groups apart, ``draws.latents[name][draws.components == 0]``.
        """
        index = looks(self.shape[1]).to(self.stats["acceptance_rate"].device)
        kept = {} if self._latents is None else {name: value[:, index] for name, value in self._latents.items()}
        if self.inputs is not None and not kept:
            inputs = self.inputs[:, index]
            kept = {} if self.problem is None else self.problem.latents(inputs)
            kept = kept or {"inputs": inputs}
        return chain_groups(side_by_side(kept, len(self.shape) - 2))

    def generate(self, n: int | None = None, *, seed: int | None = None) -> Tensor:
        """Complete outputs ``[chains, draws or n, *batch, *output_shape]``.

        The observed part is as observed; the rest is generated from the latents with fresh noise.

        Args:
            n: outputs per chain, evenly spaced over its draws; None for one per draw.
            seed: seed of the fresh noise; None uses the run's.

        Raises:
            ArgumentError: the draws hold no inputs, or no problem to generate from, or an argument is out of range.
        """
        if self.problem is None:
            raise ArgumentError("these draws were loaded without their problem: Draws.load(path, problem=...)")
        if self.inputs is None:
            raise ArgumentError("these draws hold no inputs: sample(..., keep='inputs')")
        if not self.problem.can_complete:
            raise ArgumentError(f"a {type(self.problem).__name__} has no outputs to generate")
        inputs = self.inputs
        if n is not None:
            n = whole_number("generate", "n", n)
            allocatable("generate", "n", n, n * inputs[:, 0].numel(), "generate fewer", like=inputs)
            inputs = inputs[:, torch.arange(n, device=inputs.device) * inputs.shape[1] // n]
        seed = self.seed if seed is None else random_seed("generate", seed)
        rng = torch.Generator(inputs.device).manual_seed(_generation_seed(seed))
        return self.problem.complete(inputs, rng)

    def summary(self, names: Sequence[str] | str | None = None) -> "pandas.DataFrame":
        """One row per latent: ``mean, sd, hdi_3%, hdi_97%, mcse_mean, mcse_sd, ess_bulk, ess_tail, r_hat`` (ArviZ).

        All chains count alike: where :attr:`components` has several groups, a mean over them is not the posterior's.

        Args:
            names: names of latents; None for all.

        Raises:
            ArgumentError: no latent has such a name, or there are no latents.
        """
        az = _arviz()
        names = [names] if isinstance(names, str) else names
        if not self.latents:
            raise ArgumentError("summary(): there are no latents to summarise: the model's latents(u) names none")
        if names is not None and not (isinstance(names, Sequence) and set(names) <= set(self.latents)):
            raise ArgumentError(f"summary(names={names!r}): must be among the latents {', '.join(self.latents)}")
        with warnings.catch_warnings():
            # a constant column gives 0/0, which the table shows as NaN
            warnings.filterwarnings("ignore", message="invalid value encountered", category=RuntimeWarning)
            table = az.summary(
                self.to_arviz(),
                group="posterior",
                var_names=None if names is None else list(names),
                kind="all",
                round_to="none",
            )
        assert not isinstance(table, str)
        return table  # type: ignore[return-value]

    def stats_summary(self) -> "pandas.DataFrame":
        """One row per problem: the mean of every statistic over chains and draws, and the ``longest_stay`` of a chain.

        For example ``acceptance_rate``, ``slice_evaluations`` per transition, or the ``noise_acceptance_rate`` and
        ``target_acceptance_rate`` of :class:`Alternating`; of what is true or false, such as ``diverging``, the share.
        """
        import pandas

        columns = {name: value.double().mean((0, 1)) for name, value in self.stats.items()}
        columns["longest_stay"] = self.longest_stay.amax(0)
        return pandas.DataFrame({name: value.flatten().tolist() for name, value in columns.items()})

    def to_arviz(self) -> "arviz.InferenceData":
        """Latents as ``posterior``, statistics as ``sample_stats``, inputs as ``unconstrained_posterior``."""
        az = _arviz()

        batch = self.shape[2:]
        taken = [name for name in self.latents if names_dimension(name)]
        if taken:
            raise ArgumentError(f"a latent is named {taken[0]!r}, like a dimension of the draws: rename it")
        names = ["problem"] if len(batch) == 1 else [f"problem_{i}" for i in range(len(batch))]

        def dims(variables: dict[str, Tensor]) -> dict[str, list[str]]:
            def own(name: str, value: Tensor) -> list[str]:
                return [f"{name}_dim_{i}" for i in range(value.ndim - 2 - len(batch))]

            return {name: names + own(name, value) for name, value in variables.items()}

        def arrays(variables: dict[str, Tensor]) -> dict:
            return {name: value.detach().cpu().numpy() for name, value in variables.items()}

        with warnings.catch_warnings():
            # it suspects exchanged axes
            warnings.filterwarnings("ignore", message="More chains .* than draws", category=UserWarning)
            data = az.from_dict(
                posterior=arrays(self.latents),
                sample_stats=arrays(self.stats),
                dims=dims({**self.latents, **self.stats}),
                save_warmup=False,
            )
            if self.inputs is not None:
                inputs = {"inputs": self.inputs}
                data.add_groups({"unconstrained_posterior": arrays(inputs)}, dims=dims(inputs))
        data.attrs.update(
            format=_FORMAT,
            kernel=json.dumps(to_json(self.kernel)),
            seed=self.seed,
            interrupted=int(self.interrupted),
            ancestors=json.dumps(None if self.ancestors is None else self.ancestors.tolist()),
            torch_version=str(torch.__version__),
        )
        return data

    def save(self, path: str | os.PathLike) -> None:
        """Write a netCDF file (ArviZ's groups) atomically.

        Raises:
            ArgumentError: the file cannot be written; an older one stays as it was.
        """
        with complete_file(path) as part:
            data = self.to_arviz()
            energy = _last_energy(self.problem, self.inputs) if self._last_energy is None else self._last_energy
            if energy is not None:
                last = {"last_energy": energy.numpy()}
                data.add_groups({"constant_data": _arviz().dict_to_dataset(last, default_dims=[])})
            tree = data.to_datatree()
            compressed = {node.path: {name: {"zlib": True} for name in node.variables} for node in tree.subtree}
            # in memory first: HDF5 ends the process when its disk is full
            file = io.BytesIO()
            tree.to_netcdf(file, engine="h5netcdf", encoding={path: by for path, by in compressed.items() if by})
            part.write_bytes(file.getbuffer())

    @classmethod
    def load(cls, path: str | os.PathLike, problem: Any = None) -> "Draws":
        """Read what :meth:`save` wrote; only :meth:`generate` needs ``problem``.

        Raises:
            CheckpointError: the file is missing, damaged, or was not written by :meth:`save`.
            ArgumentError: the problem is not one, has inputs of another shape, or another observation or energy.

        A kernel whose class is not imported loads as a :class:`dgm_infer.kernels.stored.UnknownKernel`, with a warning.
        """
        import h5py

        az = _arviz()
        path = file_path("Draws.load", "path", path)
        if problem is not None and not isinstance(problem, Fibre | Target):
            problem = as_target(problem)
        if not path.is_file():
            raise CheckpointError(f"no draws at {path}: Draws.save(path) writes them")
        try:
            with h5py.File(path, "r") as file:
                _refuse_what_is_not_there(path, file)
            data = az.from_netcdf(os.fspath(path), engine="h5netcdf")
            attributes = dict(data.attrs)
            if attributes.get("format") != _FORMAT:
                raise CheckpointError(f"{path} was not written by Draws.save (format {attributes.get('format')!r})")
            groups = {
                name: {str(key): torch.from_numpy(array.values.copy()) for key, array in data[name].items()}
                for name in data.groups()
            }
            ancestors = json.loads(attributes.get("ancestors", "null"))
            draws = cls(
                inputs=groups.get("unconstrained_posterior", {}).get("inputs"),
                latents=groups["posterior"],
                stats=groups["sample_stats"],
                kernel=from_json(json.loads(attributes["kernel"])),
                seed=int(attributes["seed"]),
                interrupted=bool(attributes["interrupted"]),
                problem=problem,
                ancestors=None if ancestors is None else torch.tensor(ancestors),
            )
            # files of earlier versions have none
            draws._last_energy = groups.get("constant_data", {}).get("last_energy")
        except (OSError, LookupError, ValueError, TypeError, AttributeError, MemoryError) as error:
            raise CheckpointError(f"{path} is damaged, or not a file of draws: {cause(error)}") from error
        if isinstance(draws.kernel, UnknownKernel):
            warnings.warn(f"{path}: {_UNKNOWN.format(draws.kernel.class_path)}", stacklevel=2)
        if problem is not None and draws.inputs is not None:
            _check_problem(path, problem, draws.kernel, draws.inputs, draws._last_energy)
            draws._follow(problem)
        return draws

    def _follow(self, problem: Any) -> None:
        """Move to the device of a problem."""
        like = reference(problem)
        if like is None or self.inputs is None:
            return
        self.inputs = self.inputs.to(like)
        self.stats = {name: value.to(like.device) for name, value in self.stats.items()}
        self._latents = self._latents and {name: value.to(like.device) for name, value in self._latents.items()}
        self.ancestors = None if self.ancestors is None else self.ancestors.to(like.device)

    def __repr__(self):
        names = ", ".join(self.latents) if self._latents or self.problem else "?"
        return f"Draws(chains, draws, *batch = {tuple(self.shape)}; latents {names})"


@cache
def _arviz():
    """ArviZ, imported when it is first needed and without its notice about version 1."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="\nArviZ is undergoing", category=FutureWarning)
        import arviz
    return arviz


def _refuse_what_is_not_there(path: os.PathLike, group: "h5py.Group") -> None:
    """Raise CheckpointError where HDF5 would read what the file does not hold: from other files, or out of nothing."""
    import h5py

    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise CheckpointError(f"{path} links to elsewhere at {name!r}: Draws.save writes no such file")
        item = group[name]
        if isinstance(item, h5py.Group):
            _refuse_what_is_not_there(path, item)
        elif isinstance(item, h5py.Dataset) and (item.external or item.is_virtual):
            raise CheckpointError(f"{path} takes {name!r} from another file: Draws.save writes no such file")
        elif isinstance(item, h5py.Dataset) and item.nbytes > _DENSEST * max(item.id.get_storage_size(), _SMALL):
            raise CheckpointError(
                f"{path} promises {item.nbytes / 2**30:.3g} GiB of {name!r}, far more than it holds: it is damaged"
            )


def longest_run(held: Tensor) -> Tensor:
    """Longest run of True along the second dimension, ``[chains, n, *batch] -> [chains, *batch]``."""
    run = longest = held.new_zeros((held.shape[0], *held.shape[2:]), dtype=torch.int64)
    for stayed in held.unbind(1):
        run = torch.where(stayed, run + 1, 0)
        longest = torch.maximum(longest, run)
    return longest


def names_dimension(name: str) -> bool:
    """Whether a latent's name is that of a dimension of :meth:`Draws.to_arviz`."""
    return name in ("chain", "draw") or name.startswith("problem")


def _generation_seed(seed: int) -> int:
    """Seed of a stream separate from that of ``sample(seed=seed)``, whose numbers would not be fresh noise."""
    digest = hashlib.sha256(f"generate {seed}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _last_energy(problem: Any, inputs: Tensor | None) -> Tensor | None:
    """Energy of a target at the last draws, ``[chains, *batch]``; None of others, and where it fails.

    A look at the draws must not cost them.
    """
    if inputs is None or not isinstance(problem, Target):
        return None
    like = reference(problem)
    last = inputs[:, -1]
    try:
        with torch.no_grad():
            return problem.energy(last if like is None else last.to(like)).detach().cpu().double()
    except Exception:
        return None


def _check_problem(
    path: str | os.PathLike, problem: Fibre | Target, kernel: Kernel, inputs: Tensor, last_energy: Tensor | None
) -> None:
    """Raise ArgumentError unless inputs ``[chains, draws, *batch, D]`` are draws of the problem."""
    expected = (*problem.batch_shape, problem.dim)
    if tuple(inputs.shape[2:]) != expected:
        raise ArgumentError(
            f"Draws.load(problem=...): {path} holds inputs of shape {tuple(inputs.shape[2:])}, the problem has "
            f"{expected}: give the problem that was sampled"
        )
    if isinstance(problem, Fibre):
        error = problem.constraint_error(inputs[:, -1].to(problem.values))
        if not (error < max(_NEAR, 10 * (getattr(kernel, "tolerance", None) or 0)) * problem.scale).all():
            raise ArgumentError(
                f"Draws.load(problem=...): the draws in {path} miss its observation by {error.max():.2g}: give the "
                "problem that was sampled"
            )
    energy = _last_energy(problem, inputs)
    if energy is not None and last_energy is not None:
        error = (energy - last_energy).abs()
        if (error > _NEAR * last_energy.abs().clamp_min(1)).any():
            raise ArgumentError(
                f"Draws.load(problem=...): the energy at the draws in {path} differs from that of the run by "
                f"{error.max():.2g}: give the problem that was sampled"
            )
