"""``check()``: a report of the faults of a generator, or of conditioning it on some data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..arguments import positive, whole_number
from ..errors import DgmInferError
from ..models import (
    GenerativeModel,
    LatentVariableModel,
    MeanOfDecoder,
    as_generative_model,
    base_distribution,
    is_discrete,
)
from .condition import bind, pixels_only
from .derivatives import Spectrum, check_derivatives, spectrum, tame_draws
from .faults import (
    STRUCTURE_DRAWS,
    check_declared,
    check_log_factor,
    check_mode,
    check_outputs,
    check_randomness,
    check_range,
    check_rows,
    check_values,
    device_of,
    frozen_copy,
    prior_draws,
)
from .fibre import Fibre
from .kinks import JUMP, find_jump, find_kinks, named_kinks
from .magnitude import far_data
from .measurement import ObservedMeasurement
from .observations import Bound
from .observed import ObservedModel, observed_model
from .operators import Everything
from .solve import damped_gauss_newton

__all__ = ["Finding", "Report", "check"]

# Ratio of singular values from which a report mentions it.
BADLY_CONDITIONED = 300.0
# Steps of the least squares that say how far data are from the model.
_FITS = 30
# Misfit that is none, as a share of the noise proposed without data.
_EXACT = 1e-3


@dataclass(frozen=True)
class Finding:
    """One fault or note."""

    code: str
    """The check that found it: model, observed, hidden_randomness, training_mode, batch_statistics, output_range,
    structure, observations, observations_range, prior_mass, rank, too_many_observations, conditioning, kinks,
    derivatives, discrete."""
    severity: str
    """``error``: conditioning fails or is wrong; ``warning``: it may be; ``note``: good to know."""
    words: str
    """A description, with numbers and a remedy."""


@dataclass(frozen=True)
class Report:
    """Result of :func:`check`; truthy if there are no errors."""

    model: str
    findings: tuple[Finding, ...]
    n_inputs: int | None = None
    n_outputs: int | None = None
    """Number of outputs, with data that of observed ones."""
    rank: int | None = None
    """Largest rank of their Jacobian at prior draws; None if it was not computed."""

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings and notes."""
        return not any(finding.severity == "error" for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of errors and warnings."""
        return tuple(finding.code for finding in self.findings if finding.severity != "note")

    def __str__(self) -> str:
        sizes = [
            f"{value} {name}" if name != "rank" else f"rank {value}"
            for name, value in (("inputs", self.n_inputs), ("outputs", self.n_outputs), ("rank", self.rank))
            if value is not None
        ]
        verdict = "no fault found" if not self.codes else f"{len(self.codes)} found"
        heading = f"{self.model}" + (f" ({', '.join(sizes)})" if sizes else "") + f": {verdict}"
        return "\n".join([heading, *(f"  {f.severity}, {f.code}: {f.words}" for f in self.findings)])

    __repr__ = __str__


@dataclass
class _Search:
    """The findings so far."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, code: str, severity: str, words: str) -> None:
        self.findings.append(Finding(code, severity, words))

    @contextmanager
    def error(self, code: str) -> Iterator[None]:
        """Turn an error raised in the block into a finding."""
        try:
            yield
        except DgmInferError as error:
            self.add(code, "error", str(error))

    @property
    def failed(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def found(self, *codes: str) -> bool:
        return any(finding.code in codes for finding in self.findings)


def check(model: GenerativeModel, observed=None, observe=None, *, noise: float | None = None, draws: int = 4) -> Report:
    """Report what would keep a generator from being conditioned.

    The checks run at prior draws, in float64 on the model's own device: training mode and batch statistics, hidden
    randomness, outputs outside the declared range, a structure that does not hold, the rank of the Jacobian, and
    whether reverse mode, forward mode and finite differences agree, and kinks that limit acceptance. With data also:
    whether they fit the model, reach the edge of its range, outnumber the rank, or vary by amounts of very different
    size. For a model of discrete outputs, the mean of its decoder is checked.

    Args:
        model: the generator; it is not changed.
        observed: the data, as for :func:`condition`; None for the generator alone.
        observe: the observation operator, as for :func:`condition`.
        noise: standard deviation of the measurement's noise, as for :func:`condition`.
        draws: number of prior draws at which derivatives are taken.

    Returns:
        a :class:`Report`: ``if not report: print(report)``.

    Raises:
        ArgumentError: ``draws`` is below 1, or ``noise`` not positive.
    """
    draws = whole_number("check", "draws", draws)
    noise = None if noise is None else positive("check", "noise", noise)
    search, name = _Search(), type(model).__name__

    def report(n_inputs: int | None = None, n_outputs: int | None = None, rank: int | None = None) -> Report:
        return Report(name, tuple(search.findings), n_inputs, n_outputs, rank)

    discrete = is_discrete(model)
    with search.error("model"):
        model = MeanOfDecoder(LatentVariableModel.of(model)) if discrete else as_generative_model(model)
        frozen = frozen_copy(model, torch.float64, device_of(model))
        check_declared(frozen)
    if search.failed:
        return report()
    u = prior_draws(frozen, max(draws, 2), torch.float64, device_of(model))
    _check_function(search, model, frozen, u)
    for key, share in frozen.lost_mass.items():
        search.add("prior_mass", "warning", f"{100 * share:.2g} % of the prior of {key} cannot be reached: it rounds")
    if search.found("observed"):
        return report(frozen.input_density.dim)
    size = torch.Size(frozen.output_shape).numel()
    with_data = observed is not None and not discrete
    bound: Bound | None = Bound(Everything(size), u.new_zeros(size))
    if isinstance(frozen, MeanOfDecoder):
        _check_discrete(search, name, frozen, observed, observe)
    elif with_data:
        frozen, bound = _check_data(search, frozen, observed, observe, noise)
    if bound is None or search.found("hidden_randomness", "batch_statistics", "observations"):
        # single rows have no derivatives, or the observed outputs are undefined
        return report(frozen.input_density.dim)
    reduced, n_outputs = observed_model(frozen, bound.operator), bound.values.shape[-1]
    with search.error("structure"):
        reduced.check_declaration(prior_draws(frozen, STRUCTURE_DRAWS, u.dtype, u.device))
    data = bound.values if with_data else None
    u = tame_draws(reduced, draws, data, u)
    if not len(u):
        search.add("observed", "note", "outputs overflow at every prior draw tried, so that no derivative was taken")
    elif not search.found("structure"):
        with search.error("derivatives"):
            check_derivatives(reduced, u, data)
    if not len(u) or search.found("structure", "derivatives"):
        return report(reduced.dim, n_outputs)
    sizes = spectrum(reduced, u, data)
    if not discrete:
        _check_rank(search, reduced, u, sizes.rank, n_outputs, data)
        if not search.failed:
            _check_geometry(search, reduced, u, sizes, with_data)
    return report(reduced.dim, n_outputs, sizes.rank)


def _check_function(search: _Search, model: GenerativeModel, frozen: GenerativeModel, u: Tensor) -> None:
    """Whether ``observed`` and the log factor are deterministic functions of each row, of the right shapes."""
    with search.error("observed"):
        x = check_outputs(frozen, u)
        check_log_factor(frozen, u)
        with search.error("output_range"):
            check_range(frozen, x)
        with search.error("hidden_randomness"):
            check_randomness(frozen, u)
        if not search.found("hidden_randomness"):
            # with hidden randomness all evaluations differ
            with search.error("training_mode"):
                check_mode(model, frozen, u)
            with search.error("batch_statistics"):
                check_rows(frozen, u)


def _check_data(
    search: _Search, frozen: GenerativeModel, observed, observe, noise: float | None
) -> tuple[GenerativeModel, Bound | None]:
    """The model whose outputs are observed, with their noise, and what is observed of them."""
    bound = None
    with search.error("observations"):
        bound = bind(frozen, observed, observe, torch.float64, device_of(frozen))
        if noise is not None:
            measured = ObservedMeasurement.of(frozen, bound.operator, noise, bound.values.shape[-1])
            frozen, bound = measured.model, Bound(measured.operator, bound.values)
    if bound is not None:
        u = prior_draws(frozen, STRUCTURE_DRAWS, torch.float64, device_of(frozen))
        with torch.no_grad():
            far = far_data(frozen, bound.operator, bound.values, frozen.observed(u))
        if far is not None:
            search.add("observations_range", "error" if far.certain else "warning", far.words)
    if bound is not None and not search.found("observations_range"):
        with search.error("observations_range"):
            check_values(frozen, bound.operator, bound.values)
        # the first problem represents all, though each may have its own mask
        bound = Bound(bound.operator.first(), bound.values.reshape(-1, bound.values.shape[-1])[0])
    return frozen, bound


def _check_discrete(search: _Search, name: str, frozen: MeanOfDecoder, observed, observe) -> None:
    search.add(
        "discrete",
        "note",
        f"the outputs of this {name} are discrete: condition() gives the posterior of its latents, given the pixels "
        "that pixels(mask) names",
    )
    if observed is None:
        return
    with search.error("observations"):
        selection, values = bind(frozen, observed, pixels_only(observe, name), torch.float64, device_of(frozen))
    if search.found("observations"):
        return
    batch, size = values.shape[:-1], torch.Size(frozen.output_shape).numel()
    with torch.no_grad():
        likelihood = frozen.decoder(values.new_zeros(*batch, frozen.input_density.dim))
    images = selection.complete(values, values.new_zeros(*batch, size))
    support = base_distribution(likelihood).support
    assert support is not None
    possible = support.check(images.reshape(*batch, *likelihood.event_shape)).reshape(images.shape)
    wrong = values[~selection(possible)]
    if len(wrong):
        search.add(
            "observations_range",
            "error",
            f"{len(wrong)} of {values.numel()} observed values lie outside the decoder's support, such as "
            f"{wrong[0].item():g}: binarise the images",
        )


def _misfit(reduced: ObservedModel, u: Tensor, values: Tensor, rank: int) -> float:
    """Standard deviation of noise by the residual of least squares: the least one of searches from ``u [draws, D]``."""
    fibre = Fibre(reduced, values)
    tolerance = u.new_full((len(u),), 1e-8)
    points, _ = damped_gauss_newton(fibre.rows(len(u)), u, tolerance=tolerance, max_iterations=_FITS)
    with torch.no_grad():
        squares = reduced.residual(points, values).square().sum(-1)
    return (squares.nan_to_num(torch.inf).min() / max(values.shape[-1] - rank, 1)).sqrt().item()


def _check_rank(
    search: _Search, reduced: ObservedModel, u: Tensor, rank: int, n_outputs: int, data: Tensor | None
) -> None:
    if rank == n_outputs or (rank == reduced.dim and data is None):
        return
    with torch.no_grad():
        sd = 0.05 * reduced.outputs(u).std(-1).mean().item()
    # data that the model fits exactly say nothing of their noise
    if data is not None and _EXACT * sd < (misfit := _misfit(reduced, u, data, rank)) < torch.inf:
        sd = misfit
    sd = f"{sd:.2g}"
    noise = f"WithNoise(model, sd={sd})"
    if data is not None:
        search.add(
            "too_many_observations",
            "error",
            f"{n_outputs} observed values, but the Jacobian of these has rank {rank} at prior draws ({reduced.dim} "
            f"inputs): no exact posterior exists; observe at most {rank}, or allow for noise of the measurement, "
            f"condition(..., noise={sd}), or of the output, {noise}",
        )
    else:
        search.add(
            "rank",
            "warning",
            f"the Jacobian of the {n_outputs} outputs has rank {rank} at prior draws, of {reduced.dim} inputs "
            f"(normalised latents lose one): at most {rank} values can be observed exactly, more with {noise}",
        )


def _check_geometry(search: _Search, reduced: ObservedModel, u: Tensor, sizes: Spectrum, with_data: bool) -> None:
    """What makes constrained chains slow: outputs that hardly vary beside others, and kinks."""
    if with_data and sizes.condition > BADLY_CONDITIONED:
        search.add(
            "conditioning",
            "note",
            f"some combinations of the observed values hardly vary: the singular values of their Jacobian range from "
            f"{sizes.largest:.2g} to {sizes.smallest:.2g}, so that an error of 1e-8 in the data moves inputs by "
            f"{1e-8 / sizes.smallest:.1g}; data that the model did not generate are hard to reach exactly: observe "
            "fewer values, or allow for noise of the measurement, condition(..., noise=sd)",
        )
    # on a fibre, or as many outputs as could define one
    n_rows = sizes.rank if with_data else max(1, sizes.rank // 2)
    if (kinks := find_kinks(reduced, u, n_rows)) is not None:
        search.add("kinks", "warning", kinks.words)
    elif not named_kinks(reduced.model) and (jump := find_jump(reduced.outputs, u, u.roll(1, 0))) is not None:
        search.add("kinks", "warning", f"the Jacobian jumps, by {100 * jump:.0f} % {JUMP}")
