"""``Draws``: positions and statistics of a sampling run, its diagnostics and its file."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import allocatable, file_path, flag, function, mapping, names_of, other_seed, random_seed, whole_number
from ..autodiff.xla import compiler_version
from ..conditioning.fibre import Fibre
from ..diagnosis import Diagnosis
from ..errors import ArgumentError, CheckpointError, cause, warn
from ..files import complete_file
from ..kernels import Kernel
from ..kernels.mode_jumps import Jumps, ModeJumps
from ..target import Target, as_target, reference
from . import show
from .chain_groups import Basins, basins, group_chains, longest_run, looks, side_by_side
from .diagnose import diagnose
from .inference_data import inference_data, read_draws, summarised, write_draws
from .predictive import CalledProgram, observed_data, predicted, program_of
from .show import NamedTensors
from .stored import UnknownKernel, check_problem, from_json, known_problem, packed, to_json, unpacked

if TYPE_CHECKING:
    import arviz
    import pandas
    from matplotlib.figure import Figure

__all__ = ["Draws"]

_FORMAT = "dgm-infer draws 1"
_OTHERS: dict[str, str] = dict.fromkeys(
    (".png", ".jpg", ".jpeg", ".pdf", ".svg"), "give a name.nc; draws.plot().savefig(path) draws"
)
_OTHERS |= {".csv": "give a name.nc; draws.summary().to_csv(path) writes the table"}
_UNKNOWN = "its kernel {} is not available here; import the module that defines it before loading"


class Draws:
    """Result of :func:`sample`.

    Attributes:
        inputs: ``[chains, draws, *batch, Du]``, or None if only latents were kept.
        stats: per-draw statistics, each ``[chains, draws, *batch]``: ``acceptance_rate``, ``diverging``,
            ``n_steps``, ``step_size``, ``energy``; on a fibre also ``constraint_error``, ``projection_failed``,
            ``reversal_failed``, ``solver_iterations``; of chains that jump ``jump_acceptance``.
        kernel: the frozen, adapted kernel.
        seed: seed of the run.
        interrupted: whether the run was stopped before its last draw, by Ctrl-C or by an exception of the model.
        problem: the problem that was sampled; None after :meth:`load` without it.
        stopped_by: what ``sample(until=...)`` had reached when it ended; None of other runs, and of draws from a file.
        ancestors: ``[chains, *batch]``, the index of the prior draw that each chain descends from; None if each has its
            own. Chains with the same index share their start, so that R-hat compares fewer starts.
        modes: those that chains jump between, started in, or could have missed; None if none were looked for.
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
        modes: Jumps | None = None,
    ):
        self.inputs = inputs
        self.stats = stats
        self.kernel = kernel
        self.seed, self.problem, self.interrupted = seed, problem, interrupted
        self.ancestors, self.modes = ancestors, kernel.modes if isinstance(kernel, ModeJumps) else modes
        self.stopped_by: str | None = None
        self._latents = latents
        self._fingerprint: dict[str, Tensor] | None = None
        self._observed: dict[str, Tensor] | None = None

    @cached_property
    def latents(self) -> dict[str, Tensor]:
        """Latent variables by name, each ``[chains, draws, *batch, *shape]``."""
        if self._latents is not None:
            return NamedTensors(self._latents)
        with torch.no_grad():
            return NamedTensors(self.problem.latents(self.inputs))

    def __getitem__(self, name: str) -> Tensor:
        """A latent variable: ``draws["z"]`` is ``draws.latents["z"]``."""
        return NamedTensors(self.latents)[name]

    @property
    def _observed_data(self) -> dict[str, Tensor]:
        return observed_data(self.problem) if self._observed is None else self._observed

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
            # a single draw has no size to guess
            size = value.shape[same.ndim :].numel()
            same &= (value[:, 1:] == value[:, :-1]).reshape(*same.shape, size).all(-1)
        return longest_run(same)

    @cached_property
    def chain_groups(self) -> Tensor:
        """Group of each chain, by its latents, ``[chains, *batch]``; -1 where it cannot be told (math 5.7).

        Chains of different groups never overlap. How many chains a group has comes from the starting points: at best
        its Laplace mass (math 5.10). Summarise groups apart, ``draws.latents[name][draws.chain_groups == 0]``.
        """
        index = looks(self.shape[1]).to(self.stats["acceptance_rate"].device)
        kept = {} if self._latents is None else {name: value[:, index] for name, value in self._latents.items()}
        if self.inputs is not None and not kept:
            inputs = self.inputs[:, index]
            kept = {} if self.problem is None else self.problem.latents(inputs)
            kept = kept or {"inputs": inputs}
        return group_chains(side_by_side(kept, len(self.shape) - 2))

    def basins(self) -> Basins:
        """The modes that chains on a fibre are in, by the low points below their middle and last draws (math 5.9).

        Tells modes by few draws, where :attr:`chain_groups` needs chains that have settled: draws that go down the
        fibre to the same point are in one basin, and the two draws of a chain in one mode. Chains of different modes
        may still meet in a longer run. Takes about sixty Jacobians per chain.

        Raises:
            ArgumentError: these are not draws on a fibre with standard normal inputs, or hold no inputs or problem.
        """
        if not isinstance(self.problem, Fibre) or self.inputs is None:
            raise ArgumentError("basins() are of draws on a fibre, with their problem and inputs")
        n = self.shape[1]
        return basins(self.problem, self.inputs[:, [(n - 1) // 2, n - 1]].movedim(1, 0))

    def diagnose(self) -> Diagnosis:
        """What is wrong with these draws, how bad it is and what to do, worst first; falsy if nothing is (math 8.6).

        One finding per cause: R-hat is not reported of problems whose draws are useless or in separate groups, nor
        effective draws where R-hat shows that chains have not mixed. R-hat and effective sample sizes are the
        rank-normalised ones (Vehtari et al. 2021, doi:10.1214/20-BA1221), and the energies are judged by E-BFMI
        (Betancourt 2016, arXiv:1604.00695). Draws that were loaded without their problem are not compared with the
        observation. Like :meth:`summary`, it takes milliseconds per latent and problem.

        Example:
            >>> print(draws.diagnose())  # doctest: +SKIP
            >>> if findings := draws.diagnose():  # doctest: +SKIP
            ...     print(findings[0].remedy)
        """
        # the inputs of a model that names no latents
        inputs = {} if self.inputs is None else {"inputs": self.inputs}
        # derivatives are compared, which a caller's inference mode has none of
        with torch.inference_mode(False):
            return diagnose(self, self.latents or inputs)

    def generate(self, n: int | None = None, *, seed: int | None = None, mean: bool = False) -> Tensor:
        """Complete outputs ``[chains, draws or n, *batch, *output_shape]``.

        The observed part is as observed; the rest is generated from the latents with fresh noise.

        Args:
            n: outputs per chain, evenly spaced over its draws; None for one per draw.
            seed: seed of the fresh noise; None uses the run's.
            mean: leave out the noise that the model adds to its outputs, as a decoder's: the rest is then its mean.

        Raises:
            ArgumentError: the draws hold no inputs, or no problem to generate from, or an argument is out of range.
            ModelError: ``mean`` of a model whose noise is not known to be added.
        """
        if self.problem is None:
            raise ArgumentError("these draws were loaded without their problem: Draws.load(path, problem=...)")
        if self.inputs is None:
            raise ArgumentError("these draws hold no inputs: sample(..., keep='inputs')")
        if not self.problem.can_complete:
            raise ArgumentError(f"a {type(self.problem).__name__} has no outputs to generate")
        flag("generate", "mean", mean)
        inputs = _evenly_spaced("generate", n, self.inputs)
        seed = self.seed if seed is None else random_seed("generate", seed)
        rng = torch.Generator(inputs.device).manual_seed(other_seed("generate", seed))
        return self.problem.complete(inputs, rng, mean=True) if mean else self.problem.complete(inputs, rng)

    def predictive(
        self,
        program: Callable[..., Any] | None = None,
        *args: Any,
        n: int | None = None,
        seed: int | None = None,
        fresh: Sequence[str] | str = (),
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Posterior predictive values of a Pyro program by name, each ``[chains, draws or n, *batch, *shape]``.

        ``y' ~ p(y | z)``: the program runs once per draw, with its latent variables z from the draws; every other
        statement is drawn again, in the program's order, as by ``pyro.infer.Predictive``. So ``y`` is a new data set
        given the latents, whether it was observed hard or softly; a deterministic observation repeats what was
        observed, unless the program draws noise with torch, which is drawn again.

        Args:
            program: None for that of the model, which gives what was observed; another one gives all statements that
                the draws do not hold, and its deterministic values.
            args: other arguments to call it with, such as new covariates. With any, ``program=None`` is the model's
                program called with these, and gives its deterministic values too.
            n: values per chain, evenly spaced over its draws; None for one per draw.
            seed: seed of all that is drawn; None uses the run's.
            fresh: latents to draw again from the program given the others, such as effects of new groups.
            kwargs: other arguments by name; those called n, seed or fresh are given by position.

        Raises:
            ArgumentError: there is no program, or none of its statements is a latent of these draws, or one has another
                shape in it.
            ModelError: the program fails, or has a discrete latent variable that was summed out.
        """
        if program is not None:
            source = CalledProgram(
                function("predictive", "program", program, "def program(x)"), args, kwargs, is_new=True
            )
        else:
            source = program_of(self.problem)
            if source is None:
                why = "were loaded without their problem" if self.problem is None else "are not those of a Pyro program"
                raise ArgumentError(f"predictive(program=None): these draws {why}: give the program that has the data")
            if args or kwargs:
                source = CalledProgram(source.program, args, kwargs, is_new=True)
        latents = {name: _evenly_spaced("predictive", n, value) for name, value in self.latents.items()}
        seed = other_seed("predictive", self.seed if seed is None else random_seed("predictive", seed))
        return predicted(latents, len(self.shape), source, (fresh,) if isinstance(fresh, str) else tuple(fresh), seed)

    def summary(self, names: Sequence[str] | str | None = None) -> "pandas.DataFrame":
        """One row per latent: ``mean, sd, hdi_3%, hdi_97%, mcse_mean, mcse_sd, ess_bulk, ess_tail, r_hat`` (ArviZ).

        All chains count alike: where :attr:`chain_groups` has several groups, a mean over them is not the posterior's.

        Args:
            names: names of latents; None for all.

        Raises:
            ArgumentError: no latent has such a name, or there are no latents.
        """
        names = None if names is None else names_of("summary", "names", names, self.latents)
        if not self.latents:
            raise ArgumentError("summary(): there are no latents to summarise: the model's latents(u) names none")
        return summarised(self.to_arviz(), names)

    def plot(
        self, kind: show.Kind = "trace", names: Sequence[str] | str | None = None, *, n: int = 6, originals: Any = None
    ) -> "Figure":
        """ArviZ's plots of the ``n`` entries of latents with the largest R-hat: ``draws.plot().savefig("x.png")``.

        Args:
            kind: which of ArviZ's plots, ``arviz.plot_trace`` and so on; or ``"pictures"``, a row per problem of what
                was observed, ``n`` completions, their mean and their standard deviation.
            names: names of latents to choose from; None for all.
            n: entries or completions shown.
            originals: complete pictures ``[*batch, *output_shape]``, if they are known, for the rows of ``"pictures"``.

        Raises:
            ArgumentError: there is no such latent, or a single draw; or these are not draws of pictures.
        """
        return show.plot(self, kind, names, n=n, originals=originals)

    def _repr_html_(self) -> str:
        return show.html(self)

    def stats_summary(self) -> "pandas.DataFrame":
        """One row per problem: the mean of every statistic over chains and draws, and the ``longest_stay`` of a chain.

        For example ``acceptance_rate``, ``slice_evaluations`` per transition, or the ``noise_acceptance_rate`` and
        ``target_acceptance_rate`` of :class:`Alternating`; of what is true or false, such as ``diverging``, the share.
        """
        import pandas

        columns = {name: value.double().mean((0, 1)) for name, value in self.stats.items()}
        columns["longest_stay"] = self.longest_stay.amax(0)
        return pandas.DataFrame({name: value.flatten().tolist() for name, value in columns.items()})

    def to_arviz(self, predictive: Mapping[str, Tensor] | bool = False) -> "arviz.InferenceData":
        """Latents as ``posterior``, statistics as ``sample_stats``, inputs as ``unconstrained_posterior``.

        Of ArviZ 0.2x an ``InferenceData``; since version 1, which has none, the same groups as an ``xarray.DataTree``.

        Draws of a Pyro program also have ``observed_data``, under the names of its statements.

        Args:
            predictive: what :meth:`predictive` gave, for the group ``posterior_predictive``; True to draw it here.

        Raises:
            ArgumentError: a variable is named like a dimension of the draws, or predictive values have other chains.
        """
        given = self.predictive() if predictive is True else None if predictive is False else predictive
        data = inference_data(
            self.latents,
            self.stats,
            len(self.shape) - 2,
            inputs=self.inputs,
            predictive=mapping("to_arviz", "predictive", given, "draws.predictive()"),
            observed=self._observed_data,
        )
        jumps = isinstance(self.kernel, ModeJumps)
        data.attrs.update(
            format=_FORMAT,
            kernel=json.dumps(to_json(self.kernel)),
            seed=self.seed,
            interrupted=int(self.interrupted),
            ancestors=json.dumps(None if self.ancestors is None else self.ancestors.tolist()),
            modes=json.dumps(None if self.modes is None or jumps else to_json(self.modes)),
            torch_version=str(torch.__version__),
            jax_version=compiler_version(),
        )
        return data

    def save(self, path: str | os.PathLike) -> None:
        """Write a netCDF file (ArviZ's groups) atomically.

        Raises:
            ArgumentError: the file cannot be written, or its ending is of another format; an older one stays as it was.
        """
        if (ending := file_path("save", "path", path).suffix.lower()) in _OTHERS:
            raise ArgumentError(f"save(path={os.fspath(path)!r}): draws are netCDF, not {ending}: {_OTHERS[ending]}")
        known = known_problem(self.problem) if self._fingerprint is None else self._fingerprint
        with complete_file(path) as part:
            write_draws(part, self.to_arviz(), {} if known is None else {"fingerprint": packed(known).numpy()})

    @classmethod
    def load(cls, path: str | os.PathLike, problem: Any = None) -> "Draws":
        """Read what :meth:`save` wrote; only :meth:`generate` needs ``problem``.

        Raises:
            CheckpointError: the file is missing, damaged, or was not written by :meth:`save`.
            ArgumentError: the problem is not one, has inputs of another shape, or another observation or energy.

        A kernel whose class is not imported loads as an ``UnknownKernel``, with a warning.
        """
        path = file_path("Draws.load", "path", path)
        if problem is not None and not isinstance(problem, Fibre | Target):
            problem = as_target(problem)
        if not path.is_file():
            raise CheckpointError(f"no draws at {path}: Draws.save(path) writes them")
        try:
            attributes, groups = read_draws(path, _FORMAT)
            ancestors, modes = (json.loads(attributes.get(name, "null")) for name in ("ancestors", "modes"))
            draws = cls(
                inputs=groups.get("unconstrained_posterior", {}).get("inputs"),
                latents=groups["posterior"],
                stats=groups["sample_stats"],
                kernel=from_json(json.loads(attributes["kernel"])),
                seed=int(attributes["seed"]),
                interrupted=bool(attributes["interrupted"]),
                problem=problem,
                ancestors=None if ancestors is None else torch.tensor(ancestors),
                modes=None if modes is None else from_json(modes),
            )
            draws._fingerprint = unpacked(groups.get("constant_data", {}).get("fingerprint"))
            draws._observed = None if problem is not None else groups.get("observed_data", {})
        except (OSError, LookupError, ValueError, TypeError, AttributeError, MemoryError) as error:
            raise CheckpointError(f"{path} is damaged, or not a file of draws: {cause(error)}") from error
        if isinstance(draws.kernel, UnknownKernel):
            warn(f"{path}: {_UNKNOWN.format(draws.kernel.class_path)}")
        if problem is not None:
            check_problem("Draws.load", path, problem, draws._fingerprint, draws.inputs)
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


def _evenly_spaced(call: str, n: int | None, values: Tensor) -> Tensor:
    """``n`` of the draws of ``[chains, draws, ...]``; all for None."""
    if n is None:
        return values
    n = whole_number(call, "n", n)
    allocatable(call, "n", n, n * values[:, 0].numel(), "generate fewer", like=values)
    return values[:, torch.arange(n, device=values.device) * values.shape[1] // n]
