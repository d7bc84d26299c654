"""Pyro programs as generative models: latent variables become inputs, hard observations the constraint."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import mapping
from ..errors import ArgumentError, ModelError
from ..sampling.predictive import CalledProgram
from .guards import check_structure, prepared
from .reparametrisation import reparametrise
from .statements import (
    as_data,
    check_numbers,
    conditioned,
    first_run,
    has_data,
    imputed,
    is_deterministic,
    is_discrete_site,
    is_likelihood,
    is_of_lower_dimension,
    is_variable,
    log_likelihoods,
    point_of,
    run,
)
from .tape import Tape, first_line
from .traced import TracedModel, TracedRun


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
    check_structure("from_pyro", structure)
    hard, likely = as_data("from_pyro", "observed", observed), as_data("from_pyro", "soft", soft)
    made = mapping("from_pyro", "functions", functions, "{'largest': lambda values: ...}")
    model = ProgramModel(program, args, kwargs, hard, likely, made)
    return prepared(model, structure, first_line(program))


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
        observed: dict[str, Tensor],
        soft: dict[str, Tensor],
        functions: dict[str, Callable],
    ):
        super().__init__(getattr(program, "__name__", type(program).__name__))
        # the networks of a program are parts of the model
        self.program = program
        self._functions = functions
        self._soft = dict(soft)
        self.source = CalledProgram(program, args, kwargs)
        nodes = first_run(self.source, self._soft)
        values = dict(observed)
        for name in (*observed, *soft):
            if name not in nodes and name not in functions:
                known = [name for name, node in nodes.items() if is_variable(node)]
                raise ArgumentError(f"observed: {name!r} is not a statement of {self.name} (it has {known})")
        for name in list(values):
            if name in nodes and is_of_lower_dimension(nodes[name]):
                self._soft[name] = values.pop(name)
        if not observed:
            own = {name: node for name, node in nodes.items() if has_data(node) and name not in soft}
            values = {name: node["value"] for name, node in own.items() if not _is_soft(node)}
        if not values:
            raise ModelError(
                f"nothing in {self.name} is observed exactly: name a continuous or deterministic statement in "
                "observed; for likelihoods alone sample(target_from_pyro(program, ...)), and log_evidence of the same"
            )
        self.hard = tuple(values)
        self._imputed = imputed(nodes)
        self._check(nodes)
        check_numbers(self.name, {k: node for k, node in nodes.items() if is_likelihood(node) and k not in values})
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
        own = {name: node["value"] for name, node in nodes.items() if is_likelihood(node)}
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
        def value(node: Mapping[str, Any]) -> Tensor | None:
            name, fn = node["name"], node["fn"]
            is_hard = name in self.hard
            if is_hard and (point := point_of(fn)) is not None:
                return point.v.expand(fn.batch_shape + fn.event_shape)
            if not is_variable(node) or is_deterministic(node) or (node["is_observed"] and not is_hard):
                return None
            tape.in_prior = not is_hard
            drawn = tape.draw(reparametrise(fn), f"site {name!r}")
            tape.in_prior = False
            return drawn

        source = replace(self.source, program=self.program)
        trace = run(source, conditioned(source, self._soft), value)
        nodes: dict[str, Any] = {name: node for name, node in trace.nodes.items() if is_variable(node)}
        soft = [name for name, node in nodes.items() if is_likelihood(node) and name not in self.hard]
        tape.factors += [each.to(tape.dtype) for each in log_likelihoods(trace, soft)]
        tape.factors += [point_of(nodes[name]["fn"]).log_density.sum() for name in self._weighted]
        values = {name: node["value"] for name, node in nodes.items()}
        made = {name: function(values) for name, function in self._functions.items()}
        outputs = [made[name] if name in made else values[name] for name in self.hard]
        hidden = {*soft, *(name for name in self.hard if name in nodes and not is_deterministic(nodes[name]))}
        latents = {name: value for name, value in values.items() if name not in hidden}
        output = outputs[0] if len(outputs) == 1 else torch.cat([value.reshape(-1) for value in outputs])
        return TracedRun(output, {**latents, **made})

    def _check(self, nodes: Mapping[str, Any]) -> None:
        for name, node in nodes.items():
            if not is_variable(node):
                continue
            fn = node["fn"]
            if name not in self.hard and has_data(node) and point_of(fn) is not None:
                raise ModelError(
                    f"site {name!r} of {self.name} is a Delta, which has no likelihood: name it in observed, as it is "
                    "a function of the other variables"
                )
            if node["is_observed"] and name not in self.hard:
                continue
            if is_discrete_site(node):
                raise ModelError(
                    f"site {name!r} of {self.name} is discrete ({type(fn).__name__}): give it in soft, or use "
                    "target_from_pyro, which sums over discrete latent variables"
                )
            if _is_weighed(node) and not is_deterministic(node) and name not in self._imputed:
                remedy = "give it in soft" if name in self.hard else "use target_from_pyro"
                raise ModelError(
                    f"site {name!r} of {self.name} is scaled or masked, and only soft observations can be: {remedy}"
                )


def _is_soft(node: Mapping[str, Any]) -> bool:
    """Whether the program's own observation is a likelihood."""
    return is_of_lower_dimension(node) or (_is_weighed(node) and not is_deterministic(node))


def _is_weighed(node: Mapping[str, Any]) -> bool:
    """Whether the density counts in part, or of some elements: ``poutine.scale`` and ``mask``."""
    return node["scale"] != 1.0 or node["mask"] is not None


def _is_weighted(node: Mapping[str, Any]) -> bool:
    """Whether it is a ``Delta`` with a density."""
    point = point_of(node["fn"])
    return point is not None and bool(point.log_density.any())
