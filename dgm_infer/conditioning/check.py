"""``check()``: a report of the faults of a generator, or of conditioning it on some data."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from ..arguments import context, whole_number
from ..arguments.values import plural
from ..diagnosis import Finding
from ..errors import DgmInferError
from ..html import block, table, text
from ..models import (
    GenerativeModel,
    LatentVariableModel,
    MeanOfDecoder,
    WithNoise,
    as_generative_model,
    base_distribution,
    is_discrete,
    reference_tensor,
)
from ..settings import Settings
from ..structures import Dense
from .checks import DATA_CHECKS, MODEL_CHECKS, findings, is_final
from .condition import bind, checked_noise, pixels_only
from .derivatives import (
    Spectrum,
    find_jump,
    find_kinks,
    jump_words,
    kinked_operations,
    named_kinks,
    spectrum,
    tame_draws,
)
from .fibre import Fibre
from .observations import Bound
from .observations import observe as as_observation
from .observed import ObservedModel
from .projection import damped_gauss_newton
from .subject import Subject


@dataclass(frozen=True)
class ReportSettings(Settings):
    """What a report mentions."""

    condition: float = 300.0
    """Ratio of singular values from which it does."""
    fits: int = 30
    """Steps of the least squares that say how far data are from the model."""
    exact: float = 1e-3
    """Misfit that is none, as a share of the noise proposed without data."""
    seconds: float = 0.1
    """Seconds per Jacobian and chain from which exact conditioning is called slow: a hundred transitions of ten steps
    then take minutes per chain."""


SETTINGS = ReportSettings()


@dataclass(frozen=True)
class Report:
    """Result of :func:`check`; truthy if there are no errors."""

    model: str
    findings: tuple[Finding, ...]
    """Their codes: model, observed, hidden_randomness, training_mode, batch_statistics, output_range, implausible,
    structure, derivatives, observations, observations_range, noise, too_many_observations; and of this report alone
    prior_mass, rank, conditioning, cost, kinks, discrete."""
    n_inputs: int | None = None
    n_outputs: int | None = None
    """Number of outputs, with data that of observed ones."""
    rank: int | None = None
    """Largest rank of their Jacobian at prior draws; None if it was not computed."""
    n_noise: int = 0
    """Number of inputs that are noise of single outputs."""

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
        return "\n".join([self._heading, *(f"  {f.severity}, {f.code}: {f}" for f in self.findings)])

    @property
    def _heading(self) -> str:
        counts = (("input", self.n_inputs), ("output", self.n_outputs))
        sizes = [plural(value, name) for name, value in counts if value is not None]
        if self.n_noise and self.n_inputs is not None:
            sizes[0] = f"{plural(self.n_inputs - self.n_noise, 'input')} + {self.n_noise} of noise"
        sizes += [] if self.rank is None else [f"rank {self.rank}"]
        verdict = "no fault found" if not self.codes else f"{len(self.codes)} found"
        return f"{self.model}" + (f" ({', '.join(sizes)})" if sizes else "") + f": {verdict}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(f.severity, f.what, f.remedy) for f in self.findings]
        return block(f'<p class="said">{text(self._heading)}</p>', table(("", "what", "remedy"), rows) if rows else "")


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
        a ``Report``, truthy if there are no errors, to print.

    Raises:
        ArgumentError: ``draws`` is below 1, or ``noise`` not positive.
    """
    context("check")
    draws = whole_number("check", "draws", draws)
    noise = None if noise is None else checked_noise("check", noise)
    found: list[Finding] = []
    name, discrete = type(model).__name__, is_discrete(model)

    def report(n_inputs: int | None = None, n_outputs: int | None = None, rank: int | None = None) -> Report:
        local = 0
        if n_inputs is not None and n_outputs is not None and isinstance(subject.reduced.model, WithNoise):
            local = n_inputs - subject.reduced.model.global_density.dim
        return Report(name, tuple(found), n_inputs, n_outputs, rank, local)

    try:
        model = MeanOfDecoder(LatentVariableModel.of(model)) if discrete else as_generative_model(model)
        subject = Subject.of(model, torch.float64, reference_tensor(model).device, max(draws, 2), thorough=True)
    except DgmInferError as error:
        found.append(Finding("error", str(error), code="model"))
        return report()
    found += findings(subject, MODEL_CHECKS)
    dim = subject.model.input_density.dim
    for key, share in subject.model.lost_mass.items():
        words = f"{100 * share:.2g} % of the prior of {key} cannot be reached: it rounds"
        found.append(Finding("warning", words, code="prior_mass"))
    if discrete:
        found.append(
            Finding(
                "note",
                f"the outputs of this {name} are discrete: condition() gives the posterior of its latents, given the "
                "pixels that pixels(mask) names",
                code="discrete",
            )
        )
    if is_final(found):
        return report(dim)
    try:
        seen = pixels_only(observe, name) if discrete else as_observation(observe)
        if observed is not None:
            bound = bind(subject.model, observed, seen if discrete else observe, torch.float64, subject.u.device)
            if not discrete:
                subject.observe(*bound, noise)
            elif fault := _outside_support(subject, bound):
                found.append(fault)
            _ = subject.reduced
    except DgmInferError as error:
        found.append(Finding("error", str(error), code="observations"))
        return report(dim)
    found += findings(subject, DATA_CHECKS)
    reduced, data = subject.first
    n_outputs = subject.x.shape[-1] if data is None else data.shape[-1]
    u = tame_draws(reduced, draws, data, subject.u)
    if is_final(found) or not len(u):
        return report(reduced.dim, n_outputs)
    began = time.perf_counter()
    sizes = spectrum(reduced, u, data)
    seconds = (time.perf_counter() - began) / len(u)
    if not discrete:
        found += _of_rank(reduced, u, sizes.rank, n_outputs, data, found)
        if all(finding.severity != "error" for finding in found):
            found += _of_geometry(reduced, u, sizes, data)
            found += _of_cost(reduced, n_outputs, seconds) if data is not None else ()
    return report(reduced.dim, n_outputs, sizes.rank)


def _outside_support(subject: Subject, bound: Bound) -> Finding | None:
    """Data that a decoder of discrete outputs never gives."""
    frozen, (selection, values) = subject.model, bound
    assert isinstance(frozen, MeanOfDecoder)
    batch, size = values.shape[:-1], torch.Size(frozen.output_shape).numel()
    with torch.no_grad():
        likelihood = frozen.decoder(values.new_zeros(*batch, frozen.input_density.dim))
    images = selection.complete(values, values.new_zeros(*batch, size))
    support = base_distribution(likelihood).support
    assert support is not None
    possible = support.check(images.reshape(*batch, *likelihood.event_shape)).reshape(images.shape)
    wrong = values[~selection(possible)]
    if not len(wrong):
        return None
    return Finding(
        "error",
        f"{len(wrong)} of {values.numel()} observed values lie outside the decoder's support, such as "
        f"{wrong[0].item():g}: binarise the images",
        code="observations_range",
    )


def _misfit(reduced: ObservedModel, u: Tensor, values: Tensor, rank: int) -> float:
    """Standard deviation of noise by the residual of least squares: the least one of searches from ``u [draws, D]``."""
    fibre = Fibre(reduced, values)
    tolerance = u.new_full((len(u),), 1e-8)
    points, _ = damped_gauss_newton(fibre.rows(len(u)), u, tolerance=tolerance, max_iterations=SETTINGS.fits)
    with torch.no_grad():
        squares = reduced.residual(points, values).square().sum(-1)
    return (squares.nan_to_num(torch.inf).min() / max(values.shape[-1] - rank, 1)).sqrt().item()


def _of_rank(
    reduced: ObservedModel, u: Tensor, rank: int, n_outputs: int, data: Tensor | None, found: list[Finding]
) -> Iterator[Finding]:
    """More values than can be observed exactly, with the noise that would allow for them."""
    if rank == n_outputs or (rank == reduced.dim and data is None):
        return
    with torch.no_grad():
        sd = 0.05 * reduced.outputs(u).std(-1).mean().item()
    # data that the model fits exactly say nothing of their noise
    if data is not None and SETTINGS.exact * sd < (misfit := _misfit(reduced, u, data, rank)) < torch.inf:
        sd = misfit
    sd = f"{sd:.2g}"
    noise = f"WithNoise(model, sd={sd})"
    if data is not None:
        # said with its rank here, in the place of the bare count
        found[:] = [finding for finding in found if finding.code != "too_many_observations"]
        yield Finding(
            "error",
            f"{n_outputs} observed values, but the Jacobian of these has rank {rank} at prior draws ({reduced.dim} "
            f"inputs): no exact posterior exists; observe at most {rank}, or allow for noise of the measurement, "
            f"condition(..., noise={sd}), or of the output, {noise}",
            code="too_many_observations",
        )
    else:
        yield Finding(
            "warning",
            f"the Jacobian of the {n_outputs} outputs has rank {rank} at prior draws, of {reduced.dim} inputs "
            f"(normalised latents lose one): at most {rank} values can be observed exactly, more with {noise}",
            code="rank",
        )


def _of_cost(reduced: ObservedModel, n_outputs: int, seconds: float) -> Iterator[Finding]:
    """Exact values whose Jacobian, one or more per step, takes long."""
    if isinstance(reduced.structure, Dense) and not reduced.model.has_local_inputs and seconds > SETTINGS.seconds:
        yield Finding(
            "note",
            f"a Jacobian of {n_outputs} observed values by {reduced.dim} inputs takes {seconds:.1g} s per chain, and "
            f"every step of a chain needs one: observe fewer values (a mask, downsample or linear), or allow for noise "
            "of the measurement, condition(..., noise=sd), where a step needs one gradient",
            code="cost",
        )


def _of_geometry(reduced: ObservedModel, u: Tensor, sizes: Spectrum, data: Tensor | None) -> Iterator[Finding]:
    """What makes constrained chains slow: outputs that hardly vary beside others, and kinks."""
    if data is not None and sizes.condition > SETTINGS.condition:
        yield Finding(
            "note",
            f"some combinations of the observed values hardly vary: the singular values of their Jacobian range from "
            f"{sizes.largest:.2g} to {sizes.smallest:.2g}, so that an error of 1e-8 in the data moves inputs by "
            f"{1e-8 / sizes.smallest:.1g}; data that the model did not generate are hard to reach exactly: observe "
            "fewer values, or allow for noise of the measurement, condition(..., noise=sd)",
            code="conditioning",
        )
    # on a fibre, or as many outputs as could define one
    n_rows = sizes.rank if data is not None else max(1, sizes.rank // 2)
    if (kinks := find_kinks(reduced, u, n_rows)) is not None:
        fibre = None if data is None else Fibre(reduced, data)
        if fibre is None or fibre.marginal is None:
            yield Finding("warning", kinks.words, code="kinks")
            return
        # of the room above, which imports this one
        default = import_module("..sampling.plan", __package__).default_kernel(fibre)
        if hasattr(default, "n_geodesic"):
            words = f"under the default kernel here, ConstrainedHMC, {kinks.words}; or sample by dgm.LiftedHMC()"
            yield Finding("warning", words, code="kinks")
        else:
            words = (
                f"nothing to do: the default kernel here, {type(default).__name__}, integrates the noise out and has "
                f"no such jumps; under ConstrainedHMC, {kinks.words}"
            )
            yield Finding("note", words, code="kinks")
    elif not named_kinks(reduced.model) and (jump := find_jump(reduced.outputs, u, u.roll(1, 0))) is not None:
        fault, remedy = jump_words(jump, kinked_operations(reduced.outputs, u[:1]))
        yield Finding("warning", f"the {fault}: {remedy}", code="kinks")
