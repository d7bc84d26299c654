"""The structures that models declare by name: independent units, Markov models observed at every step, dense."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ModelError, cause
from .blocks import Blocks, Diagonal
from .structure import Dense, Structure, Units
from .units import SIMULATED, UnitStructure, View


def of_units(sizes: Units, view: View = SIMULATED) -> UnitStructure:
    """The structure of units of these sizes."""
    return Diagonal(sizes, view) if sizes.is_scalar else Blocks(sizes, view)


def independent(model: Any) -> UnitStructure:
    """Single outputs, or ``unit_outputs`` consecutive ones, given the global inputs (math 4.6, J 8.2)."""
    return of_units(Units(model.global_density.dim, model.unit_inputs or 1, model.unit_outputs or 1))


@dataclass(frozen=True)
class OneStepAhead(View):
    """Every state as one step from the previous observed state (math 4.7).

    ``c_t(u) = f(y_{t-1}, z(u1), u2_t) - y_t`` has the zeros of ``g_x(u) - y`` and, at these, the same ``|J J^T|`` and
    row space of J; but its steps are independent units.
    """

    names = "steps"
    is_separable = False

    def outputs(self, model, u, observed):
        return model.one_step_ahead(u, observed)

    def check(self, model, u, x):
        """Steps from the simulated states must reproduce the simulated states."""
        name = type(model).__name__
        try:
            miss = (model.one_step_ahead(u, x) - x).abs().max() / x.abs().max().clamp_min(1)
        except Exception as error:
            raise ModelError(
                f"{name} declares structure 'markov', but transition() fails for all steps at once: "
                f"{cause(error)} (states have one shape, and leading dimensions broadcast)"
            ) from error
        if miss > torch.finfo(x.dtype).eps ** 0.75:
            raise ModelError(
                f"{name} declares structure 'markov', but its transitions from the observed states differ from the "
                f"simulated ones (by {miss.item():.3g} of the largest): derive simulate() from transition(), or "
                "declare structure = 'dense'"
            )


def markov(model: Any) -> UnitStructure:
    """Whole steps, or the components of a step if ``unit_inputs`` and ``unit_outputs`` declare them.

    Raises:
        ModelError: the model has no local inputs.
    """
    if model.n_steps == 0:
        raise ModelError(
            f"{type(model).__name__} declares structure 'markov' without local inputs: give local_density a dimension, "
            "or declare structure = 'dense'"
        )
    state = torch.Size(model.output_shape).numel() // model.n_steps
    sizes = Units(model.global_density.dim, model.unit_inputs or model.step_inputs, model.unit_outputs or state)
    return of_units(sizes, OneStepAhead())


STRUCTURES: dict[str, Callable[[Any], Structure]] = {
    "independent": independent,
    "markov": markov,
    "dense": lambda model: Dense(),
}
"""The structures that a model can declare by name, as functions of the model."""


def validate_structure(model: Any) -> None:
    """Raise :class:`ModelError` unless the model declares a name of :data:`STRUCTURES` or a :class:`Structure`."""
    declared = model.structure
    known = declared in STRUCTURES if isinstance(declared, str) else isinstance(declared, Structure)
    if not known:
        raise ModelError(f"{type(model).__name__}.structure = {declared!r} is not one of {', '.join(STRUCTURES)}")


def declared_structure(model: Any) -> Structure:
    """The structure that a model's attribute ``structure`` names or is."""
    declared = model.structure
    return STRUCTURES[declared](model) if isinstance(declared, str) else declared
