"""The ordered checks of a model and of data for it: ``condition()`` enforces them, ``check()`` reports them.

Each check is a function of a :class:`Subject` that returns a :class:`Finding` or None; it may rely on those before it.
The model takes nine evaluations, data and derivatives six more; what a module with the same weights has passed is not
looked at again.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..diagnosis import Finding
from ..errors import DgmInferError, ModelError, ObservationError, cause, warn
from ..models import beneath_noise, copied
from .agreement import DIFFERENTIABLE, check_agreement, check_second, constant_outputs, derivative_remedy, stepped
from .derivatives import tame_draws
from .faults import (
    check_agreeing,
    check_rows,
    evaluated,
    far_values,
    functions_of,
    largest,
    largest_difference,
    mixing,
    off_scale,
    own_random_numbers,
    said_interval,
    type_remedy,
)
from .observed import made_by, observed_model
from .subject import LIMITS, Subject

# Errors that leave nothing to look at for the checks after them.
_FINAL = {"model", "observed", "hidden_randomness", "batch_statistics", "observations", "structure", "derivatives"}
_OF_DATA = {"observations", "observations_range", "too_many_observations"}


Check = Callable[[Subject], Finding | None]


def findings(subject: Subject, checks: Sequence[Check]) -> Iterator[Finding]:
    """What the checks find, in their order, up to an error that leaves nothing to look at."""
    for check in checks:
        found = check(subject)
        if found is not None:
            yield found
            if is_final([found]):
                return


def is_final(found: Iterable[Finding]) -> bool:
    """Whether an error is among them that leaves nothing to look at."""
    return any(each.severity == "error" and each.code in _FINAL for each in found)


def enforce(subject: Subject, checks: Sequence[Check]) -> None:
    """Raise the first error that the checks find, and warn of the rest.

    Raises:
        ModelError, ObservationError: what the check's code is about.
    """
    for found in findings(subject, checks):
        if found.severity == "error":
            raise (ObservationError if found.code in _OF_DATA else ModelError)(str(found))
        warn(str(found))


def _error(code: str, what: str) -> Finding:
    return Finding("error", what, code=code)


def _raised(code: str, check: Callable[..., None], *arguments: Any) -> Finding | None:
    """The error that a check raises, as a finding."""
    try:
        check(*arguments)
    except DgmInferError as error:
        return _error(code, str(error))
    return None


# ---------------------------------------------------------------------------------------------------- the model
_REAL = "give real numbers, as torch.view_as_real(x) does"


def outputs(subject: Subject) -> Finding | None:
    """Outputs can be computed, and have the declared shape and the type of the inputs."""
    model, u, name = subject.model, subject.u, subject.name
    size = torch.Size(model.output_shape).numel()
    try:
        x = subject.x
    except ModelError as error:
        # the model itself explains why it cannot be conditioned
        return _error("observed", str(error))
    except Exception as error:
        return _error(
            "observed",
            f"{name}.observed fails for inputs of shape {tuple(u.shape)} and type {u.dtype}: {cause(error)} "
            f"({type_remedy(model, u, str(error))})",
        )
    if tuple(x.shape) != (len(u), size):
        return _error(
            "observed",
            f"{name}.observed maps inputs of shape {tuple(u.shape)} to outputs of shape {tuple(x.shape)}; "
            f"expected ({len(u)}, {size}), flat, for output_shape {tuple(model.output_shape)} (set output_shape to the "
            "shape of one output)",
        )
    if x.dtype != u.dtype:
        remedy = _REAL if x.is_complex() else "compute in the dtype of the inputs"
        return _error("observed", f"{name}.observed gives {x.dtype} for inputs of {u.dtype}: {remedy}")
    return None


def log_factor(subject: Subject) -> Finding | None:
    """The log factor, if there is one, is a real number per input."""
    if not subject.model.has_log_factor:
        return None
    u, name = subject.u, f"{subject.name}.log_factor"
    try:
        with torch.enable_grad(), own_random_numbers(u):
            factor = subject.model.log_factor(u.detach().clone().requires_grad_())
    except Exception as error:
        return _error("observed", f"{name} fails for inputs of shape {tuple(u.shape)}: {cause(error)}")
    if isinstance(factor, Tensor) and factor.shape == u.shape[:-1] and not factor.is_complex():
        return None
    what = f"type {type(factor).__name__}"
    if isinstance(factor, Tensor):
        what = str(factor.dtype) if factor.is_complex() else f"shape {tuple(factor.shape)}"
    return _error(
        "observed",
        f"{name} gives {what} for inputs of shape {tuple(u.shape)}: must be one real number per input, "
        f"{tuple(u.shape[:-1])}",
    )


def output_range(subject: Subject) -> Finding | None:
    """Outputs lie in the declared range."""
    if subject.model.output_range is None:
        return None
    low, high = subject.model.output_range
    x = subject.x.nan_to_num(low, high, low)
    least, largest = x.min().item(), x.max().item()
    if low <= least and largest <= high:
        return None
    return _error(
        "output_range",
        f"{subject.name} declares output_range {said_interval(low, high)}, but its outputs at prior draws are between "
        f"{least:.3g} and {largest:.3g}: apply what is missing, "
        "as from_module(transform=torch.sigmoid) does, or declare the range of its last layer, or None",
    )


def plausible(subject: Subject) -> Finding | None:
    """The model finds nothing wrong with its own outputs."""
    what = subject.model.implausible(subject.x)
    return None if what is None else Finding("warning", what, code="implausible")


def randomness(subject: Subject) -> Finding | None:
    """The same inputs give the same outputs."""
    for name, function in functions_of(subject.model).items():
        if found := _raised("hidden_randomness", check_agreeing, function, subject.u, f"{subject.name}.{name}"):
            return found
    return None


def training_mode(subject: Subject) -> Finding | None:
    """Training mode, if a part is in it, computes what evaluation mode does: no dropout, no batch statistics."""
    if not any(getattr(module, "training", False) for module in subject.given.modules()):
        return None
    u, x = subject.u, subject.x
    # on a copy: training mode may update running statistics
    training = copied(subject.given).to(device=u.device, dtype=u.dtype)
    (trained,) = evaluated(training.observed, u)
    difference = largest_difference(trained, x)
    # a program rounds in another order where it runs as straight-line code
    if difference <= torch.finfo(u.dtype).eps ** 0.5 * max(1e-3, largest(x)):
        return None
    return _error(
        "training_mode",
        "the generator, or a part of it, is in training mode and its outputs differ from evaluation mode by up to "
        f"{difference:.3g} (dropout or batch statistics): call model.eval() first",
    )


def rows(subject: Subject) -> Finding | None:
    """The output of a row does not depend on the other rows of its batch."""
    for name, function in functions_of(subject.model).items():
        if found := _raised("batch_statistics", check_rows, function, subject.u, f"{subject.name}.{name}"):
            return found
    return None


def gradient(subject: Subject) -> Finding | None:
    """Outputs have derivatives, if they are needed."""
    if not subject.needs_gradient or subject.has_gradient:
        return None
    remedy = (
        derivative_remedy(subject.gradient_error)
        or "compute with torch's functions, without detach(), no_grad() or NumPy"
    )
    return _error(
        "derivatives",
        f"{subject.name}.observed has no derivative: {remedy}, or pass tolerance= and a kernel that needs none",
    )


MODEL_CHECKS: tuple[Check, ...] = (
    outputs,
    log_factor,
    output_range,
    plausible,
    randomness,
    training_mode,
    rows,
    gradient,
)


# ---------------------------------------------------------------------------------------------------- the data
def operator(subject: Subject) -> Finding | None:
    """The operator treats every output alike, by itself."""
    if subject.values is None:
        return None

    def values(*outputs: Tensor) -> list[Tensor]:
        with torch.no_grad(), own_random_numbers(subject.x):
            # it may have data of each problem, with which the outputs broadcast
            return [subject.operator(x.reshape(len(x), *[1] * subject.n_batch, -1)) for x in outputs]

    first, again = values(subject.x[:2], subject.x[:2])
    if first.is_complex():
        return _error("observations", f"observe gives {first.dtype}: {_REAL}")
    difference = largest_difference(first, again)
    if difference > 0:
        return _error(
            "observations",
            f"observe returns different values for the same output (by {difference:.3g}): it must not draw random "
            "numbers",
        )
    difference = mixing(values, subject.x[:2])
    if difference > 0:
        return _error(
            "observations",
            f"observe changes the values of an output when the others of its batch change (by {difference:.3g}): "
            "compute every output by itself, with dimensions counted from the right, as in x.mean(-1)",
        )
    return None


def structure(subject: Subject) -> Finding | None:
    """The Jacobian has the structure that the model declares."""
    try:
        return _raised("structure", subject.reduced.check_declaration, subject.many)
    except RuntimeError as error:
        remedy = derivative_remedy(str(error)) or DIFFERENTIABLE
        return _error("derivatives", f"{subject.name} has no derivative by torch ({cause(error)}): {remedy}")


def second_derivatives(subject: Subject) -> Finding | None:
    """Derivatives have derivatives, and right ones, which the gradient of ``log|J J^T|`` takes."""
    if not subject.has_gradient or subject.has_passed("second"):
        return None
    plain, u = observed_model(subject.model, subject.operator.first()), subject.u
    n_batch = 0 if subject.operator.data else subject.n_batch
    points = plain.sample_inputs((LIMITS.second,), torch.Generator(u.device).manual_seed(0), u)
    function = lambda v: plain.outputs(v.reshape(len(v), *[1] * n_batch, -1)).flatten(1)  # noqa: E731
    by_columns = subject.reduced.structure.units is not None
    found = _raised("derivatives", lambda: check_second(function, points, subject.name, by_columns=by_columns))
    if found is None:
        subject.passes("second")
    return found


def derivatives(subject: Subject) -> Finding | None:
    """The derivatives that sampling uses are those of the outputs, and of the factor; one problem stands for all."""
    harmless = subject.noise is not None or not subject.needs_gradient
    stage = f"derivatives{', constants allowed' if harmless else ''}"
    if subject.has_passed(stage) or not (subject.has_gradient or subject.thorough):
        return None
    # without the noise of the measurement, which hides that outputs change in steps
    plain, values = observed_model(subject.model, subject.operator.first()), subject.values
    n_batch = 0 if subject.operator.data else subject.n_batch
    if values is None:
        data = like = subject.x.new_zeros(subject.x.shape[-1])
    else:
        data, like = values.reshape(-1, values.shape[-1])[0], values

    def residual(v: Tensor) -> Tensor:
        return plain.residual(v.reshape(len(v), *[1] * n_batch, -1), data).flatten(1)

    u = tame_draws(plain, LIMITS.derivatives, data, like, residual)
    if not len(u):
        what = "outputs overflow at every prior draw tried, so that no derivative was taken"
        return Finding("note", what, code="observed") if subject.thorough else None
    try:
        found = check_agreement(residual, u, subject.name, needs_both=subject.thorough)
        if subject.model.has_log_factor:
            factor = f"{subject.name}.log_factor"
            check_agreement(lambda v: subject.model.log_factor(v).unsqueeze(-1), u, factor)
    except ModelError as error:
        return _error("derivatives", str(error))
    if not subject.needs_gradient and stepped(found).any():
        # a tolerance needs no derivative: none is better than one of a part of the outputs
        subject.has_gradient = False
        return None
    constant = None if values is None else constant_outputs(found, subject.name, has_noise=harmless)
    if constant:
        return _error("observations", constant)
    subject.passes(stage)
    return None


def far_data(subject: Subject) -> Finding | None:
    """The data are of the size of what the model generates: within three widths of the range of its outputs.

    That is the declared range, or that at prior draws, where at least a tenth of the values must be (images aside).
    """
    if subject.values is None:
        return None
    model, seen = subject.reduced.model, subject.reduced.operator
    declared = model.output_range if seen.keeps_range else None
    if declared is not None and not math.isfinite(declared[1] - declared[0]):
        declared = None
    made = subject.made if seen.keeps_range else made_by(seen, subject.values, subject.made)
    shape = model.output_shape if seen.keeps_range else ()
    found = far_values(type(model).__name__, shape, subject.values, made, declared=declared)
    model, u, sd = beneath_noise(subject.model, subject.u)
    sd = math.hypot(sd, subject.noise or 0.0)
    if found is not None or not sd:
        return found
    with torch.no_grad():
        made = made_by(subject.operator, subject.values, model.observed(u))
    declared = model.output_range if subject.operator.keeps_range else None
    return off_scale(subject.name, subject.values, made, sd, declared)


def edges(subject: Subject) -> Finding | None:
    """No pixel, or mean of pixels, is on or beyond an edge of the model's range.

    Outputs have derivatives only inside the range: tanh and the sigmoid never reach its edges, and a clipped output
    stays there.
    """
    model, values = subject.reduced.model, subject.values
    if values is None or model.output_range is None or not subject.reduced.operator.keeps_range:
        return None
    low, high = model.output_range
    beyond = (values <= low) | (values >= high)
    if not beyond.any():
        return None
    inside = 0.01 * (high - low)
    remedy = f"move the data inside (values.clamp({low + inside:.3g}, {high - inside:.3g})), or "
    remedy = remedy if inside < math.inf else ""
    return _error(
        "observations_range",
        f"{int(beyond.sum())} of {values.numel()} observed values, of {values.min().item():.3g} to "
        f"{values.max().item():.3g}, are on or beyond the edge of the model's output_range {said_interval(low, high)}, "
        f"which it never reaches: {remedy}give the model output noise with WithNoise(model, sd=...)",
    )


def atoms(subject: Subject) -> Finding | None:
    """No datum is a value that the model gives with positive probability.

    A clamped output makes an event of such a value, which no surface of inputs has.
    """
    data = subject.values
    if data is None or subject.noise is not None or data.numel() > LIMITS.atoms:
        return None
    with torch.no_grad():
        values = made_by(subject.operator, data, subject.made)
    hits = (values == data).sum(0)
    if not (hits > 1).any():
        return None
    value, most = data[(hits > 1).expand_as(data)][0].item(), int(hits.max())
    return _error(
        "observations",
        f"{int((hits > 1).sum())} of {hits.numel()} observed values, such as {value:.4g}, are values that "
        f"{subject.name} gives with positive probability ({most} of {len(values)} prior draws): a clamped or censored "
        "output is an event: observe the others, pixels(mask), and multiply the probability of the event, by "
        "log_factor or as a soft observation of a program; or pass tolerance=",
    )


def number(subject: Subject) -> Finding | None:
    """There are no more observed values than inputs."""
    if subject.values is None or (n := subject.values.shape[-1]) <= subject.reduced.dim:
        return None
    return _error(
        "too_many_observations",
        f"{n} observed values but only {subject.reduced.dim} inputs: no exact posterior exists; observe fewer, "
        "allow for noise, condition(..., noise=sd) or WithNoise(model, sd=...), or pass tolerance=",
    )


APPROXIMATE_CHECKS: tuple[Check, ...] = (operator, structure, derivatives, far_data)
DATA_CHECKS: tuple[Check, ...] = (*APPROXIMATE_CHECKS[:3], second_derivatives, far_data, edges, atoms, number)
