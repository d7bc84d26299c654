"""Checks of programs at conversion time: what would make their outputs differ from what is written."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..arguments import choice
from ..arguments.values import plural
from ..autodiff.jacobian_products import pull_back
from ..conditioning.agreement import check_agreement
from ..errors import ArgumentError, DgmInferError, ModelError, cause, warn
from ..models import frozen_copy, reference_tensor
from .charts import chart_of
from .log_densities import TOLERATED, lost_mass, warn_of_lost_mass
from .tape import Tape, check_same, line_of_error, solver_of_error
from .traced import TracedModel, TracedRun, UnitSplit

Model = TypeVar("Model", bound=TracedModel)


@dataclass(frozen=True)
class CheckSettings:
    """How a program is checked when it is converted."""

    runs: int = 3
    """Runs that are compared; the median over an odd number ignores one at a kink."""
    tries: int = 30
    """Runs to find as many of finite outputs in."""
    searched: int = 1000
    """Prior draws among which others of finite outputs are looked for, if the runs have too few."""
    factors: tuple[float, ...] = (1.0, 2.0, 4.0)
    """By which these draws are spread out: wide priors of rates explode where their mass is, not in their tails."""
    wider: int = 4
    """Draws at each of them, and at the prior's own width, at which units that were found are looked at again."""
    stepped: int = 100
    """Prior draws at which derivatives are 0 before outputs are said to change in steps."""
    jacobian_entries: int = 2**21
    """Up to which a Jacobian is searched for units: 16 MB, as many as one of 1448 x 1448."""
    few_global: int = 8
    """Global inputs up to which inputs of the prior are not searched for local ones."""
    unit_outputs: int = 64
    """Outputs per unit up to which units are searched; their blocks are factorised at the cost of its square."""


CHECKS = CheckSettings()


def check_structure(call: str, structure: str | None) -> None:
    """Raise ArgumentError for a structure that a program cannot be asked for."""
    if isinstance(structure, str) and structure == "markov":
        raise ArgumentError(
            f"{call}(structure='markov'): that is for a dgm.DirectedModel, which defines the transition of a step; "
            "of a program it is 'dense' or 'independent'"
        )
    if structure is not None:
        choice(call, "structure", structure, ("dense", "independent"))


def prepared(model: Model, structure: str | None, line: str) -> Model:
    """The model with its draws recorded, its structure found, and the program checked at random inputs.

    Args:
        model: is changed and returned.
        structure: None to find units, "dense" to leave them, "independent" to insist on them.
        line: where the program is defined.

    Raises:
        ModelError: the program fails; or it does not make the same draws in each run, has hidden randomness, branches
            on random values, or has no derivatives, wrong ones, or none but 0.
    """
    name, device = model.name, reference_tensor(model).device
    frozen = frozen_copy(model, torch.float64, device)
    with _random_state():
        runs = _recorded(frozen, device, line)
        draws, factors = tuple(runs[0][0].draws), bool(runs[0][0].factors)
        if not sum(draw.size for draw in draws):
            raise ModelError(f"{name} draws no random numbers with torch: nothing to condition ({line})")
        for each in (model, frozen):
            each.has_factor = factors
            each.arrange(draws, None)
            each.output_shape = tuple(runs[0][1].output.shape)
        u = torch.stack([tape.inputs for tape, _ in runs])
        _check_replay(frozen, u, torch.stack([outcome.output.flatten() for _, outcome in runs]), line)
        u = _finite(frozen, u, line)
        _check_derivatives(frozen, u, line)
        _find_structure(model, frozen, u, structure, line)
        with torch.no_grad():
            shares = {name: lost_mass(d, chart_of(d)) for name, d in runs[0][0].charted.items()}
    model.lost_mass = {name: share for name, share in shares.items() if share > TOLERATED}
    warn_of_lost_mass(model.name, model.lost_mass)
    model.probes = u.to(device)
    return model


def _recorded(frozen: TracedModel, device: torch.device, line: str) -> list[tuple[Tape, TracedRun]]:
    """Runs at random numbers, those of finite outputs first: a prior may reach where a simulator explodes.

    Raises:
        ModelError: the program fails, or draws other numbers from run to run, or gives a distribution parameters that
            are not valid in every run.
    """
    name, runs, finite = frozen.name, [], []
    for seed in range(CHECKS.tries):
        with _named(name, "fails"):
            tape, outcome = frozen.record(torch.float64, device, seed)
        _check_output(name, outcome, line)
        runs.append((tape, outcome))
        check_same(name, runs[0][0].draws, tape.draws)
        if tape.invalid is None and outcome.output.isfinite().all():
            finite.append(runs[-1])
        if len(finite) == CHECKS.runs:
            return finite
    if not finite:
        for tape, outcome in runs:
            if tape.invalid and outcome.output.isfinite().all():
                raise ModelError(f"{name} gives a distribution parameters that are not valid, at {tape.invalid}")
    return (finite + runs)[: CHECKS.runs]


def _check_output(name: str, outcome: TracedRun, line: str) -> None:
    output = outcome.output
    if not isinstance(output, Tensor) or not output.is_floating_point():
        what = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ModelError(f"{name} returns {what}: expected one tensor of real numbers ({line})")


def _check_replay(frozen: TracedModel, u: Tensor, outputs: Tensor, line: str) -> None:
    """A run with the recorded numbers must give the recorded outputs: alone, again, and many at once."""
    name = frozen.name
    with torch.no_grad():
        with _named(name, "fails"):
            alone = torch.stack([frozen.observed(row) for row in u])
            again = torch.stack([frozen.observed(row) for row in u])
        if _differ(alone, again) or _differ(alone, outputs):
            raise ModelError(
                f"{name} gives different outputs for the same random numbers of torch: draw all of them with torch, "
                f"not with NumPy, random or compiled code, and change nothing outside ({line})"
            )
        with _named(name, "cannot be vectorised over chains"):
            together = frozen.observed(u)
        if _differ(alone, together):
            raise ModelError(f"{name} gives different outputs for several chains at once than for each alone ({line})")


def _finite(frozen: TracedModel, u: Tensor, line: str) -> Tensor:
    """The inputs of finite outputs, with others in their place where those are few; all of them if there are none."""
    rng = torch.Generator(u.device).manual_seed(CHECKS.runs)
    with torch.no_grad(), _named(frozen.name, "fails"):
        if frozen.observed(u).isfinite().all():
            return u
        more = frozen.input_density.sample((CHECKS.searched,), generator=rng, dtype=u.dtype, device=u.device)
        # wide priors of rates explode where they have their mass, and not in their tails
        every = torch.cat([u, *(factor * more for factor in CHECKS.factors)])
        finite = every[frozen.observed(every).isfinite().flatten(1).all(1)][: len(u)]
    if len(finite) < 2:
        warn(
            f"{frozen.name} gives finite outputs in fewer than 2 of {len(every)} runs at random numbers: its "
            f"derivatives are not checked, and it runs as it is written, which is slower ({line})",
        )
        return u
    return finite


def _check_derivatives(frozen: TracedModel, u: Tensor, line: str) -> None:
    functions: list[Callable[[Tensor], Tensor]] = [frozen.observed]
    if frozen.has_factor:
        functions.append(lambda x: frozen.log_factor(x).unsqueeze(-1))
    for function in functions:
        with _named(frozen.name, "has no derivative"):
            try:
                found = check_agreement(function, u, frozen.name)
            except ModelError as error:
                cuts = frozen.replay(u[0])[2]
                raise ModelError(f"{error}, at {cuts[0] if cuts else line}") from error
            if function is functions[0] and not found.products.any():
                _check_steps(frozen, u, line)


def _check_steps(frozen: TracedModel, u: Tensor, line: str) -> None:
    """Outputs that change only in steps: they differ between prior draws, and no derivative at any is other than 0."""
    rng = torch.Generator(u.device).manual_seed(2)
    more = frozen.input_density.sample((CHECKS.stepped,), generator=rng, dtype=u.dtype, device=u.device)
    u = torch.cat([u, more])
    with torch.no_grad():
        outputs = frozen.observed(u)
    w = torch.randn(outputs.shape, generator=rng, dtype=u.dtype, device=u.device)
    if (outputs != outputs[0]).any() and not pull_back(lambda x: frozen.observed(x) * w, u)[1].any():
        raise ModelError(
            f"the outputs of {frozen.name} change only in steps, with derivatives that are exactly 0 everywhere: leave "
            f"out rounding (round, floor, comparisons, argmax), at {line}; what has to count is a "
            "Simulation for sample_abc(), of dgm_infer.likelihood_free, which take no derivative"
        )


def _find_structure(model: TracedModel, frozen: TracedModel, u: Tensor, structure: str | None, line: str) -> None:
    n_outputs, dim = torch.Size(model.output_shape).numel(), u.shape[-1]
    if structure == "dense":
        model.found = "dense, as asked for"
        return
    if n_outputs * dim > CHECKS.jacobian_entries and structure is None:
        model.found = f"dense (a Jacobian of {n_outputs} x {dim} was not searched for units)"
        return
    is_noise = torch.cat([torch.full((draw.size,), not draw.is_prior) for draw in model.draws])

    def found(jacobian: Tensor) -> UnitSplit | None:
        pattern = (jacobian != 0).any(1)
        split = _find_units(pattern, is_noise)
        if split is None or split.outputs == n_outputs:
            # a unit of everything tells less than noise that is added
            split = _added(frozen, u, _split(pattern, is_noise, dim)) or split
        if split is None and structure is None:
            split = _added(frozen, u, _one_unit(jacobian, is_noise))
        return split

    jacobian = _jacobian(frozen.observed, u)
    split = found(jacobian)
    if split is not None:
        # sorting, selections and thresholds couple outputs at some inputs alone
        split = found(torch.cat([jacobian, _wider_jacobian(frozen, u)], 1))
    if split is None:
        if structure == "independent":
            raise ModelError(f"structure='independent', but the outputs of {model.name} share their noise ({line})")
        model.found = "dense (the outputs share their noise)"
        return

    def latents(x: Tensor) -> Tensor:
        flat = [value.to(x.dtype).reshape(len(x), -1) for value in frozen.latents(x).values()]
        return torch.cat([x.new_zeros(len(x), 1), *flat], -1)

    uses = (_jacobian(latents, u) != 0).any(1).any(0)
    model.latents_are_global = not bool(uses[split.order[split.n_global :]].any())
    model.arrange(model.draws, split)
    n_units = n_outputs // split.outputs
    each, others = plural(split.inputs, "local input"), plural(split.n_global, "global input")
    model.found = (
        f"{n_units} independent units of {plural(split.outputs, 'output')} and {each} each, {others}"
        if n_units > 1 or n_outputs == 1
        else f"noise of {each} that the outputs share is added, {others}"
    )


def _wider_jacobian(frozen: TracedModel, u: Tensor) -> Tensor:
    """That of the outputs at prior draws, spread out by :attr:`CheckSettings.factors`: ``[N, n, D]``, where finite."""
    rng = torch.Generator(u.device).manual_seed(3)
    shape = (CHECKS.wider,)
    drawn = [frozen.input_density.sample(shape, generator=rng, dtype=u.dtype, device=u.device) for _ in CHECKS.factors]
    jacobian = _jacobian(frozen.observed, torch.cat([f * v for f, v in zip(CHECKS.factors, drawn, strict=True)]))
    return jacobian[:, jacobian.isfinite().all(-1).all(0)]


def _find_units(pattern: Tensor, is_noise: Tensor) -> UnitSplit | None:
    """The cheapest split into units; None if there is none.

    The inputs of the prior are global, unless that makes many of them which belong to single units.

    Args:
        pattern: whether an output may depend on an input, ``[N, D]``.
        is_noise: whether an input is not one of the prior, ``[D]``.
    """
    split = _split(pattern, is_noise, len(pattern))
    if split is not None and split.n_global <= CHECKS.few_global:
        return split
    wider = _split(pattern, torch.ones_like(is_noise), len(pattern))
    if split is None or (wider is not None and 2 * wider.n_global <= split.n_global):
        # inputs of the prior alone are not noise that a unit could be solved by
        return wider if is_noise.any() else None
    return split


def _added(frozen: TracedModel, u: Tensor, split: UnitSplit | None) -> UnitSplit | None:
    """The split, if its local inputs are normal and added, so that they integrate out; else None.

    With more global inputs than outputs a Jacobian is cheaper dense, and a split is of no other use.
    """
    if split is None:
        return None
    local = torch.zeros(u.shape[-1], dtype=torch.bool).index_fill(0, split.order[split.n_global :], True)
    is_normal = torch.cat([torch.full((draw.size,), draw.kind == "normal") for draw in frozen.draws])
    if (local & ~is_normal).any():
        return None
    noise = u * local.to(u)
    with torch.no_grad():
        outputs = torch.stack([frozen.observed(u + (k - 1) * noise) for k in range(3)])
    added = outputs.isfinite().all() and not _differ(outputs[1] - outputs[0], outputs[2] - outputs[1])
    return split if added else None


def _one_unit(jacobian: Tensor, is_noise: Tensor) -> UnitSplit | None:
    """One unit of all the noise, if its derivatives ``[N, n, D]`` are those of fixed numbers, of full rank.

    Others would have to be computed and factorised at every position.
    """
    blocks, n_outputs = jacobian[..., is_noise], len(jacobian)
    if not is_noise.any() or is_noise.all() or n_outputs > min(CHECKS.unit_outputs, blocks.shape[-1]):
        return None
    if not blocks.isfinite().all() or _differ(blocks, blocks[:, :1]):
        return None
    if torch.linalg.matrix_rank(blocks[:, 0]) < n_outputs:
        return None
    order = torch.cat([torch.nonzero(~is_noise).flatten(), torch.nonzero(is_noise).flatten()])
    return UnitSplit(int((~is_noise).sum()), blocks.shape[-1], n_outputs, order)


def _split(pattern: Tensor, candidates: Tensor, most: int) -> UnitSplit | None:
    """The cheapest split whose local inputs are among the candidates, with at most so many global ones."""
    n_outputs = len(pattern)
    sizes = [m for m in range(1, CHECKS.unit_outputs + 1) if n_outputs % m == 0 and m < max(n_outputs, 2)]
    splits = [split for m in sizes if (split := _units_of(m, pattern, candidates)) is not None]
    # entries per output, which the factorisation squares
    return min(
        (split for split in splits if split.n_global <= most),
        key=lambda split: split.n_global**2 + split.inputs * split.outputs,
        default=None,
    )


def _units_of(size: int, pattern: Tensor, candidates: Tensor) -> UnitSplit | None:
    n_outputs, dim = pattern.shape
    n_units = n_outputs // size
    touched = pattern.unflatten(0, (n_units, size)).any(1)
    own = candidates & (touched.sum(0) == 1)
    unit = touched.to(torch.int8).argmax(0)
    inputs = int(torch.bincount(unit[own], minlength=n_units).min())
    if inputs < size:
        return None
    # an equal number each: what a unit has beyond it is global
    local = torch.stack([torch.nonzero(own & (unit == i)).flatten()[-inputs:] for i in range(n_units)]).flatten()
    is_global = torch.ones(dim, dtype=torch.bool).index_fill(0, local, False)
    order = torch.cat([torch.nonzero(is_global).flatten(), local])
    return UnitSplit(int(is_global.sum()), inputs, size, order)


def _jacobian(function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """Derivatives of every output with respect to every input at all points, ``[N, n, D]``."""
    with torch.no_grad():
        return pull_back(function, u)[1].cpu()


def _differ(a: Tensor, b: Tensor) -> bool:
    difference = (a - b).nan_to_num(0, 0, 0).abs().max().item() if a.numel() else 0.0
    return difference > 1e-6 * max(1e-3, a.nan_to_num(0, 0, 0).abs().max().item() if a.numel() else 0.0)


@contextmanager
def _named(name: str, what: str) -> Iterator[None]:
    """Errors of the program become one of ours, with the line that raised it and what to do."""
    try:
        yield
    except DgmInferError:
        raise
    except Exception as error:
        line = line_of_error(error)
        where = f" at {line}" if line else ""
        raise ModelError(f"{name} {what}{where}: {_remedy(error) or cause(error)}") from error


def _remedy(error: Exception) -> str | None:
    """What to change, by the message of torch."""
    low = str(error).lower()
    if "data-dependent control flow" in low:
        return (
            solver_of_error(error) or "it branches on a random value: compute both branches and choose with torch.where"
        )
    if ".item()" in low:
        return "it makes a Python number of a random value, which cuts the graph: keep it a tensor"
    if "numpy" in low or "storage" in low or "data pointer" in low or ".tolist()" in low:
        return "it makes a NumPy array or a list of random values, which cuts the graph: keep them tensors"
    if "in-place" in low or "inplace" in low:
        return (
            "it changes a tensor in place that does not depend on the random numbers: make it in the simulator with "
            "torch.zeros, or write x = x + y, torch.stack"
        )
    if "setup_context" in low or "generate_vmap_rule" in low or "jvp" in low:
        return (
            "its autograd.Function needs setup_context, with forward(x) in place of forward(ctx, x), "
            "generate_vmap_rule = True, and a jvp"
        )
    if "random" in low and "vmap" in low:
        return "it draws random numbers in a function that hides them: write it with torch.rand or torch.randn"
    return None


@contextmanager
def _random_state() -> Iterator[None]:
    """The random states of Python and NumPy stay as they were; torch's are kept by each recorded run."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])
