"""Posterior predictive values of Pyro programs: their statements drawn again, given draws of their latent variables."""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError, ModelError, cause, extra

# Runs that are vectorised at once.
_ROWS = 4096


@contextmanager
def importing_pyro() -> Iterator[None]:
    """Context for imports of Pyro, which an extra installs.

    Parts of it that are unused here need torch.jit, which warns about this Python version.
    """
    with extra("pyro"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit")
        yield


@dataclass(frozen=True, eq=False)
class CalledProgram:
    """A Pyro program and how it is called: ``program(*args, **kwargs)``.

    Attributes:
        observed: names of what was observed, hard or softly, beyond the program's own ``obs=``.
        functions: outputs by name, of the dict of all values by name.
        is_new: whether it is another one than that of the model, or is called otherwise.
    """

    program: Callable[..., Any]
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    observed: Collection[str] = ()
    functions: Mapping[str, Callable[[dict[str, Tensor]], Tensor]] = field(default_factory=dict)
    is_new: bool = False

    def __deepcopy__(self, memo: dict) -> "CalledProgram":
        # the user's own, not the frozen copy of another type that conditioning computes with
        return self

    @property
    def name(self) -> str:
        return getattr(self.program, "__name__", type(self.program).__name__)


def program_of(problem: Any) -> CalledProgram | None:
    """The Pyro program that a problem was made of; None if it was made otherwise."""
    source = getattr(getattr(problem, "model", problem), "source", None)
    return source if isinstance(source, CalledProgram) else None


def observed_data(problem: Any) -> dict[str, Tensor]:
    """What a problem made of a Pyro program observes, by the program's names, each ``[*batch, *shape]``.

    Entries that the observation hides are NaN; names of which only a function was observed are left out.
    """
    if program_of(problem) is None:
        return {}
    model = getattr(problem, "model", problem)
    if model is problem:
        return dict(model.observed_data)
    hidden = problem.values.new_full((*problem.batch_shape, math.prod(model.output_shape)), math.nan)
    return model.observed_data(problem.observed.operator.complete(problem.values, hidden))


def predicted(
    latents: Mapping[str, Tensor], n_lead: int, program: CalledProgram, fresh: Collection[str], seed: int
) -> dict[str, Tensor]:
    """Values of the statements that latents do not fix, each ``[*lead, *shape]``.

    Args:
        latents: draws by name, each ``[*lead, *shape]`` with ``n_lead`` leading dimensions.
        n_lead: number of leading dimensions.
        program: runs once per draw, vectorised where torch can.
        fresh: names of latents to draw again too.
        seed: of torch's global generator during the runs, which is restored.

    Raises:
        ArgumentError: no latent is a statement of the program, or one has another shape there, or ``fresh`` names none.
        ModelError: the program fails, or has a discrete latent variable that was summed out.
    """
    lead = next(iter(latents.values())).shape[:n_lead] if latents else torch.Size()
    sites = _first_run(program)
    given = [name for name in latents if name in sites and not sites[name].is_deterministic and name not in fresh]
    _check(program, sites, latents, n_lead, given, fresh)
    rows = {name: latents[name].to(sites[name].like).reshape(-1, *sites[name].like.shape) for name in given}
    drawn = {name for name, site in sites.items() if program.is_new or site.was_observed} | {*program.observed, *fresh}
    wanted = [name for name in sites if name in drawn and name not in given]

    def one(values: dict[str, Tensor]) -> dict[str, Tensor]:
        every = {name: node["value"] for name, node in _run(program, values)[0].items()}
        made = {name: function(every) for name, function in program.functions.items()}
        return {name: every[name] for name in wanted} | made

    devices = {site.like.device for site in sites.values() if site.like.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        values = _vectorised(one, rows, seed)
        if values is None:
            torch.manual_seed(seed)
            try:
                each = [one({name: value[i] for name, value in rows.items()}) for i in range(lead.numel())]
            except Exception as error:
                raise ModelError(f"predictive(): {program.name} fails: {cause(error)}") from error
            values = {name: torch.stack([row[name] for row in each]) for name in each[0]}
    return {name: value.reshape(*lead, *value.shape[1:]) for name, value in values.items()}


class _Site(NamedTuple):
    """A statement of a program, as its first run found it."""

    like: Tensor
    """Its value in that run."""
    is_deterministic: bool
    was_observed: bool
    """Whether the program itself has data for it."""


def _first_run(program: CalledProgram) -> dict[str, _Site]:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            nodes, observed = _run(program, {})
        except Exception as error:
            raise ModelError(f"predictive(): {program.name} fails: {cause(error)}") from error
    return {name: _Site(node["value"], is_stated(node), name in observed) for name, node in nodes.items()}


def _check(
    program: CalledProgram,
    sites: dict[str, _Site],
    latents: Mapping[str, Tensor],
    n_lead: int,
    given: list[str],
    fresh: Collection[str],
) -> None:
    unknown = [name for name in fresh if name not in sites or sites[name].is_deterministic]
    if unknown:
        known = [name for name, site in sites.items() if not site.is_deterministic]
        raise ArgumentError(f"predictive(fresh={unknown[0]!r}): is not a sample statement of {program.name}: {known}")
    if not given:
        raise ArgumentError(
            f"predictive(program={program.name}): none of its statements, {list(sites)}, is a latent of these draws, "
            f"{list(latents)}"
        )
    for name in given:
        own, there = tuple(latents[name].shape[n_lead:]), tuple(sites[name].like.shape)
        if own != there:
            raise ArgumentError(
                f"predictive(): {name!r} has shape {own} in the draws and {there} in {program.name}: call it with "
                f"arguments that leave the shape, or draw {name!r} again given the other latents, fresh=[{name!r}]"
            )
    if program.is_new:
        return
    known = {*latents, *fresh, *program.observed}
    lost = [n for n, site in sites.items() if not (n in known or site.is_deterministic or site.was_observed)]
    if lost:
        raise ModelError(
            f"predictive(): {lost[0]!r} of {program.name} was summed out, and the draws do not hold it: "
            "fresh=[name] draws it from the program, regardless of the data"
        )


def _run(program: CalledProgram, values: Mapping[str, Tensor]) -> tuple[dict[str, Any], set[str]]:
    """The statements of one run that takes these values, and the names of those that the program has data for."""
    with importing_pyro():
        import pyro
        from pyro import poutine
        from pyro.distributions import Unit
        from pyro.poutine.messenger import Messenger
        from pyro.poutine.subsample_messenger import _Subsample

    observed: set[str] = set()

    class Replicate(Messenger):
        """Statements without a given value are drawn, those with data too."""

        def _pyro_sample(self, msg):
            name, fn = msg["name"], msg["fn"]
            # what pyro.factor adds to a density is not a value
            if isinstance(fn, _Subsample | Unit) or is_stated(msg):
                return
            if msg["is_observed"]:
                observed.add(name)
                msg["is_observed"], msg["value"] = False, None
            if name in values:
                msg["value"], msg["done"] = values[name], True

    with pyro.validation_enabled(False), Replicate():
        trace = poutine.trace(program.program).get_trace(*program.args, **program.kwargs)
    every: dict[str, Any] = dict(trace.nodes)
    nodes = {
        name: node
        for name, node in every.items()
        if node["type"] == "sample" and not isinstance(node["fn"], _Subsample | Unit)
    }
    return nodes, observed


def is_stated(node: Mapping[str, Any]) -> bool:
    """Whether a statement is ``pyro.deterministic``."""
    return bool(node["infer"] and node["infer"].get("_deterministic"))


def _vectorised(
    one: Callable[[dict[str, Tensor]], dict[str, Tensor]], rows: dict[str, Tensor], seed: int
) -> dict[str, Tensor] | None:
    """The values of all rows; None if torch cannot vectorise the program."""

    def anchored(values: dict[str, Tensor]) -> dict[str, Tensor]:
        like = next(iter(values.values()))
        with _OwnNumbers((like.reshape(-1)[:1] * 0).nan_to_num(0.0).sum()):
            return one(values)

    torch.manual_seed(seed)
    try:
        return torch.func.vmap(anchored, randomness="different", chunk_size=_ROWS)(rows)
    except Exception:
        # a loop says what is wrong, if it is not vmap
        return None


class _OwnNumbers(TorchFunctionMode):
    """While active under vmap, each row draws its own numbers into tensors that do not depend on the row.

    Args:
        zero: a number 0 of the row, which makes them depend on it: torch refuses to fill others.
    """

    def __init__(self, zero: Tensor):
        super().__init__()
        self.zero = zero

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.normal and args and isinstance(args[0], Tensor):
            args = (args[0] + self.zero.to(args[0].dtype), *args[1:])
        made = func(*args, **kwargs)
        if func in _FILLED and isinstance(made, Tensor) and made.is_floating_point():
            return made + self.zero.to(made.dtype)
        return made


# Makers of tensors that torch.distributions, or a program, then fills with random numbers.
_FILLED = {Tensor.new, Tensor.new_empty, Tensor.new_zeros, torch.empty, torch.zeros, torch.empty_like, torch.zeros_like}
