"""Statements of Pyro programs: what each is, and runs that give some of them their values."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..arguments import array, digits, mapping
from ..errors import ModelError, cause
from ..sampling.predictive import CalledProgram, importing_pyro, is_stated
from .charts import has_fewer_dimensions, without_events

with importing_pyro():
    import pyro
    from pyro import poutine
    from pyro.distributions import Delta, MaskedDistribution
    from pyro.poutine.messenger import Messenger
    from pyro.poutine.subsample_messenger import _Subsample

Node = Mapping[str, Any]
"""One statement of a run: its distribution ``fn``, its value, and what Pyro notes of it."""


def as_data(call: str, field: str, values: Any) -> dict[str, Tensor]:
    """Data by name as tensors; whole numbers stay such, as programs may index by them.

    Raises:
        ArgumentError: it is not a mapping of numbers.
    """
    found = {}
    for name, value in mapping(call, field, values, "{'y': data}").items():
        found[name] = array(call, f"{field}[{name!r}]", value)
        if found[name].is_floating_point():
            found[name] = array(call, f"{field}[{name!r}]", value, digits(value))
    return found


def conditioned(source: CalledProgram, data: Mapping[str, Tensor]) -> Callable[..., Any]:
    """The program with data for some of its statements."""
    return poutine.condition(source.program, data=dict(data)) if data else source.program


def first_run(source: CalledProgram, data: Mapping[str, Tensor], *, densities: bool = False) -> dict[str, Any]:
    """The sample statements of a run as Pyro itself makes it, plates too, with their values.

    Args:
        source: a program and how it is called.
        data: values for some of its statements.
        densities: whether all have a log density, which Pyro checks.

    Raises:
        ModelError: the program fails, or takes mini-batches, or data that need a density are not numbers.
    """
    # Pyro draws from the global generators
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="pyro")
        torch.manual_seed(0)
        try:
            trace = poutine.trace(conditioned(source, data)).get_trace(*source.args, **source.kwargs)
            every: dict[str, Any] = dict(trace.nodes)
            nodes = {name: node for name, node in every.items() if node["type"] == "sample"}
            for node in nodes.values():
                # obs= may be a number
                node["value"] = torch.as_tensor(node["value"])
            if densities:
                check_numbers(source.name, {name: node for name, node in nodes.items() if is_likelihood(node)})
                trace.compute_log_prob(lambda name, _: point_of(nodes[name]["fn"]) is None)
        except ModelError:
            raise
        except Exception as error:
            said = cause(error).removesuffix("Trace Shapes: Param Sites: Sample Sites:").strip()
            remedy = ""
            if isinstance(error, NotImplementedError) and "sampling" in said:
                remedy = (
                    ": an improper prior, to which no evidence belongs: give a wide one that can be drawn from, such "
                    "as Normal(0, 100), or HalfNormal(100) above 0"
                )
            raise ModelError(f"the Pyro program {source.name} fails: {said}{remedy}") from error
    for frame in (frame for node in nodes.values() for frame in node["cond_indep_stack"]):
        if frame.full_size is not None and frame.size < frame.full_size:
            raise ModelError(
                f"plate {frame.name!r} of {source.name} takes {frame.size} of {frame.full_size} data at a time: "
                "posterior and evidence need them all, omit subsample_size and subsample"
            )
    return nodes


def check_numbers(program: str, nodes: Mapping[str, Node]) -> None:
    """Raise :class:`ModelError` if data are missing where they have a density."""
    for name, node in nodes.items():
        n = int(node["value"].isnan().sum()) if node["value"].is_floating_point() else 0
        if n:
            raise ModelError(
                f"the data of site {name!r} of {program} have {n} missing values (NaN): leave them out, y[~y.isnan()], "
                "or mask them, poutine.mask(mask=~y.isnan()), and observe y.nan_to_num(1)"
            )


class _Given(Messenger):
    def __init__(self, value: Callable[[Node], Tensor | None]):
        super().__init__()
        self.value = value

    def _pyro_sample(self, msg):
        value = self.value(msg)
        if value is not None:
            msg["value"], msg["done"] = value, True


def run(source: CalledProgram, program: Callable[..., Any], value: Callable[[Node], Tensor | None]) -> Any:
    """The trace of one run.

    Args:
        source: how it is called.
        program: what is called.
        value: gives statements their values; None leaves one to Pyro.
    """
    with pyro.validation_enabled(False), _Given(value):
        return poutine.trace(program).get_trace(*source.args, **source.kwargs)


def imputed(nodes: Mapping[str, Node]) -> set[str]:
    """The variables that ``pyro.sample(name, ..., obs_mask=)`` draws for missing data.

    Pyro masks their elements where data are present, which leaves those without a density; nothing depends on them, so
    they keep their prior.
    """
    parts = (name.removesuffix("_unobserved") for name in nodes if name.endswith("_unobserved"))
    return {f"{part}_unobserved" for part in parts if f"{part}_observed" in nodes and part in nodes}


def log_likelihoods(trace: Any, names: Collection[str]) -> list[Tensor]:
    """The log density of each of some statements of a run, summed."""
    with pyro.validation_enabled(False):
        trace.compute_log_prob(lambda name, _: name in names)
    return [trace.nodes[name]["log_prob_sum"] for name in names]


def is_variable(node: Node) -> bool:
    """Whether it has a value: not a plate."""
    return node["type"] == "sample" and not isinstance(node["fn"], _Subsample)


def point_of(fn: Any) -> Any:
    """The ``Delta`` of a statement, perhaps masked; None if it is none."""
    while isinstance(fn, torch.distributions.Independent | MaskedDistribution):
        fn = fn.base_dist
    return fn if isinstance(fn, Delta) else None


def is_deterministic(node: Node) -> bool:
    """Whether it is a function of others: ``pyro.deterministic``, or a ``Delta``."""
    return is_stated(node) or point_of(node["fn"]) is not None


def is_latent(node: Node) -> bool:
    return is_variable(node) and not node["is_observed"] and not is_deterministic(node)


def has_data(node: Node) -> bool:
    """Whether the program, or who conditions it, gives it a value: ``obs=``, also of a ``Delta``.

    A ``Delta`` that is observed at its own point is what ``poutine.reparam`` makes of a variable.
    """
    if not is_variable(node) or not node["is_observed"] or is_stated(node):
        return False
    point = point_of(node["fn"])
    return point is None or not torch.equal(*torch.broadcast_tensors(torch.as_tensor(node["value"]), point.v))


def is_likelihood(node: Node) -> bool:
    """Whether it has data and a density."""
    return is_variable(node) and node["is_observed"] and not is_deterministic(node)


def is_of_lower_dimension(node: Node) -> bool:
    """Whether no input of a model could move it over all its values: it is discrete, on a surface, or a factor."""
    return (
        not node["value"].numel()
        or is_discrete_site(node)
        or (not is_deterministic(node) and has_fewer_dimensions(node["fn"]))
    )


def is_discrete_site(node: Node) -> bool:
    if is_deterministic(node):
        return False
    fn: Any = node["fn"]
    while isinstance(fn := without_events(fn), torch.distributions.MixtureSameFamily):
        fn = fn.component_distribution
    try:
        return bool(fn.has_enumerate_support or fn.support.is_discrete)
    except (AttributeError, NotImplementedError):
        # a factor has no support
        return False
