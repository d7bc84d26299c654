"""``Evidence``: estimates of log Z with their errors, status, diagnostics and weighted draws; ``compare()`` of two."""

import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..arguments import file_path, fraction, function, instance
from ..arguments.values import of_problems
from ..diagnosis import Diagnosis, diagnosis, finding
from ..errors import ArgumentError, CheckpointError, cause
from ..files import read_arrays, write_file
from ..html import block, table, text
from .estimators import exceeded, welch
from .method import EstimateStatus
from .warnings import further_findings, run_warnings

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_FORMAT = "dgm-infer evidence 1"
_Result = TypeVar("_Result")


class Expectation(NamedTuple):
    """A weighted mean over the draws, each ``[*batch, ...]``."""

    value: Tensor
    std_error: Tensor
    """From the spread over chains."""


@dataclass(eq=False, kw_only=True, repr=False)
class Evidence:
    """Result of :func:`log_evidence`.

    ``status`` says what the numbers are:

    - ``"unbiased"``: ``E[exp(log_z)] = Z``; log_z itself is too low by ``-bias`` on average.
    - ``"consistent"``: log_z converges to log Z as chains lengthen.
    - ``"lower"``: the expectation of log_z is at most log Z.
    - ``"upper"``: the expectation of log_z is at least log Z.
    - ``"heuristic"``: an upper bound, or an estimate that uses one, from inexact draws.

    Attributes:
        log_z: ``[*batch]``, float64 like all estimates.
        std_error: standard error of ``log_z``, from the spread over chains, ``[*batch]``. With a base that is the
            target up to a constant all weights are equal, and it is that of rounding, 1e-15: right where the draws
            cover the target. Mass that no draw meets is not in it: see ``unseen_modes`` and ``plateaus``.
        bias: estimated ``E[log_z] - log Z``, ``[*batch]``; NaN if unknown. ``log_z`` is not corrected for it.
        dof: degrees of freedom of the standard error.
        status: as above.
        method: the method's name.
        diagnostics: by name: ``ess`` and ``max_weight_share`` of the weights at the target, ``acceptance``,
            ``gradient_evaluations`` (per chain and problem, including ``pilot_evaluations``), ``seconds``,
            ``effective_chains`` by their shares of the weight, ``unseen_modes`` and ``unseen_shift`` (modes that no
            draw has visited, and what they add to log Z, if more than the error without them), ``energy_spacing``
            (nats between neighbouring numbers of the size of the energies at the draws), ``plateaus`` (share of prior
            draws where the likelihood is flat and far below the posterior's), ``switches`` (share of inputs without a
            gradient that change it all the same when they are redrawn), ``wide_shift`` (by how much log Z is
            larger by independent points around the draws, if more than by chance), ``neck_shift`` (the same along a
            direction in which the density narrows and rises), ``drift`` of tempering (by how much
            log Z is larger in the second half of the run, if more than by chance; part of ``std_error``). Annealing
            adds ``lost_chains``; tempering ``base_moment_error`` and related checks, ``beta_occupancy [10, *batch]``,
            ``round_trips``, ``log_zeta``; SMC ``lost_chains``, ``temperatures``, ``run_std_error`` if waste-free, and
            its ``max_weight_share`` is the largest share of a run.
        draws: weighted draws of the target ``[chains, draws, *batch, D]``; None if not kept.
        log_weights: ``[chains, draws, *batch]``.
        seed: seed of the run.
        interrupted: whether Ctrl-C ended the run: chains may be shorter, and problems without an estimate are NaN.
    """

    log_z: Tensor
    std_error: Tensor
    bias: Tensor
    dof: int
    status: EstimateStatus
    method: str
    diagnostics: dict[str, Any]
    draws: Tensor | None
    log_weights: Tensor
    seed: int
    interrupted: bool = False

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of ``log_z +- t std_error``, Student's t of ``dof`` degrees of freedom: each ``[*batch]``."""
        return _interval(self.log_z, self.std_error, torch.tensor(self.dof), level)

    def expectation(self, f: Callable[[Tensor], Tensor]) -> Expectation:
        """Expectation under the target from all weighted draws, ``sum w f / sum w``, a ratio of sums over all chains.

        Args:
            f: ``[chains, draws, *batch, D] -> [chains, draws, *batch, ...]``.

        Raises:
            ArgumentError: the draws were not kept, or f changes their leading dimensions.
        """
        if self.draws is None:
            raise ArgumentError("this evidence holds no draws: log_evidence(..., keep_draws=True)")
        function("expectation", "f", f, "lambda x: x")
        shape, values = self.log_weights.shape, f(self.draws)
        if not isinstance(values, Tensor) or values.shape[: len(shape)] != shape:
            what = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"type {type(values).__name__}"
            raise ArgumentError(
                f"expectation(f): f returns {what}: expected a tensor of shape {tuple(shape)} and what follows"
            )
        values = values.double()
        weights = (self.log_weights - self.log_weights.amax((0, 1))).exp()
        weights = weights.reshape(*shape, *[1] * (values.ndim - len(shape)))
        n = shape[0]
        numerators = torch.where(weights > 0, weights * values, 0).sum(1)
        denominators = weights.sum(1)
        total = denominators.sum(0)
        value = numerators.sum(0) / total
        residual = (numerators - value * denominators) / (total / n)
        error = (residual.square().sum(0) / ((n - 1) * n)).sqrt() if n > 1 else torch.full_like(value, math.nan)
        return Expectation(value, error)

    def diagnose(self) -> Diagnosis:
        """What is wrong with these estimates, how bad it is and what to do, worst first; falsy if nothing is.

        It has what :func:`log_evidence` warns of, and adds interrupted runs, problems without an estimate, base moments
        that tempering does not recover, weights of which one draw has most, and standard errors above one nat. That a
        bound is not tight is not a fault.
        """
        tensors = {name: value for name, value in self.diagnostics.items() if isinstance(value, Tensor)}
        chains = len(self.log_weights)
        found = list(run_warnings(tensors, self.std_error, self.status, chains))
        found += further_findings(tensors, self.std_error, self.status, chains)
        known = self.log_z.isfinite()
        if (lost := ~known).any():
            why = "the run was interrupted before it: run it again" if self.interrupted else "choose a wider base"
            what = f"there is no estimate{of_problems(lost)} ({int(lost.sum())} of {lost.numel()} problems)"
            found.append(finding("useless", what, why, lost))
        if self.interrupted and known.any():
            what = f"the estimate{of_problems(known)} is from an interrupted run"
            remedy = "its chains may be shorter: run it again, unless the standard error suffices"
            found.append(finding("imprecise", what, remedy, known))
        numbers = [f"{self.status}, {chains} chains"]
        if known.any():
            numbers.append(f"standard error at most {self.std_error[known].max().item():.2g}")
            for name, words in (("effective_chains", "effective chains"), ("ess", "effective draws")):
                if name in tensors and tensors[name].shape == known.shape:
                    numbers.append(f"{words} at least {tensors[name][known].double().min().item():.3g}")
        return diagnosis(found, ", ".join(numbers))

    def to_dataframe(self, level: float = 0.95) -> "pandas.DataFrame":
        """One row per problem: ``log_z, std_error, bias, low, high, dof, status, method`` and scalar diagnostics."""
        import pandas

        low, high = self.interval(level)
        columns = {"log_z": self.log_z, "std_error": self.std_error, "bias": self.bias, "low": low, "high": high}
        shape = self.log_z.shape
        table: dict[str, Any] = {name: value.reshape(-1).cpu().numpy() for name, value in columns.items()}
        table |= {"dof": self.dof, "status": self.status, "method": self.method}
        for name, value in self.diagnostics.items():
            if not isinstance(value, Tensor):
                table[name] = value
            elif value.shape == shape:
                table[name] = value.reshape(-1).cpu().numpy()
        index = pandas.RangeIndex(shape.numel(), name="problem")
        if len(shape) > 1:
            names = [f"problem_{i}" for i in range(len(shape))]
            index = pandas.MultiIndex.from_product([range(n) for n in shape], names=names)
        return pandas.DataFrame(table, index=index)

    def save(self, path: str | os.PathLike) -> None:
        """Write a NumPy archive (``.npz``) atomically."""
        tensors = {"log_z": self.log_z, "std_error": self.std_error, "bias": self.bias, "log_weights": self.log_weights}
        if self.draws is not None:
            tensors["draws"] = self.draws
        names = ("dof", "status", "method", "seed", "interrupted")
        write_archive(path, _FORMAT, tensors, {name: getattr(self, name) for name in names}, self.diagnostics)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Evidence":
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the file is missing, damaged, or was not written by :meth:`save`.
        """
        return read_archive(cls, path, _FORMAT, "evidence", cls._fits, {"draws": None})

    @staticmethod
    def _fits(shapes: dict[str, tuple[int, ...]]) -> bool:
        batch, weights = shapes["log_z"], shapes["log_weights"]
        same = all(shapes[name] == batch for name in ("std_error", "bias"))
        return same and weights[2:] == batch and shapes.get("draws", (*weights, 1))[:-1] == weights

    def __repr__(self):
        shape = tuple(self.log_z.shape)
        if self.log_z.numel() == 1:
            number, error = f"log_z {self.log_z.item():.3f}", f" +- {self.std_error.item():.3f}"
        else:
            number = f"mean log_z {self.log_z.mean().item():.3f}"
            error = f", mean std_error {self.std_error.mean().item():.3f}"
        if len(self.log_weights) == 1 and self.std_error.isnan().all():
            error = ", no error from one chain"
        number += error
        return f"Evidence({self.method}, *batch = {shape}; {number}; {self.status})"

    def _repr_html_(self) -> str:
        frame = self.to_dataframe().reset_index()
        parts = [f'<p class="said">{text(self)}</p>', f"<pre>{text(self.diagnose())}</pre>"]
        return block(*parts, table([*map(str, frame.columns)], frame.head(10).itertuples(index=False)))

    def plot(self, level: float = 0.95) -> "Figure":
        """``log_z`` with its interval, problem by problem: ``estimate.plot().savefig("log_z.png")``.

        Raises:
            ArgumentError: the level is not between 0 and 1.
        """
        low, high = self.interval(level)
        return intervals(self.log_z, low, high, f"log Z ({self.method}, {self.status})")


def write_archive(
    path: str | os.PathLike,
    form: str,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    diagnostics: dict[str, Any],
) -> None:
    """Write tensors, and a header with plain values, as a NumPy archive of this format, atomically."""
    plain = {name: value for name, value in diagnostics.items() if not isinstance(value, Tensor)}
    own = {f"diagnostics.{name}": value for name, value in diagnostics.items() if isinstance(value, Tensor)}
    header = np.array(json.dumps({"format": form, **numbers, "diagnostics": plain}))
    arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in (tensors | own).items()}
    file = io.BytesIO()
    np.savez_compressed(file, header=header, **arrays)
    write_file(path, file)


def read_archive(
    kind: type[_Result],
    path: str | os.PathLike,
    form: str,
    what: str,
    fits: Callable[[dict[str, tuple[int, ...]]], bool],
    absent: dict[str, Any] | None = None,
) -> _Result:
    """The result that :func:`write_archive` wrote, whose arguments are its tensors, its plain values and diagnostics.

    Args:
        kind: class of the result.
        what: its name in messages.
        fits: whether shapes by name are those of one result.
        absent: arguments of tensors that may be missing.

    Raises:
        CheckpointError: the file is missing, damaged, or of another format.
    """
    name = f"{kind.__name__}.save"
    path = file_path(f"{kind.__name__}.load", "path", path)
    if not path.is_file():
        raise CheckpointError(f"no {what} at {path}: {name}(path) writes it")
    try:
        arrays = read_arrays(path, fits)
        header = json.loads(str(arrays.pop("header")))
        found = header.pop("format", None)
        if found != form:
            raise CheckpointError(f"{path} was not written by {name} (format {found!r})")
        tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
        prefix = "diagnostics."
        diagnostics = {key.removeprefix(prefix): tensors.pop(key) for key in list(tensors) if key.startswith(prefix)}
        header["diagnostics"] = {**diagnostics, **header["diagnostics"]}
        return kind(**{**(absent or {}), **tensors, **header})
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged, or was not written by {name}: {cause(error)}") from error


# Which bound the difference of two results is: that of the first, and the other side of the second.
_LOWER, _UPPER = {"lower", "unbiased", "consistent"}, {"upper", "unbiased", "consistent"}


@dataclass(frozen=True, eq=False)
class Comparison:
    """``log Z_a - log Z_b`` of the same problems under two targets, such as two models.

    Attributes:
        difference: ``[*batch]``; NaN where either has no estimate.
        std_error: from the chains of both, ``sqrt(e_a^2 + e_b^2)``, ``[*batch]``.
        dof: degrees of freedom of ``std_error`` (Welch), ``[*batch]``.
        status: ``"consistent"``; ``"lower"`` or ``"upper"`` if a bound of one makes the difference one;
            ``"heuristic"`` if two bounds leave its sign open.
    """

    difference: Tensor
    std_error: Tensor
    dof: Tensor
    status: EstimateStatus

    @property
    def mean(self) -> float:
        """Mean difference over problems with estimates."""
        return float(self._known.mean())

    @property
    def mean_std_error(self) -> float:
        """Its standard error over problems like these: from the spread of the differences, in which the chains' errors
        are; from the chains for a single problem."""
        known = self._known
        if len(known) == 1:
            return float(self.std_error[self.difference.isfinite()])
        return float(known.std() / math.sqrt(len(known)))

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of ``difference +- t std_error``, each ``[*batch]``."""
        return _interval(self.difference, self.std_error, self.dof, level)

    @property
    def _known(self) -> Tensor:
        return self.difference[self.difference.isfinite()].double()

    def __repr__(self):
        n = self.difference.numel()
        over = "" if n == 1 else f", mean and standard error over {len(self._known)} problems"
        return f"Comparison(log Z_a - log Z_b {self.mean:.3f} +- {self.mean_std_error:.3f}{over}; {self.status})"

    def _repr_html_(self) -> str:
        low, high = (end.flatten().tolist() for end in self.interval())
        rows = zip(
            range(10), self.difference.flatten().tolist(), self.std_error.flatten().tolist(), low, high, strict=False
        )
        head = ("problem", "difference", "std_error", "low", "high")
        return block(f'<p class="said">{text(self)}</p>', table(head, rows))

    def plot(self, level: float = 0.95) -> "Figure":
        """The difference with its interval, problem by problem: ``dgm.compare(a, b).plot()``.

        Raises:
            ArgumentError: the level is not between 0 and 1.
        """
        return intervals(self.difference, *self.interval(level), "log Z of a - log Z of b")


def _interval(value: Tensor, std_error: Tensor, dof: Tensor, level: float) -> tuple[Tensor, Tensor]:
    fraction("interval", "level", level)
    # without degrees of freedom the quantile is NaN
    half = exceeded(0.5 - level / 2, dof).to(std_error) * std_error
    return value - half, value + half


def intervals(value: Tensor, low: Tensor, high: Tensor, label: str) -> "Figure":
    """Values with the ends of their intervals, each ``[*batch]``, problem by problem."""
    from matplotlib.figure import Figure

    middle, below, above = (x.detach().double().cpu().flatten().numpy() for x in (value, value - low, high - value))
    figure = Figure(figsize=(min(4 + 0.15 * len(middle), 12), 3.2), layout="constrained")
    axis = figure.add_subplot()
    axis.errorbar(range(len(middle)), middle, [below, above], fmt="o", markersize=3, capsize=2)
    axis.set_xlabel("problem")
    axis.set_ylabel(label)
    return figure


def compare(a: Evidence, b: Evidence) -> Comparison:
    """The difference of two estimates of log Z with its error, problem by problem.

    What problems have in common, such as an image that is unlikely under both models, drops out of the differences, so
    that their mean is known better than either mean.

    Args:
        a, b: of the same problems in the same order, with separate random numbers (``seed``).

    Raises:
        ArgumentError: their batch shapes differ, or no problem has an estimate in both.
    """
    for name, value in (("a", a), ("b", b)):
        instance("compare", name, value, Evidence, "log_evidence(target)")
    if a.log_z.shape != b.log_z.shape:
        raise ArgumentError(
            f"compare(): batch shapes {tuple(a.log_z.shape)} and {tuple(b.log_z.shape)} must be equal: the same "
            "problems in the same order"
        )
    difference = a.log_z - b.log_z.to(a.log_z)
    if not difference.isfinite().any():
        raise ArgumentError("compare(): no problem has an estimate in both")
    variance, dof = welch(torch.stack([a.std_error, b.std_error.to(a.std_error)]), (a.dof, b.dof))
    # two errors of zero have no degrees of freedom of their own
    dof = dof.nan_to_num(float(max(min(a.dof, b.dof), 1)))
    return Comparison(difference, variance.sqrt(), dof, _status(a.status, b.status))


def _status(a: EstimateStatus, b: EstimateStatus) -> EstimateStatus:
    below, above = a in _LOWER and b in _UPPER, a in _UPPER and b in _LOWER
    if below and above:
        return "consistent"
    return "lower" if below else "upper" if above else "heuristic"
