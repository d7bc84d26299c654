"""``check()``: what is wrong with a generator, or with conditioning it on some data, in words."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import vjp, vmap

from ..arguments import whole_number
from ..errors import DgmInferError, ModelError, cause
from ..models import (
    DirectedModel,
    GenerativeModel,
    LatentVariableModel,
    MeanOfDecoder,
    as_generative_model,
    base_distribution,
    is_discrete,
)
from ..structures.jacobian import LowRankPlusBlocks, push_forward
from .condition import bind, pixels_only
from .faults import (
    check_mode,
    check_outputs,
    check_randomness,
    check_range,
    check_rows,
    check_structure,
    check_values,
    device_of,
    frozen_copy,
    prior_draws,
)
from .observations import Bound
from .operators import Selection
from .reduced import ObservedModel, observed_model

__all__ = ["Finding", "Report", "check"]

# Singular values below this, relative to the largest, count as zero: normalisation adds a small number to a norm, and
# leaves the direction that it takes away a derivative of about that size.
RANK_TOLERANCE = 1e-6
# Relative difference up to which derivatives agree: between the modes, and with finite differences.
MODES_TOLERANCE = 1e-6
DIFFERENCES_TOLERANCE = 1e-3
# Most entries of derivatives held at once.
ENTRIES = 2**25


@dataclass(frozen=True)
class Finding:
    """One fault, or one thing to know."""

    code: str
    """What was looked for: model, observed, hidden_randomness, training_mode, batch_statistics, output_range,
    structure, observations, observations_range, rank, too_many_observations, derivatives, discrete."""
    severity: str
    """``error``: conditioning fails or is wrong; ``warning``: it may; ``note``: good to know."""
    words: str
    """What it is, with numbers and a remedy."""


@dataclass(frozen=True)
class Report:
    """What :func:`check` found; true where nothing is in the way."""

    model: str
    findings: tuple[Finding, ...]
    n_inputs: int | None = None
    n_outputs: int | None = None
    """Observed ones, where there are data."""
    rank: int | None = None
    """Largest rank of the Jacobian of these at prior draws; None where it was not computed."""

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings and notes may be."""
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
    """Findings as they come."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, code: str, severity: str, words: str) -> None:
        self.findings.append(Finding(code, severity, words))

    @contextmanager
    def error(self, code: str) -> Iterator[None]:
        """What is raised in the block becomes a finding."""
        try:
            yield
        except DgmInferError as error:
            self.add(code, "error", str(error))

    @property
    def failed(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def found(self, *codes: str) -> bool:
        return any(finding.code in codes for finding in self.findings)


def check(model: GenerativeModel, observed=None, observe=None, *, draws: int = 4) -> Report:
    """Look for what keeps a generator from being conditioned, and say it in words.

    Tried at prior draws, in float64 on the model's own device: training mode and batch statistics, hidden randomness,
    outputs outside the declared range, a structure that is not there, the rank of the Jacobian, and whether reverse
    mode, forward mode and finite differences give the same derivatives. With data also: whether they fit the model,
    reach the edge of its range, or are more than the rank. A model of discrete outputs is looked at through the
    mean of its decoder.

    Args:
        model: the generator; it is not changed.
        observed: the data, as for :func:`condition`; None for the generator alone.
        observe: the observation operator, as for :func:`condition`.
        draws: of the prior, at which derivatives are taken.

    Returns:
        a :class:`Report`: ``if not report: print(report)``.

    Raises:
        ArgumentError: ``draws`` is below 1.
    """
    draws = whole_number("check", "draws", draws)
    search, name = _Search(), type(model).__name__

    def report(n_inputs: int | None = None, n_outputs: int | None = None, rank: int | None = None) -> Report:
        return Report(name, tuple(search.findings), n_inputs, n_outputs, rank)

    discrete = is_discrete(model)
    with search.error("model"):
        model = MeanOfDecoder(LatentVariableModel.of(model)) if discrete else as_generative_model(model)
        frozen = frozen_copy(model, torch.float64, device_of(model))
        frozen.output_shape = tuple(frozen.output_shape)
    if search.failed:
        return report()
    u = prior_draws(frozen, max(draws, 2), torch.float64, device_of(model))
    _check_function(search, model, frozen, u)
    if search.found("observed"):
        return report(frozen.input_density.dim)
    size = torch.Size(frozen.output_shape).numel()
    with_data = observed is not None and not discrete
    bound = Bound(Selection(torch.arange(size, device=u.device), size), u.new_zeros(size))
    if isinstance(frozen, MeanOfDecoder):
        _check_discrete(search, name, frozen, observed, observe)
    elif with_data:
        bound = _check_data(search, frozen, observed, observe) or bound
    if search.found("hidden_randomness", "batch_statistics", "observations"):
        # there are no derivatives of single rows, or nobody knows of what
        return report(frozen.input_density.dim)
    reduced, n_outputs = observed_model(frozen, bound.operator), bound.values.shape[-1]
    if reduced.units is not None:
        assert isinstance(frozen, DirectedModel)
        with search.error("structure"):
            check_structure(frozen, u.dtype, u.device)
    data = bound.values if with_data else None
    u = _tame_draws(reduced, draws, data, u)
    if not len(u):
        search.add("observed", "note", "outputs overflow at every prior draw tried, so that no derivative was taken")
    elif not search.found("structure"):
        with search.error("derivatives"):
            _check_derivatives(reduced, u, data)
    if not len(u) or search.found("structure", "derivatives"):
        return report(reduced.dim, n_outputs)
    rank = _rank(reduced, u, data)
    if not discrete:
        _check_rank(search, reduced, u, rank, n_outputs, with_data)
    return report(reduced.dim, n_outputs, rank)


def _check_function(search: _Search, model: GenerativeModel, frozen: GenerativeModel, u: Tensor) -> None:
    """Whether ``observed`` is a deterministic function of each row, of the declared shape and range."""
    with search.error("observed"):
        x = check_outputs(frozen, u)
        with search.error("output_range"):
            check_range(frozen, x)
        with search.error("hidden_randomness"):
            check_randomness(frozen, u)
        if not search.found("hidden_randomness"):
            # with randomness all evaluations differ
            with search.error("training_mode"):
                check_mode(model, frozen, u)
            with search.error("batch_statistics"):
                check_rows(frozen, u)


def _check_data(search: _Search, frozen: GenerativeModel, observed, observe) -> Bound | None:
    bound = None
    with search.error("observations"):
        bound = bind(frozen, observed, observe, torch.float64, device_of(frozen))
    if bound is not None:
        with search.error("observations_range"):
            check_values(frozen, bound.operator, bound.values)
        operator = bound.operator
        if isinstance(operator, Selection):
            # masks of their own: the first problem's stands for all
            operator = Selection(operator.index.reshape(-1, operator.index.shape[-1])[0], operator.size)
        bound = Bound(operator, bound.values.reshape(-1, bound.values.shape[-1])[0])
    return bound


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
    assert isinstance(selection, Selection)
    batch = values.shape[:-1]
    with torch.no_grad():
        likelihood = frozen.decoder(values.new_zeros(*batch, frozen.input_density.dim))
    images = selection.scatter(values, values.new_zeros(*batch, selection.size))
    support = base_distribution(likelihood).support
    assert support is not None
    possible = support.check(images.reshape(*batch, *likelihood.event_shape)).reshape(images.shape)
    wrong = values[~selection(possible)]
    if len(wrong):
        search.add(
            "observations_range",
            "error",
            f"{len(wrong)} of {values.numel()} observed values are none that the decoder gives, such as "
            f"{wrong[0].item():g}: binarise the images",
        )


def _tame_draws(reduced: ObservedModel, draws: int, data: Tensor | None, like: Tensor) -> Tensor:
    """Up to ``draws`` prior draws at which nothing overflows, ``[n, D]``."""
    rng = torch.Generator(like.device).manual_seed(2)

    def size(u: Tensor) -> Tensor:
        with torch.no_grad():
            return _constraint(reduced, u, data)(u + 1e-3).abs().amax(-1).nan_to_num(torch.inf, torch.inf)

    u = reduced.sample_inputs((draws,), rng, like)
    if size(u).isfinite().all():
        return u
    # a simulator may overflow at most of its prior draws: the tamest of many
    u = reduced.sample_inputs((64 * draws,), rng, like)
    sizes = torch.cat([size(part) for part in u.split(draws)])
    order = sizes.argsort()[:draws]
    return u[order[sizes[order].isfinite()]]


def _constraint(reduced: ObservedModel, u: Tensor, data: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The constraint of the data, or of what the model makes at ``u`` itself: ``[..., D] -> [..., Dy]``."""
    with torch.no_grad():
        values = reduced.outputs(u) if data is None else data
    return lambda v: reduced.residual(v, values)


def _check_derivatives(reduced: ObservedModel, u: Tensor, data: Tensor | None) -> None:
    """Raises :class:`ModelError` where ``w.(J v)`` is not the same in both modes and as a finite difference."""
    rng = torch.Generator(u.device).manual_seed(3)
    function, name = _constraint(reduced, u, data), type(reduced.model).__name__
    v = torch.randn(u.shape[-1], generator=rng, dtype=u.dtype, device=u.device)
    step = 1e-6
    with torch.no_grad():
        difference = (function(u + step * v) - function(u - step * v)) / (2 * step)
    w = torch.randn(difference.shape[-1], generator=rng, dtype=u.dtype, device=u.device)
    with _differentiating(name, "reverse"):
        reverse = vjp(function, u)[1](w.expand_as(difference))[0] @ v
    with _differentiating(name, "forward"):
        forward = push_forward(function, u, v.unsqueeze(0))[1][0] @ w
    # of the terms that the products add up
    size = torch.linalg.vector_norm(difference, dim=-1) * torch.linalg.vector_norm(w)
    apart = ((reverse - forward).abs() / size.maximum(reverse.abs()).clamp_min(1e-12)).nanmedian().item()
    if not apart <= MODES_TOLERANCE:
        raise ModelError(
            f"reverse- and forward-mode derivatives of {name} differ, by {apart:.2g} of their size: correct the "
            "backward or the jvp of its autograd.Function"
        )
    # of most draws: at a kink differences mean little
    apart = ((reverse - difference @ w).abs() / size.clamp_min(1e-9)).nanmedian().item()
    if not apart <= DIFFERENCES_TOLERANCE:
        raise ModelError(
            f"the derivatives of {name} are not those of its outputs (finite differences are {apart:.2g} of their size "
            "away): look for detach(), rounding, or a backward that is another function's"
        )


@contextmanager
def _differentiating(name: str, mode: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"{name} has no {mode}-mode derivative ({cause(error)}): compute with torch's differentiable "
            "functions; an autograd.Function needs setup_context, and a jvp of its own"
        ) from error


def _rank(reduced: ObservedModel, u: Tensor, data: Tensor | None) -> int:
    """Largest rank of the constraint's Jacobian at ``u``."""
    function = _constraint(reduced, u, data)
    units = reduced.units
    if units is not None:
        blocks = LowRankPlusBlocks.entries(function, u, units.n_global, units.inputs).entries[1]
        values = torch.linalg.svdvals(blocks)
        if (values > RANK_TOLERANCE * values.amax((-1, -2), keepdim=True)).all(-1).all(-1).any():
            # every unit has full rank by its own inputs
            return blocks.shape[-3] * blocks.shape[-2]
    value, pull = vjp(function, u)[:2]
    n_outputs, n_inputs = value.shape[-1], u.shape[-1]
    if n_outputs <= n_inputs + 8:
        rows = torch.eye(n_outputs, dtype=u.dtype, device=u.device)
    else:
        # random combinations of many outputs have the rank of all of them
        rng = torch.Generator(u.device).manual_seed(4)
        rows = torch.randn(n_inputs + 8, n_outputs, generator=rng, dtype=u.dtype, device=u.device)
    chunk = max(1, ENTRIES // (value.numel() + u.numel()))
    jacobian = vmap(lambda row: pull(row.expand_as(value))[0], chunk_size=chunk)(rows).movedim(0, -2)
    values = torch.linalg.svdvals(jacobian.nan_to_num(0, 0, 0))
    return int((values > RANK_TOLERANCE * values[..., :1]).sum(-1).max())


def _check_rank(search: _Search, reduced: ObservedModel, u: Tensor, rank: int, n_outputs: int, with_data: bool) -> None:
    if rank == n_outputs or (rank == reduced.dim and not with_data):
        return
    with torch.no_grad():
        spread = reduced.outputs(u).std(-1).mean().item()
    noise = f"WithNoise(model, sd={0.05 * spread:.1g})"
    if with_data:
        search.add(
            "too_many_observations",
            "error",
            f"{n_outputs} observed values, but the Jacobian of these has rank {rank} at prior draws ({reduced.dim} "
            f"inputs): no exact posterior exists; observe at most {rank}, or give the model output noise, such as "
            f"{noise}",
        )
    else:
        search.add(
            "rank",
            "warning",
            f"the Jacobian of the {n_outputs} outputs has rank {rank} at prior draws, of {reduced.dim} inputs "
            f"(normalised latents lose one): at most {rank} values can be observed exactly, more with {noise}",
        )
