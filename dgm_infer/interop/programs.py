"""Pyro programs as generative models: latent variables become inputs, hard observations the constraint."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..arguments import array, choice, mapping
from ..errors import ArgumentError, ModelError, cause
from ..extras import extra
from ..sampling.predictive import CalledProgram
from .charts import has_fewer_dimensions, is_point
from .guards import prepared
from .reparametrisation import reparametrise
from .tape import Tape, first_line
from .traced import TracedModel, TracedRun

with extra("pyro"), warnings.catch_warnings():
    # torch.jit warns about this Python version; only parts of Pyro that are unused here need it
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    from pyro import poutine
    from pyro.poutine.messenger import Messenger
    from pyro.poutine.subsample_messenger import _Subsample

__all__ = ["ProgramModel", "from_pyro"]


def from_pyro(
    program: Callable[..., Any],
    *args: Any,
    observed: Mapping[str, Any] | None = None,
    soft: Mapping[str, Any] | None = None,
    functions: Mapping[str, Callable[[dict[str, Tensor]], Tensor]] | None = None,
    structure: str | None = None,
    **kwargs: Any,
) -> "ProgramModel":
    """A Pyro program as a generative model, to be conditioned exactly: ``condition(model, model.data)``.

    The outputs are the hard observations: sample statements through their pathwise form (``loc + scale v`` of a normal
    v), ``pyro.deterministic`` and ``Delta`` statements, or functions of both. So a *deterministic* function of random
    variables can be observed. Soft observations multiply the density instead: those of ``soft``, discrete ones, those
    of fewer dimensions than entries (Dirichlet, LKJ, Wishart), and the program's own ``obs=``. Latent variables become
    inputs of unit variance where there is such a form (math 1.3), else by the bijection of their support, with their
    own density; angles become the directions of normal vectors.

    Args:
        program: a callable with ``pyro.sample`` statements, called as ``program(*args, **kwargs)``. It runs vectorised
            over chains; random numbers that it draws with torch become inputs too.
        observed: data by name of a statement, or of a function. None if the program's own ``obs=`` of continuous
            variables are the hard observations.
        soft: data by name of statements whose likelihood multiplies the density.
        functions: further outputs by name, of the dict of all values by name.
        structure: as for :func:`dgm_infer.from_simulator`.

    Returns:
        a model with the program's latent and deterministic values as latents, and with ``data``, the hard observations:
        of the statement's shape if there is one, flat in the order of ``observed`` if there are several.

    Raises:
        ArgumentError: a name is not a statement of the program, or data have another shape.
        ModelError: the program fails or nothing in it is observed hard; a latent variable is discrete; a plate takes
            mini-batches; or as for :func:`dgm_infer.from_simulator`.
    """
    if not callable(program):
        raise ArgumentError(f"from_pyro({type(program).__name__}): expected a Pyro program, a callable")
    if structure is not None:
        choice("from_pyro", "structure", structure, ("dense", "independent"))
    given = {
        field: mapping("from_pyro", field, value, "{'y': data}")
        for field, value in (("observed", observed), ("soft", soft), ("functions", functions))
    }
    model = ProgramModel(program, args, kwargs, **given)
    return prepared(model, structure, first_line(program))


def _arrays(field: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: array("from_pyro", f"{field}[{name!r}]", value) for name, value in values.items()}


class ProgramModel(TracedModel):
    """A Pyro program as a model: see :func:`from_pyro`, which makes it.

    Attributes:
        data: the hard observations, for :func:`dgm_infer.condition`.
        hard: their names.
    """

    data: Tensor

    def __init__(
        self,
        program: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        observed: dict[str, Any],
        soft: dict[str, Any],
        functions: dict[str, Callable],
    ):
        super().__init__(getattr(program, "__name__", type(program).__name__))
        self.program = program
        self._args, self._kwargs, self._functions = args, kwargs, functions
        self._soft = _arrays("soft", soft)
        nodes = self._first_run()
        values = _arrays("observed", observed)
        for name in (*observed, *soft):
            if name not in nodes and name not in functions:
                known = [name for name, node in nodes.items() if not isinstance(node["fn"], _Subsample)]
                raise ArgumentError(f"observed: {name!r} is not a statement of {self.name} (it has {known})")
        for name in list(values):
            if name in nodes and _is_soft(nodes[name]):
                self._soft[name] = values.pop(name)
        if not observed:
            own = {name: node for name, node in nodes.items() if _has_own_data(node) and name not in soft}
            values = {name: node["value"] for name, node in own.items() if not _is_soft(node)}
        if not values:
            raise ModelError(
                f"nothing in {self.name} is observed exactly: name a continuous or deterministic statement in "
                "observed; for likelihoods alone sample(target_from_pyro(program, ...)), and log_evidence of the same"
            )
        self.hard = tuple(values)
        self._check(nodes)
        for name, value in values.items():
            if name in nodes and value.shape != nodes[name]["value"].shape:
                raise ArgumentError(
                    f"observed[{name!r}] has shape {tuple(value.shape)}: {self.name} gives "
                    f"{tuple(nodes[name]['value'].shape)}"
                )
        one = next(iter(values.values()))
        flat = torch.cat([value.detach().reshape(-1).to(torch.float64) for value in values.values()])
        self.register_buffer("data", flat.reshape(one.shape) if len(values) == 1 else flat, persistent=False)
        self._shapes = {name: value.shape for name, value in values.items()}
        own = {name: node["value"] for name, node in nodes.items() if _is_own_observation(node)}
        # what pyro.factor observes is empty
        self._seen = {name: v for name, v in {**own, **self._soft}.items() if name not in values and v.numel()}
        made = {name: function for name, function in functions.items() if name in values}
        self._weighted = {name for name, node in nodes.items() if _is_weighted(node)}
        self.source = CalledProgram(program, args, kwargs, (*values, *self._soft), made)

    def observed_data(self, outputs: Tensor) -> dict[str, Tensor]:
        """The observations by name, each ``[*batch, *shape]``; those without an entry that is a number are left out.

        Args:
            outputs: the hard ones, flat, ``[*batch, Dy]``.
        """
        sizes = [shape.numel() for shape in self._shapes.values()]
        # a function may give another number of values than its data had here
        parts = outputs.split(sizes, -1) if sum(sizes) == outputs.shape[-1] else ()
        hard = {
            name: part.reshape((*outputs.shape[:-1], *shape))
            for (name, shape), part in zip(self._shapes.items(), parts, strict=False)
            if not part.isnan().all()
        }
        soft = {name: value.expand((*outputs.shape[:-1], *value.shape)) for name, value in self._seen.items()}
        return {**hard, **soft}

    def run(self, tape: Tape) -> TracedRun:
        sites = _Sites(tape, self.hard)
        program = poutine.condition(self.program, data=self._soft) if self._soft else self.program
        with pyro.validation_enabled(False), sites:
            trace = poutine.trace(program).get_trace(*self._args, **self._kwargs)
            nodes: dict[str, Any] = {name: node for name, node in trace.nodes.items() if _is_variable(node)}
            soft = [name for name, node in nodes.items() if _is_own_observation(node) and name not in self.hard]
            if soft:
                trace.compute_log_prob(lambda name, node: name in soft)
                tape.factors += [nodes[name]["log_prob_sum"].to(tape.dtype) for name in soft]
            tape.factors += [_point(nodes[name]["fn"]).log_density.sum() for name in self._weighted]
        values = {name: node["value"] for name, node in nodes.items()}
        made = {name: function(values) for name, function in self._functions.items()}
        outputs = [made[name] if name in made else values[name] for name in self.hard]
        hidden = {*soft, *(name for name in self.hard if name in nodes and not _is_deterministic(nodes[name]))}
        latents = {name: value for name, value in values.items() if name not in hidden}
        output = outputs[0] if len(outputs) == 1 else torch.cat([value.reshape(-1) for value in outputs])
        return TracedRun(output, {**latents, **made})

    def _first_run(self) -> dict[str, Any]:
        """The statements of one run as Pyro itself makes it."""
        program = poutine.condition(self.program, data=self._soft) if self._soft else self.program
        # this run draws from torch's global generator
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="pyro")
            torch.manual_seed(0)
            try:
                trace = poutine.trace(program).get_trace(*self._args, **self._kwargs)
            except Exception as error:
                raise ModelError(f"{self.name} fails: {cause(error)}") from error
        nodes: dict[str, Any] = dict(trace.nodes)
        nodes = {name: node for name, node in nodes.items() if node["type"] == "sample"}
        for node in nodes.values():
            # obs= may be a number
            node["value"] = torch.as_tensor(node["value"])
        return nodes

    def _check(self, nodes: Mapping[str, Any]) -> None:
        for name, node in nodes.items():
            fn = node["fn"]
            if isinstance(fn, _Subsample):
                if fn.subsample_size is not None and fn.subsample_size < fn.size:
                    raise ModelError(
                        f"plate {name!r} of {self.name} takes {fn.subsample_size} of {fn.size} data at a time: "
                        "conditioning needs them all, omit subsample_size"
                    )
                continue
            if name not in self.hard and _has_own_data(node) and is_point(fn):
                raise ModelError(
                    f"site {name!r} of {self.name} is a Delta, which has no likelihood: name it in observed, as it is "
                    "a function of the other variables"
                )
            if node["is_observed"] and name not in self.hard:
                continue
            if _is_discrete(node):
                raise ModelError(
                    f"site {name!r} of {self.name} is discrete ({type(fn).__name__}): give it in soft, sum over it by "
                    "hand, or use target_from_pyro, which does"
                )
            if not _is_deterministic(node) and (node["scale"] != 1.0 or node["mask"] is not None):
                raise ModelError(
                    f"site {name!r} of {self.name} is scaled or masked: only soft observations can be, give it in soft"
                )


class _Sites(Messenger):
    """Gives latent variables, and those observed exactly, their values from a tape."""

    def __init__(self, tape: Tape, hard: tuple[str, ...]):
        super().__init__()
        self.tape, self.hard = tape, hard

    def _pyro_sample(self, msg):
        name, fn = msg["name"], msg["fn"]
        is_hard = name in self.hard
        if is_hard and is_point(fn):
            msg["value"], msg["done"] = _point(fn).v.expand(fn.batch_shape + fn.event_shape), True
            return
        if isinstance(fn, _Subsample) or _is_deterministic(msg) or (msg["is_observed"] and not is_hard):
            return
        self.tape.in_prior = not is_hard
        msg["value"], msg["done"] = self.tape.draw(reparametrise(fn), f"site {name!r}"), True
        self.tape.in_prior = False


def _is_variable(node: Mapping[str, Any]) -> bool:
    return node["type"] == "sample" and not isinstance(node["fn"], _Subsample)


def _is_deterministic(node: Mapping[str, Any]) -> bool:
    return _is_stated(node) or is_point(node["fn"])


def _is_stated(node: Mapping[str, Any]) -> bool:
    """Whether it is a statement ``pyro.deterministic``."""
    return bool(node["infer"] and node["infer"].get("_deterministic"))


def _has_own_data(node: Mapping[str, Any]) -> bool:
    return _is_variable(node) and node["is_observed"] and not _is_stated(node)


def _is_own_observation(node: Mapping[str, Any]) -> bool:
    return _has_own_data(node) and not _is_deterministic(node)


def _is_soft(node: Mapping[str, Any]) -> bool:
    """Whether an observation is a likelihood: a discrete one, or one on a surface, which no input could reach."""
    return _is_discrete(node) or (not _is_deterministic(node) and has_fewer_dimensions(node["fn"]))


def _is_weighted(node: Mapping[str, Any]) -> bool:
    return is_point(node["fn"]) and bool(_point(node["fn"]).log_density.any())


def _point(fn: Any) -> Any:
    """The ``Delta`` of a statement."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def _is_discrete(node: Mapping[str, Any]) -> bool:
    if _is_deterministic(node):
        return False
    fn: Any = node["fn"]
    while isinstance(fn, torch.distributions.MixtureSameFamily):
        fn = fn.component_distribution
    try:
        return bool(fn.has_enumerate_support or fn.support.is_discrete)
    except (AttributeError, NotImplementedError):
        # a factor has no support
        return False
